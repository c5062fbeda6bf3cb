"""The allocator: objects never overlap, all come back, and what rounding and mixing of sizes costs
is bounded.
"""

from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, settings
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

from kvhold.memory.slab import (
    ALIGNMENT,
    LARGE_BYTES,
    SLAB_BYTES,
    SlabAllocator,
    ZonedSlabs,
    size_class,
    zone_bytes,
)

KIB, MIB = 1 << 10, 1 << 20

sizes = st.one_of(
    st.sampled_from(
        [
            1,
            ALIGNMENT - 1,
            ALIGNMENT,
            ALIGNMENT + 1,
            LARGE_BYTES - 1,
            LARGE_BYTES,
            LARGE_BYTES + 1,
            SLAB_BYTES,
            SLAB_BYTES + 1,
        ]
    ),
    st.integers(1, 64 * KIB),
    st.integers(1, 2 * MIB),
)


def fill(slabs: SlabAllocator, nbytes: int) -> list[int]:
    """Objects of `nbytes` until there is no room."""
    offsets = []
    while (offset := slabs.allocate(nbytes)) is not None:
        offsets.append(offset)
    return offsets


def is_one_free_run(slabs: SlabAllocator) -> bool:
    """Whether everything can be had in one piece. Leaves it as it was."""
    offset = slabs.allocate(slabs.capacity)
    if offset is not None:
        slabs.free(offset)
    return offset == 0


class TestSizeClass:
    @given(st.integers(1, 4 * MIB))
    def test_it_is_aligned_and_no_smaller(self, nbytes: int) -> None:
        assert size_class(nbytes) >= nbytes
        assert size_class(nbytes) % ALIGNMENT == 0

    @given(st.integers(1, 4 * MIB))
    def test_it_loses_an_eighth_at_most_or_less_than_one_page(self, nbytes: int) -> None:
        assert size_class(nbytes) - nbytes < max(ALIGNMENT, nbytes / 8 + 1)

    @given(st.integers(1, 2 * MIB))
    def test_it_is_a_class_of_its_own(self, nbytes: int) -> None:
        assert size_class(size_class(nbytes)) == size_class(nbytes)

    @given(st.integers(1, 2 * MIB), st.integers(1, 2 * MIB))
    def test_more_bytes_never_have_a_smaller_class(self, one: int, other: int) -> None:
        assert (size_class(one) <= size_class(other)) or one > other

    def test_small_objects_come_in_few_classes(self) -> None:
        assert len({size_class(nbytes) for nbytes in range(1, LARGE_BYTES)}) <= 24


class TestAllocate:
    def test_the_lowest_address_goes_first(self) -> None:
        slabs = SlabAllocator(4 * MIB)
        assert [slabs.allocate(ALIGNMENT) for _ in range(3)] == [0, ALIGNMENT, 2 * ALIGNMENT]
        slabs.free(ALIGNMENT)
        assert slabs.allocate(100) == ALIGNMENT
        assert slabs.allocate(MIB) == SLAB_BYTES

    def test_of_several_slabs_with_room_the_lowest_fills_first(self) -> None:
        slabs = SlabAllocator(4 * MIB)
        fill(slabs, 4096)
        for offset in (3 * MIB, MIB, 2 * MIB + 4096):
            slabs.free(offset)
        assert fill(slabs, 4096) == [MIB, 2 * MIB + 4096, 3 * MIB]

    def test_what_does_not_fit_is_none(self) -> None:
        slabs = SlabAllocator(MIB)
        assert slabs.allocate(MIB + 1) is None
        assert slabs.allocate(MIB) == 0
        assert slabs.allocate(1) is None
        assert slabs.used_bytes == MIB

    @pytest.mark.parametrize("capacity", [0, 1, ALIGNMENT - 1])
    def test_less_than_a_page_is_nothing(self, capacity: int) -> None:
        slabs = SlabAllocator(capacity)
        assert (slabs.capacity, slabs.free_bytes, slabs.allocate(1)) == (0, 0, None)

    def test_the_end_of_a_capacity_that_is_not_aligned_is_left(self) -> None:
        slabs = SlabAllocator(3 * ALIGNMENT + 7)
        assert slabs.capacity == 3 * ALIGNMENT
        assert fill(slabs, 1) == [0, ALIGNMENT, 2 * ALIGNMENT]

    def test_less_than_a_slab_is_used_to_the_end(self) -> None:
        slabs = SlabAllocator(SLAB_BYTES + 5 * ALIGNMENT)
        assert len(fill(slabs, ALIGNMENT)) == slabs.capacity // ALIGNMENT
        assert slabs.used_bytes == slabs.capacity

    @given(st.integers(1, 2 * MIB))
    @settings(max_examples=50)
    def test_objects_of_one_size_fill_at_least_seven_eighths(self, nbytes: int) -> None:
        slabs = SlabAllocator(16 * MIB)
        held = len(fill(slabs, nbytes)) * size_class(nbytes)
        assert held == slabs.used_bytes
        assert held > slabs.capacity * 7 / 8 or slabs.capacity - held < size_class(nbytes)

    def test_all_or_nothing(self) -> None:
        slabs = SlabAllocator(3 * MIB)
        assert slabs.allocate_all([MIB, 5000, MIB, 5000, ALIGNMENT, MIB]) is None
        assert (slabs.used_bytes, is_one_free_run(slabs)) == (0, True)
        offsets = slabs.allocate_all([MIB, 5000, 500 * KIB])
        assert offsets is not None
        assert slabs.used_bytes == MIB + 8 * KIB + 500 * KIB

    def test_nothing_asked_is_nothing_taken(self) -> None:
        slabs = SlabAllocator(MIB)
        assert slabs.allocate_all([]) == []
        assert slabs.used_bytes == 0

    def test_an_object_has_bytes(self) -> None:
        with pytest.raises(AssertionError):
            SlabAllocator(MIB).allocate(0)


class TestFree:
    @pytest.mark.parametrize("nbytes", [1, 5000, 100_000, LARGE_BYTES, MIB, 3 * MIB])
    @pytest.mark.parametrize(
        "order", ["first in, first out", "last in, first out", "every other one"]
    )
    def test_whatever_the_order_all_merges_to_one_run(self, nbytes: int, order: str) -> None:
        slabs = SlabAllocator(8 * MIB)
        offsets = fill(slabs, nbytes)
        steps = {
            "first in, first out": offsets,
            "last in, first out": offsets[::-1],
            "every other one": offsets[::2] + offsets[1::2],
        }
        for offset in steps[order]:
            slabs.free(offset)
        assert slabs.used_bytes == 0
        assert slabs.free_bytes == slabs.capacity
        assert is_one_free_run(slabs)

    def test_memory_moves_between_sizes(self) -> None:
        slabs = SlabAllocator(8 * MIB)
        for nbytes in (4096, 100_000, 700_000, 5000, 8 * MIB, 1):
            offsets = fill(slabs, nbytes)
            assert len(offsets) * size_class(nbytes) > slabs.capacity * 7 / 8 - size_class(nbytes)
            for offset in offsets:
                slabs.free(offset)

    def test_one_small_object_holds_back_one_slab_and_no_more(self) -> None:
        slabs = SlabAllocator(8 * MIB)
        offsets = fill(slabs, ALIGNMENT)
        kept = offsets[len(offsets) // 2]
        for offset in offsets:
            if offset != kept:
                slabs.free(offset)
        assert len(fill(slabs, MIB)) == 7

    def test_scattered_large_objects_hold_back_their_own_bytes_alone(self) -> None:
        slabs = SlabAllocator(16 * MIB)
        offsets = fill(slabs, MIB)
        for offset in offsets[::2]:
            slabs.free(offset)
        assert slabs.allocate(MIB + 1) is None, "free, but not in one piece"
        assert len(fill(slabs, MIB)) == 8

    @pytest.mark.parametrize("nbytes", [100, 60_000, 120 * KIB, MIB])
    def test_freeing_twice_is_a_bug(self, nbytes: int) -> None:
        slabs = SlabAllocator(4 * MIB)
        offset = slabs.allocate(nbytes)
        other = slabs.allocate(nbytes)
        assert offset is not None and other is not None
        slabs.free(offset)
        with pytest.raises(AssertionError):
            slabs.free(offset)

    @pytest.mark.parametrize(
        "offset", [1, 100, 120 * KIB - ALIGNMENT, 8 * 120 * KIB, SLAB_BYTES, -ALIGNMENT, 64 * MIB]
    )
    def test_freeing_what_was_never_given_is_a_bug(self, offset: int) -> None:
        slabs = SlabAllocator(4 * MIB)
        assert slabs.allocate(120 * KIB) == 0
        with pytest.raises(AssertionError):
            slabs.free(offset)


class Allocating(RuleBasedStateMachine):
    """Any mix of sizes, in any order, beside a plain account of who has which bytes."""

    objects: Bundle[int] = Bundle("objects")

    @initialize(capacity=st.sampled_from([3 * ALIGNMENT, 500 * KIB, MIB, 4 * MIB + 12 * KIB]))
    def begin(self, capacity: int) -> None:
        self.slabs = SlabAllocator(capacity)
        self.taken: dict[int, int] = {}  # offset -> size

    @rule(target=objects, nbytes=sizes)
    def allocate(self, nbytes: int) -> int | MultipleResults[int]:
        offset = self.slabs.allocate(nbytes)
        if offset is None:
            assert self.largest_gap() < size_class(nbytes) + 2 * SLAB_BYTES, (
                "a gap this large has room beside the slabs at its ends"
            )
            return multiple()
        self.take(offset, nbytes)
        return offset

    @rule(target=objects, wanted=st.lists(sizes, max_size=5))
    def allocate_all(self, wanted: list[int]) -> MultipleResults[int]:
        before = self.slabs.used_bytes, self.slabs.free_bytes
        offsets = self.slabs.allocate_all(wanted)
        if offsets is None:
            assert (self.slabs.used_bytes, self.slabs.free_bytes) == before
            return multiple()
        for offset, nbytes in zip(offsets, wanted, strict=True):
            self.take(offset, nbytes)
        return multiple(*offsets)

    @rule(offset=consumes(objects))
    def free(self, offset: int) -> None:
        del self.taken[offset]
        self.slabs.free(offset)

    def take(self, offset: int, nbytes: int) -> None:
        assert offset % ALIGNMENT == 0
        assert 0 <= offset <= offset + size_class(nbytes) <= self.slabs.capacity
        starts = sorted(self.taken)
        at = bisect_left(starts, offset)
        assert at == len(starts) or offset + size_class(nbytes) <= starts[at], "overlaps the next"
        assert at == 0 or starts[at - 1] + self.taken[starts[at - 1]] <= offset, (
            "overlaps the one before"
        )
        self.taken[offset] = size_class(nbytes)

    def largest_gap(self) -> int:
        edges = [
            (0, 0),
            *sorted((offset, offset + size) for offset, size in self.taken.items()),
            (self.slabs.capacity, 0),
        ]
        return max(start - end for (_, end), (start, _) in pairwise(edges))

    @invariant()
    def used_bytes_are_exact(self) -> None:
        assert self.slabs.used_bytes == sum(self.taken.values())
        assert self.slabs.used_bytes + self.slabs.free_bytes <= self.slabs.capacity

    def teardown(self) -> None:
        if hasattr(self, "slabs"):
            for offset in self.taken:
                self.slabs.free(offset)
            assert is_one_free_run(self.slabs)
            assert (self.slabs.used_bytes, self.slabs.free_bytes) == (0, self.slabs.capacity)


TestAllocating = Allocating.TestCase
TestAllocating.settings = settings(max_examples=80, stateful_step_count=50)


class TestZones:
    def test_an_object_lies_in_the_wanted_zone_while_that_has_room(self) -> None:
        slabs = ZonedSlabs(48 * MIB, 3)
        assert (slabs.capacity, zone_bytes(48 * MIB, 3)) == (48 * MIB, 16 * MIB)
        for zone in (2, 0, 1, 1):
            offset = slabs.allocate(MIB, zone)
            assert offset is not None
            assert slabs.zone_of(offset) == zone
        # without a wish, the emptiest
        assert slabs.zone_of(slabs.allocate(MIB) or 0) in (0, 2)

    def test_a_full_zone_is_no_room_until_enough_is_free_elsewhere(self) -> None:
        slabs = ZonedSlabs(64 * MIB, 2)
        while slabs.allocate_all([MIB], 0) is not None and slabs.used_bytes < 32 * MIB:
            pass
        (far,) = slabs.allocate_all([MIB], 0) or [0]
        assert slabs.zone_of(far) == 1, "half of the bytes are free there"
        others = [slabs.allocate(MIB, 1) for _ in range(31)]
        assert slabs.used_bytes == slabs.capacity
        slabs.free(others[0] or 0)
        assert slabs.allocate_all([MIB], 0) is None
        assert slabs.allocate_all([MIB]) == [others[0]]

    def test_what_does_not_fit_whole_leaves_nothing_allocated(self) -> None:
        slabs = ZonedSlabs(8 * MIB, 2)
        assert slabs.allocate_all([3 * MIB, 3 * MIB, 3 * MIB], 0) is None
        assert slabs.used_bytes == 0

    @given(st.lists(st.tuples(sizes, st.sampled_from([None, 0, 1]), st.booleans()), max_size=60))
    @settings(max_examples=60, deadline=None)
    def test_objects_never_overlap_and_all_come_back(
        self, steps: list[tuple[int, int | None, bool]]
    ) -> None:
        slabs = ZonedSlabs(12 * MIB, 2)
        held: dict[int, int] = {}
        for nbytes, zone, frees in steps:
            if frees and held:
                offset = next(iter(held))
                del held[offset]
                slabs.free(offset)
            offset_or_none = slabs.allocate(nbytes, zone)
            if offset_or_none is not None:
                held[offset_or_none] = nbytes
            ends = sorted((start, start + size) for start, size in held.items())
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert not ends or ends[-1][1] <= slabs.capacity
        for offset in held:
            slabs.free(offset)
        assert (slabs.used_bytes, slabs.free_bytes) == (0, slabs.capacity)
