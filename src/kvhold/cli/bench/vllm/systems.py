"""The engines that are compared, each a real vLLM in a process of its own, all alive at the same time.

| system | what it is |
|---|---|
| recompute | no connector, no prefix cache: every prompt is computed |
| vllm | no connector, vLLM's own prefix cache in memory that is too small for the working set: what kvhold's cost is measured against |
| vllm, again | the same once more: how much two processes differ that should not |
| vllm, all in memory | no connector, the prefix cache in memory that holds everything: the limit, where a hit copies nothing |
| offloading | vLLM's OffloadingConnector, with the host-memory spec of `benchmarks/vllm_host_offload.py` |
| kvhold | kvhold's connector and a node |
| kvhold, left alone | the same engine, asked to leave the request alone: what a request costs that is followed, stored and not found |
| kvhold, left alone again | the same once more |
| kvhold, layer by layer | with `layerwise`, which wants no prefix cache; where it is asked for |
| kvhold, beside the passes | as by default, but without a prefix cache, to compare that with |

Offloading and kvhold have the prefix cache too, KV memory as small as "vllm" has, and the same number of bytes to keep KV in.

Identical vLLM processes differ here by up to a third, each steadily in its own way: where memory comes to lie decides how fast the CPU's
kernels are. Engines are therefore started without randomised addresses, and what then still differs is measured by "vllm, again". What is
small is measured within one engine.
"""

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvhold.cli.demo.engine import Engine, options_for
from kvhold.cli.demo.models import ModelInfo
from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient, end_node

RECOMPUTE = "recompute"
PLAIN = "vllm"
AGAIN = "vllm, again"
LIMIT = "vllm, all in memory"
OFFLOADING = "offloading"
KVHOLD = "kvhold"
LEFT_ALONE = "kvhold, left alone"
LEFT_AGAIN = "kvhold, left alone again"
LAYERWISE = "kvhold, layer by layer"
BESIDE = "kvhold, beside the passes"
SYSTEMS = (RECOMPUTE, PLAIN, AGAIN, OFFLOADING, KVHOLD, LEFT_ALONE, LEFT_AGAIN, LAYERWISE, BESIDE, LIMIT)
OUTPUT_TOKENS = 8
PEER_SPEC = Path(__file__).resolve().parents[5] / "benchmarks" / "vllm_host_offload.py"  # there is one in a checkout

_ROOM_TOKENS = 128  # beside a prompt and its output
_NODE_OUTLIVES_ENGINES_S = 600.0
_ADDR_NO_RANDOMIZE = 0x0040000  # of Linux's personality(2)
_ASK_PERSONALITY = 0xFFFFFFFF


@dataclass(frozen=True)
class System:
    """One system under measurement. pids: its processes; rules: what its requests say to kvhold."""

    engine: Engine
    pids: tuple[int, ...]
    rules: Mapping[str, Any] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU time that its processes have used, all threads."""
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)  # Linux's number for another process's CPU clock


@contextmanager
def started(
    model: ModelInfo, *, num_tokens: int, held_tokens: int, num_threads: int, peer: Path | None, layerwise: bool = False
) -> Iterator[dict[str, System]]:
    """All systems by name, ready; they end with the block. Raises EngineFailed when one does not start.

    num_tokens: of the longest prompt; small KV memory holds two of them
    held_tokens: how many tokens' KV the limit's memory and both connectors' memory hold
    num_threads: of each engine
    peer: the file of the host-memory spec; None: vLLM's offloading is left out
    layerwise: also the two that say what it gains
    """
    longest = num_tokens + OUTPUT_TOKENS + _ROOM_TOKENS
    held_bytes = held_tokens * model.kv_bytes_per_token
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder, _fixed_addresses(), ExitStack() as stack:
        socket = Path(folder) / "node.sock"
        given: dict[str, dict[str, Any]] = {
            RECOMPUTE: {"prefix_caching": False},
            PLAIN: {},
            AGAIN: {},
            LIMIT: {"kv_cache_bytes": held_bytes},
            OFFLOADING: {"kv_transfer_config": _offloading(peer, held_bytes)} if peer is not None else {},
            KVHOLD: {"kv_transfer_config": _kvhold(socket, held_bytes)},
        }
        if layerwise:
            for name, extra in ((LAYERWISE, {"layerwise": True}), (BESIDE, {})):
                own = _kvhold(Path(folder) / f"{len(given)}.sock", held_bytes, **extra)
                given[name] = {"kv_transfer_config": own, "prefix_caching": False}
        environment = {OFFLOADING: {"PYTHONPATH": _python_path(peer)}} if peer is not None else {}
        for options in given.values():
            node = options.get("kv_transfer_config", {}).get("kv_connector_extra_config", {}).get("node", {})
            if node:
                stack.callback(end_node, Path(node["socket"]))
        systems = {}
        for name, options in given.items():
            if name != OFFLOADING or peer is not None:
                engine = Engine(
                    options_for(model, max_model_len=longest, num_threads=num_threads, **options), environment=environment.get(name)
                )
                stack.enter_context(engine)
                systems[name] = System(engine, (engine.pid, _node_pid(socket)) if name == KVHOLD else (engine.pid,))
        of_kvhold = systems[KVHOLD]
        systems |= {name: replace(of_kvhold, rules={"store": False, "load": False}) for name in (LEFT_ALONE, LEFT_AGAIN)}
        yield systems


@contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Processes started in the block have the same addresses every time, where the kernel lets us say so."""
    libc = ctypes.CDLL(None)
    before = libc.personality(ctypes.c_ulong(_ASK_PERSONALITY))
    libc.personality(ctypes.c_ulong(before | _ADDR_NO_RANDOMIZE))
    try:
        yield
    finally:
        libc.personality(ctypes.c_ulong(before))


def _kvhold(socket: Path, held_bytes: int, **others: Any) -> dict[str, Any]:
    node = {"socket": str(socket), "idle_exit_s": _NODE_OUTLIVES_ENGINES_S}
    return {
        "kv_connector": "KVHoldConnector",
        "kv_connector_module_path": "kvhold.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram_bytes": held_bytes, "node": node, **others},
    }


def _offloading(peer: Path, held_bytes: int) -> dict[str, Any]:
    extra = {"spec_name": "HostMemorySpec", "spec_module_path": peer.stem, "cpu_bytes_to_use": held_bytes}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _python_path(peer: Path) -> str:
    return os.pathsep.join(filter(None, [str(peer.resolve().parent), os.environ.get("PYTHONPATH")]))


def _node_pid(socket: Path) -> int:
    with NodeClient(socket, ClientConfig(), name="kvhold bench") as client:
        return int(client.status()["pid"])
