"""The example does what its page says."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "transformers_reuse.py"


def test_the_second_question_loads_what_the_first_has_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--tokens", "260"])
    monkeypatch.setenv("KVHOLD_TOKENS_PER_CHUNK", "64")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    output = capsys.readouterr().out
    assert "question 1: 280 tokens, 0 loaded, 280 computed" in output
    assert "question 2: 280 tokens, 256 loaded, 24 computed" in output
    assert output.count("same tokens: True") == 2
