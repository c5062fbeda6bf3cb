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
from kvhold.kernels import Chunks, gather, plan_blocks
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
