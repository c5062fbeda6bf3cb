"""LMCache 0.5.6 for vLLM on a CPU, in its own environment."""

import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvhold_lab.bench.compare import lmcache_in_vllm
from kvhold_lab.bench.compare.visits import TOKENS_PER_BLOCK
from kvhold_lab.engines.process import LoggedProcess
from kvhold_lab.servers.base import free_port

_TOKENS_PER_CHUNK = 256

# Keep nothing in LMCache's memory. By default it refuses four chunks if less is free.
_ONLY_BELOW = ("--l2-store-policy", "skip_l1")

_START_S = 120.0
_POLL_S = 0.05
_GIB = 1 << 30
_QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


class LMCacheServer:
    def __init__(
        self,
        python: Path,
        *,
        l1_bytes: int,
        tier: str,
        folder: Path,
        num_tokens: int,
        redis_port: int = 0,
    ) -> None:
        self._port = free_port()
        self._shared = f"kvhold_compare_{os.getpid()}_{self._port}"
        below: dict[str, list[str]] = {
            "ram": [],
            "disk": [
                *_ONLY_BELOW,
                "--l2-adapter",
                f'{{"type": "fs_native", "base_path": "{folder}"}}',
            ],
            "redis": [
                *_ONLY_BELOW,
                "--l2-adapter",
                f'{{"type": "resp", "host": "127.0.0.1", "port": {redis_port}}}',
            ],
        }
        self._command = [
            str(python.parent / "lmcache"),
            *(
                "server",
                "--host",
                "127.0.0.1",
                "--port",
                str(self._port),
                "--http-port",
                str(free_port()),
            ),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", self._shared),
            *(
                "--chunk-size",
                str(tokens_per_chunk(num_tokens)),
                "--l1-size-gb",
                str(l1_bytes / _GIB),
                "--eviction-policy",
                "LRU",
            ),
            *below[tier],
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    def connector(self) -> dict[str, Any]:
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self._port,
            "lmcache.mp.mq_timeout": 60.0,
        }
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": lmcache_in_vllm.__name__,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def __enter__(self) -> Self:
        environment = {**_QUIET, "PYTHONPATH": "", "PYTHONHASHSEED": "0"}
        self._process = LoggedProcess(
            "lmcache server", self._command, log_path=None, environment=environment
        )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(20.0)
        self._end()

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while True:
            if not self._process.is_alive:
                raise self._process.failure("start")
            if time.monotonic() > until:
                raise self._process.failure("start", f"did not listen within {_START_S:g} s")
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                time.sleep(_POLL_S)

    def _end(self) -> None:
        self._process.kill()
        for left in Path("/dev/shm").glob(f"*{self._shared}*"):
            left.unlink(missing_ok=True)


def tokens_per_chunk(num_tokens: int) -> int:
    return _TOKENS_PER_CHUNK if num_tokens >= 4 * _TOKENS_PER_CHUNK else TOKENS_PER_BLOCK


def environment(python: Path, held_bytes: int, *, num_tokens: int) -> dict[str, str]:
    packages = next((python.parent.parent / "lib").glob("python3*/site-packages"))
    of_memory = {
        "LMCACHE_CHUNK_SIZE": str(tokens_per_chunk(num_tokens)),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(held_bytes / _GIB),
    }
    return {lmcache_in_vllm.PACKAGES: str(packages), "PYTHONHASHSEED": "0", **_QUIET, **of_memory}
