import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self

from kvhold_lab.simulation.descriptors import Descriptors
from kvhold_lab.simulation.wire import End, SimTransport
from kvhold_lab.simulation.world import SimLoop, World


class SimOs:
    devnull, O_RDONLY, O_CLOEXEC = os.devnull, os.O_RDONLY, os.O_CLOEXEC

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors

    def open(self, path: str, flags: int) -> int:
        self._descriptors.take()
        return 0

    def close(self, fd: int) -> None:
        self._descriptors.put_back()


class ListeningLoop:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.call_later = loop.call_later

    def create_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return self._loop.create_task(work)

    def add_reader(self, sock: "ListeningSocket", callback: Callable[[], None]) -> None:
        sock.watch(self._loop, callback)

    def remove_reader(self, sock: "ListeningSocket") -> None:
        sock.watch(None, None)

    async def connect_accepted_socket(
        self, make_protocol: Callable[[], Any], sock: "AcceptedSocket"
    ) -> None:
        sock.serve(self._loop, make_protocol())


class ListeningSocket:
    """Calls its watcher while a client waits."""

    def __init__(self, world: World) -> None:
        self._descriptors = world.descriptors
        self._backlog: deque[End] = deque()
        self._loop: SimLoop | None = None
        self._on_readable: Callable[[], None] | None = None
        self._closed = False

    def arrive(self, end: End) -> None:
        if self._closed:
            end.close()
        else:
            self._backlog.append(end)
            self._tell()

    def watch(self, loop: SimLoop | None, on_readable: Callable[[], None] | None) -> None:
        self._loop, self._on_readable = loop, on_readable
        self._tell()

    def setblocking(self, flag: bool) -> None: ...

    def listen(self, backlog: int) -> None: ...

    def accept(self) -> tuple["AcceptedSocket", None]:
        if not self._backlog:
            raise BlockingIOError
        self._descriptors.take()
        end = self._backlog.popleft()
        end.on_closed = self._descriptors.put_back
        return AcceptedSocket(end), None

    def close(self) -> None:
        self._closed = True
        while self._backlog:
            self._backlog.popleft().close()

    def _tell(self) -> None:
        if self._backlog and self._loop is not None:
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if self._on_readable is not None and self._backlog:
            self._on_readable()
            self._tell()


class AcceptedSocket:
    def __init__(self, end: End) -> None:
        self._end = end

    def setblocking(self, flag: bool) -> None: ...

    def send(self, data: bytes) -> None:
        self._end.send(data)

    def serve(self, loop: SimLoop, protocol: Any) -> None:
        SimTransport(self._end, loop, protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
