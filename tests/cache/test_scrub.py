"""The scrubber compares idle chunks with their checksums and removes those that do not match."""

from collections.abc import Iterator

import pytest

from kvhold.cache.local import LocalCache, open_cache
from kvhold.cache.scrub import Scrubber
from kvhold.core.keys import Namespace
from kvhold.testing.cache import PLAIN, a_prompt, read, store

SPACE = Namespace(model="model", layout=PLAIN)


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with open_cache(ram_bytes="4MiB", scrub_interval_s=0) as cache:
        cache.register(SPACE)
        yield cache


@pytest.fixture
def scrubber(cache: LocalCache) -> Scrubber:
    """One that goes a step when it is told to."""
    return Scrubber(cache._state, cache._happen, 1.0)


def a_pass(scrubber: Scrubber) -> int:
    """Steps from the end of one pass to the end of the next.

    Returns the bytes that were compared.
    """
    while scrubber.step() is not None:
        pass
    compared = 0
    while (nbytes := scrubber.step()) is not None:
        compared += nbytes
    return compared


def offset_of(cache: LocalCache, seed: int, chunk: int) -> int:
    with cache.lookup(a_prompt(SPACE, 64, seed).query()) as hit:
        lease = cache.claim(hit.ticket)
        assert lease is not None
        with lease:
            return int(lease.chunks().offsets[chunk])


def test_a_pass_compares_every_idle_chunk_once(cache: LocalCache, scrubber: Scrubber) -> None:
    for seed in range(20):
        store(cache, a_prompt(SPACE, 64, seed))
    assert a_pass(scrubber) == 20 * 4 * PLAIN.chunk_bytes(0, 16)
    assert scrubber.status()["passes"] == 1
    assert cache.status()["pinned_chunks"] == 0
    assert cache.status()["counters"]["kvhold_scrubbed_chunks"] == 80
    assert all(read(cache, a_prompt(SPACE, 64, seed)) == 64 for seed in range(20))


def test_damaged_chunks_are_removed_and_counted(cache: LocalCache, scrubber: Scrubber) -> None:
    for seed in range(3):
        store(cache, a_prompt(SPACE, 64, seed))
    cache._arena.view(offset_of(cache, 1, 2), 1)[0] ^= 0x10
    a_pass(scrubber)
    assert [read(cache, a_prompt(SPACE, 64, seed)) for seed in range(3)] == [64, 32, 64]
    counters = cache.status()["counters"]
    assert counters["kvhold_damaged_chunks{found_by=scrubber}"] == 1
    assert "kvhold_damaged_chunks{found_by=reader}" not in counters


def test_chunks_that_are_read_are_left_to_their_readers(
    cache: LocalCache, scrubber: Scrubber
) -> None:
    store(cache, a_prompt(SPACE, 64, 1))
    store(cache, a_prompt(SPACE, 64, 2))
    with cache.lookup(a_prompt(SPACE, 64, 1).query()):
        assert a_pass(scrubber) == 4 * PLAIN.chunk_bytes(0, 16)
    assert a_pass(scrubber) == 8 * PLAIN.chunk_bytes(0, 16)


def test_chunks_come_and_go_during_a_pass(
    cache: LocalCache, scrubber: Scrubber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhold.cache.scrub._BATCH_BYTES", 1)
    for seed in range(4):
        store(cache, a_prompt(SPACE, 64, seed))
    scrubber.step()
    for seed in range(4, 40):
        scrubber.step()
        store(cache, a_prompt(SPACE, 64, seed))
        if seed % 5 == 0:
            cache.clear()
    a_pass(scrubber)
    assert cache.status()["pinned_chunks"] == 0


def test_its_thread_finds_damage_by_itself_and_ends_with_the_cache() -> None:
    with open_cache(ram_bytes="4MiB", scrub_interval_s=0.05) as cache:
        cache.register(SPACE)
        store(cache, a_prompt(SPACE, 64, 1))
        offset = offset_of(cache, 1, 0)
        cache._arena.view(offset, 1)[0] ^= 1
        with cache._lock:  # told of each that the thread posts
            found = cache._lock.wait_for(
                lambda: (
                    cache._state.metrics.value("kvhold_damaged_chunks", found_by="scrubber") == 1
                ),
                60,
            )
        assert found
    assert cache._scrubber._thread is not None and not cache._scrubber._thread.is_alive()


def test_an_interval_of_0_is_no_thread(cache: LocalCache) -> None:
    assert cache._scrubber._thread is None
    assert cache.status()["scrub"] == {"interval_s": 0.0, "passes": 0, "pass_bytes": 0}
