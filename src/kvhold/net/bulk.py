"""Large values over a plain socket, in threads."""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Watch: TypeAlias = Callable[[memoryview], None]

PIECE_BYTES = 256 << 10  # still in the core's cache when they are checked
WAKE_BYTES = 256 << 10  # wake the reader of a large value
_MOST_PIECES = 512  # IOV_MAX is 1024
_STALL_MS = 10.0
_TURN_S = 0.05  # of the thread


@dataclass(eq=False)
class Incoming:
    """watch: called with each piece, in order"""

    parts: Sequence[memoryview]
    nbytes: int
    watch: Watch | None = None
    has_arrived: bool = False

    def views(self) -> Iterable[memoryview]:
        left = self.nbytes
        for part in self.parts:
            view = part.cast("B") if part.nbytes else part
            yield view[:left]
            left -= min(left, view.nbytes)


class SocketTransfer:
    def __init__(self, sock: socket.socket, wake_at: Callable[[int], None]) -> None:
        self._sock = sock
        self._wake_at = wake_at
        self.is_stopped = False

    def receive(self, left: deque[tuple[memoryview, Incoming]]) -> bool:
        """Remove received views; True: all. Raises OSError, EOFError."""
        until_s = time.monotonic() + _TURN_S
        while left:
            self._check_stopped()
            view = left[0][0]
            piece = view[: next_piece(view.nbytes)]
            if piece.nbytes:
                try:
                    received = self._sock.recv_into(piece)
                except (BlockingIOError, InterruptedError):
                    self._wake_at(min(sum(one.nbytes for one, _ in left), WAKE_BYTES))
                    if self._may_go_on(until_s):
                        continue
                    return False
                if not received:
                    raise EOFError("the server closed the connection")
                took(left, received)
            else:
                took(left, 0)
        return True

    def _check_stopped(self) -> None:
        if self.is_stopped:
            raise ConnectionAbortedError("closed on this side")

    def _may_go_on(self, until_s: float) -> bool:
        if time.monotonic() > until_s:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(_STALL_MS))


def next_piece(nbytes: int) -> int:
    """Later pieces do not cut layers of 2**n bytes."""
    return nbytes % PIECE_BYTES or min(nbytes, PIECE_BYTES)


def took(left: deque[tuple[memoryview, Incoming]], received: int) -> None:
    """Remove bytes of the first view."""
    view, incoming = left[0]
    if incoming.watch is not None and received:
        incoming.watch(view[:received])
    if received < view.nbytes:
        left[0] = view[received:], incoming
        return
    left.popleft()
    if not left or left[0][1] is not incoming:
        incoming.has_arrived = True


def send_some(sock: socket.socket, left: list[memoryview]) -> int:
    """Remove sent bytes."""
    try:
        sent = moved = sock.sendmsg(left[:_MOST_PIECES])
    except (BlockingIOError, InterruptedError):
        return 0
    whole = 0
    while whole < len(left) and sent >= left[whole].nbytes:
        sent -= left[whole].nbytes
        whole += 1
    del left[:whole]
    if sent:
        left[0] = left[0][sent:]
    return moved
