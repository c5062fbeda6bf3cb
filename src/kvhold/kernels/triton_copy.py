"""On a GPU: one launch for all runs, layers and planes, on the current stream.

With TRITON_INTERPRET=1 at import, this and other kernels run on host memory.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvhold.kernels.plan import Plan
from kvhold.kernels.view import Int64s, View

# a program's turn: 128 threads, eight times 16 bytes
TILE_WORDS = 2048
PROGRAMS = 16  # 256 KiB in flight: a bus of 64 GB/s holds 130 KB in 2 us
PROGRAMS_IN_DEVICE = 256  # two for each multiprocessor of an H100
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Words:
    """a_vector: words of `nbytes` that a thread moves at once, up to 16 bytes."""

    nbytes: int
    a_vector: int


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    """The device must be able to address the arena."""
    view = plan.view
    if view.device == "cpu" and not INTERPRETED:
        raise ValueError("the triton worker copies host memory only under TRITON_INTERPRET=1")
    words = words_of(plan)
    tables, num_tiles = _on_device(plan, words)
    first, stop = layers.start * view.planes, layers.stop * view.planes
    counts = (plan.num_runs, num_tiles, first, stop - first)
    _launch(view, words, to_arena, tables, counts, programs_for(plan))


def prepare(view: View) -> None:
    """Compile for chunks that begin at multiples of 16 bytes."""
    words = _words(_bits(view))
    for to_arena in (True, False):
        tables = torch.zeros(1, dtype=torch.int64, device=view.device)
        _launch(view, words, to_arena, tables, (0, 0, 0, 0), PROGRAMS)


def programs_for(plan: Plan) -> int:
    is_in_device = plan.view.device != "cpu" and plan.chunks.device == plan.view.device
    return PROGRAMS_IN_DEVICE if is_in_device else PROGRAMS


def words_of(plan: Plan) -> Words:
    return _words(
        _bits(plan.view)
        | int(np.bitwise_or.reduce(_arena(plan) + plan.chunk_starts[plan.chunk], axis=None))
    )


def _bits(view: View) -> int:
    piece = view.row_bytes if view.rows_are_whole else view.head_bytes
    bits = piece | view.row_bytes | view.block_stride | view.row_stride | view.head_stride
    return bits | int(np.bitwise_or.reduce(view.table, axis=None))


def _words(bits: int) -> Words:
    bits |= VECTOR_BYTES
    widest = bits & -bits
    nbytes = min(8, widest)
    return Words(nbytes, widest // nbytes)


def _launch(
    view: View,
    words: Words,
    to_arena: bool,
    tables: "torch.Tensor",
    counts: tuple[int, int, int, int],
    programs: int,
) -> None:
    heads, head_bytes = (
        (1, view.row_bytes) if view.rows_are_whole else (view.heads, view.head_bytes)
    )
    _, num_tiles, _, num_planes = counts
    with _device_of(view):
        _copy_tiles[(max(1, min(programs, num_tiles * num_planes)),)](
            tables,
            *counts,
            view.row_stride,
            view.head_stride,
            to_arena=to_arena,
            runs_are_whole=view.runs_are_whole,
            row_words=heads * head_bytes // words.nbytes,
            head_words=head_bytes // words.nbytes,
            word_bytes=words.nbytes,
            vector_words=words.a_vector,
            tile_words=TILE_WORDS,
        )


def _device_of(view: View) -> AbstractContextManager[None]:
    return nullcontext() if view.device == "cpu" else torch.cuda.device(view.device)


def _arena(plan: Plan) -> int:
    address = plan.chunks.address_seen_from(plan.view.device)
    assert address is not None, "the dispatcher admits only memory that the device can address"
    return address


def _on_device(plan: Plan, words: Words) -> tuple[Any, int]:
    """All tables, int64, and the number of tiles. Uploaded once per stream.

    Per run: arena address, plane stride, view offset, words. Per tile: its run and number. Per
    layer and plane: its address.
    """
    view = plan.view
    on_host = view.device == "cpu"
    key = ("triton", None if on_host else torch.cuda.current_stream(view.device))
    if key not in plan.memo:
        num_words = plan.rows * view.row_bytes // words.nbytes
        tiles = -(-num_words // TILE_WORDS)
        run = np.repeat(np.arange(plan.num_runs), tiles)
        parts: list[Int64s] = [
            plan.chunk_offsets + _arena(plan),
            plan.plane_strides,
            plan.view_offsets,
            num_words,
            run,
            np.arange(run.size) - (np.cumsum(tiles) - tiles)[run],
            view.table.reshape(-1),
        ]
        tables = torch.empty(
            sum(part.size for part in parts), dtype=torch.int64, pin_memory=not on_host
        )
        np.concatenate(parts, out=tables.numpy())
        plan.memo[key] = (
            tables if on_host else tables.to(view.device, non_blocking=True),
            run.size,
        )
    tables, num_tiles = plan.memo[key]
    return tables, num_tiles


@triton.jit(
    do_not_specialize=[
        "num_runs",
        "num_tiles",
        "first_plane",
        "num_planes",
        "row_stride",
        "head_stride",
    ]
)
def _copy_tiles(  # type: ignore[no-untyped-def]  # Triton reads annotations itself and knows few
    tables,
    num_runs,
    num_tiles,
    first_plane,
    num_planes,
    row_stride,
    head_stride,
    to_arena: tl.constexpr,
    runs_are_whole: tl.constexpr,
    row_words: tl.constexpr,
    head_words: tl.constexpr,
    word_bytes: tl.constexpr,
    vector_words: tl.constexpr,
    tile_words: tl.constexpr,
):
    """A job is one tile of one plane. Addresses from a table have no known alignment."""
    if word_bytes == 8:
        word = tl.pointer_type(tl.int64)
    elif word_bytes == 4:
        word = tl.pointer_type(tl.int32)
    elif word_bytes == 2:
        word = tl.pointer_type(tl.int16)
    else:
        word = tl.pointer_type(tl.int8)

    vector_bytes: tl.constexpr = vector_words * word_bytes
    of_tiles = tables + 4 * num_runs
    nth = tl.arange(0, tile_words)
    num_jobs = num_tiles.to(tl.int64) * num_planes
    for job in range(tl.program_id(0).to(tl.int64), num_jobs, tl.num_programs(0)):
        tile = job % num_tiles
        plane = first_plane + job // num_tiles
        run = tl.load(of_tiles + tile)
        start = tl.load(of_tiles + num_tiles + tile) * tile_words
        in_arena = tl.load(tables + run) + plane * tl.load(tables + num_runs + run)
        in_view = tl.load(of_tiles + 2 * num_tiles + plane) + tl.load(tables + 2 * num_runs + run)
        words = tl.multiple_of(tl.load(tables + 3 * num_runs + run), vector_words)

        within = start + nth
        mask = within < words
        arena_words = tl.multiple_of(in_arena.to(word), vector_bytes) + within
        view_base = tl.multiple_of(in_view.to(word), vector_bytes)
        if runs_are_whole:
            view_words = view_base + within
        else:
            row = within // row_words
            head = within % row_words // head_words
            offset = (
                row * (row_stride // word_bytes)
                + head * (head_stride // word_bytes)
                + within % head_words
            )
            view_words = tl.max_contiguous(
                tl.multiple_of(view_base + offset, vector_bytes), vector_words
            )
        if to_arena:
            tl.store(arena_words, tl.load(view_words, mask=mask), mask=mask)
        else:
            tl.store(view_words, tl.load(arena_words, mask=mask), mask=mask)


INTERPRETED = not isinstance(_copy_tiles, triton.runtime.JITFunction)
