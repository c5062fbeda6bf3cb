"""The short form of `kvhold bench soak damage --where memory` and `--where tiers`: no flipped bit
reaches an engine.
"""

import pytest

from kvhold_lab.bench.soak import flips

pytestmark = pytest.mark.server


def test_no_bit_that_is_flipped_in_memory_reaches_an_engine() -> None:
    result = flips.in_memory(300, seed=1)
    assert result.delivered == 0
    assert result.flipped["memory"] >= 300
    assert result.missed == result.flipped, "each of them is a miss, and nothing else is"
    assert result.exact["memory"] > 0
    assert result.passed


def test_no_bit_that_is_flipped_over_any_tier_reaches_an_engine() -> None:
    result = flips.in_tiers(60, seed=1)
    assert result.delivered == 0
    assert {"memory", "disk", "fs", "kvhold"} <= result.flipped.keys()
    assert result.flipped.keys() | result.not_here.keys() == set(flips.TIERS)
    assert all(result.exact.values())
    assert result.passed
