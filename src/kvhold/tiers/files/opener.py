"""Open a place once for many calls, and close it after the last one.

`open` has its own task: a cancelled caller must not lose a lock.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from kvhold.core.errors import TierError

Place = TypeVar("Place")


class _Held(Generic[Place]):
    def __init__(self, place: Place) -> None:
        self.place = place
        self.users = 0
        self.is_retired = False
        self.closed = asyncio.Event()


class Opener(Generic[Place]):
    """After `close`, calls raise the error `closed`."""

    def __init__(
        self,
        open: Callable[[], Coroutine[Any, Any, Place]],
        close: Callable[[Place], None],
        *,
        closed: TierError,
    ) -> None:
        self._open = open
        self._close = close
        self._closed_error = closed
        self._is_closed = False
        self._held: _Held[Place] | None = None
        self._lost: list[_Held[Place]] = []
        self._opening: asyncio.Task[None] | None = None

    @property
    def place(self) -> Place | None:
        return self._held.place if self._held else None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Place]:
        held = await self._get()
        held.users += 1
        try:
            yield held.place
        finally:
            held.users -= 1
            self._close_if_unused(held)

    def lose(self, place: Place) -> bool:
        """After its last user. False: it was lost before."""
        held = self._held
        if held is None or held.place is not place:
            return False
        self._held = None
        self._lost.append(held)
        held.is_retired = True
        self._close_if_unused(held)
        return True

    async def close(self) -> None:
        self._is_closed = True
        if self._opening is not None:
            await asyncio.wait((self._opening,))
        if self._held is not None:
            self.lose(self._held.place)
        for held in list(self._lost):
            await held.closed.wait()

    async def _get(self) -> _Held[Place]:
        while True:
            if self._is_closed:
                raise self._closed_error
            if self._held is not None:
                return self._held
            if self._opening is None:
                self._opening = asyncio.create_task(self._open_once())
                self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._opening)

    async def _open_once(self) -> None:
        try:
            self._held = _Held(await self._open())
        finally:
            self._opening = None  # in the task: `_opening` is never a finished task

    def _close_if_unused(self, held: _Held[Place]) -> None:
        if held.is_retired and not held.users and not held.closed.is_set():
            self._lost.remove(held)
            self._close(held.place)
            held.closed.set()
