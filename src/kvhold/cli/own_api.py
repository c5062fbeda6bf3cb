"""Requests to `kvhold control` of this host, through its Unix socket."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from kvhold.core.config import load_config
from kvhold.core.errors import KVHoldError
from kvhold.node.paths import control_path, socket_path

_SPARE_S = 10.0
_MOST_ANSWER_BYTES = 64 << 20


class ApiError(KVHoldError):
    """No API answers, or it refuses."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask_api(method: str, path: str, *, socket: str | None, body: Any = None) -> Any:
    """Return the answer. socket: the node's. Raises ApiError, ConfigError."""
    config = load_config({"node": {"socket": socket}} if socket else {})
    place = control_path(config.control.socket, socket_path(config.node.socket))
    connection = UnixConnection(place, 2 * config.control.node_timeout_s + _SPARE_S)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read(_MOST_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ApiError(
            f"no API answers on {place} ({why}): start it with `kvhold control`; pins need it"
        ) from None
    finally:
        connection.close()
    answer = _decoded(raw)
    if response.status >= http.client.BAD_REQUEST:
        detail = answer.get("detail") if isinstance(answer, dict) else None
        raise ApiError(str(detail or f"the API answered with status {response.status}"))
    return answer


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
