"""The process at the other end of a Unix socket: who it is, and whether it still lives.

    peer = Peer.of(connection)
    peer.pid, peer.has_ended()

A socket that closes says that its process has ended, unless a child that was forked off has a copy of it. So the node also asks the
kernel now and then. It keeps no descriptor a process: 256 engines are more than the default limit has room for.
"""

import logging
import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_STATE, _START_TIME = 0, 19  # of the fields in /proc/PID/stat that follow the command


@dataclass(frozen=True)
class Peer:
    """A process.

    pid:      0 where it is in another PID namespace
    uid:      its user
    start:    when it was started, in the kernel's clock ticks, so that another process with its pid is not mistaken for it; -1: not known
    """

    pid: int
    uid: int
    start: int

    @classmethod
    def of(cls, connection: socket.socket) -> "Peer":
        """The process that connected, from the kernel."""
        pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return cls(pid, uid, _start_of(pid) if _proc_is_ours() else -1)

    def has_ended(self) -> bool:
        """Whether all its threads have ended, so that it writes no memory any more. False where that cannot be told."""
        if self.pid <= 0 or self.start < 0:
            return False
        try:
            fields = _stat(self.pid)
            if fields is None:
                return _is_gone(self.pid)
            if int(fields[_START_TIME]) != self.start:
                return True
            return fields[_STATE] in ("Z", "X") and _is_gone(self.pid)
        except OSError as error:  # no descriptor is left, for one
            log.debug("process %d: %s", self.pid, error)
            return False


def _proc_is_ours() -> bool:
    """Whether /proc numbers processes as this process does. One of another PID namespace would show other processes."""
    try:
        return Path("/proc/self").readlink() == Path(str(os.getpid()))
    except OSError:
        return False


def _start_of(pid: int) -> int:
    try:
        fields = _stat(pid) if pid > 0 else None
    except OSError:
        return -1
    return int(fields[_START_TIME]) if fields is not None else -1


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command, which may hold blanks; None: there is no such file. Raises OSError."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _is_gone(pid: int) -> bool:
    """Whether a process without a first thread has no other one either. Raises OSError."""
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
