"""What a node lends to its peers: the chunk's own memory, pinned, with the writer's checksums."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvhold.cache import LocalCache, open_cache
from kvhold.cache.transfer.peer_source import PeerSource
from kvhold.codecs import read_header, verify
from kvhold.core.errors import FrameError
from kvhold.core.keys import Namespace
from kvhold.testing.cache import PLAIN, a_prompt, store

pytestmark = pytest.mark.asyncio

SPACE = Namespace(model="model", layout=PLAIN)
MOST = 1 << 20


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with open_cache(ram_bytes="16MiB", huge_pages="never", scrub_interval_s=0) as cache:
        cache.register(SPACE)
        store(cache, a_prompt(SPACE, 32))
        yield cache


def source_of(
    cache: LocalCache, post: Callable[[Callable[[], None]], None] = lambda event: event()
) -> PeerSource:
    return PeerSource(cache._state, post)


def keys_of(count: int) -> list[bytes]:
    prompt = a_prompt(SPACE, 16 * count)
    return [prompt.chunk_key(number) for number in range(count)]


async def test_a_frame_is_the_chunks_own_memory_with_the_writers_checksums(
    cache: LocalCache,
) -> None:
    source = source_of(cache)
    async with source.lent(keys_of(3), [MOST] * 3) as frames:
        assert cache.status()["pinned_chunks"] == 2
        assert frames[2] is None
        assert frames[0] is not None
        header, payload = frames[0]
        read = read_header(header, frame_bytes=header.nbytes + payload.nbytes)
        verify(read, payload)
        assert source.frame_size(keys_of(1)[0], payload.nbytes, 16) == read.frame_bytes
        [entry] = [one for one in cache._state.ram.entries() if one.key == keys_of(1)[0]]
        cache._state.ram.view(entry)[7] ^= 1  # seen there, so nothing was copied
        with pytest.raises(FrameError, match="checksum"):
            verify(read, payload)
    assert cache.status()["pinned_chunks"] == 0
    async with source.lent(keys_of(1), [MOST]) as [damaged]:
        assert damaged is not None
        with pytest.raises(FrameError, match="checksum"):  # not taken again from damaged bytes
            verify(read_header(damaged[0]), damaged[1])


async def test_a_frame_larger_than_its_room_is_not_lent(cache: LocalCache) -> None:
    async with source_of(cache).lent(keys_of(1), [1000]) as frames:
        assert frames == [None]
        assert cache.status()["pinned_chunks"] == 0
    assert cache.status()["pinned_chunks"] == 0


async def test_a_caller_that_leaves_before_the_answer_pins_nothing(cache: LocalCache) -> None:
    posted: list[Callable[[], None]] = []
    source = source_of(cache, posted.append)

    async def lend() -> None:
        async with source.lent(keys_of(2), [MOST] * 2):
            await asyncio.sleep(60)

    for turns in range(4):
        posted.clear()
        lending = asyncio.ensure_future(lend())
        await asyncio.sleep(0)
        hold = posted.pop()
        if turns == 0:
            lending.cancel()
        hold()
        for _ in range(turns):
            await asyncio.sleep(0)
        lending.cancel()
        await asyncio.wait([lending])
        await asyncio.sleep(0.01)
        for event in posted:
            event()
        assert cache.status()["pinned_chunks"] == 0
