"""How long the prompts of `kvhold bench compare` are on a machine: what it takes is what was
measured, 29 minutes and 70.
"""

import pytest

from kvhold_lab.bench.compare.length import LENGTHS, fitting
from kvhold_lab.bench.compare.names import TIERS, num_asked
from kvhold_lab.bench.compare.visits import VISITING, WORKLOADS, visits

LONG, SHORT = LENGTHS
ALL = [visit for workload in WORKLOADS.values() for visit in visits(workload, rounds=5)]


def test_where_cores_are_fast_prompts_are_long_and_it_takes_less_than_half_an_hour() -> None:
    tokens, expected_s = fitting(0.54, ALL, num_asked(VISITING, TIERS))
    assert tokens == LONG
    assert 20 * 60 < expected_s < 30 * 60


def test_where_cores_are_slow_prompts_are_short_so_that_it_takes_less_than_an_hour() -> None:
    tokens, expected_s = fitting(1.30, ALL, num_asked(VISITING, TIERS))
    assert tokens == SHORT
    assert 25 * 60 < expected_s < 45 * 60


def test_what_cannot_be_done_in_time_is_as_short_as_can_be() -> None:
    tokens, expected_s = fitting(5.0, ALL, num_asked(VISITING, TIERS))
    assert tokens == SHORT
    assert expected_s == pytest.approx(fitting(2.5, ALL, num_asked(VISITING, TIERS))[1] * 2)


def test_one_tier_and_one_set_take_less() -> None:
    few = list(visits(WORKLOADS["2x"], rounds=5))
    assert num_asked(VISITING, ("ram",)) == 7
    assert num_asked(VISITING, TIERS) == 13
    length, fitted = fitting(1.30, few, num_asked(VISITING, ("ram",)))
    assert length == LONG
    assert fitted == pytest.approx(
        1.30 / 0.54 * fitting(0.54, few, num_asked(VISITING, ("ram",)))[1]
    )
