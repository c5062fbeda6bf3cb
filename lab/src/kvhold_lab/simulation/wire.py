"""A socket between two processes: bytes arrive in order, late, and cut anywhere.

An end closes when its last copy closes: a forked child has one.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvhold_lab.simulation.world import SimLoop, World


class End:
    def __init__(self, world: World) -> None:
        self.world = world
        self.peer: End
        self.copies = 1
        self.closed = False
        self.most_bytes = 1 << 20
        self.process: Any = None
        self.on_closed: Callable[[], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_data: Callable[[bytes], None] | None = None
        self.on_eof: Callable[[], None] | None = None
        self._out = bytearray()
        self._in = bytearray()
        self._moving = False
        self._eof_sent = False
        self._eof_seen = False
        self._handed = 0
        self._wants_room = False

    def push(self, data: memoryview) -> int:
        if self.peer.closed or self.closed:
            raise BrokenPipeError("the other end is closed")
        some = bytes(
            data[
                : max(0, self.most_bytes - len(self._out) - len(self.peer._in) - self.peer._handed)
            ]
        )
        if not some:
            self._wants_room = True
            raise BlockingIOError
        self.send(some)
        return len(some)

    def pull(self) -> bytes:
        if not self._in and not self._eof_seen:
            raise BlockingIOError
        data = bytes(self._in)
        self._in.clear()
        return data

    def was_read(self, nbytes: int) -> None:
        self._handed -= nbytes
        if self.peer._wants_room and self.peer.on_change is not None:
            self.peer._wants_room = False
            self.peer.on_change()

    def send(self, data: bytes | bytearray) -> None:
        if not self.closed and not self.peer.closed:
            self._out += data
            self._move()

    @property
    def unsent(self) -> int:
        return len(self._out)

    def fork(self) -> None:
        self.copies += 1

    def close(self) -> None:
        self.copies -= 1
        if self.copies <= 0 and not self.closed:
            self.closed = True
            self._in.clear()
            self._move()
            if self.on_closed is not None:
                self.on_closed()
            if self.peer.on_change is not None and not self.peer.closed:
                self.peer.on_change()

    def _move(self) -> None:
        if not self._moving:
            self._moving = True
            self.world.later(self.world.delay(0.0003, slow=0.01, slow_s=1.5), self._arrive)

    def _arrive(self) -> None:
        self._moving = False
        random = self.world.random
        if self._out:
            size = len(self._out) if random.random() < 0.8 else random.randint(1, len(self._out))
            data = bytes(self._out[:size])
            del self._out[:size]
            if not self.peer.closed:
                self.peer._in += data
                self.peer.hand_over()
        if self._out:
            self._move()
        elif self.closed and not self._eof_sent:
            self._eof_sent = True
            self.peer._eof_seen = True
            self.peer.hand_over()

    def hand_over(self) -> None:
        if not self.closed and self.on_change is not None:
            self.on_change()
        if self.closed or self.on_data is None:
            return
        if self._in:
            data = bytes(self._in)
            self._in.clear()
            self._handed += len(data)
            self.on_data(data)
        if self._eof_seen and not self._in and self.on_eof is not None:
            on_eof, self.on_eof = self.on_eof, None
            on_eof()


def connect(world: World) -> tuple[End, End]:
    near, far = End(world), End(world)
    near.peer, far.peer = far, near
    return near, far


class SimTransport(asyncio.Transport):
    def __init__(self, end: End, loop: SimLoop, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._end = end
        self._loop = loop
        self._protocol = protocol
        self._closing = False
        self._paused = False
        self._unread = bytearray()
        self._eof = False
        end.on_data = lambda data: self._soon(self._received, data)
        end.on_eof = lambda: self._soon(self._ended)
        self._soon(protocol.connection_made, self)
        self._soon(end.hand_over)

    def _soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon(callback, *args)

    def _received(self, data: bytes) -> None:
        self._unread += data
        self._read()

    def _ended(self) -> None:
        self._eof = True
        self._read()

    def _read(self) -> None:
        while self._unread and not self._paused and not self._closing:
            buffer = memoryview(self._protocol.get_buffer(-1))
            size = min(len(self._unread), len(buffer))
            buffer[:size] = self._unread[:size]
            del self._unread[:size]
            self._end.was_read(size)
            self._protocol.buffer_updated(size)
        if self._eof and not self._unread and not self._paused:
            self.close()

    def write(self, data: Any) -> None:
        if not self._closing:
            self._end.send(data)

    def get_write_buffer_size(self) -> int:
        return self._end.unsent

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._soon(self._read)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._end.close()
            self._soon(self._protocol.connection_lost, None)

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
