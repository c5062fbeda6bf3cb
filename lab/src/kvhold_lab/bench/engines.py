"""Measured vLLM engines, each in its own process."""

import ctypes
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.node import NodeClient
from kvhold_lab.engines.engine import Engine

PEER_SPEC = Path(__file__).resolve().parents[4] / "benchmarks" / "vllm_host_offload.py"
ROOM_TOKENS = 128
PATIENT = ClientConfig(connect_timeout_s=60.0, call_timeout_s=60.0)

_MOMENT_S = 0.05
_ADDR_NO_RANDOMIZE = 0x0040000
_ASK_PERSONALITY = 0xFFFFFFFF
# map no single block, return no memory
_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class OutputsDiffer(KVHoldError): ...


@dataclass(frozen=True)
class Served:
    """seconds:       to the first token; of a burst: to the end
    cached_tokens: of the shortest hit
    """

    seconds: float
    cpu_s: float
    token_ids: list[list[int]]
    cached_tokens: int


@dataclass(frozen=True)
class System:
    """checks_memory: `client.check_memory`; None: unchanged"""

    engine: Engine
    pids: tuple[int, ...]
    rules: Mapping[str, Any] = field(default_factory=dict)
    checks_memory: bool | None = None

    def serve(self, prompts: list[list[int]], *, max_tokens: int) -> Served:
        if self.checks_memory is not None:
            assert self.engine.check_memory(self.checks_memory), "the engine has no node"
        before_s = self.cpu_s()
        if len(prompts) == 1:
            one = self.engine.generate(prompts[0], max_tokens=max_tokens, rules=self.rules)
            return Served(
                one.ttft_s, self.cpu_s() - before_s, [one.token_ids], one.num_cached_tokens
            )
        began = time.perf_counter()
        many = self.engine.generate_many(prompts, max_tokens=max_tokens, rules=self.rules)
        seconds = time.perf_counter() - began
        return Served(seconds, self.cpu_s() - before_s, many.token_ids, min(many.num_cached_tokens))

    def cpu_s(self) -> float:
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)


@contextmanager
def alike() -> Iterator[None]:
    """Processes started within have fixed addresses and keep memory."""
    before = {name: os.environ.get(name) for name in _KEEPS_MEMORY}
    libc = ctypes.CDLL(None)
    personality = libc.personality(ctypes.c_ulong(_ASK_PERSONALITY))
    os.environ.update(_KEEPS_MEMORY)
    libc.personality(ctypes.c_ulong(personality | _ADDR_NO_RANDOMIZE))
    try:
        yield
    finally:
        libc.personality(ctypes.c_ulong(personality))
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def offloading_connector(peer: Path, held_bytes: int) -> dict[str, Any]:
    """peer: file of the host-memory spec"""
    extra = {
        "spec_name": "HostMemorySpec",
        "spec_module_path": peer.stem,
        "cpu_bytes_to_use": held_bytes,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def python_path(peer: Path) -> str:
    return os.pathsep.join(filter(None, [str(peer.resolve().parent), os.environ.get("PYTHONPATH")]))


def node_pid(socket: Path) -> int:
    with NodeClient(socket, PATIENT, name="kvhold bench") as client:
        return client.status()["pid"]


def flush_engines(client: NodeClient, *, patience_s: float) -> None:
    """Raises TimeoutError."""
    until = time.monotonic() + patience_s
    before: Mapping[str, Any] | None = None
    while (left_s := until - time.monotonic()) > 0 and client.flush(deadline_s=left_s):
        status = client.status()
        if status["counters"] == before and not any(status["held"].values()):
            return
        before = status["counters"]
        time.sleep(_MOMENT_S)
    raise TimeoutError(f"the node did not write all it held within {patience_s:g} s")
