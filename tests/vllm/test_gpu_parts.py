"""The parts of `kvhold bench gpu` that need vLLM, where there is no GPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from click.testing import CliRunner

from kvhold_lab.bench.gpu.command import command
from kvhold_lab.bench.gpu.verify import _rows_of, _Setup

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("part", ["mini", "verify", "vllm"])
def test_all_that_is_checked_is_right(part: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(command, ["--device", "cpu", "--part", part, "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    checks = [row for row in rows if row["unit"] == "checks"]
    assert checks
    assert all(row["ok"] and row["value"] > 0 for row in checks)
    times = [row for row in rows if row["unit"] == "ms"]
    assert all(row["value"] > 0 and row["limit"] > 0 for row in times)
    assert times or part == "verify"


def test_a_verification_that_ends_early_is_a_failure() -> None:
    passed = {"model": "llama", "path": "plain", "ties": 1, "requests": 26, "outcome": "pass"}
    off = passed | {"path": "async", "outcome": "off"}
    setup = _Setup("default", "llama", "plain,async,tp2")
    rows = list(_rows_of(setup, [passed, off], "text\nnot ended within 420 s\n"))
    assert [row.ok for row in rows] == [True, None, False]
    assert "1 ties" in rows[0].name
    assert rows[2].name.endswith("not ended within 420 s")
    assert len(list(_rows_of(setup, [passed, off, passed], ""))) == 3
