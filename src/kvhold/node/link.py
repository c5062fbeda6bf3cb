"""One connection to the node, and the arena that came with it.

    link = Link(path, "vllm-worker", timeout_s=5)
    answer = link.call("ping", encode(Ping()), deadline_s=1)
    buffer = link.hold() ... link.let_go()              # around every reading and writing of the arena

Broken or closed, a link lasts until nobody reads or writes the arena through it: the node takes memory back when the socket closes.
Safe from any thread; calls take turns. `client.py` makes a lasting client of it.
"""

import os
import select
import socket
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DeadlineExceeded, NodeError, ProtocolError
from kvhold.memory.arena import Arena, Toucher
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.paths import peer_user

_DESCRIPTORS = 2  # that come with a welcome
_FIRST_BYTES = 64 << 10  # read at once: all of most answers
_MOST_NAME = 100  # characters: a Hello is short

_answer_decoder: Decoder[m.Answer] = Decoder(m.Answer)
_greeting_decoder: Decoder[m.Welcome | m.Refused] = Decoder(m.Welcome | m.Refused)


class Link:
    """One connection and its arena. Broken or closed, it lasts until nobody reads or writes the arena through it."""

    def __init__(self, path: Path, name: str, timeout_s: float) -> None:
        self._socket, welcome, self._arena_fd, self._bell = _join(path, name, timeout_s)
        self._arena_size = (welcome.arena_bytes, welcome.huge_pages)
        self._arena: Arena | None = None
        self._toucher: Toucher | None = None
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._talk = threading.Lock()
        self._first = memoryview(bytearray(_FIRST_BYTES))  # of an answer
        self._count_lock = threading.Lock()
        self._held = 0  # readers and writers of the arena
        self._calls = 0
        self.retired = False
        self.last_heard_s = time.monotonic()

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The arena, mapped at its first use: tools that only ask for the status never do."""
        with self._count_lock:
            return self._mapped()

    def call(self, operation: str, request: bytearray, deadline_s: float) -> m.Answer:
        """One request and its answer. Raises OSError, ProtocolError, DeadlineExceeded; after any exception the link is of no more use."""
        until = time.monotonic() + deadline_s
        with self._count_lock:
            if self.retired:
                raise ConnectionError("the connection is closed")
            self._calls += 1
        try:
            if not self._talk.acquire(timeout=deadline_s):
                raise TimeoutError
            try:
                return self._converse(request, until)
            finally:
                self._talk.release()
        except TimeoutError:
            raise DeadlineExceeded(operation, deadline_s) from None
        finally:
            with self._count_lock:
                self._calls -= 1
                self._close_if_unused()

    def pause(self, seconds: float) -> None:
        """For so long, or until the node says that something has ended which a caller of this link may be waiting for.

        Of several callers that pause at once one may hear of it alone.
        """
        with self._count_lock:
            if self.retired:
                return
            self._calls += 1
        try:
            waiting = select.poll()
            waiting.register(self._bell, select.POLLIN)
            waiting.register(self._socket, 0)  # nothing but its end
            waiting.poll(seconds * 1e3)
            with suppress(BlockingIOError):  # the time is over, or another one has heard it
                os.eventfd_read(self._bell)
        finally:
            with self._count_lock:
                self._calls -= 1
                self._close_if_unused()

    def hold(self) -> npt.NDArray[np.uint8]:
        """One more reader or writer of the arena. Raises NodeError when it cannot be had."""
        with self._count_lock:
            buffer = self._mapped()
            self._held += 1
            return buffer

    def let_go(self) -> None:
        """One less."""
        with self._count_lock:
            self._held -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """No more calls; close as soon as nobody holds anything."""
        with self._count_lock:
            self.retired = True
            self._close_if_unused()

    def _mapped(self) -> npt.NDArray[np.uint8]:
        if self.retired:
            raise NodeError("the connection to the node is closed")
        if self._buffer is None:
            nbytes, huge = self._arena_size
            fd, self._arena_fd = self._arena_fd, -1  # `attach` takes it over, even where it fails
            if fd < 0:
                raise NodeError("the node's arena could not be mapped")
            self._arena = Arena.attach(fd, nbytes, huge)
            self._toucher = Toucher(self._arena.regions).start()
            self._buffer = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        return self._buffer

    def _close_if_unused(self) -> None:
        if not self.retired or self._held:
            return
        if self._calls:  # the last of them closes; those that wait for an answer need wait no longer
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return
        self._socket.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
        if self._toucher is not None:
            self._toucher.stop()
        self._buffer = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        elif self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1

    def _converse(self, request: bytearray, until: float) -> m.Answer:
        if self.retired:
            raise ConnectionError("the connection is closed")
        self._wait_until(until)
        self._socket.sendall(request)
        answer = _answer_decoder.decode(self._body(until))
        self.last_heard_s = time.monotonic()
        return answer

    def _wait_until(self, until: float) -> None:
        """What the socket does next ends then. Raises TimeoutError when that is past."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _body(self, until: float) -> memoryview:
        """Of the next answer, good until the one after it."""
        answer, got = self._first, 0
        while got < LENGTH_BYTES:
            got += self._read(answer[got:], until)
        size = LENGTH_BYTES + body_length(answer)
        if got > size:
            raise ProtocolError("the node said more than it was asked")
        if size > len(answer):
            answer = memoryview(bytearray(size))
            answer[:got] = self._first[:got]
        while got < size:
            got += self._read(answer[got:size], until)
        return answer[LENGTH_BYTES:size]

    def _read(self, into: memoryview, until: float) -> int:
        self._wait_until(until)
        count = self._socket.recv_into(into)
        if not count:
            raise ConnectionError("the node closed the connection")
        return count


def _join(path: Path, name: str, timeout_s: float) -> tuple[socket.socket, m.Welcome, int, int]:
    """Connect and greet. Returns the socket, the node's welcome, and the descriptors of the arena and the bell. Raises NodeError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        if (uid := peer_user(sock)) != os.getuid():
            raise NodeError(f"the node on {path} belongs to user {uid}; you are user {os.getuid()}: run your own, on a socket of your own")
        sock.sendall(encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, name[:_MOST_NAME], os.getpid())))
        data, fds = _receive_with_descriptors(sock)
        while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + body_length(data, m.MAX_HELLO_BYTES):
            more = sock.recv(65536)
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        greeting = _greeting_decoder.decode(data[LENGTH_BYTES:])
        if isinstance(greeting, m.Refused):
            raise NodeError(f"the node on {path} refused: {greeting.reason}")
        if greeting.version != m.PROTOCOL_VERSION:
            raise NodeError(
                f"the node on {path} (kvhold {greeting.node}) speaks protocol {greeting.version}, this client {m.PROTOCOL_VERSION}; "
                f"install the same kvhold on both sides, then restart the node (kvhold stop)"
            )
        if len(fds) != _DESCRIPTORS:
            raise ProtocolError("the node sent no arena, or no bell")
        arena, bell = fds
        fds = []
        return sock, greeting, arena, bell
    except (OSError, ProtocolError) as error:
        sock.close()
        raise NodeError(f"cannot join a node on {path}: {error}") from None
    except NodeError:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _receive_with_descriptors(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bytes, and the descriptors that came with them. `socket.recv_fds` would pass them on to every child, which keeps the arena alive."""
    fds = array("i")
    data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_LEN(_DESCRIPTORS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
