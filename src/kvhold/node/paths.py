"""Where this user's node listens: `default_socket()`, and the checks that make the place safe."""

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

_MAX_PATH = 107  # sun_path of a Unix socket, less its final zero


def default_socket() -> Path:
    """The node's socket in the first of this user's places that nobody else has taken.

    `$XDG_RUNTIME_DIR/kvhold`, or `kvhold-UID` in the temporary directory. Everybody may make a folder of that name there; then it is
    `/run/user/UID/kvhold`, or a folder of this host's in `~/.cache/kvhold/run`. The same for all engines of the user that have the same
    environment: it depends on who owns the folders, and on nothing that changes while they run.
    """
    places = list(_places())
    for number, folder in enumerate(places):
        if _is_free_or_ours(folder):
            if number:
                _warn_once(places[0], folder)
            return folder / "node.sock"
    return places[0] / "node.sock"  # whoever uses it is told what is wrong


def socket_path(configured: str) -> Path:
    """The configured socket, or the default. Raises NodeError for a path that no Unix socket can have."""
    path = Path(configured).expanduser().absolute() if configured else default_socket()
    if len(os.fsencode(path)) > _MAX_PATH:
        raise NodeError(f"node.socket {path} is too long: a Unix socket's path has at most {_MAX_PATH} bytes")
    return path


def lock_path(path: Path) -> Path:
    """The file beside a socket that its node has locked, from before it listens until after it has let go of its memory."""
    return Path(f"{path}.lock")


def clears_path(path: Path) -> Path:
    """Return the file in which the node of a socket remembers the clears that tiers owe.

    It lies in `$XDG_STATE_HOME/kvhold` (`~/.local/state/kvhold`), because the socket's folder seldom outlives a reboot. Hosts may share a
    home, so the name has the host's, and a digest of the socket's path. Beside the socket, with a warning, where there is no such folder.
    """
    beside = Path(f"{path}.clears")
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        folder = (state if state.is_absolute() else Path.home() / ".local" / "state") / "kvhold"
    except RuntimeError:  # this user has no home
        folder = beside.parent
    if not _is_free_or_ours(folder):
        if folder != beside.parent:
            log.warning("%s cannot be used: clears that tiers owe are in %s, which a reboot may remove; see clears_file", folder, beside)
        return beside
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return folder / f"{socket.gethostname()}-{digest}.clears"


def watch_path(path: Path) -> Path:
    """The file beside a socket that the watcher of its node has locked (`node/watcher.py`)."""
    return Path(f"{path}.watch")


def prepare_folder(path: Path, *, any_owner: bool = False) -> None:
    """Make the socket's folder, for this user alone. Raises NodeError when others could change what is in it; any_owner: they may."""
    folder = path.parent
    try:
        os.close(open_folder(folder, any_owner=any_owner))
    except Unsafe as error:
        raise NodeError(f"node.socket: {error}; or set node.any_owner=true, if nobody else can reach that folder") from None
    except OSError as error:
        raise NodeError(f"node.socket: cannot make the folder {folder}: {error.strerror}; choose a place you can write") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NodeError(f"node.socket: cannot write to {folder}; choose a place you can write")


def open_beside(path: Path, flags: int) -> int:
    """A descriptor of a file of the node's, in a folder that is there: a lock or a log. Follows no link and truncates nothing.

    The file must be this user's, whoever the folder belongs to (`prepare_folder` looks at that). Raises OSError; `Unsafe` for what another
    user has put there.
    """
    folder = open_folder(path.parent, make=False, any_owner=True)
    try:
        return open_own_file(path.name, flags, dir_fd=folder, shown=str(path))
    finally:
        os.close(folder)


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _places() -> Iterator[Path]:
    """Where a node's folder may be, the best place first."""
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
    except RuntimeError:  # this user has none
        return
    yield home / ".cache" / "kvhold" / "run" / socket.gethostname()  # hosts may share a home


def _is_free_or_ours(folder: Path) -> bool:
    """Whether the folder is this user's alone, or can be made."""
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
    log.warning("%s is not this user's alone; the node's socket is in %s instead. Set node.socket to choose a place", usual, chosen)
