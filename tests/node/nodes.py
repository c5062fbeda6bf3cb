"""Real nodes, real clients, and clients that do not keep to the protocol, for the tests of this
folder.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.core.status import HeldStatus
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode, split_number
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, fill

PATIENT_S = 60.0  # on a busy machine; nothing that works takes nearly as long
PATIENT = ClientConfig(
    connect_timeout_s=PATIENT_S,
    call_timeout_s=PATIENT_S,
    arrival_timeout_s=PATIENT_S,
    heartbeat_interval_s=PATIENT_S,  # who finds a lost node is the test's call
    reconnect_interval_s=0.02,
)
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}
SPACE = Namespace(model="model", layout=PLAIN)

_answers: Decoder[m.Answer | m.Welcome] = Decoder(m.Answer | m.Welcome)


def eventually(condition: Callable[[], Any], within_s: float = PATIENT_S) -> Any:
    """The first true answer of `condition`."""
    until = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < until, f"not within {within_s:g} s"
        time.sleep(0.005)
    return answer


def clean_environ(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVHOLD_")} | more


def run_kvhold(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvhold", *arguments]
    return subprocess.run(
        command, env=clean_environ(**environ), capture_output=True, text=True, timeout=PATIENT_S
    )


def open_descriptors() -> dict[int, str]:
    """What this process has open, and what it is."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found[int(entry.name)] = str(entry.readlink())
    return found


class RunningNode:
    """A `kvhold serve` of our own, and the clients made here."""

    def __init__(self, path: Path, *arguments: str, under: Sequence[str] = ()) -> None:
        """under: words before the command, such as `ip netns exec NAME`"""
        self.path = path
        self.log = path.with_suffix(".test-log")
        self._clients: list[NodeClient] = []
        command = [
            *under,
            sys.executable,
            "-m",
            "kvhold",
            "serve",
            "--socket",
            str(path),
            "--ram-bytes",
            "16MiB",
            *arguments,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean_environ()
            )
        assert self.process.stdout is not None
        with self.process.stdout as said:
            self.ready = said.readline()
        if "ready" not in self.ready:
            self.kill()
            pytest.fail(f"the node did not start: {self.log.read_text()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, *, name: str = "test", **settings: Any) -> NodeClient:
        """One that waits long for answers, and not long before it looks for a lost node."""
        self._clients.append(NodeClient(self.path, replace(PATIENT, **settings), name=name))
        return self._clients[-1]

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does not answer meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                assert self.process.wait(PATIENT_S) == 0, self.log.read_text()
            finally:
                self.kill()
        assert "Traceback" not in self.log.read_text(), self.log.read_text()


class RawClient:
    """Bytes to a node and from it, no manners. `greet` first makes it a client like others."""

    def __init__(self, path: Path, *, greet: bool = False) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENT_S)
        self.socket.connect(str(path))
        self.greeted = False
        self.number = 0  # of the last request
        if greet:
            self.say(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "raw", os.getpid()))
            # the arena's descriptor, not asked for, is dropped by the kernel
            assert isinstance(self.hear(), m.Welcome)
            self.greeted = True

    def say(self, message: m.Message) -> None:
        self.socket.sendall(self.encoded(message))

    def encoded(self, message: m.Message) -> bytes:
        """With the next number, after the greeting."""
        if not self.greeted:
            return bytes(encode(message))
        self.number += 1
        return bytes(encode(message, self.number))

    def hear(self) -> m.Answer | m.Welcome:
        body: Any = self._read(body_length(self._read(LENGTH_BYTES)))
        if self.greeted:
            self.answered, body = split_number(body)
        return _answers.decode(body)

    def ask(self, request: m.Message) -> Any:
        self.say(request)
        answer = self.hear()
        assert self.answered in (self.number, 0), "an answer to this request, or a refusal of all"
        return answer

    def is_closed(self) -> bool:
        """Whether the node has nothing more to say. Waits for that."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self.socket.recv(nbytes - len(data))
            assert more, "the node closed the connection"
            data += more
        return data


class FakeNode:
    """Listens where a node would, and says what the test tells it to: one list a connection, one
    element a message heard.
    """

    def __init__(
        self, path: Path, *conversations: list[bytes | Callable[[socket.socket], None]]
    ) -> None:
        self._conversations = conversations
        self._fd = os.memfd_create("fake-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 2 << 20)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(PATIENT_S)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for conversation in self._conversations:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # the client may hang up at any time, even with something unread
            with connection, suppress(ConnectionError):
                connection.settimeout(PATIENT_S)
                for said in conversation:
                    connection.recv(65536)
                    if callable(said):
                        said(connection)
                    else:
                        socket.send_fds(connection, [said], [self._fd])
                if conversation:
                    connection.recv(65536)  # until the client has had enough

    def __enter__(self) -> "FakeNode":
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        os.close(self._fd)


def write_half(client: NodeClient, num_tokens: int, seed: int) -> Any:
    """Reserve chunks and write only the first half of each; commit nothing."""
    names = a_prompt(SPACE, num_tokens, seed).chunks()
    reservation = client.reserve(PLAIN, names)
    for at in reservation.chunks().offsets:
        reservation.buffer[at : at + PLAIN.chunk_bytes(0, 16) // 2] = 0xAB
    return reservation


def filled_reservation(client: NodeClient, num_tokens: int, seed: int) -> tuple[Any, np.ndarray]:
    """A reservation that was filled and not committed, and a copy of its bytes."""
    names = a_prompt(SPACE, num_tokens, seed).chunks()
    reservation = client.reserve(PLAIN, names)
    fill(reservation, PLAIN, names)
    return reservation, bytes_of(reservation)


def bytes_of(reservation: Any) -> np.ndarray:
    places = reservation.chunks()
    return np.concatenate(
        [
            reservation.buffer[at : at + PLAIN.chunk_bytes(0, int(n))]
            for at, n in zip(places.offsets, places.num_tokens, strict=True)
        ]
    )


def set_deadlines(client: NodeClient, **settings: Any) -> None:
    """Its settings, from now on: it has joined in peace, and what the test breaks is
    given up soon.
    """
    client._config = replace(client._config, **settings)


def held_by(client: NodeClient) -> HeldStatus:
    return client.status()["held"]


def works(client: NodeClient) -> bool:
    """Whether the client has a node again."""
    try:
        client.status()
    except KVHoldError:
        return False
    return True
