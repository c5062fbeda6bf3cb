import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvhold.core.api import Cache
from kvhold.core.holdings import ABSENT, Lease, Reservation
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout

MakeCache = Callable[[], Cache]

FULL = Group(layers=3, planes=2, heads=2, head_dim=64, dtype="bfloat16")
SLIDING = Group(
    layers=2, planes=2, heads=1, head_dim=96, dtype="float16", attention="sliding", window=24
)
_STATE = Group(layers=1, planes=1, heads=1, head_dim=500, dtype="float32", attention="state")

PLAIN = Layout(groups=(FULL,), tokens_per_chunk=16)
HYBRID = Layout(groups=(FULL, SLIDING, _STATE), tokens_per_chunk=16)
LAYOUTS = {
    "full": PLAIN,
    "tails-in-blocks": Layout(groups=(FULL,), tokens_per_chunk=16, tail_tokens=4),
    "no-tails": Layout(groups=(FULL,), tokens_per_chunk=16, tail_tokens=0),
    "one-latent-plane": Layout(
        groups=(Group(layers=5, planes=1, heads=1, head_dim=576, dtype="bfloat16"),),
        tokens_per_chunk=16,
    ),
    "packed-blocks": Layout(
        groups=(
            Group(
                layers=2,
                planes=2,
                heads=1,
                head_dim=64,
                dtype="int8",
                packing="x",
                block_tokens=8,
                block_bytes=1030,
            ),
        ),
        tokens_per_chunk=16,
        tail_tokens=8,
    ),
    "float8-beside-float32": Layout(
        groups=(
            FULL,
            Group(layers=1, planes=2, heads=1, head_dim=7, dtype="float8_e4m3fn"),
            _STATE,
        ),
        tokens_per_chunk=16,
    ),
    "sliding-alone": Layout(groups=(SLIDING,), tokens_per_chunk=16),
    "full-sliding-state": HYBRID,
}

PATIENT_S = 60.0


def demanded_bytes(key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(int.from_bytes(key, "little")).integers(
        0, 256, nbytes, dtype=np.uint8
    )


def a_prompt(namespace: Namespace, num_tokens: int, seed: int = 0) -> Prompt:
    """Random tokens. Prompts of one seed share their beginning."""
    return namespace.prompt(
        np.random.default_rng(seed).integers(0, 50_000, 4096, dtype=np.int32)[:num_tokens]
    )


def fill(reservation: Reservation, layout: Layout, names: ChunkNames, shard: int = 0) -> None:
    for group in range(len(layout.groups)):
        places = reservation.chunks(group)
        for chunk in map(int, np.flatnonzero(places.offsets != ABSENT)):
            key = make_key(
                names.namespace,
                names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES],
                group,
                shard,
            )
            nbytes = layout.chunk_bytes(group, int(places.num_tokens[chunk]))
            at = int(places.offsets[chunk])
            reservation.buffer[at : at + nbytes] = demanded_bytes(key, nbytes)


def store(
    cache: Cache,
    prompt: Prompt,
    shard: int = 0,
    *,
    first: int = 0,
    tail: bool = True,
    groups: npt.ArrayLike | None = None,
) -> list[int]:
    layout, names = prompt.namespace.layout, prompt.chunks(first, tail=tail)
    with cache.reserve(layout, names, shard, groups=groups) as reservation:
        fill(reservation, layout, names, shard)
        reservation.commit()
        return reservation.granted


def check(lease: Lease, prompt: Prompt, num_tokens: int, shard: int = 0) -> None:
    """Assert that the lease has exactly what each group needs, with the right bytes."""
    layout, size = prompt.namespace.layout, prompt.namespace.layout.tokens_per_chunk
    lengths = [size] * (num_tokens // size) + ([num_tokens % size] if num_tokens % size else [])
    assert lease.num_tokens.tolist() == lengths[lease.first_chunk :]
    for number, geometry in enumerate(layout.groups):
        offsets = lease.chunks(number).offsets
        assert len(offsets) == len(lengths) - lease.first_chunk
        for at, chunk in enumerate(range(lease.first_chunk, len(lengths))):
            last = chunk == len(lengths) - 1
            in_window = chunk * size + lengths[chunk] > num_tokens - geometry.window
            needed = {"full": True, "sliding": in_window, "state": last}[geometry.attention]
            assert (offsets[at] != ABSENT) == needed, f"chunk {chunk} of group {number}"
            if needed:
                whole = lengths[chunk] == size
                chain_hash = prompt.hash_at(chunk) if whole else _tail_hash(prompt, lengths[chunk])
                nbytes = layout.chunk_bytes(number, lengths[chunk])
                key = make_key(prompt.namespace.digest, chain_hash, number, shard)
                found = lease.buffer[int(offsets[at]) : int(offsets[at]) + nbytes]
                assert np.array_equal(found, demanded_bytes(key, nbytes)), (
                    f"bytes of chunk {chunk} of group {number}"
                )
    lease.verify(layout)


def read(cache: Cache, prompt: Prompt, shard: int = 0) -> int:
    """Check every byte of the hit. Returns its tokens."""
    with cache.lookup(prompt.query()) as hit:
        if hit.num_tokens:
            lease = cache.claim(hit.ticket, shard)
            assert lease is not None, "the ticket of an open hit is valid"
            with lease:
                check(lease, prompt, hit.num_tokens, shard)
        return hit.num_tokens


def flood(cache: Cache, namespace: Namespace, seed: int = 1_000_000) -> None:
    layout = namespace.layout
    a_chunk = sum(
        layout.chunk_bytes(group, layout.tokens_per_chunk) for group in range(len(layout.groups))
    )
    for i in range(2 * cache.status()["arena_bytes"] // (8 * a_chunk)):
        store(cache, a_prompt(namespace, 8 * layout.tokens_per_chunk, seed + i))


class CacheFixtures:
    lower_tiers = False
    """Whether evicted chunks come back from a lower tier. They stay in memory until written."""

    def settle(self, cache: Cache) -> None:
        until = time.monotonic() + PATIENT_S
        while self.lower_tiers and (
            (status := cache.status())["arriving_chunks"] or status["write_behind"]["chunks"]
        ):
            assert time.monotonic() < until, (
                f"chunks are still arriving or being written after {PATIENT_S:g} s"
            )
            time.sleep(0.002)

    @pytest.fixture
    def cache(self, make_cache: MakeCache) -> Iterator[Cache]:
        cache = make_cache()
        cache.clear()
        assert cache.status()["used_bytes"] == 0
        yield cache
        self.settle(cache)
        status = cache.status()
        assert status["held"] == {"tickets": 0, "leases": 0, "reservations": 0}
        assert status["pinned_chunks"] == 0
        cache.clear()
        assert cache.status()["used_bytes"] == 0
        assert cache.status()["chunks"] == 0

    @pytest.fixture
    def space(self, cache: Cache) -> Namespace:
        return registered(cache, Namespace(model="model", layout=PLAIN))

    @pytest.fixture
    def hybrid(self, cache: Cache) -> Namespace:
        return registered(cache, Namespace(model="model", layout=HYBRID))


def registered(cache: Cache, space: Namespace) -> Namespace:
    cache.register(space)
    return space


def _tail_hash(prompt: Prompt, num_tokens: int) -> bytes:
    at = prompt.tail_lengths.index(num_tokens)
    return prompt.tails[at * HASH_BYTES : (at + 1) * HASH_BYTES]
