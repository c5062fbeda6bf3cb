"""Bytes in memory that change after they were stored are a miss, and are not sealed as right on
their way below.
"""

from collections.abc import Iterator

import pytest
from xxhash import xxh3_64_intdigest

from kvhold.cache.local import LocalCache, open_cache
from kvhold.cache.transfer.commands import PendingRead
from kvhold.cache.transfer.framing import Framer
from kvhold.cache.transfer.read_buffer import ReadBuffer
from kvhold.codecs import make_codec, read_header
from kvhold.core.checksums import pack
from kvhold.core.errors import DamagedChunks, FrameError
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace, make_key
from kvhold.core.metrics import Metrics
from kvhold.core.store_options import DEFAULT_OPTIONS
from kvhold.memory.arena import Arena
from kvhold.testing.cache import PLAIN, a_prompt, read, store
from kvhold.tiers.base import WatchedParts
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier, Wanted
from kvhold.tiers.stack import TierPlace

SPACE = Namespace(model="model", layout=PLAIN)
KEY = make_key(SPACE.digest, bytes(20), 0, 0)
NBYTES = PLAIN.chunk_bytes(0, PLAIN.tokens_per_chunk)


@pytest.fixture
def ram() -> Iterator[RamTier]:
    with Arena.create(2 << 20, huge_pages="never") as arena:
        yield RamTier(arena, make_policy("lru"), Metrics())


def stored(ram: RamTier) -> Entry:
    """A committed chunk with its checksums."""
    entry = reserved(ram)
    ram.view(entry)[:] = bytes(number % 251 for number in range(NBYTES))
    size = NBYTES // PLAIN.groups[0].layers
    entry.checksums = pack(
        [xxh3_64_intdigest(ram.view(entry)[at : at + size]) for at in range(0, NBYTES, size)]
    )
    ram.commit(entry)
    return entry


def reserved(ram: RamTier) -> Entry:
    entries = ram.reserve_all(
        [Wanted(KEY, NBYTES)], num_tokens=PLAIN.tokens_per_chunk, first_token=0
    )
    assert entries is not None
    return entries[0]


def frame(ram: RamTier, entry: Entry, codec: str) -> bytes:
    written = Framer(make_codec(codec)).framed(entry, PLAIN, ram.view(entry), DEFAULT_OPTIONS)
    assert written is not None
    return b"".join(written.parts)


def received(ram: RamTier, value: bytes) -> Entry:
    """The entry that a frame has come up into. Raises FrameError."""
    entry = reserved(ram)
    read_buffer = ReadBuffer.of(ram, PendingRead(entry, PLAIN, TierPlace(0, len(value))))
    at = 0
    for part in read_buffer.parts:
        part[:] = value[at : at + part.nbytes]
        at += part.nbytes
    read_buffer.accept(len(value), check=True)
    return entry


def raw_frame(ram: RamTier) -> bytes:
    entry = stored(ram)
    value = frame(ram, entry, "raw")
    ram.remove(entry)
    return value


def come(read_buffer: ReadBuffer, value: bytes, *, cut: int) -> None:
    """The value's bytes, as a stream brings them: in pieces that a watch sees."""
    parts = read_buffer.parts
    assert isinstance(parts, WatchedParts)
    watch, at = parts.begin(), 0
    for part in parts:
        for start in range(0, part.nbytes, cut):
            piece = part[start : start + cut]
            piece[:] = value[at : at + piece.nbytes]
            watch(piece)
            at += piece.nbytes


@pytest.mark.parametrize("cut", [1, 7, 64, 100, 1000, 1 << 20])
def test_a_chunk_is_checked_as_it_arrives(ram: RamTier, cut: int) -> None:
    value = raw_frame(ram)
    entry = reserved(ram)
    read_buffer = ReadBuffer.of(ram, PendingRead(entry, PLAIN, TierPlace(0, len(value))))
    come(read_buffer, value, cut=cut)
    assert read_buffer.is_summed
    read_buffer.accept(len(value), check=True)
    assert entry.checksums == pack(read_header(value).checksums)
    for at in (len(value) - NBYTES, len(value) - 1):
        damaged = bytearray(value)
        damaged[at] ^= 1
        come(read_buffer, bytes(damaged), cut=cut)
        with pytest.raises(FrameError, match="checksum"):
            read_buffer.accept(len(value), check=True)


def test_what_came_before_does_not_vouch_for_bytes_that_nobody_watched(ram: RamTier) -> None:
    value = raw_frame(ram)
    entry = reserved(ram)
    read_buffer = ReadBuffer.of(ram, PendingRead(entry, PLAIN, TierPlace(0, len(value))))
    come(read_buffer, value, cut=100)
    assert isinstance(read_buffer.parts, WatchedParts)
    read_buffer.parts.begin()
    read_buffer.parts[1][3] ^= 1
    assert not read_buffer.is_summed
    with pytest.raises(FrameError, match="checksum"):
        read_buffer.accept(len(value), check=True)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_checksums_go_below_and_come_up_with_the_chunk(ram: RamTier, codec: str) -> None:
    entry = stored(ram)
    value, checksums = frame(ram, entry, codec), entry.checksums
    ram.remove(entry)
    assert received(ram, value).checksums == checksums


def test_a_raw_frame_states_what_the_writer_took(ram: RamTier) -> None:
    """A5: the checksum was taken when the chunk was written below, so earlier damage was sealed as
    valid.
    """
    entry = stored(ram)
    ram.view(entry)[5] ^= 1
    value = frame(ram, entry, "raw")
    assert pack(read_header(memoryview(value)).checksums) == entry.checksums
    ram.remove(entry)
    with pytest.raises(FrameError, match="checksum"):
        received(ram, value)


def test_damaged_bytes_are_not_encoded(ram: RamTier) -> None:
    entry = stored(ram)
    ram.view(entry)[NBYTES - 1] ^= 1
    with pytest.raises(DamagedChunks):
        frame(ram, entry, "lossless")


def test_the_mover_drops_and_removes_a_damaged_chunk() -> None:
    with open_cache(ram_bytes="4MiB", tiers=["memory://?max_bytes=4MiB&codec=lossless"]) as cache:
        cache.register(SPACE)
        prompt = a_prompt(SPACE, 16)
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            places = reservation.chunks()
            assert places.sums is not None
            places.sums.known[:] = True  # as if a copy had taken those of other bytes
            reservation.commit()
        assert cache.flush(deadline_s=60)
        with cache.lookup(prompt.query()) as hit:
            assert (hit.num_tokens, hit.reason) == (0, "damaged")
        status = cache.status()
        assert status["counters"]["kvhold_damaged_chunks{found_by=writer}"] == 1
        assert (
            status["tier_counters"]["kvhold_tier_dropped_chunks{tier=memory,reason=damaged}"] == 1
        )


def test_damage_in_memory_is_a_miss_and_the_good_copy_below_comes_up() -> None:
    with open_cache(ram_bytes="4MiB", tiers=["memory://?max_bytes=4MiB"]) as cache:
        cache.register(SPACE)
        prompt = a_prompt(SPACE, 16)
        store(cache, prompt)
        assert cache.flush(deadline_s=60)
        spoil(cache, 0)
        with cache.lookup(prompt.query()) as hit:
            lease = cache.claim(hit.ticket)
            assert lease is not None
            with lease, pytest.raises(DamagedChunks):
                lease.verify(PLAIN)
        assert read(cache, prompt) == 16
        assert cache.status()["counters"]["kvhold_promoted_chunks"] == 1


def spoil(cache: LocalCache, chunk: int) -> None:
    """Change a byte of a chunk of the first prompt."""
    with cache.lookup(a_prompt(SPACE, 16).query()) as hit:
        lease = cache.claim(hit.ticket)
        assert lease is not None
        with lease:
            offset = int(lease.chunks().offsets[chunk])
    assert offset != ABSENT
    cache._arena.view(offset, NBYTES)[7] ^= 1
