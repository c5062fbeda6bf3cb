"""A server's process: started, waited for, hurt on purpose, and gone when its `with` ends.

    with RedisServer() as server:  # a subclass names the command and how to tell that it answers
        server.port; server.kill(); server.start(); server.pause(); server.resume()

Where the program is not installed, starting raises NotInstalled, which names the package: a test
turns it into a visible skip.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, Self

_START_S = 400.0  # moto took 187 s on two cores with sixteen who want them
_STOP_S = 20.0
_POLL_S = 0.02  # between two tries to reach a server that starts
_LOWEST_PORT = 10_240


class NotInstalled(Exception):
    """The program is not on this machine; the message says what to install."""


class ServerProcess:
    """One server in a folder of its own, which goes with it.

    Not started before `start`, or `with`.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-"))
        self.log = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What to run; `program` finds it."""
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        """Its environment."""
        return dict(os.environ)

    def answers(self) -> bool:
        """Whether it is ready for clients; asked until it is. May raise OSError for no."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True

    def start(self) -> Self:
        """Run it, on the same port and in the same folder as before, and wait until it answers."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        with self.log.open("ab") as log:
            _Process(
                self,
                self.command(),
                cwd=self.folder,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._process is not None
        until = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(
                    f"{type(self).__name__} did not "
                    f"start:\n{self.log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(_POLL_S)
        return self

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """`kill -9`, of it and of the processes it has started.

        Harmless when it is dead already.
        """
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """It accepts connections (its kernel does) and says nothing, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its folder. Idempotent."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _is_ready(self) -> bool:
        try:
            return self.answers()
        except OSError:
            return False

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or not process.pid or process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Process(subprocess.Popen[bytes]):
    """A process that its server knows from the fork on.

    A signal may end the command while `Popen` still waits for the child's exec. The child then
    runs already, and only its server can end it.
    """

    def __init__(self, server: ServerProcess, command: Sequence[str], **options: Any) -> None:
        server._process = self
        super().__init__(command, **options)


def program(name: str, package: str) -> str:
    """The path of a program. Raises NotInstalled, naming the package."""
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"{name} is not installed here: {package}")
    return found


def free_port() -> int:
    """A loopback port that nobody listens on now, and that the kernel gives to nobody unasked: so a
    server finds it free when it starts a little later, and when it starts again.
    """
    while True:
        with _one_at_a_time:  # a generator has one caller
            port_wanted = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port_wanted))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port


def _own_ports() -> Iterator[int]:
    """Below those that the kernel hands out, one after the other from a place of this process's
    own; 0, for any, where that cannot be.
    """
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        end = 0
    if end < 2 * _LOWEST_PORT:
        yield from repeat(0)
    port = _LOWEST_PORT + secrets.randbelow(end - _LOWEST_PORT)
    while True:
        yield port
        port = port + 1 if port + 1 < end else _LOWEST_PORT


_one_at_a_time = threading.Lock()
_ports = _own_ports()
