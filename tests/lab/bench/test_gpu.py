"""`kvhold bench gpu` where there is no GPU: every part runs on the host's copier and on that of
devices over a fake one.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvhold_lab.bench.gpu import orders
from kvhold_lab.bench.gpu.command import PARTS, command
from kvhold_lab.bench.gpu.rows import GpuRow, rate
from kvhold_lab.bench.gpu.target import Target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

WITH_VLLM = ("mini", "verify", "vllm")  # in tests/vllm/test_gpu_parts.py
FIELDS = {"part", "name", "value", "unit", "limit", "ratio", "ok"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_every_part_runs_and_all_that_is_checked_is_right(device: str, tmp_path: Path) -> None:
    parts = [part for part in PARTS if part not in WITH_VLLM]
    file = tmp_path / "gpu.json"
    result = run(
        "--device",
        device,
        *(word for part in parts for word in ("--part", part)),
        "--json",
        str(file),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert all(set(row) == FIELDS for row in rows)
    assert {row["part"] for row in rows} == set(parts)
    decoding = [row for row in rows if row["part"] == "decode"]
    assert len([row for row in decoding if row["name"].startswith("a step beside")]) == (
        12 if device == "fake" else 6
    )
    assert all(row["value"] > 0 for row in decoding), "bytes are copied beside each path's steps"
    checks = [row for row in rows if row["unit"] == "checks"]
    assert checks
    assert all(row["ok"] for row in checks)
    assert all(row["ok"] is None for row in rows if row["unit"] != "checks"), "goals are for GPUs"


def test_a_part_that_fails_is_a_row_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(target: Target) -> Iterator[GpuRow]:
        yield GpuRow("orders", "one", 1, "checks", ok=True)
        raise RuntimeError("an illegal memory access\nand more")

    monkeypatch.setattr(orders, "rows", broken)
    file = tmp_path / "gpu.json"
    result = run("--device", "cpu", "--part", "orders", "--part", "machine", "--json", str(file))
    assert result.exit_code == 1
    assert "RuntimeError: an illegal memory access" in result.output
    rows = json.loads(file.read_text())
    assert [row["ok"] for row in rows if row["part"] == "orders"] == [True, False]
    assert any(row["part"] == "machine" for row in rows)


def test_without_a_gpu_cuda_is_refused_in_words() -> None:
    result = run()
    assert result.exit_code == 1
    assert "there is no GPU here; try --device cpu" in result.output


def test_a_rate_below_its_goal_is_not_met() -> None:
    assert rate("p", "n", 10**9, 2.0, 1.0, 0.9) == GpuRow("p", "n", 0.5, "GB/s", 1.0, 0.5, False)
    assert rate("p", "n", 10**9, 1.0, 1.0, 0.9).ok is True
    assert rate("p", "n", 10**9, 1.0, 1.0, None).ok is None
