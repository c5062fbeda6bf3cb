"""Start programs with vLLM imported, in half of the time.

PRELOAD_VLLM names a folder of fork servers, one for each environment at vLLM's import.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from kvhold_lab.engines.fork_server import MOST_REQUEST_BYTES, READY, Fork

VARIABLE = "PRELOAD_VLLM"
_OWNER, _LOCK, _SOCKETS = "owner", "lock", ".sock"
_MOST_SERVERS = 7  # each keeps half a gigabyte
_MOST_CLIENTS = 64
_LATE = ("KVHOLD_", "XDG_", "PYTEST_", "COVERAGE_", "TEST_", "TMPDIR")
_START_S = 120.0

_Environment = frozenset[tuple[str, str]]
_lock = threading.Lock()
_servers: "dict[_Environment, _Server | None]" = {}
_started: "list[subprocess.Popen[bytes]]" = []


@contextmanager
def preloading() -> Iterator[Path]:
    """Make the folder. Its servers end with the context, or with this process."""
    folder = Path(tempfile.mkdtemp(prefix="kvhold-vllm-"))
    with (folder / _OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class ForkedProcess:
    """`subprocess.Popen` for another process's child."""

    def __init__(
        self, pid: int, end: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None
    ) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._end = end

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(os.read(self._end, 16) or -signal.SIGKILL)
            os.close(self._end)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def spawn(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    *,
    pipes: bool = True,
) -> ForkedProcess | None:
    """pipes: for stdin and stdout; else no stdin, and stdout is the log, too"""
    folder = Path(os.environ.get(VARIABLE, ""))
    if not folder.is_absolute():
        return None
    with _lock:
        server = _server_for(environment, folder)
        if server is None:
            return None
        cores = sorted(os.sched_getaffinity(0))
        fork = Fork(module, list(arguments), dict(environment), str(Path.cwd()), cores)
        request = msgspec.json.encode(fork)
        if len(request) > MOST_REQUEST_BYTES:
            return None
        try:
            return server.fork(request, log, pipes=pipes)
        except OSError:
            server.close()
            server.path.unlink(missing_ok=True)
            _servers[_early(environment)] = None
            return None


def _server_for(environment: Mapping[str, str], folder: Path) -> "_Server | None":
    kind = _early(environment)
    if kind not in _servers:
        path = folder / f"{hashlib.sha256(repr(sorted(kind)).encode()).hexdigest()[:16]}{_SOCKETS}"
        try:
            _servers[kind] = _Server(path) if _is_started(path, environment) else None
        except OSError:
            _servers[kind] = None
    return _servers[kind]


def _is_started(path: Path, environment: Mapping[str, str]) -> bool:
    """Start the server that listens there, if needed and allowed. Raises OSError."""
    with (path.parent / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return True
        if len(list(path.parent.glob(f"*{_SOCKETS}"))) >= _MOST_SERVERS:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(path))
            listening.listen(_MOST_CLIENTS)
            owner = path.with_name(_OWNER)
            command = [sys.executable, "-m", "kvhold_lab.engines.fork_server"]
            process = subprocess.Popen(
                [*command, str(listening.fileno()), str(owner)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[listening.fileno()],
                process_group=0,
            )
        _started.append(process)  # it may outlive this process
    return True


def _early(environment: Mapping[str, str]) -> _Environment:
    return frozenset(
        (name, value) for name, value in environment.items() if not name.startswith(_LATE)
    )


class _Server:
    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        atexit.register(self.close)
        self._control.settimeout(_START_S)
        self._is_ready = False
        try:
            self._control.connect(str(path))
        except OSError:
            self.close()
            raise

    def fork(self, request: bytes, log: IO[bytes], *, pipes: bool) -> ForkedProcess:
        """Raises OSError."""
        if not self._is_ready:
            self._receive()
            self._is_ready = True
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            if pipes:
                stdin, stdout = os.pipe(), os.pipe()
            else:
                stdin, stdout = (os.open(os.devnull, os.O_RDONLY), -1), (-1, os.dup(log.fileno()))
            end = os.pipe()
            for descriptor in (stdin[0], stdout[1], end[1]):
                theirs.callback(os.close, descriptor)
            for descriptor in (*((stdin[1], stdout[0]) if pipes else ()), end[0]):
                ours.callback(os.close, descriptor)
            given = [stdin[0], stdout[1], log.fileno(), end[1]]
            socket.send_fds(self._control, [request], given)
            pid = int(self._receive())
            ours.pop_all()
        return ForkedProcess(
            pid,
            end[0],
            os.fdopen(stdin[1], "wb", buffering=0) if pipes else None,
            os.fdopen(stdout[0], "rb", buffering=0) if pipes else None,
        )

    def close(self) -> None:
        self._control.close()

    def _receive(self) -> bytes:
        received = self._control.recv(len(READY) + 32)
        if not received:
            raise ConnectionResetError("the fork server has ended")
        return received
