"""A TCP proxy on loopback with a limited rate in each direction, without latency."""

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

_PIECE_BYTES = 64 << 10
_POLL_S = 0.2


class _Bucket:
    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + nbytes / self._bytes_per_s
            self.nbytes += nbytes
            until = self._free_at
        if (left := until - time.monotonic()) > 0:
            time.sleep(left)


class Throttle:
    def __init__(
        self, target: tuple[str, int], *, bytes_per_s: float, up_bytes_per_s: float | None = None
    ) -> None:
        """up_bytes_per_s: towards the target; None: the same"""
        self._target = target
        self._up, self._down = (
            _Bucket(bytes_per_s if up_bytes_per_s is None else up_bytes_per_s),
            _Bucket(bytes_per_s),
        )
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)
        self._threads = [threading.Thread(target=self._accept, name="throttle", daemon=True)]

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def down_bytes(self) -> int:
        return self._down.nbytes

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._threads[0].join()
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self._sockets += (client, server)
            for source, target, bucket in (
                (client, server, self._up),
                (server, client, self._down),
            ):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._threads.append(
                    threading.Thread(
                        target=_pump, args=(source, target, bucket), name="throttle", daemon=True
                    )
                )
                self._threads[-1].start()


def _pump(source: socket.socket, target: socket.socket, bucket: _Bucket) -> None:
    source.settimeout(None)
    with suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            bucket.take(len(piece))
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
