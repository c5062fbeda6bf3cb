"""The RAM tier: the contract by copying, and its own side, lending: what is written is unseen, what
is read stays, all comes back.
"""

from collections.abc import AsyncIterator, Iterator
from itertools import count, pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.memory.slab import ALIGNMENT, size_class
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, store
from kvhold.tiers.policies import LruPolicy, S3FifoPolicy, make_policy
from kvhold.tiers.ram import Entry, RamTier, Wanted

MIB = 1 << 20
ARENA_BYTES = 2 * MIB  # the smallest arena there is: two slabs, or 16 chunks of CHUNK bytes
CHUNK = 128 << 10


class TestRamTierByCopying(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture(params=["lru", "s3fifo", "learned"])
    async def tier(self, request: pytest.FixtureRequest) -> AsyncIterator[RamTier]:
        with Arena.create(32 * MIB, huge_pages="never") as arena:
            tier = RamTier(arena, make_policy(request.param), Metrics())
            yield tier
            await tier.close()
            await tier.delete([entry.key for entry in tier.entries()])
            assert tier.used_bytes == 0


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(ARENA_BYTES, huge_pages="never") as arena:
        yield arena


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tier(arena: Arena, metrics: Metrics) -> RamTier:
    return RamTier(arena, LruPolicy(), metrics)


def reserve(tier: RamTier, number: int, nbytes: int = CHUNK) -> Entry:
    entries = tier.reserve_all([Wanted(make_key(number), nbytes)], num_tokens=256, first_token=0)
    assert entries is not None, "there should be room"
    return entries[0]


def add(tier: RamTier, number: int, nbytes: int = CHUNK) -> Entry:
    entry = reserve(tier, number, nbytes)
    tier.commit(entry)
    return entry


def fill(tier: RamTier, nbytes: int = CHUNK) -> list[Entry]:
    """As many chunks as fit, in order of their age."""
    entries = [add(tier, number, nbytes) for number in range(ARENA_BYTES // size_class(nbytes))]
    assert tier.used_bytes == tier.capacity_bytes
    return entries


def present(tier: RamTier, numbers: range) -> list[int]:
    return [number for number in numbers if tier.find(make_key(number)) is not None]


class TestReserve:
    def test_a_new_tier_is_at_its_baseline(self, tier: RamTier) -> None:
        assert (tier.used_bytes, tier.num_chunks, tier.num_pinned, tier.capacity_bytes) == (
            0,
            0,
            0,
            ARENA_BYTES,
        )

    def test_what_is_reserved_is_held_and_not_found(self, tier: RamTier) -> None:
        entry = reserve(tier, 1)
        assert tier.holds(entry.key)
        assert tier.find(entry.key) is None
        assert (tier.num_chunks, tier.used_bytes) == (1, CHUNK)

    async def test_nobody_sees_what_is_being_written(self, tier: RamTier) -> None:
        key = reserve(tier, 1).key
        assert await tier.probe([key]) == [None]
        assert await fetch(tier, [key], [CHUNK]) == [None]
        assert await tier.delete([key]) == [False]
        assert [key async for key in tier.scan(b"")] == []
        assert await store(tier, {key: b"other"}) == [False]

    def test_the_groups_of_a_chunk_get_memory_together(self, tier: RamTier) -> None:
        entries = tier.reserve_all(
            [Wanted(make_key(1), CHUNK), Wanted(make_key(2), 100), Wanted(make_key(3), 5000)],
            num_tokens=16,
            first_token=32,
        )
        assert entries is not None
        assert [(e.key, e.nbytes, e.num_tokens, e.first_token) for e in entries] == [
            (make_key(1), CHUNK, 16, 32),
            (make_key(2), 100, 16, 32),
            (make_key(3), 5000, 16, 32),
        ]
        spans = sorted((e.offset, e.offset + e.nbytes) for e in entries)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    def test_what_is_larger_than_the_arena_evicts_nothing(self, tier: RamTier) -> None:
        entries = fill(tier)
        assert (
            tier.reserve_all(
                [Wanted(make_key(98), CHUNK), Wanted(make_key(99), ARENA_BYTES)],
                num_tokens=1,
                first_token=0,
            )
            is None
        )
        assert all(tier.find(entry.key) is entry for entry in entries)

    def test_a_chunk_that_gets_no_room_takes_nothing(self, tier: RamTier) -> None:
        entries = fill(tier)
        for entry in entries[1:]:
            tier.pin(entry)
        used = tier.used_bytes
        assert (
            tier.reserve_all(
                [Wanted(make_key(98), CHUNK), Wanted(make_key(99), CHUNK)],
                num_tokens=1,
                first_token=0,
            )
            is None
        )
        assert tier.used_bytes == used
        assert not tier.holds(make_key(98))
        assert tier.find(entries[0].key) is entries[0], (
            "what would not have been enough was not evicted"
        )

    def test_an_abandoned_chunk_leaves_nothing(self, tier: RamTier) -> None:
        entry = reserve(tier, 1)
        tier.abandon(entry)
        assert not tier.holds(entry.key)
        assert (tier.used_bytes, tier.num_chunks) == (0, 0)
        add(tier, 1)

    def test_a_committed_chunk_is_found_with_its_bytes(self, tier: RamTier, arena: Arena) -> None:
        entry = reserve(tier, 1, 5000)
        value = make_value(1, 5000)
        arena.view(entry.offset, 5000)[:] = value
        tier.commit(entry)
        assert tier.find(entry.key) is entry
        assert bytes(arena.view(entry.offset, entry.nbytes)) == value

    async def test_lent_and_copied_are_the_same_chunks(self, tier: RamTier, arena: Arena) -> None:
        entry = reserve(tier, 1, 5000)
        arena.view(entry.offset, 5000)[:] = make_value(1, 5000)
        tier.commit(entry)
        assert await fetch(tier, [entry.key], [5000]) == [make_value(1, 5000)]
        await store(tier, {make_key(2): make_value(2, 700)})
        copied = tier.find(make_key(2))
        assert copied is not None
        assert bytes(arena.view(copied.offset, copied.nbytes)) == make_value(2, 700)


class TestEvict:
    def test_the_chunk_asked_for_longest_ago_makes_room(self, tier: RamTier) -> None:
        entries = fill(tier)
        tier.pin(entries[0])
        tier.unpin(entries[0])
        add(tier, 100)
        assert present(tier, range(len(entries))) == [0, *range(2, len(entries))]

    def test_only_what_is_short_is_evicted(self, tier: RamTier) -> None:
        entries = fill(tier)
        for entry in entries[:3]:
            tier.remove(entry)
        assert (
            tier.reserve_all(
                [Wanted(make_key(100 + i), CHUNK) for i in range(4)], num_tokens=1, first_token=0
            )
            is not None
        )
        assert present(tier, range(16)) == list(range(4, 16))

    def test_free_room_counts_beside_what_can_be_evicted(self, tier: RamTier) -> None:
        entries = fill(tier)
        tier.remove(entries[0])
        for entry in entries[2:]:
            tier.pin(entry)
        assert (
            tier.reserve_all(
                [Wanted(make_key(100), CHUNK), Wanted(make_key(101), CHUNK)],
                num_tokens=1,
                first_token=0,
            )
            is not None
        )
        assert not tier.holds(entries[1].key)

    def test_small_chunks_count_as_what_they_occupy(self, tier: RamTier) -> None:
        entries = fill(tier, nbytes=1)
        for entry in entries[:-1]:
            tier.pin(entry)
        assert reserve(tier, 10_000, 4096).offset == entries[-1].offset

    @pytest.mark.parametrize("policy", [LruPolicy, S3FifoPolicy])
    def test_chunks_of_one_size_make_room_for_another(
        self, arena: Arena, metrics: Metrics, policy: type
    ) -> None:
        tier = RamTier(arena, policy(), metrics)
        for number, nbytes in enumerate([100, CHUNK, 40_000, MIB, 4097, 2 * MIB, 1]):
            for i in range(64):
                add(tier, 1000 * number + i, nbytes)
                assert tier.used_bytes <= tier.capacity_bytes

    def test_pinned_chunks_stay(self, tier: RamTier) -> None:
        entries = fill(tier)
        for entry in entries:
            tier.pin(entry)
        assert tier.num_pinned == len(entries)
        assert tier.reserve_all([Wanted(make_key(100), 1)], num_tokens=1, first_token=0) is None
        tier.unpin(entries[7])
        add(tier, 100)
        assert present(tier, range(16)) == [i for i in range(16) if i != 7]

    def test_a_chunk_pinned_twice_stays_until_both_pins_fall(self, tier: RamTier) -> None:
        entries = fill(tier)
        for entry in (*entries, entries[0]):
            tier.pin(entry)
        tier.unpin(entries[0])
        assert tier.reserve_all([Wanted(make_key(100), CHUNK)], num_tokens=1, first_token=0) is None
        tier.unpin(entries[0])
        add(tier, 100)

    def test_what_is_being_written_is_not_evicted(self, tier: RamTier) -> None:
        reserved = [reserve(tier, number) for number in range(16)]
        assert tier.reserve_all([Wanted(make_key(100), CHUNK)], num_tokens=1, first_token=0) is None
        for entry in reserved:
            tier.commit(entry)
        add(tier, 100)

    def test_what_was_evicted_is_counted(self, tier: RamTier, metrics: Metrics) -> None:
        fill(tier, nbytes=CHUNK - 5)
        assert metrics.value("kvhold_evicted_chunks", tier="ram") == 0
        add(tier, 100)
        add(tier, 101)
        assert metrics.value("kvhold_evicted_chunks", tier="ram") == 2
        assert metrics.value("kvhold_evicted_bytes", tier="ram") == 2 * (CHUNK - 5)

    async def test_a_copied_chunk_that_was_read_is_young_again(self, tier: RamTier) -> None:
        fill(tier)
        await fetch(tier, [make_key(0)], [CHUNK])
        await store(tier, {make_key(100): bytes(CHUNK)})
        assert present(tier, range(3)) == [0, 2]

    async def test_probing_makes_nothing_younger(self, tier: RamTier) -> None:
        fill(tier)
        await tier.probe([make_key(0)])
        add(tier, 100)
        assert present(tier, range(3)) == [1, 2]


class TestRemove:
    def test_a_chunk_nobody_reads_goes_at_once(self, tier: RamTier) -> None:
        tier.remove(add(tier, 1))
        assert (tier.used_bytes, tier.num_chunks) == (0, 0)

    def test_a_chunk_that_is_read_is_not_found_and_goes_with_its_last_reader(
        self, tier: RamTier, arena: Arena
    ) -> None:
        entry = add(tier, 1, 1000)
        arena.view(entry.offset, 1000)[:] = make_value(1, 1000)
        tier.pin(entry)
        tier.pin(entry)
        tier.remove(entry)
        assert tier.find(entry.key) is None
        assert not tier.holds(entry.key)
        assert (tier.num_chunks, tier.num_pinned) == (1, 1)
        tier.unpin(entry)
        assert bytes(arena.view(entry.offset, 1000)) == make_value(1, 1000)
        assert tier.used_bytes > 0
        tier.unpin(entry)
        assert (tier.used_bytes, tier.num_chunks, tier.num_pinned) == (0, 0, 0)

    def test_its_key_can_be_written_anew_while_it_is_still_read(self, tier: RamTier) -> None:
        old = add(tier, 1)
        tier.pin(old)
        tier.remove(old)
        new = add(tier, 1)
        assert new.offset != old.offset
        tier.unpin(old)
        assert tier.find(new.key) is new
        assert tier.used_bytes == CHUNK

    def test_a_chunk_removed_while_it_is_written_never_becomes_visible(self, tier: RamTier) -> None:
        entry = reserve(tier, 1)
        tier.remove(entry)
        assert not tier.holds(entry.key)
        assert tier.used_bytes == CHUNK, "its writer may still be writing"
        tier.commit(entry)
        assert tier.find(entry.key) is None
        assert (tier.used_bytes, tier.num_chunks) == (0, 0)

    def test_a_chunk_removed_while_it_is_written_can_be_abandoned(self, tier: RamTier) -> None:
        entry = reserve(tier, 1)
        tier.remove(entry)
        newer = add(tier, 1)
        tier.abandon(entry)
        assert tier.find(entry.key) is newer
        assert (tier.used_bytes, tier.num_chunks) == (CHUNK, 1)

    async def test_delete_of_a_chunk_that_is_read_is_a_delete(self, tier: RamTier) -> None:
        entry = add(tier, 1)
        tier.pin(entry)
        assert await tier.delete([entry.key, entry.key]) == [True, False]
        assert await tier.probe([entry.key]) == [None]
        tier.unpin(entry)
        assert tier.used_bytes == 0

    def test_doomed_chunks_are_not_evicted_twice(self, tier: RamTier) -> None:
        entries = fill(tier)
        tier.pin(entries[0])
        tier.remove(entries[0])
        for number in range(100, 130):
            add(tier, number)
        tier.unpin(entries[0])
        assert tier.used_bytes == tier.capacity_bytes - CHUNK

    def test_entries_are_listed_by_their_namespace_those_being_written_too(
        self, tier: RamTier
    ) -> None:
        wanted = [
            Wanted(make_key(1, b"a" * 16), 10),
            Wanted(make_key(2, b"a" * 16), 10),
            Wanted(make_key(1, b"b" * 16), 10),
        ]
        entries = tier.reserve_all(wanted, num_tokens=1, first_token=0)
        assert entries is not None
        tier.commit(entries[0])
        assert set(tier.entries(b"a" * 16)) == set(entries[:2])
        assert set(tier.entries()) == set(entries)


class Lending(RuleBasedStateMachine):
    """Writers and readers in any order over a small arena.

    Every chunk is written with a stamp of its own, once a page.
    """

    writing: Bundle[tuple[Entry, int]] = Bundle("writing")
    reading: Bundle[tuple[Entry, int]] = Bundle("reading")

    @initialize(policy=st.sampled_from(["lru", "s3fifo", "learned"]))
    def begin(self, policy: str) -> None:
        self.arena = Arena.create(ARENA_BYTES, huge_pages="never")
        self.stamps = np.frombuffer(self.arena.buffer, np.int64)[:: ALIGNMENT // 8]
        self.tier = RamTier(self.arena, make_policy(policy), Metrics())
        self.committed: dict[bytes, int] = {}  # of every key the stamp committed last
        self.written: list[tuple[Entry, int]] = []
        self.read: list[tuple[Entry, int]] = []
        self.numbers = count(1)

    def stamps_of(self, entry: Entry) -> npt.NDArray[np.int64]:
        first = entry.offset // ALIGNMENT
        return self.stamps[first : first + size_class(entry.nbytes) // ALIGNMENT]

    @rule(
        target=writing,
        numbers=st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True),
        nbytes=st.sampled_from([1, 5000, 70_000, CHUNK, 300_000, MIB]),
    )
    def reserve(self, numbers: list[int], nbytes: int) -> MultipleResults[tuple[Entry, int]]:
        wanted = [Wanted(make_key(n), nbytes) for n in numbers if not self.tier.holds(make_key(n))]
        before = self.tier.used_bytes
        entries = self.tier.reserve_all(wanted, num_tokens=1, first_token=0) if wanted else None
        if entries is None:
            assert self.tier.used_bytes <= before
            return multiple()
        given = [(entry, next(self.numbers)) for entry in entries]
        for entry, stamp in given:
            self.stamps_of(entry)[:] = stamp
        self.written += given
        return multiple(*given)

    @rule(writer=consumes(writing))
    def commit(self, writer: tuple[Entry, int]) -> None:
        entry, stamp = writer
        self.written.remove(writer)
        if not entry.doomed:
            self.committed[entry.key] = stamp
        self.tier.commit(entry)

    @rule(writer=consumes(writing))
    def abandon(self, writer: tuple[Entry, int]) -> None:
        self.written.remove(writer)
        self.tier.abandon(writer[0])

    @rule(target=reading, number=st.integers(0, 30))
    def pin(self, number: int) -> tuple[Entry, int] | MultipleResults[tuple[Entry, int]]:
        entry = self.tier.find(make_key(number))
        if entry is None:
            return multiple()
        self.tier.pin(entry)
        self.read.append((entry, self.committed[entry.key]))
        return self.read[-1]

    @rule(reader=consumes(reading))
    def unpin(self, reader: tuple[Entry, int]) -> None:
        self.read.remove(reader)
        self.tier.unpin(reader[0])

    @rule(number=st.integers(0, 30))
    def remove(self, number: int) -> None:
        for entry in self.tier.entries(make_key(number)):
            self.tier.remove(entry)

    @invariant()
    def no_bytes_have_changed_that_somebody_writes_reads_or_may_find(self) -> None:
        found = [
            (entry, self.committed[entry.key]) for entry in self.tier.entries() if entry.committed
        ]
        for entry, stamp in (*self.written, *self.read, *found):
            assert (self.stamps_of(entry) == stamp).all()

    @invariant()
    def bytes_and_chunks_are_counted_exactly(self) -> None:
        held = {
            entry.offset: entry
            for entry in (
                *self.tier.entries(),
                *(entry for entry, _ in (*self.written, *self.read)),
            )
        }
        assert self.tier.used_bytes == sum(size_class(entry.nbytes) for entry in held.values())
        assert self.tier.num_chunks == len(held)

    def teardown(self) -> None:
        for entry, _ in self.written:
            self.tier.abandon(entry)
        for entry, _ in self.read:
            self.tier.unpin(entry)
        for entry in self.tier.entries():
            self.tier.remove(entry)
        assert (self.tier.used_bytes, self.tier.num_chunks, self.tier.num_pinned) == (0, 0, 0)
        self.arena.close()


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=60, stateful_step_count=40)
