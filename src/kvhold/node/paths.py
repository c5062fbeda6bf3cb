"""Where this user's node listens: `default_socket()`, and the checks that make the place safe."""

import os
import socket
import stat
import struct
from pathlib import Path

from kvhold.core.errors import NodeError

_MAX_PATH = 107  # sun_path of a Unix socket, less its final zero


def default_socket() -> Path:
    """`$XDG_RUNTIME_DIR/kvhold/node.sock`, or the same in a folder of this user's in the temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "kvhold" / "node.sock"
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"kvhold-{os.getuid()}" / "node.sock"


def socket_path(configured: str) -> Path:
    """The configured socket, or the default. Raises NodeError for a path that no Unix socket can have."""
    path = Path(configured).expanduser().absolute() if configured else default_socket()
    if len(os.fsencode(path)) > _MAX_PATH:
        raise NodeError(f"node.socket {path} is too long: a Unix socket's path has at most {_MAX_PATH} bytes")
    return path


def lock_path(path: Path) -> Path:
    """The file beside a socket that its node has locked, from before it listens until after it has let go of its memory."""
    return Path(f"{path}.lock")


def prepare_folder(path: Path) -> None:
    """Make the socket's folder, for this user alone. Raises NodeError when it is somebody else's or cannot be written."""
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise NodeError(f"node.socket: cannot make the folder {folder}: {error.strerror}; choose a place you can write") from None
    if not stat.S_ISDIR(status.st_mode) or not os.access(folder, os.W_OK | os.X_OK):
        raise NodeError(f"node.socket: cannot write to {folder}; choose a place you can write")
    if status.st_uid != os.getuid() and path == default_socket():
        raise NodeError(f"node.socket: {folder} belongs to another user; remove it or set node.socket")


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
