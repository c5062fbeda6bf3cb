"""Store a numpy array in a cache and read it back: the work of an integration, without an engine.

    python examples/raw_cache.py

A prompt's KV is cut into chunks. `reserve` gives memory for missing chunks, `commit` makes them
visible, `lookup` finds and pins them, and `claim` gives a lease to read them.
"""

import numpy as np
import numpy.typing as npt

import kvhold
from kvhold.core.api import Cache
from kvhold.core.holdings import ABSENT, ChunkBytes
from kvhold.core.keys import Prompt

# 4 layers, with keys and values (2 planes) of 2 heads.
GROUP = kvhold.Group(layers=4, planes=2, heads=2, head_dim=64, dtype="float32")
LAYOUT = kvhold.Layout(groups=(GROUP,), tokens_per_chunk=128)


def main() -> None:
    namespace = kvhold.Namespace(model="my-model", layout=LAYOUT)
    tokens = np.random.default_rng(0).integers(0, 32_000, 300, dtype=np.int32)
    prompt = namespace.prompt(tokens)
    # [layers, planes, tokens, heads, head_dim]; an engine computes this
    kv = np.random.default_rng(1).standard_normal((4, 2, 300, 2, 64), dtype=np.float32)

    with kvhold.open_cache(ram_bytes="64MiB") as cache:
        cache.register(namespace)
        print(f"before: {found_tokens(cache, prompt)} of 300 tokens are in the cache")
        print(f"stored: {store(cache, prompt, kv)} chunks")
        print(f"stored again: {store(cache, prompt, kv)} chunks, because none is missing")
        loaded = load(cache, prompt)
        print(f"loaded: {loaded.shape[2]} tokens, the same bytes: {np.array_equal(loaded, kv)}")

        # The first 200 tokens are the same.
        other = namespace.prompt(np.concatenate([tokens[:200], tokens[:100]]))
        print(f"another prompt: {found_tokens(cache, other)} tokens")


def found_tokens(cache: Cache, prompt: Prompt) -> int:
    with cache.lookup(prompt.query()) as hit:
        return hit.num_tokens


def store(cache: Cache, prompt: Prompt, kv: npt.NDArray[np.float32]) -> int:
    """Write missing chunks. Return their number."""
    with cache.reserve(LAYOUT, prompt.chunks()) as reservation:
        places = reservation.chunks()
        for chunk in reservation.granted:
            first = chunk * LAYOUT.tokens_per_chunk
            part = as_array(reservation.buffer, places, chunk)
            part[:] = kv[:, :, first : first + part.shape[2]]
        reservation.commit()  # without it, closing releases the memory
        return len(reservation.granted)


def load(cache: Cache, prompt: Prompt) -> npt.NDArray[np.float32]:
    """[layers, planes, tokens of the hit, heads, head_dim]."""
    parts = [np.empty((4, 2, 0, 2, 64), np.float32)]
    with cache.lookup(prompt.query()) as hit:
        lease = cache.claim(hit.ticket)
        if lease is not None:
            with lease:  # the bytes stay in place in this block
                places = lease.chunks()
                parts += [
                    as_array(lease.buffer, places, chunk).copy()
                    for chunk in np.flatnonzero(places.offsets != ABSENT)
                ]
                lease.verify(LAYOUT)  # raises DamagedChunks
    return np.concatenate(parts, axis=2)


def as_array(
    buffer: npt.NDArray[np.uint8], places: ChunkBytes, chunk: int
) -> npt.NDArray[np.float32]:
    """One chunk: [layers, planes, tokens, heads, head_dim]."""
    num_tokens = int(places.num_tokens[chunk])
    at = int(places.offsets[chunk])
    end = at + LAYOUT.chunk_bytes(0, num_tokens)
    return buffer[at:end].view(np.float32).reshape(4, 2, num_tokens, 2, 64)


if __name__ == "__main__":
    main()
