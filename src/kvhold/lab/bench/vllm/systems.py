"""The engines that are compared, each a real vLLM in a process of its own, all alive at the same
time.

| system | what it is |
|---|---|
| recompute | no connector, no prefix cache: every prompt is computed |
| vllm | no connector, vLLM's own prefix cache in memory that is too small for the working set: what
kvhold's cost is measured against |
| vllm, again | the same once more: how much two processes differ that should not |
| vllm, all in memory | no connector, the prefix cache in memory that holds everything: the limit,
where a hit copies nothing |
| offloading | vLLM's OffloadingConnector, with the host-memory spec of
`benchmarks/vllm_host_offload.py` |
| kvhold | kvhold's connector and a node |
| kvhold, left alone | the same engine, asked to leave the request alone: what a request costs that
is followed, stored and not found |
| kvhold, left alone again | the same once more |
| kvhold, layer by layer | with `layerwise`, which wants no prefix cache; where it is asked for |
| kvhold, unchecked | kvhold with `client.check_memory` off, where it is asked for: what comparing
checksums costs a hit |
| kvhold, beside the passes | as by default, but without a prefix cache, to compare that with |

Offloading and kvhold have the prefix cache too, KV memory as small as "vllm" has, and the same
number of bytes to keep KV in.

Identical vLLM processes differ: what differs without randomised addresses
(`kvhold.lab.bench.engines`) is measured by "vllm, again". What is small is measured within one
engine.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvhold.lab.bench.engines import (
    ROOM_TOKENS,
    System,
    alike,
    kvhold_connector,
    node_pid,
    offloading_connector,
    python_path,
)
from kvhold.lab.engines.engine import Engine, binding, options_for
from kvhold.lab.engines.models import ModelInfo
from kvhold.node import end_node

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
UNCHECKED = "kvhold, unchecked"
SYSTEMS = (
    RECOMPUTE,
    PLAIN,
    AGAIN,
    OFFLOADING,
    KVHOLD,
    LEFT_ALONE,
    LEFT_AGAIN,
    LAYERWISE,
    BESIDE,
    UNCHECKED,
    LIMIT,
)
OUTPUT_TOKENS = 8


@contextmanager
def started(
    model: ModelInfo,
    *,
    num_tokens: int,
    held_tokens: int,
    num_threads: int,
    peer: Path | None,
    layerwise: bool = False,
    unchecked: bool = False,
) -> Iterator[dict[str, System]]:
    """All systems by name, ready; they end with the block. Raises EngineFailed when one does not
    start.

    num_tokens: of the longest prompt; small KV memory holds two of them
    held_tokens: how many tokens' KV the limit's memory and both connectors' memory hold
    num_threads: of each engine
    peer: the file of the host-memory spec; None: vLLM's offloading is left out
    layerwise: also the two that say what it gains
    unchecked: also the one that compares no checksums
    """
    longest = num_tokens + OUTPUT_TOKENS + ROOM_TOKENS
    held_bytes = held_tokens * model.kv_bytes_per_token
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder,
        alike(),
        ExitStack() as stack,
    ):
        socket = Path(folder) / "node.sock"
        given: dict[str, dict[str, Any]] = {
            RECOMPUTE: {"prefix_caching": False},
            PLAIN: {},
            AGAIN: {},
            LIMIT: {"kv_cache_bytes": held_bytes},
            OFFLOADING: {"kv_transfer_config": offloading_connector(peer, held_bytes)}
            if peer is not None
            else {},
            KVHOLD: {"kv_transfer_config": kvhold_connector(socket, held_bytes)},
        }
        if layerwise:
            for name, extra in ((LAYERWISE, {"layerwise": True}), (BESIDE, {})):
                own = kvhold_connector(Path(folder) / f"{len(given)}.sock", held_bytes, **extra)
                given[name] = {"kv_transfer_config": own, "prefix_caching": False}
        if unchecked:
            own = kvhold_connector(
                Path(folder) / "unchecked.sock", held_bytes, client={"check_memory": False}
            )
            given[UNCHECKED] = {"kv_transfer_config": own}
        environment = {OFFLOADING: {"PYTHONPATH": python_path(peer)}} if peer is not None else {}
        for options in given.values():
            node = (
                options.get("kv_transfer_config", {})
                .get("kv_connector_extra_config", {})
                .get("node", {})
            )
            if node:
                stack.callback(end_node, Path(node["socket"]))
        systems = {}
        for name, options in given.items():
            if name != OFFLOADING or peer is not None:
                engine = Engine(
                    options_for(model, max_model_len=longest, **binding(num_threads), **options),
                    environment=environment.get(name),
                )
                stack.enter_context(engine)
                systems[name] = System(
                    engine, (engine.pid, node_pid(socket)) if name == KVHOLD else (engine.pid,)
                )
        of_kvhold = systems[KVHOLD]
        systems |= {
            name: replace(of_kvhold, rules={"store": False, "load": False})
            for name in (LEFT_ALONE, LEFT_AGAIN)
        }
        yield systems
