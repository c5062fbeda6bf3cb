"""Compiled loops over raw addresses of host memory, without the GIL.

Threads take tiles (a run of a plane) from one atomic counter.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvhold.kernels.numba_compile import compiled
from kvhold.kernels.plan import Plan

STREAM_BYTES = 4 << 20  # larger calls use streaming stores
SLICE_BYTES = 1 << 20
LINE = 64
LEAD_BYTES = 4 << 10


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    view = plan.view
    tiles = len(layers) * view.planes * plan.num_runs
    nbytes = plan.nbytes(len(layers))
    slices = max(1, min(nbytes // SLICE_BYTES, tiles))
    threads = min(threads, slices)
    counter = np.zeros(1, np.int64)
    heads, head_bytes = (
        (1, view.row_bytes) if view.rows_are_whole else (view.heads, view.head_bytes)
    )
    arguments = (
        to_arena,
        nbytes >= STREAM_BYTES and _on_lines(plan, to_arena),
        view.runs_are_whole,
        counter,
        tiles if threads == 1 else -(-tiles // slices),
        layers.start * view.planes,
        layers.stop * view.planes,
        view.table.reshape(-1),
        plan.view_offsets,
        plan.chunks.address,
        plan.chunk_offsets,
        plan.plane_strides,
        plan.rows,
        view.row_stride,
        heads,
        head_bytes,
        view.head_stride,
    )
    on_threads(_copy_tiles, threads, arguments)


def on_threads(work: Any, threads: int, arguments: tuple[Any, ...]) -> None:
    helpers = [_Helper(work, arguments) for _ in range(threads - 1)]
    _start(helpers)
    work(*arguments)
    for helper in helpers:
        if not helper.ended.cancel():
            helper.ended.result()


def _on_lines(plan: Plan, to_arena: bool) -> bool:
    """Streaming stores need whole cache lines."""
    view = plan.view
    bits = view.row_bytes if view.rows_are_whole else view.head_bytes
    if to_arena:
        bits |= int(np.bitwise_or.reduce(plan.chunks.address + plan.chunk_starts[plan.chunk]))
    else:
        bits |= (
            view.block_stride
            | view.row_stride
            | view.head_stride
            | int(np.bitwise_or.reduce(view.table, axis=None))
        )
    return bits % LINE == 0


_pool: ThreadPoolExecutor | None = None


class _Helper:
    def __init__(self, work: Any, arguments: tuple[Any, ...]) -> None:
        self.ended: Future[None] = Future()
        self._work, self._arguments = work, arguments

    def __call__(self) -> None:
        if self.ended.set_running_or_notify_cancel():
            try:
                self._work(*self._arguments)
            except BaseException as error:  # noqa: BLE001
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)


def _start(helpers: Sequence[_Helper]) -> None:
    global _pool
    if not helpers:
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvhold-copy")
    with suppress(RuntimeError):
        for helper in helpers:
            _pool.submit(helper)


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


_BYTE = ir.IntType(8).as_pointer()
_LINE = ir.VectorType(ir.IntType(64), LINE // 8)


@intrinsic
def _memcpy(_: Any, to: Any, source: Any, nbytes: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, origin, count = args
        cgutils.raw_memcpy(
            builder, builder.inttoptr(target, _BYTE), builder.inttoptr(origin, _BYTE), count, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def stream(builder: Any, line: Any, to: Any) -> None:
    """Emit a store past the caches. to: a multiple of LINE"""
    store = builder.store(line, builder.inttoptr(to, _LINE.as_pointer()), align=LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def prefetch(builder: Any, address: Any) -> None:
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", (_BYTE,), kind)
    read, keep, data = (ir.Constant(number, n) for n in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, _BYTE), read, keep, data])


@intrinsic
def _stream_line(_: Any, to: Any, source: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, origin = args
        line = builder.load(builder.inttoptr(origin, _LINE.as_pointer()), align=1)
        stream(builder, line, target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _prefetch(_: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _take(_: Any, counter: Any, count: Any) -> Any:
    """Atomic. Returns the value before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, amount = args
        return builder.atomic_rmw(
            "add", builder.inttoptr(address, ir.IntType(64).as_pointer()), amount, "monotonic"
        )

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _fence(_: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _copy_tiles_source(
    to_arena: bool,
    stream: bool,
    runs_are_whole: bool,
    counter: Any,
    batch: int,
    first_plane: int,
    stop_plane: int,
    table: Any,
    view_offsets: Any,
    base: int,
    chunk_offsets: Any,
    plane_strides: Any,
    rows: Any,
    row_stride: int,
    heads: int,
    head_bytes: int,
    head_stride: int,
) -> None:
    num_runs = rows.size
    num_tiles = (stop_plane - first_plane) * num_runs
    row_bytes = heads * head_bytes
    source_row, target_row = (row_stride, row_bytes) if to_arena else (row_bytes, row_stride)
    source_head, target_head = (head_stride, head_bytes) if to_arena else (head_bytes, head_stride)
    while True:
        first = _take(counter.ctypes.data, batch)
        if first >= num_tiles:
            break
        stop = min(first + batch, num_tiles)
        for tile in range(first, stop):
            plane, run = first_plane + tile // num_runs, tile % num_runs
            in_view = table[plane] + view_offsets[run]
            in_arena = base + chunk_offsets[run] + plane * plane_strides[run]
            source, target = (in_view, in_arena) if to_arena else (in_arena, in_view)
            if not stream:
                if runs_are_whole:
                    _memcpy(target, source, rows[run] * row_bytes)
                    continue
                for row in range(rows[run]):
                    for head in range(heads):
                        _memcpy(
                            target + row * target_row + head * target_head,
                            source + row * source_row + head * source_head,
                            head_bytes,
                        )
                continue
            follows = min(tile + 1, stop - 1)
            plane, follower = first_plane + follows // num_runs, follows % num_runs
            if to_arena:
                ahead = table[plane] + view_offsets[follower]
            else:
                ahead = base + chunk_offsets[follower] + plane * plane_strides[follower]
            if runs_are_whole:
                _stream(target, source, rows[run] * row_bytes, ahead)
                continue
            for head in range(heads):
                wanted = ahead if head == heads - 1 else source + source_head
                for row in range(rows[run]):
                    for offset in range(0, head_bytes, LINE):
                        _prefetch(wanted + row * source_row + offset)
                        _stream_line(
                            target + row * target_row + offset, source + row * source_row + offset
                        )
                source += source_head
                target += target_head
    if stream:
        _fence()


@njit(inline="always")
def _stream(target: int, source: int, nbytes: int, ahead: int) -> None:
    lead = min(LEAD_BYTES, nbytes)
    for offset in range(0, nbytes - lead, LINE):
        _prefetch(source + offset + lead)
        _stream_line(target + offset, source + offset)
    for offset in range(nbytes - lead, nbytes, LINE):
        _prefetch(ahead + offset + lead - nbytes)
        _stream_line(target + offset, source + offset)


_int64s = types.Array(types.int64, 1, "C", readonly=True)
_COPY_TILES = types.void(
    *(types.boolean,) * 3,
    types.int64[::1],
    *(types.int64,) * 3,
    _int64s,
    _int64s,
    types.int64,
    *(_int64s,) * 3,
    *(types.int64,) * 4,
)


_copy_tiles = compiled(_COPY_TILES)(_copy_tiles_source)
