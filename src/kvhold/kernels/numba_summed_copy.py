"""Copy and checksum together: bytes cross memory once."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvhold.kernels import numba_copy
from kvhold.kernels.numba_compile import compiled
from kvhold.kernels.numba_copy import _fence, _int64s, _memcpy, _on_lines, _stream_line, _take
from kvhold.kernels.numba_xxh3 import (
    SHORT_BYTES,
    START,
    STRIPE_BYTES,
    finish,
    fold,
    fold_and_stream,
)
from kvhold.kernels.plan import Plan

PIECE_BYTES = 32 << 10


def copy(
    plan: Plan, layers: range, to_arena: bool, threads: int, sums: npt.NDArray[np.uint64]
) -> None:
    """sums: [chunks, layers of the view], layers of more than SHORT_BYTES bytes."""
    view, chunks = plan.view, plan.chunk_starts.size
    layer_bytes = plan.chunk_rows * (view.planes * view.row_bytes)
    first_runs = np.searchsorted(plan.chunk, np.arange(chunks + 1)).astype(np.int64)
    moved = first_runs[1:] > first_runs[:-1]
    assert (layer_bytes[moved] > SHORT_BYTES).all()
    tasks = len(layers) * chunks
    slices = max(1, min(plan.nbytes(len(layers)) // numba_copy.SLICE_BYTES, tasks))
    threads = min(threads, slices)
    heads, head_bytes = (
        (1, view.row_bytes) if view.rows_are_whole else (view.heads, view.head_bytes)
    )
    arguments = (
        to_arena,
        plan.nbytes(len(layers)) >= numba_copy.STREAM_BYTES and _may_stream(plan, to_arena),
        view.runs_are_whole,
        np.zeros(1, np.int64),
        tasks if threads == 1 else -(-tasks // slices),
        layers.start,
        layers.stop,
        view.planes,
        view.table.reshape(-1),
        plan.view_offsets,
        plan.chunks.address,
        plan.chunk_starts,
        layer_bytes,
        first_runs,
        plan.first_rows,
        plan.rows,
        view.row_stride,
        heads,
        head_bytes,
        view.head_stride,
        sums,
    )
    numba_copy.on_threads(_copy_tasks, threads, arguments)


def _may_stream(plan: Plan, to_arena: bool) -> bool:
    """Only whole lines; and a gather must have all rows of its chunks."""
    if not plan.view.runs_are_whole or not _on_lines(plan, to_arena):
        return False
    rows = np.bincount(plan.chunk, weights=plan.rows, minlength=plan.chunk_rows.size)
    return not to_arena or bool(((rows == plan.chunk_rows) | (rows == 0)).all())


def _copy_tasks_source(
    to_arena: bool,
    stream: bool,
    runs_are_whole: bool,
    counter: Any,
    batch: int,
    first_layer: int,
    stop_layer: int,
    planes: int,
    table: Any,
    view_offsets: Any,
    base: int,
    chunk_starts: Any,
    layer_bytes: Any,
    first_runs: Any,
    first_rows: Any,
    rows: Any,
    row_stride: int,
    heads: int,
    head_bytes: int,
    head_stride: int,
    sums: Any,
) -> None:
    """Runs must be in the order of the arena."""
    chunks = chunk_starts.size
    tasks = (stop_layer - first_layer) * chunks
    row_bytes = heads * head_bytes
    source_row, target_row = (row_stride, row_bytes) if to_arena else (row_bytes, row_stride)
    source_head, target_head = (head_stride, head_bytes) if to_arena else (head_bytes, head_stride)
    state = np.empty(8, np.uint64)
    at = state.ctypes.data
    while True:
        first = _take(counter.ctypes.data, batch)
        if first >= tasks:
            break
        for task in range(first, min(first + batch, tasks)):
            layer, chunk = first_layer + task // chunks, task % chunks
            if first_runs[chunk] == first_runs[chunk + 1]:
                continue
            nbytes = layer_bytes[chunk]
            start = base + chunk_starts[chunk] + layer * nbytes
            stripes = (nbytes - 1) // STRIPE_BYTES
            folded = 0
            end = start + nbytes
            state[:] = START
            for plane in range(planes):
                for run in range(first_runs[chunk], first_runs[chunk + 1]):
                    offset = plane * (nbytes // planes) + first_rows[run] * row_bytes
                    in_view = table[layer * planes + plane] + view_offsets[run]
                    source, target = (
                        (in_view, start + offset) if to_arena else (start + offset, in_view)
                    )
                    length = rows[run] * row_bytes
                    if stream:
                        number = offset // STRIPE_BYTES
                        fold(at, start + folded * STRIPE_BYTES, folded, number - folded)
                        count = min(length // STRIPE_BYTES, stripes - number)
                        fold_and_stream(at, source, number, count, target)
                        for rest in range(count * STRIPE_BYTES, length, STRIPE_BYTES):
                            _stream_line(target + rest, source + rest)
                        folded = number + count
                        if to_arena:  # streamed bytes are not in the caches
                            end = source + length
                        continue
                    if not runs_are_whole:
                        for row in range(rows[run]):
                            for head in range(heads):
                                _memcpy(
                                    target + row * target_row + head * target_head,
                                    source + row * source_row + head * source_head,
                                    head_bytes,
                                )
                        upto = min((offset + length) // STRIPE_BYTES, stripes)
                        fold(at, start + folded * STRIPE_BYTES, folded, upto - folded)
                        folded = upto
                        continue
                    for piece in range(0, length, PIECE_BYTES):
                        size = min(PIECE_BYTES, length - piece)
                        _memcpy(target + piece, source + piece, size)
                        upto = min((offset + piece + size) // STRIPE_BYTES, stripes)
                        fold(at, start + folded * STRIPE_BYTES, folded, upto - folded)
                        folded = upto
            fold(at, start + folded * STRIPE_BYTES, folded, stripes - folded)
            sums[chunk, layer] = finish(at, end - STRIPE_BYTES, nbytes)
    if stream:
        _fence()


_COPY_TASKS = types.void(
    *(types.boolean,) * 3,
    types.int64[::1],
    *(types.int64,) * 4,
    _int64s,
    _int64s,
    types.int64,
    *(_int64s,) * 5,
    *(types.int64,) * 4,
    types.uint64[:, ::1],
)


_copy_tasks = compiled(_COPY_TASKS)(_copy_tasks_source)
