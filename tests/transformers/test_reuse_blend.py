"""`Reuse` with spans: their KV is found wherever they stand, and never taken for exact."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhold.blend.selection import (
    BlendPlan,
    Budget,
    LayerState,
    QuerySelector,
    make_selector,
)
from kvhold.cache import LocalCache
from kvhold.core.errors import KVHoldError
from kvhold.integrations.transformers import Blend, Reuse, ReuseResult
from tests.transformers.models import make_model, prompt_of, small_chunks
from tests.transformers.permitted import blend_config, permit_for

GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
SEPARATOR = 5
DOCUMENTS = [prompt_of(size, seed=seed) for seed, size in enumerate((40, 33, 50), 1)]
QUESTION = prompt_of(7, seed=9)


def prompt_with(*order: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Documents after a beginning of three tokens, and a question; and the documents' spans."""
    parts, spans, at = [prompt_of(3)], [], 3
    for number in order:
        parts.append(DOCUMENTS[number])
        spans.append((at, at + DOCUMENTS[number].shape[1]))
        at = spans[-1][1]
    return torch.cat([*parts, QUESTION], dim=1), spans


Blending = Callable[..., Reuse]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture
def blending(tmp_path: Path) -> Blending:
    """Makes `Reuse` with a permit for its selector, and without canaries."""

    def make(model: Any, cache: Any, *, ratio: float = 0.2, **options: Any) -> Reuse:
        selector = make_selector("deviation", ratio=ratio)
        permit_for(model, tmp_path, selector)
        config = blend_config(tmp_path, canary_share=0)
        return Reuse(model, cache, config=config, blend=Blend(selector, **options))

    return make


def test_spans_are_found_in_another_order(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    reuse = blending(model, cache)
    first, spans = prompt_with(0, 1, 2)
    reuse.generate(first, spans=spans, **GREEDY)
    # the tail of one token of the second document is never stored
    assert reuse.last.num_stored == 40 + 32 + 50
    second, spans = prompt_with(2, 0, 1)
    reuse.generate(second, spans=spans, **GREEDY)
    assert reuse.last.num_stored == 0 and not reuse.last.reason
    assert reuse.last.num_loaded == 0
    # a fifth of the 122 held tokens is recomputed
    assert reuse.last.num_blended == 122 - 25
    assert reuse.last.num_computed == second.shape[1] - 97


def test_the_cache_is_told_of_spans_and_tokens(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    reuse = blending(model, cache)
    for order in ((0, 1), (1, 2)):
        prompt, spans = prompt_with(*order)
        reuse.generate(prompt, spans=spans, **GREEDY)
    told, first = (one.blend for one in cache.explain() if one.blend is not None)
    assert told.request != first.request
    assert [span.is_alone for span in (*first.spans, *told.spans)] == [True, True, False, True]
    held, alone = told.spans
    assert held.sources == {"ram": 32} and not held.missing, "of 33: one token is no tail"
    assert (alone.sources, alone.missing) == ({}, "never_stored")
    last = reuse.last
    assert told.result == "blended" and told.selector == "deviation check_layer=1 ratio=0.2"
    assert (told.exact_tokens, told.reused_tokens) == (last.num_loaded, last.num_blended)
    assert told.recomputed_tokens == last.num_computed
    counters = cache.status()["counters"]
    assert counters["kvhold_blended_requests{result=blended}"] == 2
    assert counters["kvhold_blended_tokens{kv=reused}"] == sum(
        one.reused_tokens for one in (told, first)
    )


def test_a_report_that_fails_costs_nothing(
    model: Any, cache: LocalCache, blending: Blending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KVHoldError("no answer")

    reuse = blending(model, cache)
    monkeypatch.setattr(cache, "report_blend", fail)
    prompt, spans = prompt_with(0)
    reuse.generate(prompt, spans=spans, **GREEDY)
    assert reuse.last.num_blended and not reuse.last.reason


def test_a_found_span_gives_what_a_computed_one_does(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    reuse = blending(model, cache)
    prompt, spans = prompt_with(2, 0)
    computed = reuse.forward(prompt, spans=spans).logits
    found = reuse.forward(prompt, spans=spans).logits
    assert reuse.last.num_blended
    torch.testing.assert_close(found, computed, rtol=1e-3, atol=1e-3)


def test_recomputing_all_of_the_spans_is_the_model_s_own_answer(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    reuse = blending(model, cache, ratio=1.0)
    for order in ((0, 1, 2), (1, 2, 0)):
        prompt, spans = prompt_with(*order)
        expected = model.generate(prompt, **GREEDY)
        assert torch.equal(reuse.generate(prompt, spans=spans, **GREEDY), expected)
        assert (reuse.last.num_blended, reuse.last.reason) == (0, "")


def test_nothing_blended_is_found_by_an_exact_prompt(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    prompt, spans = prompt_with(0, 1, 2)
    expected = model.generate(prompt, **GREEDY)
    for ratio in (0.0, 0.5, 1.0):
        blending(model, cache, ratio=ratio).generate(prompt, spans=spans, **GREEDY)
    exact = Reuse(model, cache, config=small_chunks())
    for document in (*DOCUMENTS, prompt):
        exact.forward(document)
        assert exact.last.num_loaded == 0
    assert torch.equal(exact.generate(prompt, **GREEDY), expected)


def test_an_exact_beginning_is_loaded_and_the_rest_blended(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    prompt, spans = prompt_with(0, 1, 2)
    Reuse(model, cache, config=small_chunks()).forward(prompt[:, :64])
    reuse = blending(model, cache, ratio=0.0)
    reuse.forward(prompt, spans=spans)
    reuse.forward(prompt, spans=spans)
    # the border is inside the second document: 3 + 40 + 21; of it, one token was not stored
    assert reuse.last.num_loaded == 64
    assert reuse.last.num_blended == 33 - 21 - 1 + 50
    expected = blending(model, cache, ratio=1.0)
    with torch.no_grad():
        logits = model(prompt).logits[:, -1]
    found = expected.forward(prompt, spans=spans).logits[:, -1]
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
    assert expected.last.num_loaded == 64


def test_a_separator_marks_spans_and_the_last_run_is_the_question(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    mark = torch.tensor([[SEPARATOR]])
    texts = [document[:, :20].where(document[:, :20] != SEPARATOR, 6) for document in DOCUMENTS]
    question = QUESTION.where(QUESTION != SEPARATOR, 6)
    reuse = blending(model, cache, ratio=0.0, separator=(SEPARATOR,))
    for order in ((0, 1, 2), (2, 1, 0)):
        parts = [part for number in order for part in (texts[number], mark)]
        reuse.forward(torch.cat([*parts, question], dim=1))
    assert reuse.last.num_blended == 60
    assert reuse.last.num_stored == 0


def test_without_spans_kv_is_exact_as_ever(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    reuse, prompt = blending(model, cache), prompt_of(50)
    reuse.forward(prompt)
    reuse.forward(prompt)
    assert reuse.last == ReuseResult(num_tokens=50, num_loaded=49)


def test_a_batch_is_served_without_blend(model: Any, cache: LocalCache, blending: Blending) -> None:
    reuse, prompts = blending(model, cache, separator=(SEPARATOR,)), prompt_of(40, rows=2)
    expected = model.generate(prompts, **GREEDY)
    assert torch.equal(reuse.generate(prompts, **GREEDY), expected)
    assert reuse.last.num_blended == 0


def test_spans_need_a_blend_and_make_sense(
    model: Any, cache: LocalCache, blending: Blending
) -> None:
    prompt, spans = prompt_with(0)
    with pytest.raises(ValueError, match=r"use Reuse\(model, cache, blend=...\)"):
        Reuse(model, cache, config=small_chunks()).generate(prompt, spans=spans)
    with pytest.raises(ValueError, match=r"spans\[0\] is 3 to 99"):
        blending(model, cache).forward(prompt, spans=[(3, 99)])


def test_beams_continue_a_blended_prompt(model: Any, cache: LocalCache, blending: Blending) -> None:
    reuse = blending(model, cache, ratio=1.0)
    prompt, spans = prompt_with(0, 1)
    options = {**GREEDY, "num_beams": 3}
    expected = model.generate(prompt, **options)
    for _ in range(2):
        assert torch.equal(reuse.generate(prompt, spans=spans, **options), expected)


def test_the_selector_sees_the_whole_question(
    model: Any, cache: LocalCache, tmp_path: Path
) -> None:
    asking = []

    class Watching(QuerySelector):
        def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
            asking.append(layers[0].positions.tolist())
            return super().select(plan, layers, budget)

    selector = Watching(Budget(ratio=0.2))
    permit_for(model, tmp_path, selector)
    config = blend_config(tmp_path, canary_share=0)
    prompt, spans = prompt_with(0, 1)
    reuse = Reuse(model, cache, config=config, blend=Blend(selector))
    reuse.generate(prompt, spans=spans, **GREEDY)
    question = range(spans[-1][1], prompt.shape[1])
    assert [set(question) <= set(positions) for positions in asking] == [True]
    # the last token is computed again, over the blended KV
    assert reuse.last.num_blended and reuse.last.num_loaded == 0
