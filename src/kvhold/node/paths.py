import hashlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvhold.core.errors import NodeError
from kvhold.tiers.files.safe import Unsafe, check_folder, open_folder, open_own_file

log = logging.getLogger(__name__)

_MAX_PATH = 107


def default_socket() -> Path:
    """In this user's first usable folder: the same for engines with the same environment."""
    places = list(_places())
    for number, folder in enumerate(places):
        if _is_free_or_ours(folder):
            if number:
                _warn_once(places[0], folder)
            return folder / "node.sock"
    return places[0] / "node.sock"


def socket_path(configured: str) -> Path:
    """Raises NodeError: too long."""
    path = Path(configured).expanduser().absolute() if configured else default_socket()
    if len(os.fsencode(path)) > _MAX_PATH:
        raise NodeError(
            f"node.socket {path} is too long: a Unix socket's path has at most {_MAX_PATH} bytes"
        )
    return path


def control_path(configured: str, path: Path) -> Path:
    """path: the node's socket"""
    if not configured:
        return path.with_name("control.sock")
    return Path(configured).expanduser().absolute()


def lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def clears_path(path: Path) -> Path:
    return _state_path(path, "clears", "pending clears are", "clears_file")


def tags_path(path: Path) -> Path:
    return _state_path(path, "tags", "the namespaces' tags are", "XDG_STATE_HOME")


def history_path(path: Path) -> Path:
    return _state_path(path, "history", "the history is", "control.history_file")


def _state_path(path: Path, kind: str, what: str, setting: str) -> Path:
    """In `$XDG_STATE_HOME/kvhold`, named after the host: hosts may share a home."""
    beside = Path(f"{path}.{kind}")
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        folder = (state if state.is_absolute() else Path.home() / ".local" / "state") / "kvhold"
    except RuntimeError:
        folder = beside.parent
    if not _is_free_or_ours(folder):
        if folder != beside.parent:
            log.warning(
                "%s cannot be used: %s in %s, which a reboot may remove; see %s",
                folder,
                what,
                beside,
                setting,
            )
        return beside
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return folder / f"{socket.gethostname()}-{digest}.{kind}"


def watch_path(path: Path) -> Path:
    return Path(f"{path}.watch")


def prepare_folder(path: Path, *, any_owner: bool = False, setting: str = "node.socket") -> None:
    """any_owner: others may change the folder
    setting:   of the path, for errors

    Raises NodeError.
    """
    folder = path.parent
    try:
        os.close(open_folder(folder, any_owner=any_owner))
    except Unsafe as error:
        raise NodeError(
            f"{setting}: {error}; or set node.any_owner=true, if nobody else can reach that folder"
        ) from None
    except OSError as error:
        raise NodeError(
            f"{setting}: cannot make the folder {folder}: {error.strerror}; choose a "
            "place you can write"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NodeError(f"{setting}: cannot write to {folder}; choose a place you can write")


def open_beside(path: Path, flags: int) -> int:
    """Open without following links or truncating.

    Raises OSError; `Unsafe`: a link, another user's file, or no regular file.
    """
    folder = open_folder(path.parent, make=False, any_owner=True)
    try:
        return open_own_file(path.name, flags, dir_fd=folder, shown=str(path))
    finally:
        os.close(folder)


def peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _places() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        yield Path(runtime) / "kvhold"
    else:
        yield Path(os.environ.get("TMPDIR", "/tmp")) / f"kvhold-{os.getuid()}"
    system = Path(f"/run/user/{os.getuid()}")
    if os.access(system, os.W_OK):
        yield system / "kvhold"
    try:
        home = Path.home()
    except RuntimeError:
        return
    yield home / ".cache" / "kvhold" / "run" / socket.gethostname()


def _is_free_or_ours(folder: Path) -> bool:
    try:
        state = folder.lstat()
    except FileNotFoundError:
        above = next(parent for parent in folder.parents if parent.exists())
        return os.access(above, os.W_OK | os.X_OK)
    except OSError:
        return False
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        return False
    try:
        check_folder(state, str(folder))
    except Unsafe:
        return False
    return True


@cache
def _warn_once(usual: Path, chosen: Path) -> None:
    log.warning(
        "%s is not this user's alone; the node's socket is in %s instead. Set node.socket "
        "to choose a place",
        usual,
        chosen,
    )
