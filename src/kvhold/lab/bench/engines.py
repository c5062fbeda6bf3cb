"""Real vLLM engines under measurement, each in a process of its own: started alike, given prompts,
and what a connector's settings are.

    with alike(), Engine(options_for(model, kv_transfer_config=kvhold_connector(socket,
        ram_bytes=...), ...)) as engine: served = System(engine, (engine.pid,
        node_pid(socket))).serve([prompt])

Identical vLLM processes differ on a CPU by up to a third, each steadily in its own way. The C
library's allocator gives what a large batch needs back to the kernel after each pass, or keeps it,
as it has come to: where it does not keep it a pass begins with tens of thousands of page faults.
And where memory comes to lie decides how fast the kernels are. Engines are therefore told to keep
what they have allocated, and started without randomised addresses.
"""

import ctypes
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold.core.config import ClientConfig
from kvhold.lab.engines.engine import Engine
from kvhold.node import NodeClient

PEER_SPEC = (
    Path(__file__).resolve().parents[4] / "benchmarks" / "vllm_host_offload.py"
)  # there is one in a checkout
ROOM_TOKENS = 128  # beside a prompt and its output
PATIENT = ClientConfig(
    connect_timeout_s=60.0, call_timeout_s=60.0
)  # no measurement is lost because a node was asked in a busy moment

_NODE_OUTLIVES_ENGINES_S = 600.0
_MOMENT_S = 0.05  # between the end of a pass and its first call for memory far less goes by
_ADDR_NO_RANDOMIZE = 0x0040000  # of Linux's personality(2)
_ASK_PERSONALITY = 0xFFFFFFFF
_KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}  # glibc's: no block is mapped by itself, none goes back


@dataclass(frozen=True)
class Served:
    """What became of a prompt, or of a burst of them.

    seconds: to the first token; of a burst: until all is done and the engine has settled
    cpu_s: of the whole request or burst, in all processes of the system
    cached_tokens: not computed, of the shortest hit
    """

    seconds: float
    cpu_s: float
    token_ids: list[list[int]]
    cached_tokens: int


@dataclass(frozen=True)
class System:
    """One system under measurement. pids: its processes; rules: what its requests say to kvhold."""

    engine: Engine
    pids: tuple[int, ...]
    rules: Mapping[str, Any] = field(default_factory=dict)

    def serve(self, prompts: list[list[int]], *, max_tokens: int) -> Served:
        """One prompt by itself, or several handed over together. Raises EngineFailed."""
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
        """CPU time that its processes have used, all threads."""
        return sum(
            time.clock_gettime(~pid << 3 | 2) for pid in self.pids
        )  # Linux's number for another process's CPU clock


@contextmanager
def alike() -> Iterator[None]:
    """Processes started in the block keep what they allocate, and have the same addresses every
    time, where the kernel lets us say so.
    """
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


def kvhold_connector(socket: Path, ram_bytes: int, **others: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for kvhold with a node of its own there. others: more of its
    settings.
    """
    node = {"socket": str(socket), "idle_exit_s": _NODE_OUTLIVES_ENGINES_S}
    return {
        "kv_connector": "KVHoldConnector",
        "kv_connector_module_path": "kvhold.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram_bytes": ram_bytes, "node": node, **others},
    }


def offloading_connector(peer: Path, held_bytes: int) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for its own offloading. peer: the file of the host-memory spec,
    whose folder is on `python_path`.
    """
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
    """PYTHONPATH of an engine that is to find the host-memory spec."""
    return os.pathsep.join(filter(None, [str(peer.resolve().parent), os.environ.get("PYTHONPATH")]))


def node_pid(socket: Path) -> int:
    """Of the node there."""
    with NodeClient(socket, PATIENT, name="kvhold bench") as client:
        return int(client.status()["pid"])


def flush_engines(client: NodeClient, *, patience_s: float) -> None:
    """Until all is stored and written that the engines of a node, which are idle, have computed.

    What an engine's last pass completed it copies beside whatever comes next, and says to nobody
    when it has: so the node is asked until nothing changes there. Raises TimeoutError.
    """
    until = time.monotonic() + patience_s
    before: Mapping[str, Any] | None = None
    while (left_s := until - time.monotonic()) > 0 and client.flush(deadline_s=left_s):
        status = client.status()
        if status["counters"] == before and not any(status["held"].values()):
            return
        before = status["counters"]
        time.sleep(_MOMENT_S)  # engines tell nobody
    raise TimeoutError(f"the node did not write all it held within {patience_s:g} s")
