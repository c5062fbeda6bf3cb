"""`Reuse` blends with a permit only, and its canary withdraws one that no longer holds."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhold.blend.selection import make_selector
from kvhold.cache import LocalCache
from kvhold.integrations.transformers import Blend, Reuse, ReuseResult
from tests.transformers.models import make_model, prompt_of, small_chunks
from tests.transformers.permitted import blend_config, permit_for

GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
SELECTOR = make_selector("first", ratio=0.5)
SPANS = [(3, 43), (43, 76)]


def prompt_with(question: int) -> torch.Tensor:
    """The same two documents, which `SPANS` marks, and another question."""
    documents = [prompt_of(40, seed=1), prompt_of(33, seed=2)]
    return torch.cat(
        [prompt_of(3, seed=100 + question), *documents, prompt_of(7, seed=question)], 1
    )


def reuse_of(model: Any, cache: LocalCache, folder: Path, share: float, **options: Any) -> Reuse:
    config = blend_config(folder, canary_share=share)
    return Reuse(model, cache, config=config, blend=Blend(SELECTOR), **options)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


def test_without_a_permit_a_request_is_exact_and_says_what_to_run(
    model: Any, cache: LocalCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvhold")
    reuse, prompt = reuse_of(model, cache, tmp_path, 1), prompt_with(1)
    for num_loaded in (0, prompt.shape[1] - 1):
        expected = model.generate(prompt, **GREEDY)
        assert torch.equal(reuse.generate(prompt, spans=SPANS, **GREEDY), expected)
        assert reuse.last.num_blended == 0
        assert reuse.last.num_loaded == num_loaded  # it was stored as exact
    other = prompt_with(2)
    reuse.generate(other, spans=SPANS, **GREEDY)
    assert reuse.last.reason == (
        "served without blend: there is no permit for 'first ratio=0.5' with this model; run "
        "kvhold verify --blend LlamaForCausalLM --selector 'first ratio=0.5'"
    )
    [told] = [one.blend for one in cache.explain()[:1]]
    assert told is not None and (told.result, told.note) == ("refused", reuse.last.reason)
    assert cache.status()["counters"]["kvhold_blended_requests{result=refused}"] == 2
    said = [record for record in caplog.records if "without blend" in record.message]
    assert len(said) == 1 and said[0].levelno == logging.WARNING


def test_with_a_permit_it_is_blended(model: Any, cache: LocalCache, tmp_path: Path) -> None:
    permit_for(model, tmp_path, SELECTOR)
    reuse = reuse_of(model, cache, tmp_path, 0)
    reuse.generate(prompt_with(1), spans=SPANS, **GREEDY)
    assert reuse.last.num_blended and not reuse.last.reason
    assert reuse.last.drift is None


def test_a_permit_may_come_while_requests_run(
    model: Any, cache: LocalCache, tmp_path: Path
) -> None:
    reuse = reuse_of(model, cache, tmp_path, 0)
    reuse.forward(prompt_with(1), spans=SPANS)
    assert reuse.last.reason
    permit_for(model, tmp_path, SELECTOR)
    reuse.forward(prompt_with(2), spans=SPANS)
    assert reuse.last.num_blended and not reuse.last.reason


def test_a_damaged_permit_is_none(model: Any, cache: LocalCache, tmp_path: Path) -> None:
    permit_for(model, tmp_path, SELECTOR)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"f1":', '"g1":'))
    reuse = reuse_of(model, cache, tmp_path, 0)
    reuse.forward(prompt_with(1), spans=SPANS)
    assert reuse.last.num_blended == 0
    assert f"{path} is no permit: Object contains unknown field `g1`" in reuse.last.reason


def test_settings_alone_turn_it_on(model: Any, cache: LocalCache, tmp_path: Path) -> None:
    settings = {"selector": "first", "ratio": 0.5, "canary_share": 0}
    reuse = Reuse(model, cache, config=blend_config(tmp_path, **settings))
    permit_for(model, tmp_path, SELECTOR)
    reuse.forward(prompt_with(1), spans=SPANS)
    assert reuse.last.num_blended


def test_a_canary_is_served_and_stored_as_it_is_without_blend(
    model: Any, cache: LocalCache, tmp_path: Path
) -> None:
    permit_for(model, tmp_path, SELECTOR, kl_usual=9.0)
    reuse, prompt = reuse_of(model, cache, tmp_path, 0.01), prompt_with(1)
    expected = model.generate(prompt, **GREEDY)
    assert torch.equal(reuse.generate(prompt, spans=SPANS, **GREEDY), expected)
    canary = reuse.last
    assert canary.drift is not None and 0 < canary.drift.kl < 9
    assert (canary.num_blended, canary.num_loaded, canary.reason) == (0, 0, "")
    [told] = [one.blend for one in cache.explain() if one.blend is not None]
    assert told.result == "canary" and "token is likeliest" in told.note
    assert told.recomputed_tokens == prompt.shape[1]
    reuse.generate(prompt_with(2), spans=SPANS, **GREEDY)
    blended = reuse.last
    assert blended.num_blended and blended.drift is None
    exact = Reuse(model, cache, config=small_chunks())
    with torch.no_grad():
        logits = model(prompt).logits[:, -1]
    torch.testing.assert_close(exact.forward(prompt).logits[:, -1], logits, rtol=1e-4, atol=1e-4)
    assert exact.last.num_loaded == prompt.shape[1] - 1
    exact.forward(prompt_with(2))
    assert exact.last.num_loaded == 0


def test_beams_continue_a_canary(model: Any, cache: LocalCache, tmp_path: Path) -> None:
    permit_for(model, tmp_path, SELECTOR)
    reuse, prompt = reuse_of(model, cache, tmp_path, 1), prompt_with(1)
    options = {**GREEDY, "num_beams": 3}
    expected = model.generate(prompt, **options)
    assert torch.equal(reuse.generate(prompt, spans=SPANS, **options), expected)
    assert reuse.last.drift is not None


def change_weights(model: Any) -> None:
    other = make_model("llama", seed=1)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def test_other_weights_have_no_permit(cache: LocalCache, tmp_path: Path) -> None:
    model = make_model("llama")
    permit_for(model, tmp_path, SELECTOR)
    reuse = reuse_of(model, cache, tmp_path, 0)
    reuse.forward(prompt_with(1), spans=SPANS)
    assert reuse.last.num_blended
    change_weights(model)
    reuse.forward(prompt_with(2), spans=SPANS)
    assert reuse.last.num_blended == 0
    assert "there is no permit" in reuse.last.reason


def test_the_canary_withdraws_the_permit_of_a_name_whose_weights_were_changed(
    cache: LocalCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    questions = iter(range(1, 1_000))

    def ask(reuse: Reuse) -> ReuseResult:
        reuse.forward(prompt_with(next(questions)), spans=SPANS)
        return reuse.last

    permit_for(model, tmp_path, SELECTOR, model_id="mine", kl_usual=9.0)
    measuring = reuse_of(model, cache, tmp_path, 1, model_id="mine")
    usual = sorted(drift.kl for _ in range(20) if (drift := ask(measuring).drift))[18]
    permit_for(model, tmp_path, SELECTOR, model_id="mine", kl_usual=usual)
    reuse = reuse_of(model, cache, tmp_path, 0.2, model_id="mine")
    other = reuse_of(model, cache, tmp_path, 0.2, model_id="mine")
    asked = [ask(reuse) for _ in range(25)]
    assert not any(one.reason for one in asked)
    assert 5 <= sum(one.drift is not None for one in asked) < 15

    change_weights(model)
    asked = [ask(reuse)]
    while not asked[-1].reason and len(asked) < 20:
        asked.append(ask(reuse))
    drifts = [one.drift for one in asked if one.drift]
    assert 4 <= len(drifts) <= 6
    assert all(one.num_blended for one in asked if not one.drift)
    reason = asked[-1].reason
    assert "the permit was withdrawn: " in reason
    assert f"canaries drifted by more than {usual:.3g} nats" in reason
    assert reason.endswith(
        "; run kvhold verify --blend LlamaForCausalLM --model-id mine --selector 'first ratio=0.5'"
    )
    assert reason in caplog.text
    for one in (ask(reuse), ask(other)):
        assert (one.num_blended, one.drift, one.reason) == (0, None, reason)
    permit_for(model, tmp_path, SELECTOR, model_id="mine", granted="later")
    assert not ask(reuse).reason
