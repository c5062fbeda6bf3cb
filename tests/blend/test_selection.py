"""Selectors choose the tokens that matter, within their budget, and no others."""

import re

import numpy as np
import pytest

pytest.importorskip("torch", reason="no torch in this environment")

import torch

from kvhold.blend.selection import (
    SELECTORS,
    BlendPlan,
    Budget,
    DeviationSelector,
    FirstTokensSelector,
    LayerState,
    QuerySelector,
    StoredSpan,
    make_selector,
)
from kvhold.core.errors import ConfigError

PLAN = BlendPlan(20, (StoredSpan(3, 9), StoredSpan(11, 17, stored_from=2)), num_exact=2)
HEADS, GROUP, HEAD_DIM = 2, 3, 4


def layer_of(plan: BlendPlan, *, rows: range | None = None) -> LayerState:
    """All tokens' stored KV, and of the rows the same as computed; queries that see all alike."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor(list(rows or range(plan.num_exact, plan.num_tokens)))
    shape = (plan.num_tokens, HEADS, HEAD_DIM)
    old_keys, old_values = (torch.randn(shape, generator=generator) for _ in range(2))
    return LayerState(
        number=1,
        positions=positions,
        queries=torch.zeros(len(positions), HEADS * GROUP, HEAD_DIM),
        keys=old_keys[positions],
        values=old_values[positions],
        old_keys=old_keys,
        old_values=old_values,
        scaling=1.0,
    )


class TestPlan:
    def test_tells_held_tokens_from_those_that_must_be_computed(self) -> None:
        assert np.flatnonzero(PLAN.held()).tolist() == [*range(3, 9), *range(11, 17)]
        assert PLAN.unheld().tolist() == [2, 9, 10, 17, 18, 19]
        assert PLAN.num_held == 12

    def test_the_last_token_is_computed_even_within_a_span(self) -> None:
        plan = BlendPlan(8, (StoredSpan(0, 8),))
        assert plan.unheld().tolist() == [7]
        assert plan.question_start == 7

    def test_the_question_follows_the_last_text_and_its_tail(self) -> None:
        spans = (StoredSpan(3, 9, text_end=10), StoredSpan(11, 15, text_end=18))
        plan = BlendPlan(20, spans, num_exact=2)
        assert (plan.question_start, plan.tails().tolist()) == (18, [9, 15, 16, 17])
        assert plan.unheld().tolist() == [2, 9, 10, *range(15, 20)]
        to_the_end = BlendPlan(20, (StoredSpan(11, 15, text_end=20),))
        assert (to_the_end.question_start, to_the_end.tails().tolist()) == (19, [15, 16, 17, 18])

    @pytest.mark.parametrize(
        ("spans", "num_exact"),
        [
            pytest.param((StoredSpan(3, 9), StoredSpan(8, 12)), 0, id="overlap"),
            pytest.param((StoredSpan(3, 9),), 4, id="within the exact tokens"),
            pytest.param((StoredSpan(3, 21),), 0, id="beyond the prompt"),
            pytest.param((StoredSpan(5, 5),), 0, id="empty"),
            pytest.param((StoredSpan(5, 6, -1),), 0, id="stored before the first position"),
            pytest.param((StoredSpan(3, 9, text_end=8),), 0, id="ends after its text"),
            pytest.param((StoredSpan(3, 9, text_end=21),), 0, id="a text beyond the prompt"),
            pytest.param((), 20, id="nothing is new"),
        ],
    )
    def test_refuses_spans_that_do_not_fit(
        self, spans: tuple[StoredSpan, ...], num_exact: int
    ) -> None:
        with pytest.raises(ValueError, match=r"spans must|must be new|text_end"):
            BlendPlan(20, spans, num_exact)


class TestDeviation:
    @pytest.mark.parametrize("of", ["values", "keys"])
    def test_takes_the_tokens_that_differ_most(self, of: str) -> None:
        layer = layer_of(PLAN)
        changed = layer.values if of == "values" else layer.keys
        for size, position in enumerate((12, 5, 14), 1):
            changed[position - PLAN.num_exact] += size
        changed[9 - PLAN.num_exact] += 100  # a gap: computed anyway
        selector = DeviationSelector((Budget(ratio=2 / 12),), of=of)  # type: ignore[arg-type]
        assert sorted(selector.select(PLAN, [layer], selector.budgets[0]).tolist()) == [5, 14]
        other = DeviationSelector(
            selector.budgets, of="keys" if of == "values" else "values"
        ).select(PLAN, [layer], selector.budgets[0])
        assert sorted(other.tolist()) != [5, 14]

    def test_a_bound_takes_all_that_differ_more_and_nothing_if_nothing_does(self) -> None:
        layer = layer_of(PLAN)
        selector = DeviationSelector((Budget(bound=0.01),))
        assert selector.select(PLAN, [layer], selector.budgets[0]).tolist() == []
        layer.values[[4, 6, 12]] += 1
        found = selector.select(PLAN, [layer], selector.budgets[0]).tolist()
        assert sorted(found) == [6, 8, 14]

    def test_chooses_among_the_rows_that_still_flow(self) -> None:
        layer = layer_of(PLAN, rows=range(4, 7))
        selector = DeviationSelector((Budget(ratio=1.0),))
        found = selector.select(PLAN, [layer], selector.budgets[0]).tolist()
        assert sorted(found) == [4, 5, 6]


def test_first_tokens_are_taken_evenly_from_all_spans() -> None:
    selector = FirstTokensSelector(Budget(ratio=0.5))
    found = selector.select(PLAN, [], selector.budget).tolist()
    assert sorted(found) == [3, 4, 5, 11, 12, 13]


def test_the_query_takes_the_tokens_that_its_question_attends_to() -> None:
    layer = layer_of(PLAN, rows=range(17, 20))
    layer.old_keys[13, 1] *= 5
    layer.old_keys[4, 0] *= 5
    layer.queries[1, 4] = layer.old_keys[13, 1]  # a head of the second group
    layer.queries[2, 0] = layer.old_keys[4, 0]
    selector = QuerySelector(Budget(ratio=2 / 12))
    idle = layer_of(PLAN, rows=range(17, 20))
    found = selector.select(PLAN, [idle, layer], selector.budget).tolist()
    assert sorted(found) == [4, 13]


def test_the_query_ignores_what_gaps_attend_to() -> None:
    layer = layer_of(PLAN, rows=range(10, 20))
    layer.old_keys[[4, 15]] *= 5
    layer.queries[0, 0] = layer.old_keys[4, 0]
    layer.queries[9, 0] = layer.old_keys[15, 0]
    selector = QuerySelector(Budget(ratio=1 / 12))
    assert selector.select(PLAN, [layer], selector.budget).tolist() == [15]


def test_tails_ask_nothing() -> None:
    plan = BlendPlan(20, (StoredSpan(3, 9), StoredSpan(11, 15, text_end=18)))
    layer = layer_of(plan, rows=range(15, 20))
    layer.old_keys[[5, 14]] *= 5
    layer.queries[2, 0] = layer.old_keys[5, 0]
    layer.queries[3, 0] = layer.old_keys[14, 0]
    selector = QuerySelector(Budget(ratio=1 / 10))
    assert selector.select(plan, [layer], selector.budget).tolist() == [14]


def test_a_share_is_rounded_up_and_none_takes_nothing() -> None:
    scores, positions = torch.arange(10.0), torch.arange(10)
    assert len(Budget(ratio=0.31).choose(scores, positions, 10)) == 4
    assert len(Budget(ratio=0.3).choose(scores, positions, 10)) == 3
    assert len(Budget(ratio=1.0).choose(scores, positions, 12)) == 10
    assert not len(Budget(ratio=0.0).choose(scores, positions, 10))
    assert not len(make_selector("none").select(PLAN, [], Budget(ratio=0.0)))


@pytest.mark.parametrize("name", SELECTORS)
def test_every_name_makes_a_selector_of_that_name(name: str) -> None:
    assert make_selector(name, ratio=0.1).name == name


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"name": "best", "ratio": 0.1}, "selector is 'best'; known are deviation"),
        ({"name": "query"}, "give a ratio or a bound"),
        ({"name": "query", "ratio": 0.1, "bound": 1.0}, "and not both"),
        ({"name": "query", "ratio": 1.1}, "ratio is 1.1"),
        ({"name": "query", "bound": -1.0}, "bound is -1.0"),
        ({"name": "first", "bound": 1.0}, "bound: the first tokens have no score"),
        ({"name": "deviation", "ratio": 0.1, "check_layer": -1}, "check_layer is -1"),
    ],
)
def test_refuses_settings_by_name(arguments: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        make_selector(**arguments)  # type: ignore[arg-type]
