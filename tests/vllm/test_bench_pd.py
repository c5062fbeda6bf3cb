"""`kvhold bench pd --faults` on two real vLLMs: some faults, few requests."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold_lab.bench.command import command

pytestmark = [pytest.mark.vllm, pytest.mark.alone, pytest.mark.timeout(1_800)]

ASKED = {"none": 3, "stale legs": 9, "producer killed": 3, "two nodes": 3, "peer killed": 3}


def test_no_fault_changes_a_token_or_leaves_anything_held(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    arguments = ["pd", "--faults", "--requests", "3", "--deadline-s", "300", "--json", str(found)]
    for fault in ASKED:
        arguments += ["--fault", fault]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    rows = {row["fault"]: row for row in json.loads(found.read_text()) if row["system"] == "kvhold"}
    assert {fault: row["requests"] for fault, row in rows.items()} == ASKED
    for row in rows.values():
        counts = ("wrong", "errors", "deadline_missed", "leaked")
        assert [row[name] for name in counts] == [0, 0, 0, 0], row
        assert row["detail"] == ""
    for fault in ("none", "stale legs", "two nodes"):
        assert rows[fault]["handed_tokens"] > 0, rows[fault]
