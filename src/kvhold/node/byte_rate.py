"""Bytes per second, in equal parts (start-time fair queueing). One event loop."""

import asyncio
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple


class _Waiting(NamedTuple):
    start: float
    number: int
    nbytes: int
    turn: "asyncio.Future[None]"


class ByteRate:
    def __init__(self, bytes_per_s: int) -> None:
        """bytes_per_s: 0: no limit"""
        self.bytes_per_s = bytes_per_s
        self._waiting: list[_Waiting] = []
        self._numbers = count()
        self._start = 0.0
        self._ends: dict[Hashable, float] = {}
        self._free_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return sum(not one.turn.done() for one in self._waiting)

    async def take(self, nbytes: int, owner: Hashable) -> None:
        if not self.bytes_per_s or not nbytes:
            return
        start = max(self._start, self._ends.get(owner, 0.0))
        self._ends[owner] = start + nbytes
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, _Waiting(start, next(self._numbers), nbytes, turn))
        self._next()
        await turn

    def add(self, nbytes: int) -> None:
        """Negative: fewer were sent than taken."""
        if self.bytes_per_s and nbytes:
            if nbytes > 0:
                now_s = asyncio.get_running_loop().time()
                self._free_at_s = max(self._free_at_s, now_s)
            self._free_at_s += nbytes / self.bytes_per_s
            self._next()

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            if self._waiting[0].turn.done():
                heappop(self._waiting)
                continue
            if now_s < self._free_at_s:
                self._timer = loop.call_at(self._free_at_s, self._next)
                return
            one = heappop(self._waiting)
            self._start = one.start
            self._free_at_s = max(self._free_at_s, now_s) + one.nbytes / self.bytes_per_s
            one.turn.set_result(None)
        self._start = 0.0
        self._ends.clear()
