"""Numbers into few bins and back on a GPU: what numba_bins.py does, with the same bins, symbols and values.

    measure(elements, "bfloat16", tokens, width)               # what an encoder chooses steps by
    deviations = quantise(elements, "bfloat16", steps, offsets)
    kinds = spread_kinds(classes, shifts, bounds, tokens, num_kinds)
    symbols, exceptions = to_symbols(deviations, kinds, offsets, reach)
    dequantise(symbols, offsets, steps, exceptions, "bfloat16", elements)

For who has the KV on a device: an engine's worker, or a tier of GPU memory, that encodes before bytes cross the bus, or decodes after. The
node never touches a device and uses the numba kernels. Arguments are contiguous torch tensors of one device, of the types that the numba
functions have; what is a few numbers a channel (the choice of steps, and `frequencies`) is the host's. Integer sums are torch's own.

Sums in float64 are taken token by token, as there, by one program for COLUMNS channels: another order could choose other steps. Nothing is
fused. `to_symbols` and `dequantise` wait for the device, as they answer with a size and a verdict.

With TRITON_INTERPRET=1 when this module is imported, the same kernels run on host memory, slowly, for tests.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvhold.kernels.numba_bins import ESCAPE, MOST, REACH
from kvhold.kernels.numba_floats import KINDS
from kvhold.kernels.triton_floats import EXACT, load_floats, magnitudes_of, nearest, store_within
from kvhold.kernels.triton_launch import Tensor, check, on_device

COLUMNS = 128
TOGETHER = 8  # rows of so many columns
TILE = 1024


class Channels(NamedTuple):
    """Of each column of a plane: its sum in float64, and its largest magnitude in float32, above all others if not finite."""

    sums: Tensor
    largest: Tensor


def measure(elements: Tensor, dtype: str, tokens: int, width: int) -> Channels:
    """Of `elements` [tokens * width]."""
    check(INTERPRETED, elements)
    assert elements.numel() == tokens * width
    sums = torch.zeros(width, dtype=torch.float64, device=elements.device)
    largest = torch.zeros(width, dtype=torch.float32, device=elements.device)
    if elements.numel():
        with on_device(elements):
            _sums[(triton.cdiv(width, COLUMNS),)](
                elements, sums, sums, largest, tokens, width, centred=False, kind=KINDS[dtype], columns=COLUMNS, **EXACT
            )
    return Channels(sums, largest)


def distances(elements: Tensor, dtype: str, tokens: int, means: Tensor) -> Tensor:
    """float64 [width] the sum over the tokens of |element - mean|."""
    check(INTERPRETED, elements, means)
    assert elements.numel() == tokens * means.numel() and means.dtype == torch.float64
    sums = torch.zeros_like(means)
    if elements.numel():
        with on_device(elements):
            _sums[(triton.cdiv(means.numel(), COLUMNS),)](
                elements, means, sums, sums, tokens, means.numel(), centred=True, kind=KINDS[dtype], columns=COLUMNS, **EXACT
            )
    return sums


def quantise(elements: Tensor, dtype: str, steps: Tensor, offsets: Tensor) -> Tensor:
    """int16 [tokens * width]; steps [width] of which each is at least a 127th of the channel's largest, 0 where all is zero."""
    check(INTERPRETED, elements, steps, offsets)
    width = steps.numel()
    assert width == offsets.numel() and elements.numel() % width == 0
    deviations = torch.empty(elements.numel(), dtype=torch.int16, device=elements.device)
    tokens = elements.numel() // width
    if tokens:
        with on_device(elements):
            _quantise[(triton.cdiv(tokens, TOGETHER), triton.cdiv(width, COLUMNS))](
                elements,
                steps,
                offsets,
                deviations,
                tokens,
                width,
                most=MOST,
                kind=KINDS[dtype],
                together=TOGETHER,
                columns=COLUMNS,
                **EXACT,
            )
    return deviations


class Magnitudes(NamedTuple):
    """Sums of |deviation|: int64 [width] of each column, and [tokens, runs] of each token's runs."""

    of_columns: Tensor
    of_runs: Tensor


def magnitudes(deviations: Tensor, width: int, bounds: Tensor) -> Magnitudes:
    """bounds: int64 [runs + 1] the columns at which runs begin, in ascending order from 0 on, and `width`."""
    rows = deviations.view(-1, width).abs()
    sums = torch.nn.functional.pad(rows.cumsum(dim=1, dtype=torch.int64), (1, 0))
    return Magnitudes(rows.sum(dim=0, dtype=torch.int64), sums[:, bounds].diff(dim=1))


def spread_kinds(classes: Tensor, shifts: Tensor, bounds: Tensor, tokens: int, num_kinds: int) -> Tensor:
    """uint8 [tokens * width] each element's kind: its channel's class, plus its token's shift from class 1 on, within 1..num_kinds - 1.

    classes: uint8 [width], each less than num_kinds (asserted)
    shifts:  int8 [tokens, runs], or of no elements: no shift
    """
    assert int(classes.max()) < num_kinds <= 1 + MOST
    if not shifts.numel():
        return classes.repeat(tokens)
    assert shifts.shape == (tokens, bounds.numel() - 1)
    moved = classes.to(torch.int16) + shifts.to(torch.int16).repeat_interleave(bounds.diff(), dim=1)
    moved = moved.clamp(min=1).clamp(max=num_kinds - 1)
    return torch.where(classes > 0, moved, 0).to(torch.uint8).view(-1)


def count(deviations: Tensor, kinds: Tensor, num_kinds: int) -> Tensor:
    """int64 [num_kinds, REACH + 2] how often each magnitude occurs in each kind; in the last column, all beyond REACH."""
    assert deviations.numel() == kinds.numel() and (not kinds.numel() or int(kinds.max()) < num_kinds)
    places = kinds.to(torch.int32) * (REACH + 2) + deviations.abs().clamp(max=REACH + 1)
    return torch.bincount(places, minlength=num_kinds * (REACH + 2)).view(num_kinds, REACH + 2)


def to_symbols(deviations: Tensor, kinds: Tensor, offsets: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [tokens * width] symbols, and int8 [n] exceptions; reach [kinds] is the largest deviation of each kind that is no exception."""
    assert deviations.numel() == kinds.numel() and deviations.numel() % offsets.numel() == 0
    assert not kinds.numel() or (int(kinds.max()) < reach.numel() and int(reach.max()) <= REACH)
    is_far = deviations.abs() > reach.to(torch.int16)[kinds.to(torch.int32)]
    symbols = torch.where(is_far, ESCAPE, deviations & 0xFF).to(torch.uint8)
    bins = (deviations.view(-1, offsets.numel()) + offsets).view(-1)
    return symbols, bins[is_far].to(torch.int8)


def dequantise(symbols: Tensor, offsets: Tensor, steps: Tensor, exceptions: Tensor, dtype: str, elements: Tensor) -> bool:
    """The inverse, as near as the bins are narrow. False if there are not as many exceptions as ESCAPEs; `elements` are then untouched.

    steps: finite, not negative
    """
    check(INTERPRETED, symbols, offsets, steps, exceptions, elements)
    width = steps.numel()
    assert symbols.numel() == elements.numel() and width == offsets.numel() and symbols.numel() % width == 0
    ends = (symbols.view(-1, width) == ESCAPE).sum(dim=1).cumsum(dim=0)
    if (int(ends[-1]) if ends.numel() else 0) != exceptions.numel():
        return False
    if ends.numel():
        with on_device(elements):
            _dequantise[(ends.numel(),)](
                symbols,
                offsets,
                steps,
                exceptions if exceptions.numel() else offsets,
                ends,
                elements,
                width,
                escape=ESCAPE,
                kind=KINDS[dtype],
                columns=min(TILE, triton.next_power_of_2(width)),
                **EXACT,
            )
    return True


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    elements, means, sums, largest, tokens, width, centred: tl.constexpr, kind: tl.constexpr, columns: tl.constexpr
):
    """Grid [width / columns]; `centred`: of distances from the means, without the largest."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    mask = column < width
    total = tl.full((columns,), 0.0, tl.float64)
    most = tl.full((columns,), 0, tl.int32)
    if centred:
        mean = tl.load(means + column, mask=mask, other=0)
    for token in range(tokens):
        values = load_floats(elements + token * width + column, mask, kind)
        if centred:
            total += tl.abs(values.to(tl.float64) - mean)
        else:
            total += values.to(tl.float64)
            most = tl.maximum(most, magnitudes_of(values))
    tl.store(sums + column, total, mask=mask)
    if not centred:
        tl.store(largest + column, most.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    elements,
    steps,
    offsets,
    deviations,
    tokens,
    width,
    most: tl.constexpr,
    kind: tl.constexpr,
    together: tl.constexpr,
    columns: tl.constexpr,
):
    """Grid [tokens / together, width / columns]."""
    token = tl.program_id(0) * together + tl.arange(0, together)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < width
    mask = (token < tokens)[:, None] & is_column[None, :]
    i = token[:, None] * width + column[None, :]
    step = tl.load(steps + column, mask=is_column, other=0)
    one = tl.full((columns,), 1.0, tl.float32)
    inverses = tl.where(step > 0, tl.div_rn(one, tl.where(step > 0, step, one)), 0.0)
    numbers = tl.minimum(tl.maximum(load_floats(elements + i, mask, kind) * inverses[None, :], -1.0 * most), 1.0 * most)
    offset = tl.load(offsets + column, mask=is_column, other=0).to(tl.int32)
    tl.store(deviations + i, (nearest(numbers) - offset[None, :]).to(tl.int16), mask=mask)


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    symbols, offsets, steps, exceptions, ends, elements, width, escape: tl.constexpr, kind: tl.constexpr, columns: tl.constexpr
):
    """Grid [tokens]. There are as many exceptions as ESCAPEs, so no place is beyond them."""
    token = tl.program_id(0).to(tl.int64)
    row = token * width
    used = tl.full((), 0, tl.int64)
    if token > 0:
        used = tl.load(ends + token - 1)
    for begin in range(0, width, columns):
        column = begin + tl.arange(0, columns)
        mask = column < width
        symbol = tl.load(symbols + row + column, mask=mask, other=0)
        offset = tl.load(offsets + column, mask=mask, other=0)
        is_far = mask & (symbol == escape)
        ones = is_far.to(tl.int32)
        place = used + (tl.associative_scan(ones, 0, tl.standard._sum_combine) - ones)
        used += tl.reduce(ones, 0, tl.standard._sum_combine)
        bins = (symbol + offset.to(tl.uint8, bitcast=True)).to(tl.int8, bitcast=True)
        bins = tl.where(is_far, tl.load(exceptions + place, mask=is_far, other=0), bins)
        values = bins.to(tl.float32) * tl.load(steps + column, mask=mask, other=0)
        store_within(elements + row + column, values, mask, kind)


INTERPRETED = not isinstance(_dequantise, triton.runtime.JITFunction)
