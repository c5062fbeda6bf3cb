"""What it costs to compute the first tokens of a prompt."""

from math import inf

import numpy as np
import pytest

from kvhold_lab.simulate.prefill_cost import PrefillCost


def seconds(cost: PrefillCost, num_tokens: int) -> float:
    return float(cost.seconds(np.array([num_tokens]))[0])


def test_it_is_the_sum_over_the_tokens() -> None:
    cost = PrefillCost(tokens_per_s=1000.0, attention_tokens=50.0)
    by_token = [(1 + place / 50.0) / 1000.0 for place in range(200)]
    assert [seconds(cost, num) for num in (0, 1, 200)] == pytest.approx(
        [0.0, by_token[0], sum(by_token)]
    )


def test_without_attention_it_is_linear() -> None:
    assert seconds(PrefillCost(2000.0, inf), 5000) == pytest.approx(2.5)


def test_a_long_prompt_costs_more_a_token() -> None:
    cost = PrefillCost()
    assert seconds(cost, 100_000) > 2 * 10 * seconds(cost, 10_000)


def test_a_million_tokens_do_not_overflow() -> None:
    assert seconds(PrefillCost(1.0, 1.0), 1 << 40) == pytest.approx(2.0**79)
