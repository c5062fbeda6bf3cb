"""The memory tier: the contract, its size, and twice as much KV in the same memory."""

from collections.abc import AsyncIterator

import pytest

from kvhold.core.errors import ConfigError, TierUnavailable
from kvhold.testing import TierContract
from kvhold.testing.cache import a_prompt, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers.memory import MemoryConfig, MemoryTier
from kvhold.tiers.registry import make_tier
from tests.cache.below import SPACE, a_cache_over, forget

MIB = 1 << 20


class TestMemoryTier(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture
    async def tier(self) -> AsyncIterator[MemoryTier]:
        tier = MemoryTier(MemoryConfig(max_bytes=32 * MIB))
        yield tier
        await tier.close()
        assert tier.used_bytes == 0


async def test_it_takes_its_memory_at_the_first_use_and_no_more() -> None:
    tier, _ = make_tier("memory://?max_bytes=4MiB&policy=fifo")
    assert isinstance(tier, MemoryTier)
    assert tier.used_bytes == 0
    for number in range(16):
        assert await tier.put([(make_key(number), [memoryview(bytes(MIB // 2))])]) == [None]
        assert 0 < tier.used_bytes <= 4 * MIB
    found = await tier.probe([make_key(number) for number in range(16)])
    assert found == [None] * 8 + [MIB // 2] * 8
    await tier.close()


async def test_more_than_the_host_has_is_said() -> None:
    tier = MemoryTier(MemoryConfig(max_bytes=1 << 50))
    with pytest.raises(TierUnavailable, match="memory"):
        await tier.check()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("memory://", "max_bytes is missing"),
        ("memory://host?max_bytes=1MiB", "it has no place"),
        ("memory://?max=1", "max"),
    ],
)
def test_a_bad_line_is_an_error(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_tier(line)


def test_with_a_codec_chunks_come_back_from_it() -> None:
    pytest.importorskip("kvhold.kernels.numba_rans", reason="no numba in this environment")
    with a_cache_over("memory://?max_bytes=16MiB&codec=lossless") as cache:
        store(cache, a_prompt(SPACE, 150))
        forget(cache)
        assert read(cache, a_prompt(SPACE, 150)) == 150
