"""`kvhold control` as the node's child (`control.in_node`).

A thread starts it again after its end and a pause. Its standard input has the settings; at its end,
also of a killed node, the child ends. Its output goes to the node's log.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.core.status import ControlProcessStatus

log = logging.getLogger(__name__)

READY = "kvhold control ready on "
"""Before its addresses, in its first line."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_END_S = 5.0
_MOST_LINE = 500


class ControlProcess:
    def __init__(self, config: Config, path: Path) -> None:
        """path: the node's socket. Raises ConfigError: its packages are missing."""
        if find_spec("aiohttp") is None:
            raise ConfigError("control.in_node needs aiohttp: pip install 'kvhold[control]'")
        self._settings = json.dumps(
            {
                "control": _as_arguments(config.control),
                "otel": _as_arguments(config.otel),
                "client": _as_arguments(config.client),
                "node": {"socket": str(path)},
            }
        )
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._address = self._last_line = self._last_fault = ""
        self._num_restarts = 0
        self._pids: set[int] = set()

    def is_own(self, pid: int) -> bool:
        return pid in self._pids

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvhold-control", daemon=True)
        self._thread.start()

    def status(self) -> ControlProcessStatus:
        process = self._process
        return {
            "pid": 0 if process is None else process.pid,
            "address": self._address,
            "restarts": self._num_restarts,
            "last_fault": self._last_fault,
        }

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if self._thread is None:
            return
        self._thread.join(_END_S)
        if self._thread.is_alive() and process is not None:
            process.kill()
            self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            ended = self._live()
            if self._closing.is_set():
                return
            if time.monotonic() - began_s > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            self._last_fault = f"{ended}: {self._last_line}" if self._last_line else ended
            log.warning("the API has ended (%s); it starts again in %g s", ended, pause_s)
            self._closing.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            self._num_restarts += 1

    def _live(self) -> str:
        self._last_line = ""
        command = [sys.executable, "-P", "-m", "kvhold", "control", "--for-node"]
        try:
            with self._lock:
                if self._closing.is_set():
                    return "closed"
                process = self._process = subprocess.Popen(
                    command,
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C ends the node, which ends it
                )
                self._pids.add(process.pid)
        except OSError as error:
            return f"cannot start: {error}"
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(OSError):  # it has ended
                process.stdin.write(f"{self._settings}\n")
                process.stdin.flush()
            for line in process.stdout:
                self._hear(line.strip()[:_MOST_LINE])
            return f"exit status {process.wait()}"
        finally:
            self._process, self._address = None, ""
            with suppress(OSError):
                process.stdin.close()
            process.stdout.close()

    def _hear(self, line: str) -> None:
        if not line:
            return
        if line.startswith(READY):
            self._address = line.removeprefix(READY)
        self._last_line = line
        log.info("API: %s", line)


def _environment() -> dict[str, str]:
    """Without settings: a relative path may no longer lead to their file."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVHOLD_") or name == "KVHOLD_LOG_LEVEL"
    }


def _as_arguments(settings: Any) -> dict[str, Any]:
    """For `load_config`. Pairs as a table: their values may have spaces."""
    return {
        f.name: dict(item.split("=", 1) for item in value) if f.metadata.get("pairs") else value
        for f in fields(settings)
        if (value := getattr(settings, f.name)) is not None
    }
