"""Amounts per second in the last minute. One thread adds; any reads."""

import time
from collections.abc import Callable

_PART_S = 5.0
_PARTS = 12
_UNUSED = -(10**9)


class LastMinute:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._numbers = [_UNUSED] * (_PARTS + 1)
        self._sums = [0.0] * (_PARTS + 1)

    def add(self, amount: float) -> None:
        number = int(self._clock() / _PART_S)
        at = number % len(self._sums)
        if self._numbers[at] != number:
            self._numbers[at], self._sums[at] = number, 0.0
        self._sums[at] += amount

    @property
    def per_s(self) -> float:
        now_s = self._clock()
        last = int(now_s / _PART_S)
        parts = zip(self._numbers, self._sums, strict=True)
        amount = sum(part for number, part in parts if last - _PARTS < number <= last)
        begin_s = max(self._began_s, (last - _PARTS + 1) * _PART_S)
        return amount / max(1.0, now_s - begin_s)
