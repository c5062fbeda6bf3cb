"""Programs that start with vLLM imported, in half of the time.

PRELOAD_VLLM=1 turns this on.
"""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from kvhold_lab.engines.fork_server import MOST_REQUEST_BYTES, READY, Fork

VARIABLE = "PRELOAD_VLLM"
_MOST_SERVERS = 3  # each keeps half a gigabyte
_LATE = ("KVHOLD_", "XDG_", "PYTEST_", "COVERAGE_", "TMPDIR", "_=")
_START_S = 120.0

_Environment = frozenset[tuple[str, str]]
_lock = threading.Lock()
_servers: "dict[_Environment, _Server | None]" = {}


class ForkedProcess:
    """`subprocess.Popen` for another process's child."""

    def __init__(self, pid: int, end: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
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


def spawn(module: str, environment: Mapping[str, str], stderr: IO[bytes]) -> ForkedProcess | None:
    if os.environ.get(VARIABLE) != "1":
        return None
    with _lock:
        server = _server_for(environment)
        if server is None:
            return None
        try:
            return server.fork(module, environment, stderr)
        except OSError:
            server.close()
            _servers[_early(environment)] = None
            return None


def _server_for(environment: Mapping[str, str]) -> "_Server | None":
    kind = _early(environment)
    if kind not in _servers and len(_servers) < _MOST_SERVERS:
        _servers[kind] = _Server(environment)
    return _servers.get(kind)


def _early(environment: Mapping[str, str]) -> _Environment:
    return frozenset(
        (name, value) for name, value in environment.items() if not name.startswith(_LATE)
    )


class _Server:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvhold_lab.engines.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        atexit.register(self.close)
        self._control.settimeout(_START_S)
        self._is_ready = False

    def fork(self, module: str, environment: Mapping[str, str], stderr: IO[bytes]) -> ForkedProcess:
        """Raises OSError: the server has died."""
        if not self._is_ready:
            self._receive()
            self._is_ready = True
        cores = sorted(os.sched_getaffinity(0))
        request = msgspec.json.encode(Fork(module, dict(environment), str(Path.cwd()), cores))
        if len(request) > MOST_REQUEST_BYTES:
            raise OSError("the environment is too large")
        stdin, stdout, end = os.pipe(), os.pipe(), os.pipe()
        try:
            theirs = [stdin[0], stdout[1], stderr.fileno(), end[1]]
            socket.send_fds(self._control, [request], theirs)
            pid = int(self._receive())
        except BaseException:
            for descriptor in (stdin[1], stdout[0], end[0]):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (stdin[0], stdout[1], end[1]):
                os.close(descriptor)
        return ForkedProcess(
            pid,
            end[0],
            os.fdopen(stdin[1], "wb", buffering=0),
            os.fdopen(stdout[0], "rb", buffering=0),
        )

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> bytes:
        received = self._control.recv(len(READY) + 32)
        if not received:
            raise ConnectionResetError("the fork server has ended")
        return received
