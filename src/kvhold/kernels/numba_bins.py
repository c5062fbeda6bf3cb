"""Quantise a plane of a layer, [tokens, width], finite, to few bins and back, compiled.

A bin is number / step, rounded. A deviation is a bin minus the bin of the channel's mean. A symbol
is a deviation as one byte, or ESCAPE (docs/format.md).
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit, types

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_floats import (
    FLOAT32,
    KINDS,
    MAGNITUDE,
    Bytes,
    Codes,
    Elements,
    Floats,
    as_bits,
    as_float,
    load,
    nearest,
    store,
)

Doubles: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]
Frequencies: TypeAlias = npt.NDArray[np.uint16]
Deviations: TypeAlias = npt.NDArray[np.int16]

MOST = 127
ESCAPE = 0x80
REACH = 63
# a magnitude gets a frequency (two bytes) if it or larger ones occur this often
WORTH_IT = 3
SHIFTS = 8  # a token's shift is -SHIFTS..SHIFTS - 1


class Channels(NamedTuple):
    """Per column. largest: infinity or NaN if an element is not finite."""

    sums: Doubles
    largest: Floats


def measure(elements: Elements, dtype: str, tokens: int, width: int) -> Channels:
    assert elements.size == tokens * width
    found = Channels(np.zeros(width), np.zeros(width, np.float32))
    _measure(elements, KINDS[dtype], found.sums, found.largest)
    return found


def distances(elements: Elements, dtype: str, tokens: int, means: Doubles) -> Doubles:
    """Sum of |element - mean| over the tokens: float64 [width]"""
    assert elements.size == tokens * means.size
    sums = np.zeros(means.size)
    _distances(elements, KINDS[dtype], means, sums)
    return sums


def quantise(elements: Elements, dtype: str, steps: Floats, offsets: Codes) -> Deviations:
    """int16 [tokens * width]

    steps: [width], at least 1/127 of the channel's largest magnitude; 0 if all are zero
    """
    assert steps.size == offsets.size and elements.size % steps.size == 0
    deviations = np.empty(elements.size, np.int16)
    _quantise(elements, KINDS[dtype], steps, offsets, deviations)
    return deviations


class Magnitudes(NamedTuple):
    """Sums of |deviation|: int64 [width], and [tokens, runs]."""

    of_columns: Counts
    of_runs: Counts


def magnitudes(deviations: Deviations, width: int, bounds: Counts) -> Magnitudes:
    """bounds: [runs + 1], the first column of each run, and `width`."""
    assert deviations.size % width == 0
    _check_bounds(bounds, width)
    found = Magnitudes(
        np.zeros(width, np.int64), np.zeros((deviations.size // width, bounds.size - 1), np.int64)
    )
    _magnitudes(deviations, bounds, found.of_columns, found.of_runs)
    return found


def spread_kinds(
    classes: Bytes, shifts: Codes, bounds: Counts, tokens: int, num_kinds: int
) -> Bytes:
    """The channel's class, [width], plus the token's shift, [tokens, runs] or empty.

    Class 0 is not shifted.
    """
    assert int(classes.max()) < num_kinds <= 1 + MOST
    if not shifts.size:
        return np.tile(classes, tokens)
    _check_bounds(bounds, classes.size)
    assert shifts.shape == (tokens, bounds.size - 1)
    kinds = np.empty(tokens * classes.size, np.uint8)
    _spread_kinds(classes, shifts, bounds, num_kinds, kinds)
    return kinds


def count(deviations: Deviations, kinds: Bytes, num_kinds: int) -> Counts:
    """int64 [num_kinds, REACH + 2]; the last column counts larger magnitudes."""
    assert deviations.size == kinds.size and int(kinds.max(initial=0)) < num_kinds
    counts = np.zeros((num_kinds, REACH + 2), np.int64)
    _count(deviations, kinds, counts)
    return counts


def frequencies(counts: Counts, scale: int) -> tuple[Bytes, Frequencies]:
    """Choose which magnitudes get a frequency, and scale to the sum `scale`.

    counts: [kinds, REACH + 2]

    Returns uint8 [kinds], the number of frequencies, and uint16 [kinds, REACH + 1], each for a
    magnitude and its negative.
    """
    assert counts.shape[1] == REACH + 2 and scale >= 4 * (REACH + 1)
    lengths, found = (
        np.zeros(counts.shape[0], np.uint8),
        np.zeros((counts.shape[0], REACH + 1), np.uint16),
    )
    _frequencies(counts, scale, lengths, found)
    return lengths, found


def to_symbols(
    deviations: Deviations, kinds: Bytes, offsets: Codes, reach: Counts
) -> tuple[Bytes, Codes]:
    """Symbols, uint8 [tokens * width], and exceptions, int8 [n].

    reach: [kinds], the largest deviation that is not an exception
    """
    assert deviations.size == kinds.size and deviations.size % offsets.size == 0
    assert int(kinds.max(initial=0)) < reach.size and int(reach.max()) <= REACH
    symbols, exceptions = np.empty(deviations.size, np.uint8), np.empty(deviations.size, np.int8)
    used = _to_symbols(deviations, kinds, offsets, reach, symbols, exceptions)
    return symbols, exceptions[:used]


def _check_bounds(bounds: Counts, width: int) -> None:
    assert (
        bounds.size >= 2
        and bounds[0] == 0
        and bounds[-1] == width
        and bool((np.diff(bounds) > 0).all())
    )


_UINTS = (types.uint16, types.uint32)
_u8s, _i8s, _i16s, _f32s, _f64s, _i64s = (
    kind[::1]
    for kind in (types.uint8, types.int8, types.int16, types.float32, types.float64, types.int64)
)
_u8r, _i8r, _i16r, _f32r, _f64r, _i64r = (
    readonly(kind)
    for kind in (types.uint8, types.int8, types.int16, types.float32, types.float64, types.int64)
)
_LARGEST = np.float32(np.finfo(np.float32).max)


@compiled(*(types.void(readonly(kind), types.int64, _f64s, _f32s) for kind in _UINTS))
def _measure(elements: Any, kind: int, sums: Any, largest: Any) -> None:
    width = sums.size
    values, most = np.empty(width, np.float32), np.zeros(width, np.uint32)
    for begin in range(0, elements.size, width):
        load(elements, begin, width, kind, values)
        for i in range(width):
            most[i] = max(most[i], np.uint32(as_bits(values[i]) & MAGNITUDE))
        for i in range(width):
            sums[i] += np.float64(values[i])
    for i in range(width):
        largest[i] = as_float(most[i])


@compiled(*(types.void(readonly(kind), types.int64, _f64r, _f64s) for kind in _UINTS))
def _distances(elements: Any, kind: int, means: Any, sums: Any) -> None:
    width = sums.size
    values = np.empty(width, np.float32)
    for begin in range(0, elements.size, width):
        load(elements, begin, width, kind, values)
        for i in range(width):
            sums[i] += abs(np.float64(values[i]) - means[i])


@compiled(*(types.void(readonly(kind), types.int64, _f32r, _i8r, _i16s) for kind in _UINTS))
def _quantise(elements: Any, kind: int, steps: Any, offsets: Any, deviations: Any) -> None:
    width = steps.size
    values, inverses, means = (
        np.empty(width, np.float32),
        np.zeros(width, np.float32),
        np.empty(width, np.int32),
    )
    for i in range(width):
        means[i] = offsets[i]
        if steps[i] > np.float32(0):
            inverses[i] = np.float32(np.float32(1) / steps[i])
    for begin in range(0, elements.size, width):
        load(elements, begin, width, kind, values)
        into = deviations[begin : begin + width]
        for i in range(width):
            number = np.float32(
                min(max(np.float32(values[i] * inverses[i]), np.float32(-MOST)), np.float32(MOST))
            )
            into[i] = np.int16(nearest(number) - means[i])


@compiled(types.void(_i16r, _i64r, _i64s, types.int64[:, ::1]))
def _magnitudes(deviations: Any, bounds: Any, of_columns: Any, of_runs: Any) -> None:
    width = of_columns.size
    columns, sizes = np.zeros(width, np.int32), np.empty(width, np.int32)
    for token in range(of_runs.shape[0]):
        row = deviations[token * width : (token + 1) * width]
        for i in range(width):
            sizes[i] = abs(np.int32(row[i]))
            columns[i] += sizes[i]
        for run in range(bounds.size - 1):
            of_runs[token, run] = sizes[bounds[run] : bounds[run + 1]].sum()
        if token % (1 << 20) == (1 << 20) - 1:
            for i in range(width):
                of_columns[i] += columns[i]
                columns[i] = 0
    for i in range(width):
        of_columns[i] += columns[i]


@compiled(types.void(_u8r, readonly(types.int8, 2), _i64r, types.int64, _u8s))
def _spread_kinds(classes: Any, shifts: Any, bounds: Any, num_kinds: int, kinds: Any) -> None:
    width = classes.size
    last = np.int32(num_kinds - 1)
    for token in range(shifts.shape[0]):
        for run in range(shifts.shape[1]):
            begin, end = bounds[run], bounds[run + 1]
            shift = np.int32(shifts[token, run])
            part, into = classes[begin:end], kinds[token * width + begin : token * width + end]
            for i in range(part.size):
                kind = np.int32(part[i])
                moved = min(max(np.int32(kind + shift), np.int32(1)), last)
                into[i] = np.uint8(moved if kind else np.int32(0))


@compiled(types.void(_i16r, _u8r, types.int64[:, ::1]))
def _count(deviations: Any, kinds: Any, counts: Any) -> None:
    piece = 1024
    parts = np.zeros((2, counts.shape[0] * 128), np.uint32)
    places = np.empty(piece, np.uint32)
    for begin in range(0, deviations.size, piece):
        row, row_kinds = deviations[begin : begin + piece], kinds[begin : begin + piece]
        for i in range(row.size):
            places[i] = np.uint32(row_kinds[i]) * np.uint32(128) + np.uint32(
                min(abs(np.int32(row[i])), np.int32(REACH + 1))
            )
        for i in range(row.size // 2):
            parts[0, places[2 * i]] += np.uint32(1)
            parts[1, places[2 * i + 1]] += np.uint32(1)
        if row.size % 2:
            parts[0, places[row.size - 1]] += np.uint32(1)
    for kind in range(counts.shape[0]):
        for size in range(counts.shape[1]):
            counts[kind, size] = np.int64(parts[0, kind * 128 + size]) + parts[1, kind * 128 + size]


@compiled(types.void(readonly(types.int64, 2), types.int64, _u8s, types.uint16[:, ::1]))
def _frequencies(counts: Any, scale: int, lengths: Any, found: Any) -> None:
    shares, lost = np.empty(REACH + 1, np.float64), np.empty(REACH + 1, np.float64)
    for kind in range(lengths.size):
        of_kind, table = counts[kind], found[kind]
        total = of_kind.sum()
        if of_kind[0] == total:
            continue
        reach, escapes = REACH, of_kind[REACH + 1]
        while reach > 0 and escapes + of_kind[reach] < WORTH_IT:
            escapes += of_kind[reach]
            reach -= 1
        left = scale - (max(1, escapes * scale // total) if escapes else 0)
        for m in range(reach + 1):
            weight = 2 if m else 1
            shares[m] = of_kind[m] * scale / (total * weight)
            often = max(1, int(shares[m])) if of_kind[m] else 0
            lost[m] = shares[m] - often
            table[m] = often
            left -= often * weight
        while left < 0:
            most = 0
            for m in range(1, reach + 1):
                most = m if table[m] > table[most] else most
            table[most] -= 1
            left += 2 if most else 1
        while True:
            most = -1
            for m in range(reach + 1):
                if lost[m] > 0 and left >= (2 if m else 1) and (most < 0 or lost[m] > lost[most]):
                    most = m
            if most < 0:
                break
            table[most] += 1
            lost[most] = 0
            left -= 2 if most else 1
        table[0] += left
        lengths[kind] = reach + 1


@compiled(types.int64(_i16r, _u8r, _i8r, _i64r, _u8s, _i8s))
def _to_symbols(
    deviations: Any, kinds: Any, offsets: Any, reach: Any, symbols: Any, exceptions: Any
) -> int:
    width = offsets.size
    reaches = np.zeros(256, np.int16)
    reaches[: reach.size] = reach
    used = 0
    for begin in range(0, deviations.size, width):
        row, row_kinds, into = (
            deviations[begin : begin + width],
            kinds[begin : begin + width],
            symbols[begin : begin + width],
        )
        escapes = np.int32(0)
        for i in range(width):
            is_far = abs(np.int32(row[i])) > np.int32(reaches[row_kinds[i]])
            into[i] = np.uint8(ESCAPE) if is_far else np.uint8(row[i] & 0xFF)
            escapes += np.int32(is_far)
        if escapes:
            for i in range(width):
                if into[i] == np.uint8(ESCAPE):
                    exceptions[used] = np.int8(row[i] + offsets[i])
                    used += 1
    return used


@njit(inline="always")
def _bins(row: Any, offsets: Any, values: Any) -> Any:
    escapes = np.int32(0)
    for i in range(row.size):
        values[i] = np.float32(np.int8(np.uint8(row[i] + np.uint8(offsets[i]))))
    for i in range(row.size):
        escapes += np.int32(row[i] == np.uint8(ESCAPE))
    return escapes


@compiled(*(types.boolean(_u8r, _i8r, _f32r, _i8r, types.int64, kind[::1]) for kind in _UINTS))
def _dequantise(
    symbols: Any, offsets: Any, steps: Any, exceptions: Any, kind: int, elements: Any
) -> bool:
    width = steps.size
    values = np.empty(width, np.float32)
    used = 0
    for begin in range(0, symbols.size, width):
        row = symbols[begin : begin + width]
        if _bins(row, offsets, values):
            for i in range(width):
                if row[i] == np.uint8(ESCAPE):
                    if used == exceptions.size:
                        return False
                    values[i] = np.float32(exceptions[used])
                    used += 1
        for i in range(width):
            values[i] = np.float32(values[i] * steps[i])
        if kind == FLOAT32:
            for i in range(width):
                values[i] = min(max(values[i], -_LARGEST), _LARGEST)
        store(values, width, kind, elements, begin)
    return bool(used == exceptions.size)
