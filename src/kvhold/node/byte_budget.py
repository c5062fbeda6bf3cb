"""Bytes that may be in use at once, shared by owners.

An owner uses at most half. Calls are served in order, except those that wait for their owner's
share. One event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class _Waiting:
    owner: Hashable
    nbytes: int
    turn: "asyncio.Future[None]"


class ByteBudget:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used_by: dict[Hashable, int] = {}
        self._waiting: deque[_Waiting] = deque()

    def used_by(self, owner: Hashable) -> int:
        return self._used_by.get(owner, 0)

    @asynccontextmanager
    async def taken(self, nbytes: int, owner: Hashable) -> AsyncIterator[None]:
        """nbytes: at most `limit`"""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(owner, nbytes, turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting = deque(one for one in self._waiting if one.turn is not turn)
                self._next()
            else:
                self._give_back(owner, nbytes)
            raise
        try:
            yield
        finally:
            self._give_back(owner, nbytes)

    def _give_back(self, owner: Hashable, nbytes: int) -> None:
        self.used -= nbytes
        own = self.used_by(owner) - nbytes
        if own:
            self._used_by[owner] = own
        else:
            self._used_by.pop(owner, None)
        self._next()

    def _next(self) -> None:
        passed_over: list[_Waiting] = []
        while self._waiting:
            one = self._waiting.popleft()
            if one.turn.done():
                continue
            if self._is_beyond_share(one):
                passed_over.append(one)
                continue
            if self.used + one.nbytes > self.limit:
                passed_over.append(one)
                break
            self.used += one.nbytes
            self._used_by[one.owner] = self.used_by(one.owner) + one.nbytes
            one.turn.set_result(None)
        self._waiting.extendleft(reversed(passed_over))

    def _is_beyond_share(self, one: _Waiting) -> bool:
        own = self.used_by(one.owner)
        return own > 0 and own + one.nbytes > self.limit - self.used - one.nbytes
