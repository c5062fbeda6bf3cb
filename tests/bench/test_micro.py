"""`kvhold bench micro`: what it measures and how it is written down. How fast anything is, is for the command to say, not for a test."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold.cli import cli


def test_each_row_stands_beside_a_limit_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("gather", "lookup", "startup"):
        monkeypatch.setattr(f"kvhold.cli.bench.{part}.ROUNDS", 1)
    monkeypatch.setattr("kvhold.cli.bench.gather.NUM_CHUNKS", 1)
    file = tmp_path / "micro.json"
    result = CliRunner().invoke(cli, ["bench", "micro", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert {frozenset(row) for row in rows} == {frozenset({"name", "value", "unit", "limit", "ratio"})}
    assert all(row["name"] in result.output for row in rows)
    assert all(row["value"] > 0 and row["limit"] > 0 and row["ratio"] > 0 for row in rows)
    assert {"lookup 32,000 tokens through the node", "gather, 1 thread", "node, from start to ready"} <= {row["name"] for row in rows}
