"""The copy on a GPU: one launch for all runs, layers and planes, straight between the engine's blocks and the arena.

The kernel is given addresses, not tensors: the arena may be host memory that is pinned and mapped for the device (the bytes then cross the
bus once, in the order in which they are copied), or a staging tensor on it. Words are the widest, up to 8 bytes, that every address, stride
and size is a multiple of; what is left of a tile beyond its run is masked. Work is put on the device's current stream, and nothing here
waits for it: an event the caller records after the call marks the end of the copy.

With TRITON_INTERPRET=1 when this module is imported, the same kernel runs on host memory, slowly, for tests.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvhold.kernels.plan import Plan
from kvhold.kernels.view import Int64s

TILE_BYTES = 8 << 10  # one program's share


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    """Move the plan's rows of `layers`, to the arena or from it. Arguments were checked by the door; the arena is addressable."""
    view = plan.view
    if view.device == "cpu" and not INTERPRETED:
        raise ValueError("the triton worker copies host memory only under TRITON_INTERPRET=1")
    word_bytes = _word_bytes(plan)
    tables, num_tiles = _on_device(plan, word_bytes)
    heads, head_bytes = (1, view.row_bytes) if view.rows_are_whole else (view.heads, view.head_bytes)
    first, stop = layers.start * view.planes, layers.stop * view.planes
    with nullcontext() if view.device == "cpu" else torch.cuda.device(view.device):
        _copy_tiles[(num_tiles, stop - first)](
            tables,
            plan.num_runs,
            num_tiles,
            first,
            view.row_stride,
            view.head_stride,
            to_arena=to_arena,
            runs_are_whole=view.runs_are_whole,
            row_words=heads * head_bytes // word_bytes,
            head_words=head_bytes // word_bytes,
            word_bytes=word_bytes,
            tile_words=TILE_BYTES // word_bytes,
        )


def _word_bytes(plan: Plan) -> int:
    """The widest word, up to 8 bytes, that every address, stride and size of the plan is a multiple of."""
    view = plan.view
    piece = view.row_bytes if view.rows_are_whole else view.head_bytes
    bits = piece | view.block_stride | view.row_stride | view.head_stride | 8
    for values in (view.table, _arena(plan) + plan.chunk_starts[plan.chunk]):
        bits |= int(np.bitwise_or.reduce(values, axis=None))
    return bits & -bits


def _arena(plan: Plan) -> int:
    address = plan.chunks.address_seen_from(plan.view.device)
    assert address is not None, "the door lets nothing through that the device cannot address"
    return address


def _on_device(plan: Plan, word_bytes: int) -> tuple[Any, int]:
    """One int64 tensor that holds every table, and the number of tiles. Uploaded once for each plan and stream.

    Tables, end to end: of each run its arena address, plane stride, view offset and words; of each tile its run and its first word in it;
    of each layer and plane its address.
    """
    view = plan.view
    on_host = view.device == "cpu"
    key = ("triton", None if on_host else torch.cuda.current_stream(view.device))
    if key not in plan.memo:
        words = plan.rows * view.row_bytes // word_bytes
        tiles = -(-words // (TILE_BYTES // word_bytes))
        run = np.repeat(np.arange(plan.num_runs), tiles)
        within = np.arange(run.size) - (np.cumsum(tiles) - tiles)[run]
        parts: list[Int64s] = [plan.chunk_offsets + _arena(plan), plan.plane_strides, plan.view_offsets, words]
        parts += [run, within * (TILE_BYTES // word_bytes), view.table.reshape(-1)]
        tables = torch.from_numpy(np.concatenate(parts))
        # From pinned memory, so that the upload does not wait for the stream's earlier work.
        plan.memo[key] = (tables if on_host else tables.pin_memory().to(view.device, non_blocking=True)), run.size
    tables, num_tiles = plan.memo[key]
    return tables, num_tiles


@triton.jit
def _copy_tiles(  # type: ignore[no-untyped-def]  # Triton reads annotations itself and knows few
    tables,
    num_runs,
    num_tiles,
    first_plane,
    row_stride,
    head_stride,
    to_arena: tl.constexpr,
    runs_are_whole: tl.constexpr,
    row_words: tl.constexpr,
    head_words: tl.constexpr,
    word_bytes: tl.constexpr,
    tile_words: tl.constexpr,
):
    """Grid [tiles, layers * planes]; one program copies the same tile of one plane. 64-bit arithmetic throughout."""
    tile = tl.program_id(0).to(tl.int64)
    plane = first_plane + tl.program_id(1).to(tl.int64)
    of_tiles = tables + 4 * num_runs
    run = tl.load(of_tiles + tile)
    start = tl.load(of_tiles + num_tiles + tile)
    in_arena = tl.load(tables + run) + plane * tl.load(tables + num_runs + run) + start * word_bytes
    in_view = tl.load(of_tiles + 2 * num_tiles + plane) + tl.load(tables + 2 * num_runs + run)
    words = tl.load(tables + 3 * num_runs + run)

    if word_bytes == 8:
        word = tl.pointer_type(tl.int64)
    elif word_bytes == 4:
        word = tl.pointer_type(tl.int32)
    elif word_bytes == 2:
        word = tl.pointer_type(tl.int16)
    else:
        word = tl.pointer_type(tl.int8)

    nth = tl.arange(0, tile_words)
    within = start + nth
    mask = within < words
    arena_words = in_arena.to(word) + nth
    if runs_are_whole:
        view_words = (in_view + start * word_bytes).to(word) + nth
    else:
        row = within // row_words
        head = within % row_words // head_words
        view_words = (in_view + row * row_stride + head * head_stride).to(word) + within % head_words
    if to_arena:
        tl.store(arena_words, tl.load(view_words, mask=mask), mask=mask)
    else:
        tl.store(view_words, tl.load(arena_words, mask=mask), mask=mask)


INTERPRETED = not isinstance(_copy_tiles, triton.runtime.JITFunction)
