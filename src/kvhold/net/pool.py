"""Connections to one server, each lent to one task at a time.

Commands on a stale connection are sent again. One event loop.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ProtocolError, TierError
from kvhold.net.stream import Bytes, Stream

_MAX_IN_FLIGHT = 256
_MAX_IN_FLIGHT_BYTES = 4 << 20  # of values; the server keeps unread replies in memory
_LANE_BYTES = 1 << 20  # of values, per additional connection


class Exchange(ABC):
    """One command, and the reader of its reply. Must be safe to send twice."""

    request: Sequence[Bytes]
    value_bytes: int = 0
    """Approximate bytes of values in request and reply."""
    fault: TierError | None = None
    """The reason if there is no reply."""

    @abstractmethod
    async def take(self, stream: Stream) -> None:
        """Read exactly this reply. Later commands are sent again if the stream is closed."""


class Pool:
    def __init__(self, open: Callable[[], Coroutine[Any, Any, Stream]], limit: int) -> None:
        self._open = open
        self._room = asyncio.Semaphore(limit)
        self._idle: list[Stream] = []
        self._lent: dict[Stream, None] = {}
        self._opening: set[asyncio.Future[Stream]] = set()
        self._closed = False
        self.limit = limit

    @asynccontextmanager
    async def lend(self, *, fresh: bool = False) -> AsyncIterator[Stream]:
        """The caller leaves the connection between two replies, or closes it."""
        async with self._room:
            stream = await self._take(fresh)
            if self._closed:
                stream.close()
                raise ConnectionAbortedError("closed on this side")
            self._lent[stream] = None
            try:
                with on_error(stream.close):
                    yield stream
            finally:
                self._lent.pop(stream, None)
            if not stream.closed:
                stream.reused = True
                self._idle.append(stream)

    def close_idle(self) -> None:
        """The way to the server may have forgotten them."""
        for stream in self._idle:
            stream.close()
        self._idle.clear()

    def close(self) -> None:
        """Waiting tasks get an OSError."""
        self._closed = True
        for stream in (*self._idle, *self._lent):
            stream.close()
        self._idle.clear()
        for opening in self._opening:
            opening.cancel()

    async def _take(self, fresh: bool) -> Stream:
        if self._closed:
            raise ConnectionAbortedError("closed on this side")
        while self._idle:
            stream = self._idle.pop()
            if not fresh and stream.quiet:
                return stream
            stream.close()
        opening = asyncio.ensure_future(self._open())
        self._opening.add(opening)
        try:
            await asyncio.wait((opening,))
        except asyncio.CancelledError:
            opening.cancel()
            opening.add_done_callback(_close_unused)
            raise
        finally:
            self._opening.discard(opening)
        if opening.cancelled():
            raise ConnectionAbortedError("closed on this side")
        return opening.result()


def _close_unused(opening: "asyncio.Future[Stream]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def run(
    pool: Pool, exchanges: Sequence[Exchange], *, fault: Callable[[Exception], TierError]
) -> None:
    """Use one connection per MiB of values, and one more."""
    queue = deque(exchanges)
    lanes = min(
        pool.limit, len(queue), 1 + sum(exchange.value_bytes for exchange in queue) // _LANE_BYTES
    )
    if lanes <= 1:
        faults = [await _lane(pool, queue, fault)]
    else:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_lane(pool, queue, fault)) for _ in range(lanes)]
        faults = [task.result() for task in tasks]
    for exchange in queue:
        exchange.fault = next(found for found in faults if found is not None)


async def _lane(
    pool: Pool, queue: deque[Exchange], fault: Callable[[Exception], TierError]
) -> TierError | None:
    fresh = False
    while queue:
        in_flight: deque[Exchange] = deque()
        stream: Stream | None = None
        try:
            async with pool.lend(fresh=fresh) as stream:
                await _pump(stream, queue, in_flight)
            fresh = False
        except (OSError, EOFError, ProtocolError, TierError) as error:
            fresh = stream is not None and stream.reused and isinstance(error, (OSError, EOFError))
            if not fresh:
                found = fault(error)
                for exchange in in_flight:
                    exchange.fault = found
                return found
        queue.extendleft(reversed(in_flight))
    return None


async def _pump(stream: Stream, queue: deque[Exchange], in_flight: deque[Exchange]) -> None:
    """Send from the queue and take replies, until the end or a closed stream.

    Sends more when half of the commands are done: large ones never wait for each other.
    """
    nbytes = 0
    while queue or in_flight:
        if queue and (
            len(in_flight) < 2
            or (len(in_flight) <= _MAX_IN_FLIGHT // 2 and nbytes <= _MAX_IN_FLIGHT_BYTES // 2)
        ):
            pieces: list[Bytes] = []
            while queue and (
                len(in_flight) < 2
                or (len(in_flight) < _MAX_IN_FLIGHT and nbytes < _MAX_IN_FLIGHT_BYTES)
            ):
                exchange = queue.popleft()
                in_flight.append(exchange)
                pieces += exchange.request
                nbytes += exchange.value_bytes
            await stream.send(pieces)
        await in_flight[0].take(stream)
        nbytes -= in_flight.popleft().value_bytes
        if stream.closed:
            return
        stream.reused = False
