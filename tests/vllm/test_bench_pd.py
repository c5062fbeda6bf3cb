"""`kvhold bench pd --faults` on two real vLLMs: three faults, few requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

FAULTS = ("none", "stale legs", "producer killed")
REQUESTS = 3


def test_no_fault_changes_a_token_or_leaves_anything_held(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    command = [sys.executable, "-m", "kvhold", "bench", "pd", "--faults"]
    command += ["--requests", str(REQUESTS), "--deadline-s", "300", "--json", str(found)]
    for fault in FAULTS:
        command += ["--fault", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["fault"]: row for row in json.loads(found.read_text()) if row["system"] == "kvhold"}
    assert tuple(rows) == FAULTS
    asked = {"none": REQUESTS, "stale legs": 3 * REQUESTS, "producer killed": REQUESTS}
    for fault, row in rows.items():
        assert row["requests"] == asked[fault]
        counts = ("wrong", "errors", "deadline_missed", "leaked")
        assert [row[name] for name in counts] == [0, 0, 0, 0], row
        assert row["detail"] == ""
    assert rows["none"]["handed_tokens"] > 0
    assert rows["stale legs"]["handed_tokens"] > 0
