"""`kvhold demo --blend` in small, with a hardly trained model."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvhold.cli import cli
from kvhold.core.errors import ConfigError
from kvhold_lab.demo.blend import run_blend
from kvhold_lab.retrieval.training import TrainingPhase, train

TOKENS = 5 * 101 + 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train(folder, (TrainingPhase(2, 2, 8, 9, 2, 64),), lambda said: None)
    return folder


def run(model: Path, **settings: Any) -> Any:
    return run_blend(
        num_tokens=512,
        repeats=2,
        permit_prompts=3,
        say=lambda said: None,
        model=str(model),
        **settings,
    )


def test_shows_times_answers_and_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(run_blend, model=str(model), max_f1_loss=1.0)
    monkeypatch.setattr("kvhold_lab.demo.blend.run_blend", small)
    monkeypatch.setattr("kvhold_lab.demo.command._PERMIT_PROMPTS", 3)
    figures, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    options = ["--tokens", "512", "--json", str(figures), "--picture", str(picture)]
    result = CliRunner().invoke(cli, ["demo", "--blend", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = json.loads(figures.read_text())
    assert (measured["prompt_tokens"], measured["runs"]) == (TOKENS, 5)
    assert measured["selector"] == "query ratio=0.19"
    assert 0.19 <= measured["recomputed"] < 0.22
    assert measured["reused_tokens"] == round(TOKENS * (1 - measured["recomputed"]))
    assert measured["permit"]["prompts"] == 3 and measured["canary_kl"] > 0
    assert "this demo allows 100 points" in result.output
    answers = result.output.split("in full       blended")[1].splitlines()
    assert sum(bool(line.strip()) for line in answers[1:6]) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_recomputing_everything_gives_the_answers_of_full_prefill(model: Path) -> None:
    result = run(model, ratio=1.0, max_f1_loss=1.0)
    assert result.recomputed == 1
    assert all(one.blended == one.full for one in result.answers)
    assert result.canary_kl < 1e-6


def test_without_a_permit_it_says_why(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no permit for query ratio=0.19: F1 may be"):
        run(model, max_f1_loss=0.0)


def test_two_demos_at_once_are_refused() -> None:
    result = CliRunner().invoke(cli, ["demo", "--blend", "--pd"])
    assert result.exit_code == 2 and "give --pd or --blend, not both" in result.output
