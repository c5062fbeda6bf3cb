"""Quantise numbers to 4 or 2 bits and back, compiled (docs/format.md, kivi4).

A group is 32 tokens of a channel (columns), or 32 channels of a head in one token (rows). Elements
are finite.
"""

from typing import Any

import numpy as np
from numba import njit, types

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_floats import (
    FLOAT32,
    KINDS,
    Bytes,
    Elements,
    as_bits,
    as_float,
    load,
    nearest,
    store,
)

GROUP = 32


def packed_width(width: int, bits: int) -> int:
    return -(-width * bits // 8)


def num_groups(width: int, head_dim: int) -> int:
    return width // head_dim * -(-head_dim // GROUP)


def columns_encode(
    elements: Elements, dtype: str, *, bits: int, ends: Elements, codes: Bytes
) -> None:
    """elements: [n * GROUP, width]
    ends: [n, 2, width], least and largest
    codes: [n * GROUP, packed_width]
    """
    _check_columns(elements, bits, ends, codes)
    _columns_encode(elements, KINDS[dtype], bits, ends, codes)


def columns_decode(
    codes: Bytes, ends: Elements, dtype: str, *, bits: int, elements: Elements
) -> None:
    _check_columns(elements, bits, ends, codes)
    _columns_decode(codes, ends, KINDS[dtype], bits, elements)


def rows_encode(
    elements: Elements, dtype: str, *, head_dim: int, bits: int, ends: Elements, codes: Bytes
) -> None:
    """As `columns_encode`. elements: [tokens, width]; ends: [tokens, 2, num_groups]"""
    _check_rows(elements, head_dim, bits, ends, codes)
    _rows_encode(elements, KINDS[dtype], head_dim, bits, ends, codes)


def rows_decode(
    codes: Bytes, ends: Elements, dtype: str, *, head_dim: int, bits: int, elements: Elements
) -> None:
    _check_rows(elements, head_dim, bits, ends, codes)
    _rows_decode(codes, ends, KINDS[dtype], head_dim, bits, elements)


def _check_columns(elements: Elements, bits: int, ends: Elements, codes: Bytes) -> None:
    groups, two, width = ends.shape
    assert bits in (2, 4) and two == 2 and width >= 1 and elements.shape == (groups * GROUP, width)
    assert (
        codes.shape == (groups * GROUP, packed_width(width, bits)) and elements.dtype == ends.dtype
    )


def _check_rows(elements: Elements, head_dim: int, bits: int, ends: Elements, codes: Bytes) -> None:
    tokens, width = elements.shape
    assert (
        bits in (2, 4)
        and width >= 1
        and width % head_dim == 0
        and ends.shape == (tokens, 2, num_groups(width, head_dim))
    )
    assert codes.shape == (tokens, packed_width(width, bits)) and elements.dtype == ends.dtype


_UINTS = (types.uint16, types.uint32)
_HALF = np.float32(0.5)
# least half range: below it, inverses may overflow, and all elements become the least
_LEAST = np.float32(2.0**-120)
_LARGEST = np.float32(np.finfo(np.float32).max)
_BELOW = np.int32(0x7FFF_FFFF)


@njit(inline="always")
def _rank(value: Any) -> Any:
    """An int32 that sorts like the value, -0 before 0."""
    bits = np.int32(as_bits(value))
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & _BELOW))


@njit(inline="always")
def _ranked(rank: Any) -> Any:
    return as_float(np.uint32(np.int32(rank ^ np.int32(np.int32(rank >> np.int32(31)) & _BELOW))))


@njit(inline="always")
def _inverse(least: Any, largest: Any, steps: Any) -> Any:
    half = np.float32(np.float32(largest * _HALF) - np.float32(least * _HALF))
    return np.float32(steps / half) if half >= _LEAST else np.float32(0)


@njit(inline="always")
def _pack(row: Any, bits: int, into: Any) -> None:
    count = into.size
    if bits == 4:
        high = row[count:]
        for i in range(count):
            into[i] = np.uint8(row[i] | np.uint8(high[i] << np.uint8(4)))
    else:
        second, third, fourth = row[count:], row[2 * count :], row[3 * count :]
        for i in range(count):
            low = np.uint8(row[i] | np.uint8(second[i] << np.uint8(2)))
            into[i] = np.uint8(
                low
                | np.uint8(np.uint8(third[i] << np.uint8(4)) | np.uint8(fourth[i] << np.uint8(6)))
            )


@njit(inline="always")
def _unpack(source: Any, bits: int, row: Any) -> None:
    count = source.size
    if bits == 4:
        high = row[count:]
        for i in range(count):
            row[i] = np.uint8(source[i] & np.uint8(15))
            high[i] = np.uint8(source[i] >> np.uint8(4))
    else:
        second, third, fourth = row[count:], row[2 * count :], row[3 * count :]
        for i in range(count):
            row[i] = np.uint8(source[i] & np.uint8(3))
            second[i] = np.uint8(np.uint8(source[i] >> np.uint8(2)) & np.uint8(3))
            third[i] = np.uint8(np.uint8(source[i] >> np.uint8(4)) & np.uint8(3))
            fourth[i] = np.uint8(source[i] >> np.uint8(6))


@njit(inline="always")
def _between(least: Any, largest: Any, code: Any, steps: Any, part: Any) -> Any:
    """Ends are exact: `part * steps` is 1, and the other end's weight is 0."""
    number = np.float32(code)
    from_least = np.float32(least * np.float32(np.float32(steps - number) * part))
    return np.float32(from_least + np.float32(largest * np.float32(number * part)))


@njit(inline="always")
def _store_within(values: Any, count: int, kind: int, elements: Any, begin: int) -> None:
    if kind == FLOAT32:
        for i in range(count):
            values[i] = min(max(values[i], -_LARGEST), _LARGEST)
    store(values, count, kind, elements, begin)


@compiled(
    *(
        types.void(
            readonly(kind, 2), types.int64, types.int64, kind[:, :, ::1], types.uint8[:, ::1]
        )
        for kind in _UINTS
    )
)
def _columns_encode(elements: Any, kind: int, bits: int, ends: Any, codes: Any) -> None:
    groups, _, width = ends.shape
    flat, flat_ends = elements.reshape(-1), ends.reshape(-1)
    steps = np.float32((1 << bits) - 1)
    values, least, largest = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.float32),
    )
    first, last, inverses = (
        np.empty(width, np.int32),
        np.empty(width, np.int32),
        np.empty(width, np.float32),
    )
    row = np.zeros(8 // bits * codes.shape[1], np.uint8)
    for group in range(groups):
        first[:] = np.int32(0x7FFF_FFFF)
        last[:] = np.int32(-0x8000_0000)
        for token in range(group * GROUP, (group + 1) * GROUP):
            load(flat, token * width, width, kind, values)
            for i in range(width):
                rank = _rank(values[i])
                first[i] = min(first[i], rank)
                last[i] = max(last[i], rank)
        for i in range(width):
            least[i] = _ranked(first[i])
            largest[i] = _ranked(last[i])
            inverses[i] = _inverse(least[i], largest[i], steps)
        store(least, width, kind, flat_ends, 2 * group * width)
        store(largest, width, kind, flat_ends, (2 * group + 1) * width)
        for i in range(width):
            least[i] = np.float32(least[i] * _HALF)
        for token in range(group * GROUP, (group + 1) * GROUP):
            load(flat, token * width, width, kind, values)
            for i in range(width):
                row[i] = np.uint8(
                    nearest(
                        np.float32(
                            np.float32(np.float32(values[i] * _HALF) - least[i]) * inverses[i]
                        )
                    )
                )
            _pack(row, bits, codes[token])


@compiled(
    *(
        types.void(
            readonly(types.uint8, 2), readonly(kind, 3), types.int64, types.int64, kind[:, ::1]
        )
        for kind in _UINTS
    )
)
def _columns_decode(codes: Any, ends: Any, kind: int, bits: int, elements: Any) -> None:
    groups, _, width = ends.shape
    flat, flat_ends = elements.reshape(-1), ends.reshape(-1)
    steps = np.float32((1 << bits) - 1)
    part = np.float32(np.float32(1) / steps)
    values, least, largest = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.float32),
    )
    row = np.empty(8 // bits * codes.shape[1], np.uint8)
    for group in range(groups):
        load(flat_ends, 2 * group * width, width, kind, least)
        load(flat_ends, (2 * group + 1) * width, width, kind, largest)
        for token in range(group * GROUP, (group + 1) * GROUP):
            _unpack(codes[token], bits, row)
            for i in range(width):
                values[i] = _between(least[i], largest[i], row[i], steps, part)
            _store_within(values, width, kind, flat, token * width)


@compiled(
    *(
        types.void(
            readonly(kind, 2),
            types.int64,
            types.int64,
            types.int64,
            kind[:, :, ::1],
            types.uint8[:, ::1],
        )
        for kind in _UINTS
    )
)
def _rows_encode(elements: Any, kind: int, head_dim: int, bits: int, ends: Any, codes: Any) -> None:
    tokens, width = elements.shape
    flat, flat_ends = elements.reshape(-1), ends.reshape(-1)
    steps = np.float32((1 << bits) - 1)
    of_head, of_row = -(-head_dim // GROUP), ends.shape[2]
    values, least, largest = (
        np.empty(width, np.float32),
        np.empty(of_row, np.float32),
        np.empty(of_row, np.float32),
    )
    row = np.zeros(8 // bits * codes.shape[1], np.uint8)
    for token in range(tokens):
        load(flat, token * width, width, kind, values)
        for group in range(of_row):
            begin = group // of_head * head_dim + group % of_head * GROUP
            count = min(GROUP, head_dim - group % of_head * GROUP)
            source, into = values[begin : begin + count], row[begin : begin + count]
            first, last = np.int32(0x7FFF_FFFF), np.int32(-0x8000_0000)
            for i in range(count):
                rank = _rank(source[i])
                first = min(first, rank)
                last = max(last, rank)
            least[group], largest[group] = _ranked(first), _ranked(last)
            inverse = _inverse(least[group], largest[group], steps)
            half = np.float32(least[group] * _HALF)
            for i in range(count):
                into[i] = np.uint8(
                    nearest(np.float32(np.float32(np.float32(source[i] * _HALF) - half) * inverse))
                )
        store(least, of_row, kind, flat_ends, 2 * token * of_row)
        store(largest, of_row, kind, flat_ends, (2 * token + 1) * of_row)
        _pack(row, bits, codes[token])


@compiled(
    *(
        types.void(
            readonly(types.uint8, 2),
            readonly(kind, 3),
            types.int64,
            types.int64,
            types.int64,
            kind[:, ::1],
        )
        for kind in _UINTS
    )
)
def _rows_decode(codes: Any, ends: Any, kind: int, head_dim: int, bits: int, elements: Any) -> None:
    tokens, width = elements.shape
    flat, flat_ends = elements.reshape(-1), ends.reshape(-1)
    steps = np.float32((1 << bits) - 1)
    part = np.float32(np.float32(1) / steps)
    of_head, of_row = -(-head_dim // GROUP), ends.shape[2]
    values, least, largest = (
        np.empty(width, np.float32),
        np.empty(of_row, np.float32),
        np.empty(of_row, np.float32),
    )
    row = np.empty(8 // bits * codes.shape[1], np.uint8)
    for token in range(tokens):
        load(flat_ends, 2 * token * of_row, of_row, kind, least)
        load(flat_ends, (2 * token + 1) * of_row, of_row, kind, largest)
        _unpack(codes[token], bits, row)
        for group in range(of_row):
            begin = group // of_head * head_dim + group % of_head * GROUP
            count = min(GROUP, head_dim - group % of_head * GROUP)
            source, into = row[begin : begin + count], values[begin : begin + count]
            low, high = least[group], largest[group]
            for i in range(count):
                into[i] = _between(low, high, source[i], steps, part)
        _store_within(values, width, kind, flat, token * width)
