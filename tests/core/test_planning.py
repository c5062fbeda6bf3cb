"""The choice is that of trying every end by hand; what is not known is loaded; what is alike is
loaded, too.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.planning import ComputeCost, LoadOptions, alternative, choose, compute_s, total_s

costs = st.floats(0, 1e-2)


@st.composite
def works(draw: st.DrawFn) -> ComputeCost:
    num_tokens = draw(st.integers(1, 5000))
    computed = draw(st.integers(0, num_tokens))
    return ComputeCost(
        "r",
        num_tokens,
        computed,
        draw(st.integers(1, 4096)),
        draw(costs),
        draw(costs),
        draw(costs),
        draw(costs),
        draw(st.floats(0, 1e-6)),
    )


@st.composite
def offers(draw: st.DrawFn) -> LoadOptions:
    ends = sorted(draw(st.sets(st.integers(0, 5000), min_size=1, max_size=12)))
    numbers = st.lists(st.integers(0, 1 << 24), min_size=len(ends), max_size=len(ends))
    waits = st.lists(st.floats(0, 10), min_size=len(ends), max_size=len(ends))
    return LoadOptions(np.array(ends), np.array(draw(numbers)), np.array(draw(waits)))


def by_hand(cost: ComputeCost, tokens: int, nbytes: int, wait_s: float) -> float:
    """A step at a time, a token at a time."""
    left = list(range(min(max(tokens, cost.computed_tokens), cost.num_tokens - 1), cost.num_tokens))
    computed = math.ceil(len(left) / cost.step_tokens) * cost.step_s + sum(
        cost.token_s + (at + 0.5) * cost.pair_s for at in left
    )
    return (
        wait_s
        + (cost.load_s + nbytes * cost.load_byte_s if tokens > cost.computed_tokens else 0)
        + computed
    )


@given(works(), offers())
def test_the_choice_is_the_best_of_all(cost: ComputeCost, options: LoadOptions) -> None:
    totals = [
        by_hand(cost, *one)
        for one in zip(
            options.tokens.tolist(), options.nbytes.tolist(), options.wait_s.tolist(), strict=True
        )
    ]
    assert total_s(cost, options) == pytest.approx(totals, rel=1e-6, abs=1e-9)
    chosen = choose(cost, options)
    if not cost.is_known:
        assert chosen == len(totals) - 1
        return
    assert totals[chosen] <= 1.011 * min(totals) + 1e-9
    assert all(total > 1.009 * min(totals) - 1e-9 for total in totals[chosen + 1 :]), (
        "of those that are alike it loads most"
    )
    shown = alternative(cost, options, chosen)
    assert shown.num_tokens == options.tokens[chosen]
    assert shown.total_s == pytest.approx(totals[chosen], rel=1e-6, abs=1e-9)


def test_an_engine_that_knows_nothing_yet_loads_all() -> None:
    cost = ComputeCost("r", 1000)
    assert not cost.is_known
    assert (
        choose(
            cost,
            LoadOptions(np.array([0, 500, 990]), np.array([0, 1, 2]), np.array([0.0, 1.0, 5.0])),
        )
        == 2
    )


def test_a_part_is_loaded_where_the_rest_comes_too_slowly() -> None:
    cost = ComputeCost("r", 4000, 0, 2048, 0.005, 4e-4, 1e-8, 0.002, 1e-10)
    options = LoadOptions(
        np.array([0, 1000, 2000, 4000]),
        np.array([0, 1, 2, 4]) << 20,
        np.array([0.0, 0.0, 0.1, 3.0]),
    )
    assert options.tokens[choose(cost, options)] == 2000


def test_the_last_token_is_always_computed_and_what_the_engine_has_is_not_loaded() -> None:
    cost = ComputeCost("r", 100, 80, 64, 1.0, 0.01, 0.0, 5.0, 1.0)
    assert compute_s(cost, np.array([100, 80, 0])) == pytest.approx([1.01, 1.2, 1.2])
    assert choose(cost, LoadOptions(np.array([0, 64, 96]), np.array([0, 10, 20]), np.zeros(3))) == 1
