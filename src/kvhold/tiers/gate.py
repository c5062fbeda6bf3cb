"""At most `width` calls of a tier at once, the most urgent waiting one first.

Writes never take the last turn.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum
from heapq import heappop, heappush


class Urgency(IntEnum):
    READ = 0
    DELETE = 1
    WRITE = 2
    REWRITE = 3


class Gate:
    def __init__(self, width: int) -> None:
        self._width = width
        self._writes_width = max(1, width - 1)
        self._inside = 0
        self._writing = 0
        self._arrived = 0
        self._waiting: list[tuple[Urgency, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, urgency: Urgency) -> AsyncIterator[None]:
        await self._enter(urgency)
        try:
            yield
        finally:
            self._leave(urgency)

    async def _enter(self, urgency: Urgency) -> None:
        if not self._waiting and self._may_enter(urgency):
            self._take(urgency)
            return
        turn = asyncio.get_running_loop().create_future()
        self._arrived += 1
        heappush(self._waiting, (urgency, self._arrived, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(urgency)
            raise

    def _leave(self, urgency: Urgency) -> None:
        self._inside -= 1
        self._writing -= urgency >= Urgency.WRITE
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            urgency, _, turn = self._waiting[0]
            if turn.done():
                heappop(self._waiting)
            elif self._may_enter(urgency):
                heappop(self._waiting)
                self._take(urgency)
                turn.set_result(None)
            else:
                return

    def _may_enter(self, urgency: Urgency) -> bool:
        return self._inside < self._width and (
            urgency < Urgency.WRITE or self._writing < self._writes_width
        )

    def _take(self, urgency: Urgency) -> None:
        self._inside += 1
        self._writing += urgency >= Urgency.WRITE
