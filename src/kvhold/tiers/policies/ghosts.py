"""The last use of chunks not in memory: 9 bytes each, in a table of fixed size.

A name's hash chooses a set of eight places. In a full set, the oldest use is replaced.

    number:  past (tick 21 | value 4 | kind 9 | sample 1 | uses 5) | tag 24
    mark:    one byte, 0 in an empty place; one call searches a set for it

Times have a resolution of 2 s and wrap around after 48 days.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

_MOST = 1 << 20
_WAYS = 8
_TAG_BITS = 24
_TAG = (1 << _TAG_BITS) - 1
_MARKS = 255
TICK_S = 2.0
_TICKS = 1 << 21
_KIND_BITS, _USES_BITS = 9, 5
SAMPLE = 1 << _USES_BITS  # set in the past of a sample
_PAST_BITS = 4 + _KIND_BITS + 1 + _USES_BITS  # below the tick
_VALUE = 15 << _PAST_BITS - 4
MOST_KINDS = 1 << _KIND_BITS
MOST_USES = (1 << _USES_BITS) - 1


class Ghost(NamedTuple):
    """at_s: of the last use; uses: 1 to `MOST_USES`; value: 0 to 15."""

    at_s: float
    kind: int
    uses: int
    value: int = 0


class Ghosts:
    def __init__(self, most: int = _MOST) -> None:
        """most: a power of 2, 8 or more."""
        self._firsts = most - _WAYS
        self._places = np.zeros(most, np.uint64).data
        self._marks = bytearray(most)
        self.nbytes = 9 * most
        self.num = 0

    def add(self, name: bytes, past: int, now_s: float) -> int:
        """Return the replaced past, of this or another chunk; 0: none.

        A sample's past is replaced only by another sample's.
        """
        number = xxh3_64_intdigest(name)
        place = self._find(number)
        if place < 0:
            return self._set(number, past, now_s)
        if self._places[place] >> _TAG_BITS & SAMPLE and not past & SAMPLE:
            return 0
        return self._renew(place, past)

    def mark(self, name: bytes) -> int:
        """As a sample. Returns its past; 0: unknown."""
        place = self._find(xxh3_64_intdigest(name))
        if place < 0:
            return 0
        self._places[place] |= SAMPLE << _TAG_BITS
        return self._places[place] >> _TAG_BITS

    def take(self, name: bytes) -> int:
        place = self._find(xxh3_64_intdigest(name))
        if place < 0:
            return 0
        self._marks[place] = 0
        self.num -= 1
        return self._places[place] >> _TAG_BITS

    def find(self, name: bytes) -> int:
        place = self._find(xxh3_64_intdigest(name))
        return 0 if place < 0 else self._places[place] >> _TAG_BITS

    def use_all(
        self,
        names: Iterable[bytes],
        pasts: Sequence[int],
        now_s: float,
        *,
        if_known: bool = False,
    ) -> tuple[list[int], list[int]]:
        """pasts: the past to remember: `[number of earlier uses]`
        if_known: add no unknown chunks

        Returns each chunk's earlier past, 0 if unknown, and the pasts of replaced chunks.
        """
        find, new = self._find, pasts[0]
        earlier, replaced = [], []
        for number in map(xxh3_64_intdigest, names):
            place, past = find(number), 0
            if place >= 0:
                past = self._renew(place, pasts[self._places[place] >> _TAG_BITS & MOST_USES])
            elif not if_known and (other := self._set(number, new, now_s)):
                replaced.append(other)
            earlier.append(past)
        return earlier, replaced

    def _find(self, number: int) -> int:
        tag, first = number & _TAG, number >> _TAG_BITS & self._firsts
        mark, end = (number >> 56) % _MARKS + 1, first + _WAYS
        place = self._marks.find(mark, first, end)
        while place >= 0 and self._places[place] & _TAG != tag:
            place = self._marks.find(mark, place + 1, end)
        return place

    def _renew(self, place: int, past: int) -> int:
        number = self._places[place]
        self._places[place] = past << _TAG_BITS | number & _TAG
        return number >> _TAG_BITS

    def _set(self, number: int, past: int, now_s: float) -> int:
        tag, first = number & _TAG, number >> _TAG_BITS & self._firsts
        place = self._marks.find(0, first, first + _WAYS)
        if place < 0:
            place = first + self._oldest(self._places[first : first + _WAYS].tolist(), now_s)
            replaced = self._places[place] >> _TAG_BITS
        else:
            self.num += 1
            replaced = 0
        self._places[place] = past << _TAG_BITS | tag
        self._marks[place] = (number >> 56) % _MARKS + 1
        return replaced

    def _oldest(self, numbers: list[int], now_s: float) -> int:
        now = (_tick(now_s) + 1) << _PAST_BITS + _TAG_BITS
        before = numbers if max(numbers) < now else [number for number in numbers if number >= now]
        return numbers.index(min(before))


def pack(ghost: Ghost) -> int:
    return pack_queue(ghost.at_s, ghost.value << _KIND_BITS | ghost.kind, ghost.uses)


def pack_queue(at_s: float, queue: int, uses: int) -> int:
    uses = min(uses, MOST_USES)
    return int(at_s / TICK_S) % _TICKS << _PAST_BITS | queue << _USES_BITS + 1 | uses


def unpack(past: int, now_s: float) -> Ghost:
    value, kind = divmod(queue_of(past), MOST_KINDS)
    return Ghost(now_s - age_s_of(past, now_s), kind, uses_of(past), value)


def age_s_of(past: int, now_s: float) -> float:
    return (_tick(now_s) - (past >> _PAST_BITS)) % _TICKS * TICK_S


def queue_of(past: int) -> int:
    """value * MOST_KINDS + kind."""
    return past >> _USES_BITS + 1 & (1 << _PAST_BITS - _USES_BITS - 1) - 1


def run_of(past: int) -> int:
    """Without the value and the sample, which differ within a run."""
    return past & ~(_VALUE | SAMPLE)


def uses_of(past: int) -> int:
    return past & MOST_USES


def _tick(at_s: float) -> int:
    return int(at_s / TICK_S) % _TICKS
