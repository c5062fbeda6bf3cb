"""The plainest programs for the same bytes."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

Values = Sequence[memoryview]


class RawFiles:
    def __init__(self, folder: Path, values: Values, *, threads: int, direct: bool) -> None:
        self._folder = folder
        self._values = values
        self._flags = os.O_DIRECT if direct else 0
        self._threads = ThreadPoolExecutor(threads)
        self._round = 0

    def write(self) -> None:
        self._round += 1
        list(self._threads.map(self._write_one, range(len(self._values))))
        for path in self._folder.glob(f"{self._round - 1}-*"):
            path.unlink()

    def read(self, into: Values, then: Callable[[int], None] | None = None) -> None:
        def read_one(at: int) -> None:
            self._read_one(at, into[at])
            if then is not None:
                then(at)

        list(self._threads.map(read_one, range(len(self._values))))

    def close(self) -> None:
        self._threads.shutdown()

    def _path(self, at: int) -> Path:
        return self._folder / f"{self._round}-{at}"

    def _write_one(self, at: int) -> None:
        fd = os.open(self._path(at), os.O_WRONLY | os.O_CREAT | self._flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._values[at].nbytes)
            if os.pwrite(fd, self._values[at], 0) != self._values[at].nbytes:
                raise OSError("a short write")
        finally:
            os.close(fd)

    def _read_one(self, at: int, into: memoryview) -> None:
        fd = os.open(self._path(at), os.O_RDONLY | self._flags)
        try:
            if os.preadv(fd, [into], 0) != into.nbytes:
                raise OSError("a short read")
        finally:
            os.close(fd)


class RawRedis:
    def __init__(self, port: int, password: str, values: Values, *, connections: int) -> None:
        self._values = values
        self._threads = ThreadPoolExecutor(connections)
        self._sockets = [_connected(port) for _ in range(connections)]
        for sock in self._sockets if password else ():
            sock.sendall(f"AUTH {password}\r\n".encode())
            _line(sock)

    def set(self) -> None:
        self._each(self._set_one)

    def get(self, into: Values) -> None:
        self._each(lambda sock, at: self._get_one(sock, at, into[at]))

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._threads.shutdown()

    def _each(self, work: Callable[[socket.socket, int], None]) -> None:
        def lane(number: int) -> None:
            for at in range(number, len(self._values), len(self._sockets)):
                work(self._sockets[number], at)

        list(self._threads.map(lane, range(len(self._sockets))))

    def _set_one(self, sock: socket.socket, at: int) -> None:
        name, value = b"k%d" % at, self._values[at]
        pieces: list[Any] = [
            b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, value.nbytes),
            value,
            b"\r\n",
        ]
        while pieces:
            sent = sock.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = memoryview(pieces[0])[sent:]
        _line(sock)

    def _get_one(self, sock: socket.socket, at: int, into: memoryview) -> None:
        name = b"k%d" % at
        sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        if (head := _line(sock)) != b"$%d" % into.nbytes:
            raise OSError(f"Redis answered {head!r} where {into.nbytes} bytes were stored")
        _fill(sock, into)
        _fill(sock, memoryview(bytearray(2)))


class RawSocket:
    """TCP on loopback to a process that only receives, or only sends."""

    _PEER = """
import socket, sys
total, receive = int(sys.argv[1]), sys.argv[2] == "receive"
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
memory = memoryview(bytearray(b"x") * total)  # pages of its own, not the zero page
while sock.recv(1):
    at = 0
    if receive:
        while at < total:
            at += sock.recv_into(memory[at:])
        sock.sendall(b"d")
    else:
        sock.sendall(memory)
"""

    def __init__(
        self, values: Values, *, receive: bool, way: Callable[[int], int] = lambda port: port
    ) -> None:
        self._values = values
        total = sum(value.nbytes for value in values)
        command = [sys.executable, "-c", self._PEER, str(total), "receive" if receive else "send"]
        self._peer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._peer.stdout is not None
        self._socket = _connected(way(int(self._peer.stdout.readline())))

    def send(self) -> None:
        self._socket.sendall(b"g")
        for value in self._values:
            self._socket.sendall(value)
        self._socket.recv(1)

    def receive(self, into: Values) -> None:
        self._socket.sendall(b"g")
        for value in into:
            _fill(self._socket, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.close()
        self._peer.wait(10)
        assert self._peer.stdout is not None
        self._peer.stdout.close()


class PingPong:
    _PEER = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
asked, answer = memoryview(bytearray(int(sys.argv[2]))), bytes(int(sys.argv[3]))
while True:
    at = 0
    while at < len(asked):
        count = sock.recv_into(asked[at:])
        if not count:
            sys.exit()
        at += count
    sock.sendall(answer)
"""

    def __init__(self, asked_bytes: int, answer_bytes: int) -> None:
        self._request = bytes(asked_bytes)
        self._answer = memoryview(bytearray(answer_bytes))
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-c",
                self._PEER,
                str(theirs.fileno()),
                str(asked_bytes),
                str(answer_bytes),
            ]
            self._peer = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def exchange(self) -> None:
        self._socket.sendall(self._request)
        _fill(self._socket, self._answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.close()
        self._peer.wait(10)


def _connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _line(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        more = sock.recv(1)
        if not more or line.startswith(b"-"):
            raise OSError(f"the server said {line!r}")
        line += more
    return line[:-2]


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = sock.recv_into(view)
        if not count:
            raise OSError("the connection was closed")
        view = view[count:]
