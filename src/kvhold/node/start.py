"""Join this host's node, or start it: `connect()`.

Whoever comes first starts it, under a file lock, as a process of its own that outlives the engine: the next engine finds the cache
warm. It ends by itself when it has been without clients for `node.idle_exit_s`.
"""

import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from kvhold.core.config import ClientConfig, Config, load_config
from kvhold.core.errors import KVHoldError, NodeError
from kvhold.node.client import NodeClient
from kvhold.node.paths import prepare_folder, socket_path

log = logging.getLogger(__name__)

_POLL_S = 0.01  # a lock, a socket and a child that belong to other processes tell nobody when they are ready
_LOG_TAIL_BYTES = 2000


def connect(config: Config | None = None, *, name: str = "python", **settings: Any) -> NodeClient:
    """A client of this host's node; starts the node if none answers and `node.autostart` allows it. Raises NodeError.

    Settings as in `Config`. The client looks for a lost node by itself, and starts a new one under the same rule.
    """
    config = config or load_config(settings)
    path = socket_path(config.node.socket)
    if not config.node.autostart:
        return NodeClient(path, config.client, name=name)
    ensure_node(config, path)
    return NodeClient(path, config.client, name=name, revive=lambda: ensure_node(config, path))


def end_node(path: Path, *, timeout_s: float = 60.0) -> None:
    """End the node on `path`. It may never have started, or have ended."""
    with suppress(KVHoldError), NodeClient(path, ClientConfig(call_timeout_s=timeout_s), name="end") as client:
        client.stop_node()


def ensure_node(config: Config, path: Path) -> None:
    """Return when a node listens on `path`. Raises NodeError, with the end of its log, at once when it ends while starting, and when it
    does not listen within `node.start_timeout_s`; then it may go on starting."""
    if _listens(path):
        return
    prepare_folder(path)
    until = time.monotonic() + config.node.start_timeout_s
    try:
        with Path(f"{path}.start").open("w") as lock:  # held while starting, so that of several engines one starts the node
            _wait_for(lock, path, until)
            if not _listens(path):
                _spawn(config, path, until)
    except OSError as error:
        raise NodeError(f"node.socket: cannot start a node on {path}: {error}") from None


def _wait_for(lock: TextIO, path: Path, until: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            _pause(until, path, lambda: "another process is starting the node and has not finished")


def _spawn(config: Config, path: Path, until: float) -> None:
    log_path = path.with_suffix(".log")
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvhold",
        "serve",
        "--detach",
        "--socket",
        str(path),
        "--idle-exit-s",
        f"{config.node.idle_exit_s:g}",
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVHOLD_") or k == "KVHOLD_LOG_LEVEL"} | _as_environ(config)
    output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        start = os.fstat(output).st_size
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *((os.POSIX_SPAWN_DUP2, output, fd) for fd in (1, 2))]
        pid = os.posix_spawn(command[0], command, environ, file_actions=actions, setsid=True)
    finally:
        os.close(output)
    while not _has_ended(pid):  # with --detach it ends when its child, the node, listens or has failed
        _pause(until, path, lambda: f"it was started and does not listen yet; {_told(log_path, start)}")
    if not _listens(path):
        raise NodeError(f"the node ended while starting; {_told(log_path, start)}")
    log.info("started a node on %s, its log is %s", path, log_path)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # somebody else in this process collects its children
        return True


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _pause(until: float, path: Path, why: Callable[[], str]) -> None:
    if time.monotonic() > until:
        raise NodeError(f"no node on {path} within node.start_timeout_s: {why()}")
    time.sleep(_POLL_S)


def _as_environ(settings: Any, prefix: str = "KVHOLD_") -> dict[str, str]:
    values: dict[str, str] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        if is_dataclass(value):
            values |= _as_environ(value, f"{prefix}{f.name.upper()}_")
        else:
            values[f"{prefix}{f.name.upper()}"] = " ".join(value) if isinstance(value, tuple) else str(value)
    return values


def _told(path: Path, start: int) -> str:
    """What the node has written to its log since `start`: the end of that."""
    with path.open("rb") as file:
        file.seek(start)
        tail = file.read()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"its log {path} ends with: {tail}" if tail else f"its log {path} is empty"
