"""The ZMQ addresses of events for routers, refused if others could read them."""

import socket
import stat
from importlib import import_module
from pathlib import Path
from typing import Any

from kvhold.core.errors import ConfigError, NodeError
from kvhold.net.addresses import is_loopback, split_address

_TCP, _IPC = "tcp://", "ipc://"


def import_zmq() -> Any:
    """Raises ConfigError."""
    try:
        return import_module("zmq")
    except ImportError:
        raise ConfigError(
            "events.publish needs pyzmq, which vLLM brings; install it: "
            'pip install "kvhold[events]"'
        ) from None


def bind_endpoint(made: Any, address: str, where: str, *, insecure: bool) -> str:
    """Return its address. where: the setting. Raises ConfigError, NodeError."""
    zmq = import_zmq()
    if address.startswith(_IPC):
        path = _socket_path(address, where)
    else:
        path = None
        address = _tcp_address(made, address, where, insecure=insecure)
    try:
        made.bind(address)
        if path is not None:
            path.chmod(0o600)
    except (zmq.ZMQError, OSError) as error:
        raise NodeError(f"{where}: cannot bind {address}: {error}") from None
    return str(made.getsockopt_string(zmq.LAST_ENDPOINT))


def _socket_path(address: str, where: str) -> Path:
    path = Path(address.removeprefix(_IPC))
    if not path.is_absolute():
        raise ConfigError(f"{where}: {address!r}: give an absolute path, such as ipc:///run/events")
    try:
        # ZMQ removes any file there
        is_other = not stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        is_other = False
    except OSError as error:
        raise NodeError(f"{where}: {path}: {error}") from None
    if is_other:
        raise ConfigError(f"{where}: {path} exists and is no socket; name another path")
    return path


def _tcp_address(made: Any, address: str, where: str, *, insecure: bool) -> str:
    zmq = import_zmq()
    if not address.startswith(_TCP):
        raise ConfigError(f"{where}: {address!r} is not tcp://HOST:PORT or ipc:///PATH")
    host, port = split_address(address.removeprefix(_TCP), where)
    if host != "*" and not is_loopback(host) and insecure:
        host = _resolved(host, where)
    if not is_loopback(host) and not insecure:
        raise ConfigError(
            f"{where}: {address} is beyond loopback, and ZMQ has no login: everyone who reaches "
            "the port could read the token ids of prompts. Use a loopback address, or set "
            "events.insecure"
        )
    if host == "localhost":
        host = "127.0.0.1"
    if ":" in host:
        made.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    return f"{_TCP}{host}:{port}"


def _resolved(host: str, where: str) -> str:
    """ZMQ binds addresses, not names."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"{where}: {host!r} is no address of this host: {error}") from None
