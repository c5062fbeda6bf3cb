"""As `numba_coded_copy.py`, on a GPU. A tile is some runs of one row."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvhold.kernels.numba_floats import KINDS
from kvhold.kernels.plan import Plan
from kvhold.kernels.triton_copy import PROGRAMS, VECTOR_BYTES, programs_for
from kvhold.kernels.triton_floats import EXACT, load_floats, magnitudes_of, nearest, store_floats
from kvhold.kernels.view import Coding, View

TILE_ELEMENTS = 2048
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SMALL = tl.constexpr(2.0**-60)  # a smaller scale's inverse may overflow
_UP = tl.constexpr(2.0**64)


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    """The device must be able to address the arena."""
    view = plan.view
    if view.device == "cpu" and not INTERPRETED:
        raise ValueError("the triton worker copies host memory only under TRITON_INTERPRET=1")
    _launch(
        view,
        to_arena,
        _on_device(plan),
        plan.num_rows,
        layers,
        alignment_of(plan),
        programs_for(plan),
    )


def prepare(view: View) -> None:
    for to_arena in (True, False):
        _launch(
            view,
            to_arena,
            torch.zeros(1, dtype=torch.int64, device=view.device),
            0,
            range(0),
            _alignment(_bits(view)),
            PROGRAMS,
        )


def alignment_of(plan: Plan) -> tuple[int, int]:
    """In the engine's memory and in the arena, in bytes, at most 16."""
    address = plan.chunks.address_seen_from(plan.view.device)
    assert address is not None, "the dispatcher admits only memory that the device can address"
    in_view, in_arena = _bits(plan.view)
    return _alignment(
        (
            in_view,
            in_arena
            | int(np.bitwise_or.reduce(address + plan.chunk_starts[plan.chunk], axis=None)),
        )
    )


def _bits(view: View) -> tuple[int, int]:
    return view.block_stride | view.row_stride | int(
        np.bitwise_or.reduce(view.table, axis=None)
    ), view.row_bytes


def _alignment(bits: tuple[int, int]) -> tuple[int, int]:
    in_view, in_arena = (each | VECTOR_BYTES for each in bits)
    return in_view & -in_view, in_arena & -in_arena


def _launch(
    view: View,
    to_arena: bool,
    tables: "torch.Tensor",
    num_rows: int,
    layers: range,
    alignment: tuple[int, int],
    programs: int,
) -> None:
    coding = view.coding
    assert isinstance(coding, Coding) and view.planes == 1
    together = max(1, TILE_ELEMENTS // coding.run)
    jobs = num_rows * len(layers) * triton.cdiv(coding.scales, together)
    device: AbstractContextManager[None] = (
        nullcontext() if view.device == "cpu" else torch.cuda.device(view.device)
    )
    with device:
        _copy_tiles[(max(1, min(programs, jobs)),)](
            tables,
            num_rows,
            layers.start,
            len(layers),
            to_arena=to_arena,
            kind=KINDS[coding.dtype],
            runs=coding.scales,
            run=coding.run,
            together=together,
            view_alignment=alignment[0],
            arena_alignment=alignment[1],
            **EXACT,
        )


def _on_device(plan: Plan) -> Any:
    """int64, uploaded once per stream. Per row: arena address, layer stride, view offset. Per
    layer: its address.
    """
    view = plan.view
    on_host = view.device == "cpu"
    key = ("triton coded", None if on_host else torch.cuda.current_stream(view.device))
    if key not in plan.memo:
        address = plan.chunks.address_seen_from(view.device)
        assert address is not None
        view_offsets, arena_offsets, strides = plan.of_rows()
        tables = torch.from_numpy(
            np.concatenate([arena_offsets + address, strides, view_offsets, view.table.reshape(-1)])
        )
        plan.memo[key] = (
            tables if on_host else tables.pin_memory().to(view.device, non_blocking=True)
        )
    return plan.memo[key]


@triton.jit(do_not_specialize=["num_rows", "first_layer", "num_layers"])
def _copy_tiles(  # type: ignore[no-untyped-def]  # Triton reads annotations itself and knows few
    tables,
    num_rows,
    first_layer,
    num_layers,
    to_arena: tl.constexpr,
    kind: tl.constexpr,
    runs: tl.constexpr,
    run: tl.constexpr,
    together: tl.constexpr,
    view_alignment: tl.constexpr,
    arena_alignment: tl.constexpr,
):
    if kind == 2:
        element = tl.pointer_type(tl.uint32)
    else:
        element = tl.pointer_type(tl.uint16)
    tiles: tl.constexpr = (runs + together - 1) // together
    num_jobs = num_rows.to(tl.int64) * num_layers * tiles
    for job in range(tl.program_id(0).to(tl.int64), num_jobs, tl.num_programs(0)):
        tile = job % tiles
        row = job // tiles % num_rows
        layer = first_layer + job // tiles // num_rows
        in_arena = tl.load(tables + row) + layer * tl.load(tables + num_rows + row)
        in_view = tl.load(tables + 3 * num_rows + layer) + tl.load(tables + 2 * num_rows + row)

        number = tile * together + tl.arange(0, together)
        i = number[:, None] * run + tl.arange(0, run)[None, :]
        is_run = number < runs
        mask = is_run[:, None] & (i < runs * run)
        elements = tl.multiple_of(in_view.to(element), view_alignment) + i
        codes = tl.multiple_of(in_arena.to(tl.pointer_type(tl.int8)), arena_alignment) + i
        scales = (in_arena + runs * run).to(tl.pointer_type(tl.float32)) + number
        if to_arena:
            values = load_floats(elements, mask, kind)
            peaks = tl.reduce(magnitudes_of(values), 1, tl.standard._elementwise_max).to(
                tl.float32, bitcast=True
            )
            tl.store(scales, peaks, mask=is_run)
            peaks = tl.where(peaks <= _LARGEST, peaks, 0.0)
            values = tl.where(peaks[:, None] > 0, values, 0.0)
            ups = tl.where(peaks < _SMALL, _UP, 1.0)
            raised = tl.where(peaks > 0, peaks * ups, 1.0)
            factors = tl.where(
                peaks > 0, tl.div_rn(tl.full(raised.shape, 127.0, tl.float32), raised), 0.0
            )
            tl.store(
                codes, nearest(values * ups[:, None] * factors[:, None]).to(tl.int8), mask=mask
            )
        else:
            peaks = tl.load(scales, mask=is_run, other=0)
            values = tl.load(codes, mask=mask, other=0).to(tl.float32) * (1 / 127)
            store_floats(elements, values * peaks[:, None], mask, kind)


INTERPRETED = not isinstance(_copy_tiles, triton.runtime.JITFunction)
