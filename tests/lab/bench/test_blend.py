"""`kvhold bench blend` in small, with a hardly trained model: every way to prefill is measured, and
what must be exact is.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvhold_lab.bench.blend.arms import f1
from kvhold_lab.bench.command import command
from kvhold_lab.retrieval.training import TrainingPhase, train

FIELDS = {
    "engine",
    "selector",
    "recomputed",
    "ttft_ratio",
    "f1",
    "f1_full",
    "kl",
    "reused_tokens",
}
OPTIONS = ("--tokens", "200", "--prompts", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train(folder, (TrainingPhase(2, 2, 8, 9, 2, 64),), lambda said: None)
    return folder


def test_measures_every_arm(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["blend", "--model", str(model), *OPTIONS, "--json", str(file)]
    result = CliRunner().invoke(command, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = {row["selector"]: row for row in json.loads(file.read_text())}
    assert all(row.keys() >= FIELDS for row in rows.values())
    assert {name.partition("-")[0] for name in rows} == {
        "full",
        "prefix",
        "unturned",
        "none",
        "first",
        "deviation@1",
        "deviation@2",
        "query",
    }
    full = rows["full"]
    assert (full["recomputed"], full["reused_tokens"], full["ttft_ratio"]) == (1, 0, 1)
    for name in ("full", "prefix"):  # exact
        assert rows[name]["kl"] < 1e-6
        assert (rows[name]["f1_low"], rows[name]["f1_high"]) == (0, 0)
    num_tokens = 5 * 39 + 4
    assert rows["none"]["reused_tokens"] == 5 * 39
    reused = 5 * 39 - 38  # 19 % of the documents' tokens are recomputed
    for name in ("first-19", "query-19", "deviation@1-19"):
        assert rows[name]["reused_tokens"] == reused
        assert rows[name]["recomputed"] == pytest.approx(1 - reused / num_tokens)
    assert rows["none"]["kl"] > rows["deviation@1-19"]["kl"] > 1e-6


def test_only_some_arms(model: Path) -> None:
    options = ["blend", "--model", str(model), *OPTIONS, "--selector", "query-5"]
    result = CliRunner().invoke(command, options, catch_exceptions=False)
    lines = [line.split()[0] for line in result.stdout.splitlines()[3:]]
    assert lines == ["full", "query-5"]


@pytest.mark.parametrize(
    ("found", "expected", "score"),
    [
        ([7, 8], (7, 8), 1),
        ([8, 7], (7, 8), 1),
        ([7, 9], (7, 8), 0.5),
        ([7], (7, 8), 2 / 3),
        ([], (7, 8), 0),
    ],
)
def test_f1_is_that_of_tokens(found: list[int], expected: tuple[int, ...], score: float) -> None:
    assert f1(found, expected) == pytest.approx(score)
