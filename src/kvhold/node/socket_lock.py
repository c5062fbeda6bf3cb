import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from kvhold.core.errors import NodeError
from kvhold.node.paths import lock_path, open_beside, prepare_folder
from kvhold.tiers.files.safe import Unsafe

_LOCK_ATTEMPTS = 100
_LOCK_PAUSE_S = 0.002


def _lock(fd: int) -> None:
    """Raises BlockingIOError after 0.2 s: a check for a node (`start.py`) locks for a moment."""
    for left in range(_LOCK_ATTEMPTS, 0, -1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left == 1:
                raise
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


class SocketLock:
    def __init__(
        self,
        path: Path,
        *,
        any_owner: bool = False,
        setting: str = "node.socket",
        what: str = "a node",
    ) -> None:
        """setting, what: of the socket and its owner, for errors

        Raises NodeError: another process has the socket, or the folder cannot be used.
        """
        prepare_folder(path, any_owner=any_owner, setting=setting)
        self._file = lock_path(path)
        try:
            self._fd = open_beside(self._file, os.O_RDWR | os.O_CREAT)
        except Unsafe as error:
            raise NodeError(f"{setting}: {error}") from None
        except OSError as error:
            raise NodeError(
                f"{setting}: cannot write {self._file}: {error.strerror}; choose a place "
                "you can write"
            ) from None
        try:
            _lock(self._fd)
        except OSError as error:
            owner = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise NodeError(f"{setting}: cannot lock {self._file}: {error.strerror}") from None
            raise NodeError(
                f"{what} is running on {path} already (pid {owner}); use it, stop it, or "
                f"set {setting}"
            ) from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        """Keep the file: two owners could lock two files of one name."""
        os.close(self._fd)


def bind_own(path: Path, *, setting: str = "node.socket") -> socket.socket:
    """Only this user can connect to it. The caller holds the lock. Raises NodeError."""
    _remove_stale(path, setting)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # before `bind`, so others can never connect; a umask would affect other threads
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise NodeError(f"{setting}: cannot listen on {path}: {error}") from None
    return sock


def _remove_stale(path: Path, setting: str) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NodeError(
                f"{setting}: {path} exists, and is not a socket; remove it or choose another path"
            )
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise NodeError(
            f"{setting}: cannot remove the old socket {path}: {error.strerror}"
        ) from None
