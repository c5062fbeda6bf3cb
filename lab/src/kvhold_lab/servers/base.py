"""A server process that ends with its `with` block. Raises NotInstalled without the program."""

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

_START_S = 400.0  # moto took 187 s on two busy cores
_STOP_S = 20.0
_POLL_S = 0.02
_LOWEST_PORT = 10_240


class NotInstalled(Exception):
    """Names the missing program and its package."""


class ServerProcess:
    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-"))
        self.log = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def answers(self) -> bool:
        """OSError also means no."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True

    def start(self) -> Self:
        """Return when the server answers, with the same port and folder."""
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
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """The process group. Idempotent."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Stop answering until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
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
    """A signal may interrupt `Popen`; the server knows this process once it is forked."""

    def __init__(self, server: ServerProcess, command: Sequence[str], **options: Any) -> None:
        server._process = self
        super().__init__(command, **options)


def program(name: str, package: str) -> str:
    """Raises NotInstalled."""
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"{name} is not installed here: {package}")
    return found


def free_port() -> int:
    """Outside the kernel's automatic range, so it stays free."""
    while True:
        with _one_at_a_time:
            port_wanted = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port_wanted))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port


def _own_ports() -> Iterator[int]:
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
