"""Costs are found again from times, whatever the outliers; what has changed is learnt; what nothing
tells apart is not invented.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.estimates import Estimate


def test_nothing_measured_is_nothing_known() -> None:
    assert Estimate(2).costs is None
    estimate = Estimate(2)
    estimate.measured((1.0, 10.0), 0.0)
    estimate.measured((0.0, 0.0), 1.0)
    assert estimate.costs is None, "what took no time, or has no quantity, says nothing"


@given(st.floats(1e-4, 0.1), st.floats(1e-9, 1e-6), st.integers(0, 1000))
def test_latency_and_bandwidth_are_told_apart(call_s: float, byte_s: float, seed: int) -> None:
    rng, estimate = np.random.default_rng(seed), Estimate(2)
    sizes = np.exp(rng.uniform(np.log(1 << 12), np.log(1 << 26), 24))
    for nbytes in sizes:
        estimate.measured(
            (1.0, float(nbytes)), float((call_s + byte_s * nbytes) * rng.uniform(0.98, 1.02))
        )
    assert estimate.costs is not None
    call, byte = estimate.costs
    assert np.mean(np.abs((call + byte * sizes) / (call_s + byte_s * sizes) - 1)) < 0.05


def test_a_few_outliers_spoil_nothing() -> None:
    rng, estimate = np.random.default_rng(1), Estimate(3)
    for number in range(40):
        tokens = float(rng.integers(16, 2048))
        pairs = tokens * float(rng.integers(0, 8000)) + tokens * tokens / 2
        seconds = 0.004 + 3e-4 * tokens + 2e-8 * pairs
        estimate.measured((1.0, tokens, pairs), seconds * (30 if number % 7 == 0 else 1))
    assert estimate.costs is not None
    assert np.dot(estimate.costs, (1, 2048, 2048 * 5000)) == pytest.approx(
        0.004 + 3e-4 * 2048 + 2e-8 * 2048 * 5000, rel=0.05
    )


def test_a_change_is_learnt_from_a_few() -> None:
    estimate = Estimate(2)
    for nbytes in (1e6, 2e6, 4e6) * 12:
        estimate.measured((1.0, nbytes), 0.001 + nbytes * 1e-6)
    for nbytes in (1e6, 2e6, 4e6):
        estimate.measured((1.0, nbytes), 0.001 + nbytes * 1e-8)
    assert estimate.costs is not None
    assert np.dot(estimate.costs, (1, 3e6)) == pytest.approx(0.031, rel=0.1)
    assert estimate.most(1) == 4e6


def test_one_measurement_is_explained_by_the_first_quantity() -> None:
    estimate = Estimate(2)
    estimate.measured((1.0, 5e5), 0.25)
    assert estimate.costs == pytest.approx((0.25, 0.0))


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(1e-6, 1e3)), max_size=30))
def test_costs_are_never_negative_nor_infinite(measured: list[tuple[float, float, float]]) -> None:
    estimate = Estimate(3)
    for tokens, pairs, seconds in measured:
        estimate.measured((1.0, tokens, pairs), seconds)
        costs = estimate.costs
        assert costs is not None and np.isfinite(costs).all() and min(costs) >= 0
