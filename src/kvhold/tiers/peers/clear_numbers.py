"""The numbers of clears: they order clears of one host with its peers' chunks.

A number is larger than every known one of its prefix, and about the time in milliseconds at which
memory was cleared. Any thread.
"""

import threading
import time
from collections.abc import Callable, Mapping

from kvhold.core.keys import NAMESPACE_BYTES

EVERYTHING = b""
MOST_NUMBERS = 20_000  # the journal's limit, too
_MOST_AHEAD_MS = 10 * 366 * 86_400_000  # a larger number is no clear's


class ClearNumbers:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}
        self._announced: dict[bytes, int] = {}
        self.watch: Callable[[bytes, int], None] | None = None
        """Called with each announced clear, under the lock."""

    @property
    def numbers(self) -> dict[bytes, int]:
        with self._lock:
            return dict(self._numbers)

    @property
    def announced(self) -> dict[bytes, int]:
        with self._lock:
            return dict(self._announced)

    def resume(self, numbers: Mapping[bytes, int]) -> None:
        with self._lock:
            self._numbers.update(numbers)
            self._announced.update(numbers)

    def advance(self, prefix: bytes, asked_s: float | None = None) -> int:
        with self._lock:
            asked_s = self._clock() if asked_s is None else asked_s
            number = max(self._numbers.get(prefix, 0) + 1, int(asked_s * 1000))
            keep(self._numbers, prefix, number)
            return number

    def learn(self, prefix: bytes, number: int) -> bool:
        """False: the clear is known here. Raises ValueError: no clear has this number."""
        if (
            len(prefix) not in (0, NAMESPACE_BYTES)
            or not 0 < number <= self._clock() * 1000 + _MOST_AHEAD_MS
        ):
            raise ValueError(f"a clear of {len(prefix)} bytes of a prefix, with number {number}")
        with self._lock:
            if number <= self._numbers.get(prefix, 0):
                return False
            keep(self._numbers, prefix, number)
            return True

    def announce(self, prefix: bytes) -> None:
        with self._lock:
            number = self._numbers.get(prefix, 0)
            if number <= self._announced.get(prefix, 0):
                return
            keep(self._announced, prefix, number)
            if self.watch is not None:
                self.watch(prefix, number)

    def allow(self, namespace: bytes, announced: Mapping[bytes, int]) -> bool:
        """A peer with these clears has nothing older of a namespace."""
        return all(
            announced.get(prefix, 0) >= self._numbers.get(prefix, 0)
            for prefix in (EVERYTHING, namespace)
        )


def keep(numbers: dict[bytes, int], prefix: bytes, number: int) -> None:
    """Forget the oldest clear beyond `MOST_NUMBERS`, but not that of everything."""
    numbers.pop(prefix, None)
    numbers[prefix] = number
    while len(numbers) > MOST_NUMBERS:
        del numbers[next(one for one in numbers if one != EVERYTHING)]
