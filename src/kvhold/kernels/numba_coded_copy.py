"""In host memory, to the bytes of codec int8."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from kvhold.kernels import numba_copy
from kvhold.kernels.numba_compile import compiled
from kvhold.kernels.numba_copy import _int64s, _take
from kvhold.kernels.numba_floats import FLOAT32, KINDS
from kvhold.kernels.numba_quantise import _int8_decode, _int8_encode
from kvhold.kernels.plan import Plan


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    view, coding = plan.view, plan.view.coding
    assert coding is not None and view.planes == 1
    view_offsets, arena_offsets, strides = plan.of_rows()
    tasks = len(layers) * plan.num_rows
    slices = max(1, min(tasks * coding.plain_bytes // numba_copy.SLICE_BYTES, tasks))
    threads = min(threads, slices)
    arguments = (
        to_arena,
        KINDS[coding.dtype],
        np.zeros(1, np.int64),
        tasks if threads == 1 else -(-tasks // slices),
        layers.start,
        layers.stop,
        view.table.reshape(-1),
        view_offsets,
        plan.chunks.address,
        arena_offsets,
        strides,
        coding.elements,
        coding.run,
    )
    numba_copy.on_threads(_copy_rows, threads, arguments)


@intrinsic
def _bytes_at(_: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.int64), emit


@compiled(
    types.void(
        types.boolean,
        types.int64,
        types.int64[::1],
        *(types.int64,) * 3,
        _int64s,
        _int64s,
        types.int64,
        _int64s,
        _int64s,
        types.int64,
        types.int64,
    )
)
def _copy_rows(
    to_arena: bool,
    kind: int,
    counter: Any,
    batch: int,
    first_layer: int,
    stop_layer: int,
    table: Any,
    view_offsets: Any,
    base: int,
    arena_offsets: Any,
    strides: Any,
    num_elements: int,
    run: int,
) -> None:
    rows = view_offsets.size
    tasks = (stop_layer - first_layer) * rows
    scales_bytes = 4 * (num_elements // run)
    while True:
        first = _take(counter.ctypes.data, batch)
        if first >= tasks:
            break
        for task in range(first, min(first + batch, tasks)):
            layer, row = first_layer + task // rows, task % rows
            in_view = table[layer] + view_offsets[row]
            in_arena = base + arena_offsets[row] + layer * strides[row]
            codes = carray(_bytes_at(in_arena), num_elements).view(np.int8)
            scales = carray(_bytes_at(in_arena + num_elements), scales_bytes).view(np.float32)
            if kind == FLOAT32:
                wide = carray(_bytes_at(in_view), 4 * num_elements).view(np.uint32)
                if to_arena:
                    _int8_encode(wide, kind, run, run, codes, scales)
                else:
                    _int8_decode(codes, scales, kind, run, run, wide)
            else:
                narrow = carray(_bytes_at(in_view), 2 * num_elements).view(np.uint16)
                if to_arena:
                    _int8_encode(narrow, kind, run, run, codes, scales)
                else:
                    _int8_decode(codes, scales, kind, run, run, narrow)
