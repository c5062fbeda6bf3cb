import fcntl
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from kvhold.cache.loss import loss_warning
from kvhold.core.config import ClientConfig, Config, load_config
from kvhold.core.errors import KVHoldError, NodeError
from kvhold.memory.placement import engine_memory_nodes, format_list
from kvhold.node.client import NodeClient
from kvhold.node.host import node_environment, spawn_attributes
from kvhold.node.paths import lock_path, open_beside, prepare_folder, socket_path, watch_path
from kvhold.node.requirements import pack, requirements_of

log = logging.getLogger(__name__)

_POLL_S = 0.01
_LOG_TAIL_BYTES = 2000


def connect(config: Config | None = None, *, name: str = "python", **settings: Any) -> NodeClient:
    """Join this host's node. Start it if `node.autostart` allows.

    `node.on_mismatch` and `node.require_encryption` apply to a running node.

    Raises NodeError; ConfigError: an invalid tier URL.
    """
    config = config or load_config(settings)
    path = socket_path(config.node.socket)
    required = requirements_of(config)
    for tier in required.tiers:
        if warning := loss_warning(tier.codec, config.rules):
            log.warning("tier %s: %s", tier.shown, warning)
    requires = pack(required)
    if not config.node.autostart:
        return NodeClient(path, config.client, name=name, requires=requires)
    ensure_node(config, path)
    return NodeClient(
        path,
        config.client,
        name=name,
        requires=requires,
        revive=lambda closed: ensure_node(config, path, closed),
    )


def end_node(path: Path, *, timeout_s: float = 60.0) -> None:
    with (
        suppress(KVHoldError),
        NodeClient(path, ClientConfig(call_timeout_s=timeout_s), name="end") as client,
    ):
        client.stop_node()


def ensure_node(config: Config, path: Path, given_up: threading.Event | None = None) -> None:
    """Raises NodeError: the node ends while starting, `given_up` is set, or it does not listen
    within `node.start_timeout_s`.
    """
    if _listens(path):
        return
    prepare_folder(path, any_owner=config.node.any_owner)
    patience = _Patience(
        path, time.monotonic() + config.node.start_timeout_s, given_up or threading.Event()
    )
    try:
        lock = open_beside(Path(f"{path}.start"), os.O_RDWR | os.O_CREAT)
        try:  # one of several engines starts the node
            _wait_for(lock, patience)
            if not _has_node(patience):
                _spawn(config, patience)
        finally:
            os.close(lock)
    except OSError as error:
        raise NodeError(f"node.socket: cannot start a node on {path}: {error}") from None


@dataclass(frozen=True)
class _Patience:
    path: Path
    until_s: float
    given_up: threading.Event

    def pause(self, why: Callable[[], str]) -> None:
        if time.monotonic() > self.until_s:
            raise NodeError(f"no node on {self.path} within node.start_timeout_s: {why()}")
        if self.given_up.wait(_POLL_S):
            raise NodeError(f"no node on {self.path}: the caller has stopped waiting")


def _wait_for(lock: int, patience: _Patience) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            patience.pause(lambda: "another process is starting the node and has not finished")


def _has_node(patience: _Patience) -> bool:
    while not (listens := _listens(patience.path)) and _is_taken(patience.path):
        patience.pause(lambda: "another node has the socket's lock, and does not listen")
    return listens


def _is_taken(path: Path) -> bool:
    """Without locking: that would disturb a watcher's next node."""
    return _is_locked(watch_path(path)) or _is_locked(lock_path(path))


def _is_locked(file: Path) -> bool:
    try:
        lock = open_beside(file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _spawn(config: Config, patience: _Patience) -> None:
    path = patience.path
    log_path = path.with_suffix(".log")
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvhold",
        "serve",
        "--detach",
        "--restart",
        "--socket",
        str(path),
        "--log-file",
        str(log_path),
    ]
    command += ["--idle-exit-s", f"{config.node.idle_exit_s:g}"]
    environ = node_environment(os.environ, config) | _as_environ(_at_home(config))
    output = open_beside(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        start = os.fstat(output).st_size
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            *((os.POSIX_SPAWN_DUP2, output, fd) for fd in (1, 2)),
        ]
        pid = os.posix_spawn(
            command[0], command, environ, file_actions=actions, **spawn_attributes()
        )
    finally:
        os.close(output)
    while not _has_ended(pid):
        patience.pause(
            lambda: f"the node was started, but does not listen yet; {_told(log_path, start)}"
        )
    if not _has_node(patience):
        raise NodeError(f"the node ended while starting; {_told(log_path, start)}")
    log.info("started a node on %s, its log is %s", path, log_path)


def _at_home(config: Config) -> Config:
    if config.node.numa != "engine":
        return config
    nodes = format_list(engine_memory_nodes())
    return replace(config, node=replace(config.node, numa=nodes or "spread"))


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _as_environ(settings: Any, prefix: str = "KVHOLD_") -> dict[str, str]:
    values: dict[str, str] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        if is_dataclass(value):
            values |= _as_environ(value, f"{prefix}{f.name.upper()}_")
        else:
            values[f"{prefix}{f.name.upper()}"] = (
                " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            )
    return values


def _told(path: Path, start: int) -> str:
    tail = log_tail(path, start)
    return f"its log {path} ends with: {tail}" if tail else f"its log {path} is empty"


def log_tail(path: Path, start: int) -> str:
    """Raises OSError."""
    with os.fdopen(open_beside(path, os.O_RDONLY), "rb") as file:
        file.seek(start)
        return file.read()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
