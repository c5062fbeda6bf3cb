"""Memory over a disk tier with a codec: the disk's content, and the hit after a restart.

    python examples/tiers_and_codecs.py
    python examples/tiers_and_codecs.py raw lossless int8 cachegen

For each codec, one cache stores a prompt's KV. A second cache with empty memory and the same disk
loads it. The program prints the sizes and the largest error.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvhold
from kvhold.codecs import make_codec
from kvhold.core.api import Cache
from kvhold.core.keys import Prompt

GROUP = kvhold.Group(layers=4, planes=2, heads=4, head_dim=64, dtype="float32")
LAYOUT = kvhold.Layout(groups=(GROUP,), tokens_per_chunk=128)
NUM_CHUNKS = 4
SHAPE = (4, 2, 128, 4, 64)  # of a chunk: layers, planes, tokens, heads, head_dim


def main() -> None:
    # without a budget, lossless replaces a lossy codec
    namespace = kvhold.Namespace(model="my-model", layout=LAYOUT).allowing_loss(max_error=1)
    prompt = namespace.prompt(np.arange(128 * NUM_CHUNKS))
    kv = np.random.default_rng(0).standard_normal((NUM_CHUNKS, *SHAPE), dtype=np.float32)

    for name in sys.argv[1:] or ["raw", "lossless", "int8"]:
        codec = make_codec(name)  # on a new machine, this compiles for up to half a minute
        with tempfile.TemporaryDirectory() as folder:
            settings = {"ram_bytes": "64MiB", "tiers": [disk(folder, name)]}
            with kvhold.open_cache(**settings) as cache:
                cache.register(namespace)
                store(cache, prompt, kv)
                cache.flush()
            stored_bytes = sum(
                file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()
            )
            with kvhold.open_cache(**settings) as cache:
                cache.register(namespace)
                found, sources = load(cache, prompt)
        worst = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, kv, strict=True))
        print(
            f"{name}: {len(found)} chunks from {sources}, {stored_bytes / kv.nbytes:.0%} of "
            f"{kv.nbytes} bytes on disk; largest error {worst:.4f} of at most "
            f"{codec.error_bound:.4f}"
        )


def disk(folder: str, codec: str) -> str:
    return f"disk://{folder}/kv?max_bytes=1GiB&codec={codec}"


def store(cache: Cache, prompt: Prompt, kv: npt.NDArray[np.float32]) -> None:
    with cache.reserve(LAYOUT, prompt.chunks()) as reservation:
        for chunk in reservation.granted:
            at = int(reservation.chunks().offsets[chunk])
            part = reservation.buffer[at : at + LAYOUT.whole_bytes]
            part[:] = kv[chunk].reshape(-1).view(np.uint8)
        reservation.commit()


def load(cache: Cache, prompt: Prompt) -> tuple[list[npt.NDArray[np.float32]], dict[str, int]]:
    """Return the chunks of the hit, and the tokens from each tier."""
    with cache.lookup(prompt.query(), wait_s=60) as hit:  # for the disk
        lease = cache.claim(hit.ticket)
        if lease is None:
            return [], {}
        with lease:
            found = [
                lease.buffer[at : at + LAYOUT.whole_bytes].view(np.float32).reshape(SHAPE).copy()
                for at in lease.chunks().offsets
            ]
            lease.verify(LAYOUT)
        return found, hit.sources


if __name__ == "__main__":
    main()
