"""A connection as a stream of bytes, to and from the caller's buffers.

A cancelled call no longer uses its buffers, but may leave half a message: close the connection. The
caller sets timeouts. One task at a time.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ProtocolError
from kvhold.core.turns import next_turn
from kvhold.net.bulk import WAKE_BYTES, Incoming, SocketTransfer, next_piece, send_some, took

Bytes: TypeAlias = bytes | bytearray | memoryview

AHEAD_BYTES = 16 << 10
_STEP_BYTES = 1 << 20  # per call and turn of the loop
_LEAST_APART = 512 << 10  # less is faster in the loop
# copying them is cheaper than a system call or a TLS record
_MERGE_BYTES = 4 << 10

_NOT_READABLE = (BlockingIOError, InterruptedError, ssl.SSLWantReadError)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True)
class Address:
    """tls_name: the name in the server's certificate; empty: `host`"""

    host: str = ""
    port: int = 0
    socket: str = ""
    tls_name: str = ""

    def __str__(self) -> str:
        if self.socket:
            return self.socket
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Stream:
    """A connected socket, owned.

    Calls raise OSError: the connection is lost; EOFError: the other side has ended it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._memory = bytearray(AHEAD_BYTES)
        self._ahead = memoryview(self._memory)
        self._start = self._end = 0
        self.allowed_bytes: int | None = None
        """Bytes that may still come while the other side is not trusted; None: any number."""
        self._since_turn = 0
        self._waiting: asyncio.Future[Any] | None = None
        self._step: Callable[[asyncio.Future[Any]], None] | None = None
        self._watched = False
        self._least_bytes = 1
        self.threads: Executor | None = None
        """Receive large values, without TLS."""
        self._apart: tuple[SocketTransfer, Future[bool]] | None = None
        self.closed = False
        self.reused = False
        """Used before, so the server may have closed it since."""

    async def send(self, pieces: Sequence[Bytes]) -> None:
        left = _merged(pieces)
        if isinstance(self._sock, ssl.SSLSocket):
            await self._send_tls(self._sock, left)
            return

        def go_on(whole: asyncio.Future[None]) -> None:
            try:
                send_some(self._sock, left)
            except OSError as error:
                whole.set_exception(error)
            else:
                if not left:
                    whole.set_result(None)

        moved = send_some(self._sock, left)
        if left:
            await self._writable(go_on)
        await self._moved(moved)

    async def line(self) -> bytes:
        """Up to the next CRLF. Raises ProtocolError: none within 16 KiB."""
        while (found := self._memory.find(b"\r\n", self._start, self._end)) < 0:
            await self._fill()
        line = bytes(self._ahead[self._start : found])
        self._start = found + 2
        return line

    async def read(self, nbytes: int) -> bytes:
        if nbytes < AHEAD_BYTES:
            while self._end - self._start < nbytes:
                await self._fill()
            begin, self._start = self._start, self._start + nbytes
            return bytes(self._ahead[begin : self._start])
        data = bytearray(nbytes)
        await self.read_into([memoryview(data)], nbytes)
        return bytes(data)

    async def read_into(self, parts: Sequence[memoryview], nbytes: int) -> None:
        await self.read_values([Incoming(parts, nbytes)])

    async def read_values(self, values: Sequence[Incoming]) -> None:
        left = deque((view, value) for value in values for view in value.views())
        if not self._is_apart(sum(view.nbytes for view, _ in left)):
            while left:
                await self._read_some(left)
            return
        while left and self._start < self._end:
            self._take_ahead(left)
        while left and not await self._do_apart(lambda transfer: transfer.receive(left)):
            await self._readable()

    async def skip(self, nbytes: int) -> None:
        while nbytes:
            if self._start == self._end:
                await self._fill()
            step = min(nbytes, self._end - self._start)
            self._start += step
            nbytes -= step

    async def expect_crlf(self) -> None:
        if await self.read(2) != b"\r\n":
            raise ProtocolError("a value does not end with CRLF")

    @property
    def host(self) -> str:
        """Empty: none, or the connection is lost."""
        try:
            name = self._sock.getpeername()
        except OSError:
            return ""
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def quiet(self) -> bool:
        """Open, with nothing to read."""
        if (
            self.closed
            or self._start != self._end
            or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending())
        ):
            return False
        peek = (
            partial(socket.socket.recv, self._sock)
            if isinstance(self._sock, ssl.SSLSocket)
            else self._sock.recv
        )
        try:
            peek(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Waiting tasks get an OSError. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            self._unwatch()
            if self._waiting is not None:
                self._loop.remove_writer(self._sock.fileno())
                if not self._waiting.done():
                    self._waiting.set_exception(ConnectionAbortedError("closed on this side"))
        if self._apart is None:
            self._sock.close()
        else:
            self._stop_apart()

    async def handshake(self) -> None:
        while isinstance(self._sock, ssl.SSLSocket):
            try:
                self._sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._readable()
            except ssl.SSLWantWriteError:
                await self._writable()

    async def _send_tls(self, sock: ssl.SSLSocket, views: Sequence[memoryview]) -> None:
        for view in views:
            while view.nbytes:
                try:
                    sent = sock.send(view)
                except (InterruptedError, ssl.SSLWantWriteError):
                    await self._writable()
                except ssl.SSLWantReadError:
                    await self._readable()
                else:
                    view = view[sent:]
                    await self._moved(sent)

    async def _read_some(self, left: deque[tuple[memoryview, Incoming]]) -> None:
        view = left[0][0]
        if self._start < self._end or not view.nbytes:
            self._take_ahead(left)
        elif view.nbytes < AHEAD_BYTES or self.allowed_bytes is not None:
            await self._fill()
        elif isinstance(self._sock, ssl.SSLSocket):
            took(left, await self._receive(view[:_STEP_BYTES]))
        else:
            await self._receive_all(left)

    def _take_ahead(self, left: deque[tuple[memoryview, Incoming]]) -> None:
        view, _ = left[0]
        step = min(view.nbytes, self._end - self._start)
        view[:step] = self._ahead[self._start : self._start + step]
        self._start += step
        took(left, step)

    async def _fill(self) -> None:
        """Read ahead. Call it only without buffered bytes, or inside a value."""
        left = self._end - self._start
        if left == AHEAD_BYTES:
            raise ProtocolError(f"a line longer than {AHEAD_BYTES} bytes")
        if self.allowed_bytes == 0:
            raise ProtocolError("more bytes than are allowed")
        if self._start:
            self._ahead[:left] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, left
        received = await self._receive(self._ahead[self._end :][: self.allowed_bytes])
        self._end += received
        if self.allowed_bytes is not None:
            self.allowed_bytes -= received

    async def _receive(self, view: memoryview) -> int:
        def take(some: asyncio.Future[int]) -> None:
            try:
                some.set_result(self._sock.recv_into(view))
            except _NOT_READABLE:
                return
            except OSError as error:
                some.set_exception(error)

        received = -1
        while received < 0:
            try:
                received = self._sock.recv_into(view)
            except _NOT_READABLE:
                self._wake_at(1)
                with suppress(ssl.SSLWantWriteError):
                    received = await self._readable(take)
            except ssl.SSLWantWriteError:
                await self._writable()
        if not received:
            raise EOFError("the server closed the connection")
        await self._moved(received)
        return received

    async def _receive_all(self, left: deque[tuple[memoryview, Incoming]]) -> None:
        count = len(left)

        def take(whole: asyncio.Future[None]) -> None:
            moved, there = 0, True
            while there and moved < _STEP_BYTES and len(left) == count:
                nbytes = next_piece(left[0][0].nbytes)
                try:
                    received = self._sock.recv_into(left[0][0][:nbytes])
                except _NOT_READABLE:
                    break
                except OSError as error:
                    whole.set_exception(error)
                    return
                if not received:
                    whole.set_exception(EOFError("the server closed the connection"))
                    return
                took(left, received)
                there, moved = received == nbytes, moved + received
            if len(left) == count:
                self._wake_at(min(left[0][0].nbytes, WAKE_BYTES))
            else:
                whole.set_result(None)

        self._wake_at(min(left[0][0].nbytes, WAKE_BYTES))
        await self._readable(take)

    def _is_apart(self, nbytes: int) -> bool:
        return (
            self.threads is not None
            and nbytes >= _LEAST_APART
            and self.allowed_bytes is None
            and type(self._sock) is socket.socket
        )

    async def _do_apart(self, step: Callable[[SocketTransfer], bool]) -> bool:
        """Stopped, and waited for, when cancelled or closed."""
        assert self.threads is not None
        self._check_open()
        self._unwatch()
        transfer = SocketTransfer(self._sock, self._wake_at)
        future = self.threads.submit(step, transfer)
        self._apart = transfer, future
        ended = asyncio.wrap_future(future)
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.wait((ended,))
            except asyncio.CancelledError as error:
                cancelled = error
                self._stop_apart()
        self._apart = None
        if self.closed:
            self._sock.close()
        fault = None if ended.cancelled() else ended.exception()
        if cancelled is not None:
            raise cancelled
        self._check_open()
        if fault is not None:
            raise fault
        return ended.result()

    def _stop_apart(self) -> None:
        if self._apart is not None:
            transfer, future = self._apart
            transfer.is_stopped = True
            future.cancel()
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._least_bytes:
            self._least_bytes = nbytes
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    async def _moved(self, nbytes: int) -> None:
        self._since_turn += nbytes
        if self._since_turn >= _STEP_BYTES:
            self._since_turn = 0
            await next_turn()
            self._check_open()

    async def _readable(self, step: "Callable[[asyncio.Future[Any]], None]" = _wake) -> Any:
        self._step = step
        try:
            return await self._wait(self._watch)
        finally:
            self._step = None

    async def _writable(self, step: "Callable[[asyncio.Future[Any]], None]" = _wake) -> None:
        def go_on(future: "asyncio.Future[None]") -> None:
            if not future.done():
                step(future)

        def watch(future: "asyncio.Future[None]") -> None:
            self._loop.add_writer(self._sock.fileno(), go_on, future)

        try:
            await self._wait(watch)
        finally:
            if not self.closed:
                self._loop.remove_writer(self._sock.fileno())

    async def _wait(self, watch: "Callable[[asyncio.Future[Any]], None]") -> Any:
        self._check_open()
        future = self._waiting = self._loop.create_future()
        watch(future)
        self._since_turn = 0
        try:
            return await future
        finally:
            self._waiting = None

    def _watch(self, _: "asyncio.Future[Any]") -> None:
        if not self._watched:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
            self._watched = True

    def _unwatch(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._sock.fileno())
            self._watched = False

    def _on_readable(self) -> None:
        if self._waiting is None or self._waiting.done() or self._step is None:
            self._unwatch()
        else:
            self._step(self._waiting)

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionAbortedError("closed on this side")


async def open_stream(address: Address, tls: ssl.SSLContext | None) -> Stream:
    """Raises OSError, also for a bad certificate (ssl.SSLError)."""
    sock = await (_connect_unix(address.socket) if address.socket else _connect_tcp(address))
    if tls is not None:
        with on_error(sock.close):
            sock = tls.wrap_socket(
                sock,
                server_hostname=address.tls_name or address.host or None,
                do_handshake_on_connect=False,
            )
    stream = Stream(sock)
    with on_error(stream.close):
        await stream.handshake()
    return stream


async def accept_stream(
    sock: socket.socket, tls: ssl.SSLContext | None, *, allowed_bytes: int | None = None
) -> Stream:
    """The socket is closed on failure. Raises OSError."""
    with on_error(lambda: sock.close()):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        stream = Stream(sock)
        stream.allowed_bytes = allowed_bytes
        with on_error(stream.close):  # else the loop watches the descriptor's next owner
            await stream.handshake()
    return stream


async def _connect_tcp(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    fault: OSError | None = None
    for family, kind, protocol, _, where in await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            with on_error(sock.close):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await loop.sock_connect(sock, where)
        except OSError as error:
            fault = error
        else:
            return sock
    raise fault or OSError(f"{address.host} has no address")


async def _connect_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with on_error(sock.close):
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, path)
    return sock


def _merged(pieces: Sequence[Bytes]) -> list[memoryview]:
    views: list[memoryview] = []
    small = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes < _MERGE_BYTES:
            small += view.cast("B") if view.nbytes else b""
            continue
        if small:
            views.append(memoryview(small))
            small = bytearray()
        views.append(view.cast("B"))
    if small:
        views.append(memoryview(small))
    return views
