"""Pictures of several files of rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("matplotlib")

from kvhold_lab.simulate.pictures import main


def a_row(policy: str, capacity: int, hit_rate: float, policy_for: str = "") -> dict[str, Any]:
    return {
        "policy": policy,
        "policy_for": policy_for,
        "capacity_bytes": capacity << 30,
        "disk_bytes": 0,
        "chunk_tokens": 512,
        "codec": "raw",
        "hit_rate": hit_rate,
        "evicted": 7,
    }


def draw(folder: Path, *files: str) -> Result:
    return CliRunner().invoke(main, [str(folder / "out.svg"), *(str(folder / f) for f in files)])


def test_each_file_is_a_panel_and_each_policy_a_line(tmp_path: Path) -> None:
    for name in ("first set", "second set", "third set"):
        rows = [
            a_row(policy, capacity, capacity / 100, policy_for)
            for policy, policy_for in (("lru", ""), ("learned", "ttft"), ("belady", ""))
            for capacity in (16, 64)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    pictures = []
    for _ in range(2):
        result = draw(tmp_path, "first set.json", "second set.json", "third set.json")
        assert result.exit_code == 0, result.output
        pictures.append((tmp_path / "out.svg").read_text())
    assert pictures[0] == pictures[1]
    for text in ("first set", "second set", "third set", "memory, GiB"):
        assert pictures[0].count(f">{text}<") == 1
    for policy in ("lru", "learned ttft", "belady"):
        assert pictures[0].count(f">{policy}<") == 1, "one legend"
    assert len(pictures[0]) < 100_000


@pytest.mark.parametrize("content", ["[]", "{", '[{"policy": "lru"}]'])
def test_a_file_without_rows_is_a_mistake(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    result = draw(tmp_path, "rows.json")
    assert result.exit_code == 1
    assert "rows.json" in result.output
    assert "kvhold simulate --json" in result.output
