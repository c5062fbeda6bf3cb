"""The compiled XXH3-64 is the library's, whatever the size and however the input is cut into
pieces.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvhold.core.layout import Group
from kvhold.kernels import Chunks, gather, plan_blocks, plan_slots, scatter
from kvhold.kernels.plan import Plan
from kvhold.memory.views import per_layer

pytest.importorskip("numba", reason="no numba in this environment")
numba_summed_copy = pytest.importorskip("kvhold.kernels.numba_summed_copy")
numba_copy = numba_summed_copy.numba_copy
sum_ranges = pytest.importorskip("kvhold.kernels.numba_sums").sum_ranges

RANDOM = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


def digest(data: np.ndarray, *, streaming: bool, block: int | None = None) -> int:
    """Of what a gather of one layer of one chunk writes: `data`, a byte a token, from blocks of
    `block` bytes in no order.
    """
    block = block or data.size
    blocks = -(-data.size // block)
    ids = np.random.default_rng(blocks).permutation(blocks)
    pool = np.zeros((blocks, block, 1), np.uint8)
    padded = np.zeros(blocks * block, np.uint8)
    padded[: data.size] = data
    pool[ids] = padded.reshape(blocks, block, 1)
    view = per_layer(
        Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),
        [pool],
        axes="block token dim",
    )
    chunks = Chunks(
        np.zeros(data.size + 64, np.uint8), np.zeros(1, np.int64), np.array([data.size])
    )
    sums = np.zeros((1, 1), np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        if streaming:
            patch.setattr(numba_summed_copy.numba_copy, "STREAM_BYTES", 0)
        gather(plan_blocks(view, ids, chunks), sums=sums, worker="numba")
    np.testing.assert_array_equal(chunks.base[: data.size], data)
    return int(sums[0, 0])


@pytest.mark.parametrize("streaming", [False, True])
def test_every_size_up_to_2000_bytes(streaming: bool) -> None:
    for size in range(1, 2001):
        data = RANDOM[size : 2 * size]
        assert digest(data, streaming=streaming) == xxh3_64_intdigest(data.data), size


@given(
    size=st.integers(1, 200_000),
    at=st.integers(0, 1 << 19),
    block=st.integers(1, 70_000),
    streaming=st.booleans(),
)
@example(size=3 << 16, at=0, block=1024, streaming=True)
@example(size=3 << 16, at=0, block=64, streaming=True)
@example(size=(1 << 16) + 1, at=1, block=64, streaming=False)
@settings(max_examples=100)
def test_larger_sizes_from_blocks_of_any_size(
    size: int, at: int, block: int, streaming: bool
) -> None:
    data = RANDOM[at : at + size]
    assert digest(data, streaming=streaming, block=block) == xxh3_64_intdigest(data.data)


def on_lines(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + nbytes]


@given(
    tokens=st.lists(st.integers(4, 700), min_size=1, max_size=3),
    block=st.sampled_from([1, 7, 16, 64]),
    planes=st.integers(1, 2),
    skipped=st.floats(0, 0.6),
    threads=st.integers(1, 3),
)
@example(tokens=[2], block=1, planes=2, skipped=0.0, threads=1)
@example(tokens=[512, 16, 17], block=16, planes=2, skipped=0.5, threads=2)
@settings(max_examples=60)
def test_what_is_streamed_has_the_library_s_checksums_in_both_directions(
    tokens: list[int], block: int, planes: int, skipped: float, threads: int
) -> None:
    """Rows that a scatter skips are in the checksums, too, and each flipped bit changes one."""
    layers, row = 3, 64
    chance = np.random.default_rng(len(tokens) + sum(tokens) + block)
    slots = chance.permutation(sum(tokens))
    blocks = -(-slots.size // block)
    pools = [
        on_lines(planes * blocks * block * row).reshape(planes, blocks, block, 1, row)
        for _ in range(layers)
    ]
    for pool in pools:
        pool[:] = chance.integers(0, 256, pool.shape, np.uint8)
    view = per_layer(
        Group(layers=layers, planes=planes, heads=1, head_dim=row, dtype="uint8"),
        pools,
        axes="plane block token head dim",
    )
    sizes = np.array(tokens) * planes * layers * row
    starts = np.cumsum(sizes) - sizes
    arena = on_lines(int(sizes.sum()))
    chunks = Chunks(arena, starts, np.array(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_copy, "STREAM_BYTES", 0)
        patch.setattr(numba_copy, "SLICE_BYTES", 4096)
        streams: list[bool] = []
        may_stream = numba_summed_copy._may_stream

        def noting(plan: Plan, to_arena: bool) -> bool:
            streams.append(may_stream(plan, to_arena))
            return streams[-1]

        patch.setattr(numba_summed_copy, "_may_stream", noting)

        sums = np.zeros((len(tokens), layers), np.uint64)
        gather(plan_slots(view, slots, chunks), sums=sums, threads=threads, worker="numba")
        of_arena = [
            [xxh3_64_intdigest(layer.data) for layer in arena[start : start + size].reshape(3, -1)]
            for start, size in zip(starts, sizes, strict=True)
        ]
        np.testing.assert_array_equal(sums, np.array(of_arena, np.uint64))

        some = np.where(chance.random(slots.size) < skipped, -1, slots)
        some[0] = slots[0]
        before = [pool.copy() for pool in pools]
        for pool in pools:
            pool[:] = 0
        whole = sums.copy()
        plan = plan_slots(view, some, chunks)
        scatter(plan, sums=sums, threads=threads, worker="numba")
        moved = np.diff(np.searchsorted(plan.chunk, np.arange(len(tokens) + 1))) > 0
        np.testing.assert_array_equal(sums[moved], whole[moved])
        for pool, was in zip(pools, before, strict=True):
            rows = pool.reshape(planes, -1, row)
            copied = some[some >= 0]
            np.testing.assert_array_equal(rows[:, copied], was.reshape(planes, -1, row)[:, copied])
            assert not rows[:, np.setdiff1d(np.arange(blocks * block), copied)].any()

        at = int(chance.integers(arena.size))
        arena[at] ^= 1 << int(chance.integers(8))
        chunk = int(np.searchsorted(starts, at, "right")) - 1
        layer = (at - int(starts[chunk])) // (int(sizes[chunk]) // layers)
        scatter(plan, sums=sums, threads=threads, worker="numba")
        if moved[chunk]:
            whole[chunk, layer] = sums[chunk, layer] + 1  # any other
            assert sums[chunk, layer] != of_arena[chunk][layer]
            sums[chunk, layer] = whole[chunk, layer]
        np.testing.assert_array_equal(sums[moved], whole[moved])
    assert streams == [True] * 3


def ranges_of(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Addresses and sizes of ranges of RANDOM, end to end, and the library's checksums."""
    nbytes = np.array(sizes, np.int64)
    starts = np.cumsum(nbytes) - nbytes
    expected = [
        xxh3_64_intdigest(RANDOM[start : start + size].data)
        for start, size in zip(starts.tolist(), sizes, strict=True)
    ]
    return starts + RANDOM.ctypes.data, nbytes, expected


@given(st.lists(st.integers(241, 20_000), max_size=50), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_checksums_of_ranges_are_the_library_s(sizes: list[int], threads: int) -> None:
    addresses, nbytes, expected = ranges_of(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvhold.kernels.numba_sums.SLICE_BYTES", 1)
        assert sum_ranges(addresses, nbytes, threads).tolist() == expected


def test_checksums_are_right_though_threads_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that the pool keeps and has no thread for may begin late."""
    addresses, nbytes, expected = ranges_of([60_000] * 16)
    monkeypatch.setattr("kvhold.kernels.numba_sums.SLICE_BYTES", 1)
    monkeypatch.setattr(numba_copy, "_pool", ThreadPoolExecutor(4))
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if threads_left.pop():
            started(thread)
        else:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    threads_left = [False] * 200 + [True]
    for _ in range(50):
        assert sum_ranges(addresses, nbytes, 4).tolist() == expected
