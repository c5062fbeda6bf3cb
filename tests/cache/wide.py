"""Prompts of normal numbers in a layout that every codec accepts, and what caches give back of
them.
"""

from typing import Any

import numpy as np

from kvhold.cache import LocalCache
from kvhold.codecs import read_header
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.testing.values import as_float64, from_float64
from tests.cache.below import PATIENT_S, cache_over
from tests.tiers.memory import Place

WIDE = Layout(
    groups=(Group(layers=2, planes=2, heads=2, head_dim=64, dtype="bfloat16"),), tokens_per_chunk=64
)
WIDE_SPACE = Namespace("wide", WIDE)
LOSSY_SPACE = WIDE_SPACE.allowing_loss(max_error=1)


def values_of(prompt: Prompt, chunk: int) -> bytes:
    """One chunk of WIDE, of normal numbers."""
    rng = np.random.default_rng([chunk, int.from_bytes(prompt.hash_at(chunk), "little")])
    return from_float64(rng.standard_normal(WIDE.chunk_bytes(0, 64) // 2), "bfloat16")


def store_values(
    cache: LocalCache, prompt: Prompt, store_options: StoreOptions = DEFAULT_OPTIONS
) -> None:
    names = prompt.chunks()
    with cache.reserve(WIDE, names, store_options=store_options) as reservation:
        places = reservation.chunks(0)
        for chunk in range(len(names)):
            at = int(places.offsets[chunk])
            plain = values_of(prompt, chunk)
            reservation.buffer[at : at + len(plain)] = np.frombuffer(plain, np.uint8)
        reservation.commit()


def worst_error(cache: LocalCache, prompt: Prompt) -> float:
    """Of what a whole hit brings: the largest |decoded - original| over the largest |original|, of
    any layer.
    """
    errors = []
    with cache.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
        assert hit.num_tokens == len(prompt.chunks()) * 64, hit.reason
        lease = cache.claim(hit.ticket)
        assert lease is not None
        with lease:
            for chunk, at in enumerate(lease.chunks(0).offsets):
                before = as_float64(values_of(prompt, chunk), "bfloat16").reshape(2, -1)
                after = as_float64(
                    bytes(lease.buffer[at : at + WIDE.chunk_bytes(0, 64)]), "bfloat16"
                ).reshape(2, -1)
                errors.append(
                    (np.abs(after - before).max(axis=1) / np.abs(before).max(axis=1)).max()
                )
    return float(max(errors))


def codecs_of(place: Place) -> set[str]:
    return {read_header(value).codec for value in place.values.values()}


def wide_cache(*tiers: str, **settings: Any) -> LocalCache:
    cache = cache_over(*tiers, **settings)
    for space in (WIDE_SPACE, LOSSY_SPACE):
        cache.register(space)
    return cache
