"""A prompt's lookup through a node: hashing, one round trip, finding and pinning its chunks, and letting them go.

The limit is what no lookup through a process can avoid, measured in turn with it: hashing the same tokens chunk by chunk with the same
hash and nothing around it, and one empty round trip to the same node (`Ping`).
"""

import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from kvhold.cli.bench.rows import Row
from kvhold.core.config import load_config
from kvhold.core.keys import HASH_BYTES, Namespace
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient, connect

LENGTHS = (32_000, 128_000)
ROUNDS = 25
# One small head: what is measured is names, not bytes. 256 tokens a chunk, as by default.
LAYOUT = Layout(groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),), tokens_per_chunk=256)


def rows() -> list[Row]:
    """Measure, on a node started for it. Every chunk of the prompts is there."""
    namespace = Namespace(model="bench", layout=LAYOUT)
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        config = load_config({"ram_bytes": "64MiB", "node": {"socket": str(Path(folder) / "node.sock")}}, environ={})
        with connect(config, name="kvhold bench") as client:
            client.register(namespace)
            measured = [_row(client, namespace, num_tokens) for num_tokens in LENGTHS]
            client.stop_node()
    return measured


def _row(client: NodeClient, namespace: Namespace, num_tokens: int) -> Row:
    tokens = np.random.default_rng(num_tokens).integers(0, 128_000, num_tokens, dtype=np.int32)
    with client.reserve(LAYOUT, namespace.prompt(tokens).chunks()) as room:
        room.commit()
    taken, unavoidable = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        hit = client.lookup(namespace.prompt(tokens).query())
        taken.append(time.perf_counter() - began)
        assert hit.num_tokens == num_tokens
        hit.close()
        began = time.perf_counter()
        client.ping()
        _hash_alone(tokens)
        unavoidable.append(time.perf_counter() - began)
    value, limit = median(taken) * 1e3, median(unavoidable) * 1e3
    return Row(f"lookup {num_tokens:,} tokens through the node", value, "ms", limit, limit / value)


def _hash_alone(tokens: npt.NDArray[np.int32]) -> None:
    raw, step, parent = memoryview(tokens.tobytes()), 4 * LAYOUT.tokens_per_chunk, bytes(HASH_BYTES)
    for start in range(0, len(raw), step):
        state = blake2b(parent, digest_size=HASH_BYTES)
        state.update(raw[start : start + step])
        parent = state.digest()
