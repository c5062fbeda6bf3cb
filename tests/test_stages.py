"""The times of the stages of `make test`, also of one that fails."""

import sys
from pathlib import Path

import pytest

from tools.stages import TIMES, main

FAILS = [sys.executable, "-c", "raise SystemExit(3)"]
PASSES = [sys.executable, "-c", ""]


def test_the_times_of_stages_are_printed_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "one", *PASSES]) == 0
    assert main(["run", "two words", *FAILS]) == 3
    assert len(TIMES.read_text().splitlines()) == 2
    assert main(["report"]) == 0
    one, two, together = capsys.readouterr().out.splitlines()
    assert one.endswith(" s  one")
    assert two.endswith(" s  two words")
    assert "together" in together


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "name"], ["reports"]])
def test_other_arguments_are_answered_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "python tools/stages.py report" in capsys.readouterr().err
