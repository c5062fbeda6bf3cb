"""The measured kvhold: a node and its client."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvhold.core.api import leases_as_they_arrive
from kvhold.core.config import load_config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.memory.copy import gather_blocks, scatter_blocks, warm_up
from kvhold.memory.views import per_layer
from kvhold.node import connect

if TYPE_CHECKING:
    from kvhold_lab.bench.compare_engines.child import ChildOptions, Layers

_PATIENCE_S = 60.0
_IDLE_EXIT_S = 20.0
_COPY_THREADS = 2
_SPARE_BYTES = 8 << 20
_FILLER_TOKEN = 1 << 30


def start(options: "ChildOptions", layers: "Layers") -> "KVHold":
    return KVHold(options, layers)


class KVHold:
    def __init__(self, options: "ChildOptions", layers: "Layers") -> None:
        folder = Path(options.folder)
        group = Group(
            layers=options.layers,
            planes=2,
            heads=options.heads,
            head_dim=options.head_dim,
            dtype="bfloat16",
        )
        direct = "never" if options.mode == "node, page cache" else "auto"
        tiers = {
            "ram": [],
            "disk": [f"disk://{folder}/kv?max_bytes=64GiB&direct={direct}"],
            "redis": [f"redis://127.0.0.1:{options.redis_port}/0"],
        }[options.tier]
        ram_bytes = int(1.2 * options.prompt_bytes) + _SPARE_BYTES if tiers else options.cache_bytes
        config = load_config(
            {
                "ram_bytes": ram_bytes,
                "tiers": tiers,
                "write_behind_bytes": options.cache_bytes,
                "node": {"socket": str(folder / "node.sock"), "idle_exit_s": _IDLE_EXIT_S},
                "client": dict.fromkeys(
                    ("connect_timeout_s", "call_timeout_s", "arrival_timeout_s"), _PATIENCE_S
                ),
            },
            environ={},
        )
        self.layers = layers
        self._options = options
        self._layout = Layout(groups=(group,), tokens_per_chunk=options.tokens_per_chunk)
        self._namespace = Namespace(model="bench", layout=self._layout)
        self._view = per_layer(group, layers, axes="plane block token head dim")
        self._threads = min(_COPY_THREADS, int(os.environ.get("OMP_NUM_THREADS", _COPY_THREADS)))
        self._client = connect(config, name="kvhold bench")
        self._client.register(self._namespace)
        arena_bytes = self._client.status()["arena_bytes"]
        self._fillers = math.ceil(arena_bytes / options.prompt_bytes)
        self._mark = 0
        warm_up()

    def expect(self, num_tokens: int) -> None:
        """The node's marks tell when a store is written."""

    def store(self, tokens: list[int], block_ids: list[int]) -> None:
        prompt = self._namespace.prompt(tokens)
        with self._client.reserve(self._layout, prompt.chunks()) as reservation:
            gather_blocks(
                self._view,
                np.array(block_ids),
                reservation.buffer,
                reservation.chunks(),
                threads=self._threads,
            )
            self._mark = reservation.commit()

    def settle(self) -> None:
        if self._options.tier != "ram" and not self._client.flush(
            self._mark, deadline_s=_PATIENCE_S
        ):
            raise KVHoldError(
                f"not written to the {self._options.tier} tier within {_PATIENCE_S:g} s"
            )

    def lookup(self, tokens: list[int]) -> tuple[int, Callable[[], None]]:
        hit = self._client.lookup(self._namespace.prompt(tokens).query(), wait_s=_PATIENCE_S)
        return hit.num_tokens, hit.close

    def retrieve(self, tokens: list[int], block_ids: list[int]) -> int:
        """Raises KVHoldError: a lower tier's chunk was still in memory."""
        size, ids = self._layout.tokens_per_chunk, np.array(block_ids)
        blocks = size * len(ids) // len(tokens)
        with self._client.lookup(self._namespace.prompt(tokens).query(), wait_s=0) as hit:
            for lease in leases_as_they_arrive(
                self._client, hit, size, until_s=time.monotonic() + _PATIENCE_S
            ):
                into = ids[lease.first_chunk * blocks :][: len(lease.num_tokens) * blocks]
                scatter_blocks(
                    self._view, into, lease.buffer, lease.chunks(), threads=self._threads
                )
            if self._options.tier != "ram" and "ram" in hit.sources:
                raise KVHoldError(f"{hit.sources['ram']} tokens were still in memory")
            return hit.num_tokens

    def forget(self) -> None:
        """Above a lower tier: fill memory with other prompts."""
        if self._options.tier == "ram":
            self._client.clear()
            return
        for number in range(self._fillers):
            prompt = self._namespace.prompt(
                np.full(self._options.num_tokens, _FILLER_TOKEN + number, np.int32)
            )
            with self._client.reserve(self._layout, prompt.chunks()) as reservation:
                self._mark = reservation.commit()
            self.settle()

    def pids(self) -> list[int]:
        return [self._client.status()["pid"]]

    def close(self) -> None:
        self._client.stop_node()
        self._client.close()
