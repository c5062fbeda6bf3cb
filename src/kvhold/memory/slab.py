"""A size is rounded up to a class, which wastes at most 1/8, or less than one ALIGNMENT. A class
takes *slabs* of equal slots. Not thread-safe.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

ALIGNMENT = 4096  # for O_DIRECT and huge pages
SLAB_BYTES = 1 << 20
LARGE_BYTES = SLAB_BYTES // 8  # smaller slots lose at most an eighth
_ZONE_ALIGNMENT = 2 << 20
_SLACK_PART = 64


class SlabAllocator:
    """Offsets in `[0, capacity)`, multiples of ALIGNMENT."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        self._runs = _Runs(self.capacity)
        self._partial: dict[int, list[_Slab]] = {}
        self._slab_starts: list[int] = []
        self._slabs: dict[int, _Slab] = {}
        self._large: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        assert nbytes > 0
        size = size_class(nbytes)
        if size >= LARGE_BYTES:
            start = self._runs.take(size)
            if start is None:
                return None
            self._large[start] = size
            self.used_bytes += size
            return start
        partial = self._partial.get(size)
        slab = partial[0] if partial else self._new_slab(size)
        if slab is None:
            return None
        offset = slab.take()
        if not slab.free:
            self._partial[size].remove(slab)
        self.used_bytes += size
        return offset

    def allocate_all(self, sizes: Sequence[int], zone: int | None = None) -> list[int] | None:
        """An offset per size. None: one does not fit, and nothing is allocated."""
        return _allocate_all(self, sizes)

    def free(self, offset: int) -> None:
        if offset in self._large:
            size = self._large.pop(offset)
            self._runs.give(offset, size)
            self.used_bytes -= size
            return
        slab = self._slab_at(offset)
        if not slab.free:
            insort(self._partial.setdefault(slab.slot_bytes, []), slab)
        slab.give(offset)
        self.used_bytes -= slab.slot_bytes
        if len(slab.free) == slab.num_slots:
            self._partial[slab.slot_bytes].remove(slab)
            self._slab_starts.pop(bisect_left(self._slab_starts, slab.start))
            del self._slabs[slab.start]
            self._runs.give(slab.start, slab.nbytes)

    @property
    def free_bytes(self) -> int:
        return self._runs.free_bytes

    def _new_slab(self, size: int) -> "_Slab | None":
        start = self._runs.take(SLAB_BYTES) if self.capacity >= SLAB_BYTES else None
        nbytes = SLAB_BYTES
        if start is None:
            start, nbytes = self._runs.take(size), size
        if start is None:
            return None
        slab = self._slabs[start] = _Slab(start, nbytes, size)
        insort(self._slab_starts, start)
        self._partial[size] = [slab]
        return slab

    def _slab_at(self, offset: int) -> "_Slab":
        at = bisect_left(self._slab_starts, offset + 1) - 1
        assert at >= 0, "not allocated here"
        slab = self._slabs[self._slab_starts[at]]
        assert offset < slab.start + slab.nbytes, "not allocated here"
        return slab


class ZonedSlabs:
    """Equal parts of the range (zones), such as the memory of NUMA nodes.

    If the wanted zone is full, another is used only if enough of all bytes is free.
    """

    def __init__(self, capacity: int, zones: int) -> None:
        self._zone_bytes = zone_bytes(capacity, zones)
        self._zones = [SlabAllocator(self._zone_bytes) for _ in range(zones)]
        self.capacity = sum(zone.capacity for zone in self._zones)
        self._slack = self.capacity // _SLACK_PART

    @property
    def used_bytes(self) -> int:
        return sum(zone.used_bytes for zone in self._zones)

    @property
    def free_bytes(self) -> int:
        return sum(zone.free_bytes for zone in self._zones)

    def allocate(self, nbytes: int, zone: int | None = None) -> int | None:
        if zone is not None:
            offset = self._zones[zone].allocate(nbytes)
            if offset is not None:
                return zone * self._zone_bytes + offset
            if self.capacity - self.used_bytes <= self._slack:
                return None
        emptiest = sorted(range(len(self._zones)), key=lambda n: self._zones[n].used_bytes)
        for number in emptiest:
            offset = self._zones[number].allocate(nbytes)
            if offset is not None:
                return number * self._zone_bytes + offset
        return None

    def allocate_all(self, sizes: Sequence[int], zone: int | None = None) -> list[int] | None:
        return _allocate_all(self, sizes, zone)

    def free(self, offset: int) -> None:
        self._zones[self.zone_of(offset)].free(offset % self._zone_bytes)

    def zone_of(self, offset: int) -> int:
        return offset // self._zone_bytes


def zone_bytes(capacity: int, zones: int) -> int:
    """Whole slabs and huge pages."""
    return capacity // zones // _ZONE_ALIGNMENT * _ZONE_ALIGNMENT


def _allocate_all(
    slabs: "SlabAllocator | ZonedSlabs", sizes: Sequence[int], zone: int | None = None
) -> list[int] | None:
    offsets: list[int] = []
    for nbytes in sizes:
        offset = (
            slabs.allocate(nbytes)
            if isinstance(slabs, SlabAllocator)
            else slabs.allocate(nbytes, zone)
        )
        if offset is None:
            for taken in offsets:
                slabs.free(taken)
            return None
        offsets.append(offset)
    return offsets


@lru_cache(maxsize=256)
def size_class(nbytes: int) -> int:
    """Round up: eight classes per power of two, multiples of ALIGNMENT."""
    if nbytes >= LARGE_BYTES:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT
    step = max(ALIGNMENT, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


class _Slab:
    """Equal slots. free: negated offsets, ascending, so that `pop` returns the lowest"""

    def __init__(self, start: int, nbytes: int, slot_bytes: int) -> None:
        self.start, self.nbytes, self.slot_bytes = start, nbytes, slot_bytes
        self.num_slots = nbytes // slot_bytes
        self.free = list(range(-start - (self.num_slots - 1) * slot_bytes, 1 - start, slot_bytes))

    def __lt__(self, other: "_Slab") -> bool:
        return self.start < other.start

    def take(self) -> int:
        return -self.free.pop()

    def give(self, offset: int) -> None:
        slot, rest = divmod(offset - self.start, self.slot_bytes)
        assert rest == 0 and slot < self.num_slots, "not allocated here"
        at = bisect_left(self.free, -offset)
        assert at == len(self.free) or self.free[at] != -offset, "freed twice"
        self.free.insert(at, -offset)


class _Runs:
    """Free runs, merged with their neighbours. First fit."""

    def __init__(self, capacity: int) -> None:
        self._starts = [0] if capacity else []
        self._lengths = {0: capacity} if capacity else {}
        self.free_bytes = capacity

    def take(self, nbytes: int) -> int | None:
        for at, start in enumerate(self._starts):
            length = self._lengths[start]
            if length >= nbytes:
                del self._lengths[start]
                if length == nbytes:
                    del self._starts[at]
                else:
                    self._starts[at] = start + nbytes
                    self._lengths[start + nbytes] = length - nbytes
                self.free_bytes -= nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        self.free_bytes += nbytes
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + nbytes:
            nbytes += self._lengths.pop(self._starts.pop(at))
        if at > 0:
            before = self._starts[at - 1]
            if before + self._lengths[before] == start:
                self._lengths[before] += nbytes
                return
        self._starts.insert(at, start)
        self._lengths[start] = nbytes
