"""The compared systems: each a real vLLM in its own process, all alive together.

"vllm" has a prefix cache too small for the working set and is the baseline; "vllm, again" shows the
noise. In "vllm, all in memory", the limit, a hit copies nothing. "kvhold, left alone" has store and
load off, "kvhold, beside the passes" has no prefix cache, as `layerwise`, and "kvhold, unchecked"
has `client.check_memory` off. Small effects are measured within one engine, because processes
differ.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvhold.node import end_node
from kvhold_lab.bench.engines import (
    ROOM_TOKENS,
    System,
    alike,
    kvhold_connector,
    node_pid,
    offloading_connector,
    python_path,
)
from kvhold_lab.engines.engine import Engine, binding, options_for
from kvhold_lab.engines.models import ModelInfo

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
    """Start all systems; they end with the block. Raises EngineFailed.

    num_tokens: of the longest prompt; small KV memory holds two
    held_tokens: KV that the limit and the connectors hold
    peer: the host-memory spec; None: no offloading
    layerwise: also start LAYERWISE and BESIDE
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
