"""Slices are taken and freed in order, under the caller's lock.

A slice is free after its `with`, or after the event of `until`.
"""

from collections import deque
from typing import Self

from kvhold.kernels.view import Tensor
from kvhold.memory.device.driver import DeviceEvent

ALIGNMENT = 256


class Slice:
    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self._last_use: DeviceEvent | None = None
        self._is_returned = False

    def until(self, event: DeviceEvent) -> None:
        self._last_use = event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_returned = self._last_use is None

    def is_free(self) -> bool:
        return self._is_returned or (self._last_use is not None and self._last_use.fired())

    def wait(self) -> None:
        assert self._is_returned or self._last_use is not None, (
            "the slice is in use, and `until` was not called"
        )
        if not self._is_returned and self._last_use is not None:
            self._last_use.wait()


class Ring:
    def __init__(self, memory: Tensor) -> None:
        """memory: uint8 [bytes] on the device."""
        self.memory = memory
        self.nbytes = int(memory.shape[0])
        self._taken: deque[Slice] = deque()

    def fits(self, nbytes: int) -> bool:
        return _aligned(nbytes) <= self.nbytes

    def take(self, nbytes: int) -> Slice | None:
        """None: no space now."""
        nbytes = _aligned(nbytes)
        while self._taken and self._taken[0].is_free():
            self._taken.popleft()
        start = self._next(nbytes)
        if start is None:
            return None
        self._taken.append(Slice(start, nbytes))
        return self._taken[-1]

    def take_when_free(self, nbytes: int) -> Slice:
        assert self.fits(nbytes), "the slice is larger than the ring"
        while (found := self.take(nbytes)) is None:
            self._taken[0].wait()
        return found

    def _next(self, nbytes: int) -> int | None:
        if nbytes > self.nbytes:
            return None
        if not self._taken:
            return 0
        oldest, end = self._taken[0].start, self._taken[-1].start + self._taken[-1].nbytes
        if end > oldest:
            if end + nbytes <= self.nbytes:
                return end
            return 0 if nbytes <= oldest else None
        return end if end + nbytes <= oldest else None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
