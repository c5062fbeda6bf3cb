"""`store` and `load`: whole prompts as numpy arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvhold
from kvhold import Group, Layout, LocalCache, Namespace
from kvhold.core.errors import LayoutError

FULL = Group(layers=3, planes=2, heads=2, head_dim=8, dtype="float32")
LATENT = Group(layers=2, planes=1, heads=1, head_dim=16, dtype="bfloat16")
SPACE = Namespace("model", Layout(groups=(FULL, LATENT), tokens_per_chunk=16))
TOKENS = np.arange(1, 91, dtype=np.int32)


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with kvhold.open_cache(ram_bytes="4MiB") as cache:
        yield cache


def kv_of(num_tokens: int, seed: int = 1) -> list[npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((3, 2, num_tokens, 2, 8), np.float32),
        rng.integers(0, 1 << 16, (2, 1, num_tokens, 1, 16), np.uint16),
    ]


def same(one: list[npt.NDArray[Any]], other: list[npt.NDArray[Any]], num_tokens: int) -> bool:
    return all(np.array_equal(a, b[:, :, :num_tokens]) for a, b in zip(one, other, strict=True))


def test_what_was_stored_is_loaded_bit_by_bit(cache: LocalCache) -> None:
    prompt, kv = SPACE.prompt(TOKENS), kv_of(90)
    assert cache.load(prompt).num_tokens == 0
    assert cache.store(prompt, kv) == 90
    assert cache.store(prompt, kv) == 0, "it is there"
    found = cache.load(prompt)
    assert found.num_tokens == 90
    assert same(found.kv, kv, 90)


def test_a_longer_prompt_finds_the_common_prefix_and_stores_the_rest(cache: LocalCache) -> None:
    kv = kv_of(90)
    cache.store(SPACE.prompt(TOKENS[:64]), [group[:, :, :64] for group in kv])
    found = cache.load(SPACE.prompt(TOKENS))
    assert found.num_tokens == 64
    assert same(found.kv, kv, 64)
    assert cache.store(SPACE.prompt(TOKENS), kv) == 26
    assert same(cache.load(SPACE.prompt(TOKENS)).kv, kv, 90)


def test_another_text_finds_nothing(cache: LocalCache) -> None:
    cache.store(SPACE.prompt(TOKENS), kv_of(90))
    found = cache.load(SPACE.prompt(TOKENS + 1))
    assert (found.num_tokens, [group.shape[2] for group in found.kv]) == (0, [0, 0])


def test_more_than_memory_holds_is_stored_from_the_beginning(cache: LocalCache) -> None:
    tokens = np.arange(20_000, dtype=np.int32)
    kv = kv_of(20_000)
    stored = cache.store(SPACE.prompt(tokens), kv)
    assert 0 < stored < 20_000
    found = cache.load(SPACE.prompt(tokens))
    assert found.num_tokens == stored
    assert same(found.kv, kv, stored)


def test_a_damaged_chunk_is_not_loaded(cache: LocalCache) -> None:
    prompt, kv = SPACE.prompt(TOKENS), kv_of(90)
    cache.store(prompt, kv)
    with cache.lookup(prompt.query()) as hit:
        lease = cache.claim(hit.ticket)
        assert lease is not None
        with lease:
            at = int(lease.chunks(0).offsets[2])
    cache._arena.buffer[at] ^= 1
    found = cache.load(prompt)
    assert found.num_tokens == 32
    assert same(found.kv, kv, 32)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (kv_of(90)[0], r"kv is ndarray; it must be a list of 2, one for each group"),
        (kv_of(90)[:1], r"kv is 1 arrays; it must be a list of 2"),
        (
            kv_of(89),
            r"kv\[0\] is float32 \(3, 2, 89, 2, 8\); it must be float32 .*\(3, 2, 90, 2, 8\)",
        ),
        ([kv_of(90)[0], kv_of(90)[1].astype(np.int16)], r"kv\[1\] is int16 .* must be uint16"),
    ],
    ids=["one array", "too few", "another length", "another type"],
)
def test_arrays_that_do_not_fit_are_refused_and_nothing_is_stored(
    cache: LocalCache, kv: Any, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        cache.store(SPACE.prompt(TOKENS), kv)
    assert cache.status()["chunks"] == 0


def test_what_has_no_whole_arrays_is_refused(cache: LocalCache) -> None:
    sliding = Group(4, 2, 2, 8, "float32", attention="sliding", window=32)
    packed = Group(2, 2, 1, 64, "int8", packing="x", block_tokens=16, block_bytes=1030)
    for layout, shards, message in (
        (Layout((sliding,), 16), 1, "only a part of a group with sliding attention"),
        (Layout((packed,), 16, 16), 1, "an engine's opaque packing, 'x'"),
        (Layout((FULL,), 16), 2, "a namespace of 2 shards"),
    ):
        space = Namespace("model", layout, shards=shards)
        with pytest.raises(LayoutError, match=message):
            cache.load(space.prompt(TOKENS))
