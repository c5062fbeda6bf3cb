"""The process at the other end of a Unix socket. A forked child may keep the socket open."""

import asyncio
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvhold.core.errors import NodeError

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python
_STATE, _START_TIME = 0, 19  # of /proc/PID/stat


@dataclass(frozen=True)
class SocketPeer:
    """pid:   0: in another PID namespace
    start: in kernel clock ticks, because pids recur; None: unknown
    """

    pid: int
    uid: int
    start: int | None

    @classmethod
    def of(cls, connection: socket.socket) -> "SocketPeer":
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return cls(pid, uid, _start_of(pid) if _proc_is_ours() else None)

    def has_ended(self) -> bool:
        """All threads have ended; False if unknown."""
        if self.pid <= 0 or self.start is None:
            return False
        try:
            fields = _stat(self.pid)
            if fields is None:
                return _is_gone(self.pid)
            if int(fields[_START_TIME]) != self.start:
                return True
            return fields[_STATE] in ("Z", "X") and _is_gone(self.pid)
        except OSError as error:
            log.debug("process %d: %s", self.pid, error)
            return False

    def watch(self, connection: socket.socket) -> "ProcessEnd":
        try:
            (fd,) = struct.unpack(
                "i", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
            )
            return ProcessEnd(fd)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise NodeError(f"process {self.pid} cannot be watched: {error}") from None
        if self.pid <= 0 or self.start is None:
            raise NodeError(
                "the node and this process are in different PID namespaces, and Linux "
                "before 6.5 then does not show when a process ends"
            )
        try:
            fd = os.pidfd_open(self.pid)
        except OSError as error:
            raise NodeError(f"process {self.pid} cannot be watched: {error}") from None
        if _start_of(self.pid) != self.start:
            os.close(fd)
            raise NodeError(f"process {self.pid} has ended")
        return ProcessEnd(fd)


class ProcessEnd:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def then(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._fd, callback)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _proc_is_ours() -> bool:
    """Pids differ in another PID namespace."""
    try:
        return Path("/proc/self").readlink() == Path(str(os.getpid()))
    except OSError:
        return False


def _start_of(pid: int) -> int | None:
    try:
        fields = _stat(pid) if pid > 0 else None
    except OSError:
        return None
    return int(fields[_START_TIME]) if fields is not None else None


def _stat(pid: int) -> list[str] | None:
    """The command may contain blanks. Raises OSError."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _is_gone(pid: int) -> bool:
    """No thread is left; the first has ended. Raises OSError."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        return bool(waiting.poll(0))
    finally:
        os.close(fd)
