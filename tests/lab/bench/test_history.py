"""`kvhold bench history`: results are kept with their commit and machine, and shown as a trend."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.command import command as bench
from kvhold_lab.bench.history import KeptRow, KeptRun, read, table
from kvhold_lab.bench.rows import Row


def run(*arguments: object) -> str:
    done = CliRunner().invoke(bench, ["history", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def a_run(commit: str, ratio: float, machine: str = "one") -> KeptRun:
    return KeptRun("2026-01-01T00:00:00+00:00", commit, machine, [KeptRow("a", 1.0, "ms", ratio)])


def test_rows_are_kept_with_commit_and_machine_and_shown(tmp_path: Path) -> None:
    results, file = tmp_path / "micro.json", tmp_path / "kept" / "history.jsonl"
    results.write_text(json.dumps([asdict(Row("retrieve", 2.0, "GB/s", 2.5, 0.8))]))
    for number in (1, 2):
        shown = run("--add", results, "--file", file)
        assert f"1 rows were added to {file}" in shown
        assert len(read(file)) == number
    [first, second] = read(file)
    assert first.rows == second.rows == [KeptRow("retrieve", 2.0, "GB/s", 0.8)]
    assert "cores" in first.machine
    assert "retrieve" in shown
    assert "change   1.000" in shown


def test_values_without_a_limit_are_shown_as_they_are(tmp_path: Path) -> None:
    results, file = tmp_path / "overload.json", tmp_path / "history.jsonl"
    results.write_text(
        '[{"name": "bytes of index a chunk", "value": 89.0, "unit": "B", "goal": 150, "ok": true}]'
    )
    assert " B " in run("--add", results, "--file", file)
    assert "89" in run("--file", file, "--name", "bytes*")
    assert "has no such rows" in run("--file", file, "--name", "other")


def test_the_change_is_the_last_run_over_the_median_of_the_earlier_ones() -> None:
    [machine, line] = table(
        [a_run("aaaa", 1.0), a_run("bbbb", 0.8), a_run("cccc", 0.9), a_run("dddd", 0.45)], "*", 2
    )
    assert machine == "one"
    assert line.endswith("change   0.500  cccc 0.9  dddd 0.45")


def test_machines_are_not_mixed() -> None:
    lines = table([a_run("aaaa", 1.0, "one"), a_run("bbbb", 0.5, "two")], "*", 8)
    assert [line for line in lines if "change" not in line] == ["one", "", "two"]
    assert all("change       -" in line for line in lines if "change" in line)


@pytest.mark.parametrize("content", ['{"name": 1}', "[1]", '[{"name": "a"}]', "not json"])
def test_a_file_that_is_no_result_is_refused_and_nothing_is_kept(
    tmp_path: Path, content: str
) -> None:
    results, file = tmp_path / "bad.json", tmp_path / "history.jsonl"
    results.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.json: not the --json file of a benchmark"):
        run("--add", results, "--file", file)
    assert not file.exists()


def test_a_damaged_history_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text('{"at": "", "commit": "", "machine": "", "rows": []}\n{"at": \n')
    with pytest.raises(ConfigError, match="line 2: no run of a benchmark"):
        run("--file", file)
