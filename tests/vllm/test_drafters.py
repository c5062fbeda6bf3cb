"""Which drafters are served, and how their weights are named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from vllm.config import VllmConfig

from kvhold.core.errors import LayoutError
from kvhold.integrations.vllm.naming.walk import _add_draft_model, _rules
from tests.vllm.scheduling import Options, make_config, make_folder
from tests.vllm.specs import full, groups, of_width, sliding

pytestmark = pytest.mark.vllm


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return make_config(Options(make_folder(tmp_path / "model")), Path("unused"))


@pytest.mark.parametrize(
    ("method", "looks_ahead"), [("ngram", False), ("draft_model", False), ("eagle", True)]
)
def test_which_look_ahead(config: VllmConfig, method: str, looks_ahead: bool) -> None:
    config.speculative_config = SimpleNamespace(method=method)
    assert of_width(config, 1, groups(full())).looks_ahead == looks_ahead


def test_of_those_that_look_ahead_a_hit_may_end_a_block_earlier_so_there_are_no_windows(
    config: VllmConfig,
) -> None:
    config.speculative_config = SimpleNamespace(method="eagle")
    with pytest.raises(
        LayoutError, match="speculative decoding by eagle with sliding windows or states"
    ):
        of_width(config, 1, groups(sliding(), full()))
    config.speculative_config = SimpleNamespace(method="draft_model")
    with pytest.raises(
        LayoutError, match="a drafter with attention that is not full has not been shown"
    ):
        of_width(config, 1, groups(sliding(), full()))
    of_width(config, 1, groups(sliding(), full()), allow_unproven=True)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"use_heterogeneous_vocab": True}, "another vocabulary"),
        ({"rejection_sample_method": "synthetic"}, "without a check"),
    ],
)
def test_drafts_of_which_more_than_their_model_decides_are_refused(
    config: VllmConfig, setting: dict[str, Any], why: str
) -> None:
    config.speculative_config = SimpleNamespace(method="draft_model", **setting)
    with pytest.raises(LayoutError, match=why):
        of_width(config, 1, groups(full()))


def test_the_draft_models_weights_are_in_the_name(config: VllmConfig, tmp_path: Path) -> None:
    digests = []
    for number, weights in enumerate((b"one", b"one", b"other")):
        draft = make_config(
            Options(make_folder(tmp_path / str(number), weights=weights)),
            tmp_path / "node.sock",
        ).model_config
        config.speculative_config = SimpleNamespace(
            method="draft_model", draft_model_config=draft, draft_load_config=None
        )
        kv = groups(full())
        found = of_width(config, 1, kv)
        facts: dict[str, str] = {}
        rules = _rules((), per_shard=False)
        _add_draft_model(config.speculative_config, config.load_config, rules, facts)
        digests.append((facts["vllm.draft_model_config.weights"], found.looks_ahead))
    assert digests[0] == digests[1] != digests[2]
