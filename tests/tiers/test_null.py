"""The null tier: the contract as far as it goes without keeping anything, and its one exception."""

from collections.abc import AsyncIterator

import pytest

from kvhold.core.errors import ConfigError
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, scanned, store
from kvhold.tiers.null import NullTier
from kvhold.tiers.registry import make_tier
from kvhold.tiers.url import parse_url


@pytest.fixture
async def tier() -> AsyncIterator[NullTier]:
    tier = NullTier()
    yield tier
    await tier.close()


class TestNullTier:
    """What of the contract does not ask for a value that was put."""

    test_it_has_a_name = TierContract.test_it_has_a_name
    test_an_empty_tier_misses = TierContract.test_an_empty_tier_misses
    test_no_keys_give_no_answers = TierContract.test_no_keys_give_no_answers
    test_a_miss_leaves_its_buffer_alone = TierContract.test_a_miss_leaves_its_buffer_alone
    test_unequal_lists_are_an_error_before_anything_is_read = (
        TierContract.test_unequal_lists_are_an_error_before_anything_is_read
    )
    test_closing_twice_is_harmless = TierContract.test_closing_twice_is_harmless
    test_a_tier_may_be_closed_unused = TierContract.test_a_tier_may_be_closed_unused


async def test_it_accepts_every_value_and_forgets_it(tier: NullTier) -> None:
    values = {make_key(i): bytes(1000) for i in range(3)}
    assert await store(tier, values) == [True] * 3
    assert await tier.probe(list(values)) == [None] * 3
    assert await fetch(tier, list(values), [1000] * 3) == [None] * 3
    assert (
        await tier.get(list(values), [[memoryview(bytearray(1))]] * 3, starts=[0, 1, 2])
        == [None] * 3
    )
    assert await scanned(tier) == []
    assert await tier.delete(list(values)) == [False] * 3
    await tier.check()


async def test_its_url_is_its_name() -> None:
    tier, _ = make_tier("null://")
    assert isinstance(tier, NullTier)
    await tier.close()


@pytest.mark.parametrize("line", ["null://host", "null:///path", "null://?max_bytes=1"])
def test_there_is_nothing_to_set(line: str) -> None:
    with pytest.raises(ConfigError, match=r"no place and no option; write null://$"):
        NullTier.from_url(parse_url(line))
