import asyncio
import errno
from asyncio import events
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

_FIRST_DESCRIPTOR = 1 << 20  # never a descriptor of this process
_BACKLOG = 16
_REFUSED_AFTER_S = 0.3

Touch = Callable[[memoryview, str], None]


class SocketWorld(Protocol):
    random: Random
    sockets: dict[int, "SimSocket"]

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> Any: ...

    def delay(
        self, usual_s: float = 0.001, *, slow: float = 0.02, slow_s: float = 1.0
    ) -> float: ...


class SimSocket:
    """touch: called for each access to the caller's memory"""

    def __init__(self, network: "Network", loop: Any, touch: Touch | None = None) -> None:
        self.network = network
        self.peer: SimSocket
        self.closed = False
        self.has_vanished = False
        self.is_of_server = False
        self.host = self.far_host = ""
        self.num_received = 0
        self._loop = loop
        self._touch = touch
        self._fd = network.descriptor(self)
        self._most_unsent = network.world.random.choice((64, 1_000, 1 << 20))
        self._out = bytearray()
        self._in = bytearray()
        self._moving = self._ended = self._reset = self._eof_sent = False

    def fileno(self) -> int:
        return -1 if self.closed else self._fd

    def getpeername(self) -> tuple[str, int]:
        return self.far_host, 0

    def setblocking(self, _: bool) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        self._check()
        if self.peer.closed and not self.peer.has_vanished:
            raise BrokenPipeError(errno.EPIPE, "the other end is closed")
        room = self._most_unsent - len(self._out)
        if room <= 0:
            raise BlockingIOError
        sent = 0
        for view in views:
            piece = view[: room - sent]
            if self._touch is not None:
                self._touch(piece, "reads from")
            self._out += piece
            sent += piece.nbytes
            if sent == room:
                break
        self._move()
        return sent

    def recv_into(self, view: memoryview) -> int:
        self._check()
        if not self._in:
            if self._ended:
                return 0
            raise BlockingIOError
        size = min(len(self._in), view.nbytes)
        if size > 1 and self.network.world.random.random() < 0.1:
            size = 1 + int(self.network.world.random.random() * (size - 1))
        if self._touch is not None:
            self._touch(view[:size], "writes to")
        view[:size] = self._in[:size]
        del self._in[:size]
        self.num_received += size
        return size

    def recv(self, nbytes: int, _flags: int) -> bytes:
        self._check()
        if not self._in and not self._ended:
            raise BlockingIOError
        return bytes(self._in[:nbytes])

    def close(self) -> None:
        """Sent bytes still arrive, unless received ones were never read. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._in:
            self._out.clear()
            self.network.world.later(self.network.world.delay(0.0003), self._refuse)
        else:
            self._move()

    def vanish(self) -> None:
        """As a host without power: the other end is told when it sends."""
        self.closed = self.has_vanished = True
        self._out.clear()

    @property
    def readable(self) -> bool:
        return bool(self._in) or self._ended or self._reset

    @property
    def writable(self) -> bool:
        is_refused = self.peer.closed and not self.peer.has_vanished
        return len(self._out) < self._most_unsent or self._reset or is_refused

    def reset(self) -> None:
        if not self.closed:
            self._reset = True
            self._in.clear()
            self._notify()

    def _check(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if self._reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset by the other end")

    def _move(self) -> None:
        if not self._moving:
            self._moving = True
            self.network.world.later(self.network.delay(self), self._arrive)

    def _refuse(self) -> None:
        if not self.network.holds(self, self._refuse):
            self.peer.reset()

    def _arrive(self) -> None:
        if self.network.holds(self, self._arrive):
            return
        self._moving = False
        peer, random = self.peer, self.network.world.random
        if self._out:
            size = (
                len(self._out)
                if random.random() < 0.7
                else 1 + int(random.random() * len(self._out))
            )
            if peer._reset:
                self._out.clear()
                return
            if peer.closed:
                self._out.clear()
                self.reset()
                return
            peer._in += self._out[:size]
            del self._out[:size]
            peer._notify()
            self._notify()
        if self._out:
            self._move()
        elif self.closed and not self._eof_sent:
            self._eof_sent = True
            peer._ended = True
            peer._notify()

    def _notify(self) -> None:
        if not self.closed and self._loop is not None:
            self._loop.look_at(self._fd)


class SimListener:
    def __init__(self, network: "Network", *addresses: str) -> None:
        self._network = network
        self._addresses = addresses
        self.waiting: deque[tuple[SimSocket, str]] = deque()
        self.arrived = asyncio.Event()
        for address in addresses:
            network.listeners[address] = self

    def close(self) -> None:
        """Also close connections not yet accepted. Idempotent."""
        for address in self._addresses:
            if self._network.listeners.get(address) is self:
                del self._network.listeners[address]
        for sock, _ in self.waiting:
            sock.close()
        self.waiting.clear()


class Network:
    def __init__(self, world: SocketWorld) -> None:
        self.world = world
        self.listeners: dict[str, SimListener] = {}
        self._sockets = world.sockets

    def holds(self, sock: SimSocket, go_on: Callable[[], None]) -> bool:
        """Whether sent bytes wait; then `go_on` is called later."""
        return False

    def delay(self, sock: SimSocket) -> float:
        return self.world.delay(0.0003, slow=0.005, slow_s=0.8)

    def descriptor(self, sock: SimSocket) -> int:
        number = _FIRST_DESCRIPTOR + len(self._sockets)
        self._sockets[number] = sock
        return number

    async def connect(
        self, address: str, loop: Any, host: str, touch: Touch | None = None
    ) -> SimSocket:
        await asyncio.sleep(self.world.delay(0.0005, slow=0.02, slow_s=1.5))
        listener = self.listeners.get(address)
        if listener is None:
            await asyncio.sleep(self.world.random.random() * _REFUSED_AFTER_S)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
        if len(listener.waiting) >= _BACKLOG:
            await asyncio.sleep(1.0)
            raise TimeoutError("no answer")
        return self._join(listener, address, host, SimSocket(self, loop, touch))

    def knock(self, address: str, host: str, loop: Any) -> SimSocket | None:
        listener = self.listeners.get(address)
        return (
            None
            if listener is None or len(listener.waiting) >= _BACKLOG
            else self._join(listener, address, host, SimSocket(self, loop))
        )

    def _join(self, listener: SimListener, address: str, host: str, near: SimSocket) -> SimSocket:
        far = SimSocket(self, None)
        near.peer, far.peer = far, near
        near.host = far.far_host = host
        far.host = near.far_host = address.rpartition(":")[0]
        far.is_of_server = True
        listener.waiting.append((far, host))
        listener.arrived.set()
        return near


class SocketLoop:
    world: SocketWorld
    call_soon: Callable[..., events.Handle]

    def __init__(self) -> None:
        self._readers: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._writers: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._looked_at: set[int] = set()

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        self._readers[fd] = callback, args
        self.look_at(fd)

    def remove_reader(self, fd: int) -> bool:
        return self._readers.pop(fd, None) is not None

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        self._writers[fd] = callback, args
        self.look_at(fd)

    def remove_writer(self, fd: int) -> bool:
        return self._writers.pop(fd, None) is not None

    def look_at(self, fd: int) -> None:
        if fd not in self._looked_at and self._is_due(fd):
            self._looked_at.add(fd)
            self.call_soon(self._tell, fd)

    def _is_due(self, fd: int) -> bool:
        sock = self.world.sockets[fd]
        return not sock.closed and (
            (fd in self._readers and sock.readable) or (fd in self._writers and sock.writable)
        )

    def _tell(self, fd: int) -> None:
        self._looked_at.discard(fd)
        sock = self.world.sockets[fd]
        for watchers, is_ready in ((self._readers, "readable"), (self._writers, "writable")):
            if fd in watchers and not sock.closed and getattr(sock, is_ready):
                callback, args = watchers[fd]
                callback(*args)
        self.look_at(fd)

    async def sock_accept(self, listener: SimListener) -> tuple[SimSocket, tuple[str, int]]:
        while not listener.waiting:
            listener.arrived.clear()
            await listener.arrived.wait()
        if self.world.random.random() < 0.01:
            raise OSError(errno.EMFILE, "no descriptor left, on purpose")
        sock, host = listener.waiting.popleft()
        sock._loop = self
        return sock, (host, 0)

    def add_signal_handler(self, *_: Any) -> None: ...
