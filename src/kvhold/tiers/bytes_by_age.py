import time
from collections.abc import Callable

from kvhold.core.keys import NAMESPACE_BYTES

SLOT_S = 1800
_SLOTS_A_DAY = 48
_MOST_SLOTS = 8 * _SLOTS_A_DAY
OLD = 0
"""Of all older than eight days."""


class BytesByAge:
    """By namespace and half hour of storing. One thread changes them, any may read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._bytes: dict[tuple[bytes, int], int] = {}
        self._now = self._first = OLD

    def slot(self) -> int:
        now = int(self._clock() // SLOT_S)
        if now != self._now:
            self._now = now
            if now - self._first >= _MOST_SLOTS + _SLOTS_A_DAY:
                self._fold(now - _MOST_SLOTS)
        return self._now

    def add(self, key: bytes, slot: int, nbytes: int) -> None:
        place = key[:NAMESPACE_BYTES], slot if slot >= self._first else OLD
        left = self._bytes.get(place, 0) + nbytes
        if left:
            self._bytes[place] = left
        else:
            self._bytes.pop(place, None)

    def by_slot(self) -> dict[tuple[bytes, int], int]:
        return dict(self._bytes)

    def _fold(self, first: int) -> None:
        self._first = first
        for namespace, slot in [place for place in self._bytes if OLD < place[1] < first]:
            self.add(namespace, OLD, self._bytes.pop((namespace, slot)))
