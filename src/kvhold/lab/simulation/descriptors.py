"""The descriptors of the simulated host, and a node's listening socket, which cannot do without them.

    world.descriptors.run_out(left=1)        # ENFILE for whoever wants more
    socket = ListeningSocket(world)          # the real `Listener` runs on it
    socket.arrive(end)                       # a client has connected

Connections of clients and nodes, and the node's spare descriptor, are counted. Files are not.
"""

import errno
import os
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Self

from kvhold.lab.simulation.wire import End, SimTransport
from kvhold.lab.simulation.world import SimLoop, World


class Descriptors:
    """How many the host has left."""

    def __init__(self) -> None:
        self._left = inf

    def run_out(self, left: int) -> None:
        """From now on there are so many."""
        self._left = left

    def abound(self) -> None:
        """From now on there are enough."""
        self._left = inf

    @property
    def are_short(self) -> bool:
        """Whether the next one is refused."""
        return self._left <= 0

    def take(self) -> None:
        """One less. Raises OSError."""
        if self.are_short:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        self._left -= 1

    def put_back(self) -> None:
        """One more."""
        self._left += 1


class SimOs:
    """Of the module `os`, what the listener uses for its spare descriptor."""

    devnull, O_RDONLY, O_CLOEXEC = os.devnull, os.O_RDONLY, os.O_CLOEXEC

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors

    def open(self, path: str, flags: int) -> int:
        """Any number. Raises OSError."""
        self._descriptors.take()
        return 0

    def close(self, fd: int) -> None:
        """As os.close."""
        self._descriptors.put_back()


class ListeningSocket:
    """Where clients wait until the node accepts them. A loop watches it as it watches a real socket: for as long as one waits."""

    def __init__(self, world: World, descriptors: Descriptors) -> None:
        self._world = world
        self._descriptors = descriptors
        self._backlog: deque[End] = deque()
        self._loop: SimLoop | None = None
        self._on_readable: Callable[[], None] | None = None
        self._closed = False

    def arrive(self, end: End) -> None:
        """A client has connected. end: the node's of the new connection."""
        if self._closed:
            end.close()
        else:
            self._backlog.append(end)
            self._tell()

    def watch(self, loop: SimLoop | None, on_readable: Callable[[], None] | None) -> None:
        """Called by the loop: tell it of clients; None: do not."""
        self._loop, self._on_readable = loop, on_readable
        self._tell()

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def listen(self, backlog: int) -> None:
        """It listens."""

    def accept(self) -> tuple["AcceptedSocket", None]:
        """As socket's."""
        if not self._backlog:
            raise BlockingIOError
        self._descriptors.take()
        end = self._backlog.popleft()
        end.on_closed = self._descriptors.put_back
        return AcceptedSocket(end), None

    def close(self) -> None:
        """Who waits is hung up on."""
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
    """The node's end of a connection, before a transport has it."""

    def __init__(self, end: End) -> None:
        self._end = end

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def send(self, data: bytes) -> None:
        """As socket's."""
        self._end.send(data)

    def serve(self, loop: SimLoop, protocol: Any) -> None:
        """Called by the loop: a protocol has it now."""
        SimTransport(self._end, loop, protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
