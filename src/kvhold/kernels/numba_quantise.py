"""Quantise numbers to 8 bits and back, compiled: int8 by runs of channels, float8 e4m3 by columns.

Elements are finite. A scale is stored as the largest magnitude: divided by 127 or 448 it could
vanish.
"""

from typing import Any

import numpy as np
from numba import njit, types

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_floats import (
    FLOAT32,
    KINDS,
    MAGNITUDE,
    SIGN,
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

E4M3_MAX = 448.0


def int8_encode(
    elements: Elements, dtype: str, head_dim: int, run: int, codes: Codes, largest: Floats
) -> None:
    """elements, codes: [rows * head_dim]
    largest: [rows * runs of a row]; a row's last run may be shorter
    """
    _check_int8(elements, head_dim, run, codes, largest)
    _int8_encode(elements, KINDS[dtype], head_dim, run, codes, largest)


def int8_decode(
    codes: Codes, largest: Floats, dtype: str, head_dim: int, run: int, elements: Elements
) -> None:
    _check_int8(elements, head_dim, run, codes, largest)
    _int8_decode(codes, largest, KINDS[dtype], head_dim, run, elements)


def column_largest(elements: Elements, dtype: str, planes: int, width: int) -> Floats:
    """float32, of each column of [planes, tokens, width]; infinity or NaN if an element is not
    finite.
    """
    assert elements.size % (planes * width) == 0
    largest = np.zeros((planes, width), np.float32)
    _column_largest(elements, KINDS[dtype], largest)
    return largest


def all_finite(elements: Elements, dtype: str) -> bool:
    mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}[dtype]
    return bool(_all_finite(elements, mask))


def fp8_encode(elements: Elements, dtype: str, largest: Floats, codes: Bytes) -> None:
    """elements: [planes, tokens, width]
    largest: [planes, width], at least the largest magnitude of each column
    """
    assert codes.size == elements.size and elements.size % largest.size == 0
    _fp8_encode(elements, KINDS[dtype], largest, codes)


def fp8_decode(codes: Bytes, largest: Floats, dtype: str, elements: Elements) -> None:
    assert codes.size == elements.size and elements.size % largest.size == 0
    _fp8_decode(codes, largest, KINDS[dtype], elements)


def _check_int8(elements: Elements, head_dim: int, run: int, codes: Codes, largest: Floats) -> None:
    rows = elements.size // head_dim
    assert (
        run >= 1
        and elements.size == rows * head_dim == codes.size
        and largest.size == rows * -(-head_dim // run)
    )


_SMALL = np.float32(2.0**-60)  # a smaller scale's inverse may overflow
_UP = np.float32(2.0**64)
_STEPS = np.float32(127)
_STEP = np.float32(1 / 127)  # 127 times this is 1
_MOST = np.float32(E4M3_MAX)
_PART = np.float32(1 / E4M3_MAX)  # 448 times this is 1
_ONE = np.float32(1)


@njit(inline="always")
def _to_e4m3(value: Any) -> Any:
    bits = as_bits(value)
    magnitude = np.uint32(bits & MAGNITUDE)
    # from 2**-6 on: drop 20 bits of mantissa; the exponent's bias goes from 127 to 7
    normal = np.uint32(
        np.uint32(
            magnitude
            + np.uint32(0x7FFFF)
            + (magnitude >> np.uint32(20) & np.uint32(1))
            - np.uint32(120 << 23)
        )
        >> np.uint32(20)
    )
    # below: adding 2**14 rounds, where float32 has steps of 2**-9
    below = np.uint32(
        as_bits(np.float32(as_float(magnitude) + np.float32(16384))) - np.uint32(141 << 23)
    )
    code = below if magnitude < np.uint32(121 << 23) else min(normal, np.uint32(0x7E))
    return np.uint8(code | np.uint32(bits & SIGN) >> np.uint32(24))


@njit(inline="always")
def _from_e4m3(code: Any) -> Any:
    """480 for NaN."""
    bits = np.uint32(code)
    low = np.uint32(bits & np.uint32(0x7F))
    value = as_float(np.uint32((low << np.uint32(20)) + np.uint32(120 << 23)))
    # denormal codes: 2**-7 * (1 + m/8) becomes 2**-6 * m/8
    small = np.float32(np.float32(value - np.float32(2.0**-7)) * np.float32(2))
    value = value if low >= np.uint32(8) else small
    return as_float(np.uint32(as_bits(value) | np.uint32(bits & np.uint32(0x80)) << np.uint32(24)))


@compiled(*(types.boolean(readonly(kind), types.int64) for kind in (types.uint16, types.uint32)))
def _all_finite(elements: Any, mask: int) -> bool:
    wild = 0
    for i in range(elements.size):
        wild += np.int64(elements[i]) & mask == mask
    return wild == 0


_UINTS = (types.uint16, types.uint32)
_u8s, _i8s, _f32s = types.uint8[::1], types.int8[::1], types.float32[::1]


@compiled(
    *(
        types.void(readonly(kind), types.int64, types.int64, types.int64, _i8s, _f32s)
        for kind in _UINTS
    )
)
def _int8_encode(
    elements: Any, kind: int, head_dim: int, run: int, codes: Any, largest: Any
) -> None:
    values = np.empty(run, np.float32)
    runs = largest.size // (elements.size // head_dim)
    for index in range(largest.size):
        begin = index // runs * head_dim + index % runs * run
        count = min(run, head_dim - index % runs * run)
        load(elements, begin, count, kind, values)
        most = np.uint32(0)
        for i in range(count):
            most = max(most, np.uint32(as_bits(values[i]) & MAGNITUDE))
        peak = as_float(most)
        largest[index] = peak
        up = _UP if peak < _SMALL else _ONE
        scale = np.float32(0)
        if peak > np.float32(0):
            scale = np.float32(_STEPS / np.float32(peak * up))
        into = codes[begin : begin + count]
        for i in range(count):
            into[i] = np.int8(nearest(np.float32(np.float32(values[i] * up) * scale)))


@compiled(
    *(
        types.void(
            readonly(types.int8),
            readonly(types.float32),
            types.int64,
            types.int64,
            types.int64,
            kind[::1],
        )
        for kind in _UINTS
    )
)
def _int8_decode(
    codes: Any, largest: Any, kind: int, head_dim: int, run: int, elements: Any
) -> None:
    values = np.empty(run, np.float32)
    runs = largest.size // (elements.size // head_dim)
    for index in range(largest.size):
        begin = index // runs * head_dim + index % runs * run
        count = min(run, head_dim - index % runs * run)
        peak = largest[index]
        source = codes[begin : begin + count]
        for i in range(count):
            values[i] = np.float32(np.float32(np.float32(source[i]) * _STEP) * peak)
        store(values, count, kind, elements, begin)


@compiled(*(types.void(readonly(kind), types.int64, types.float32[:, ::1]) for kind in _UINTS))
def _column_largest(elements: Any, kind: int, largest: Any) -> None:
    planes, width = largest.shape
    tokens = elements.size // largest.size
    most = np.empty(width, elements.dtype)
    mask = elements.dtype.type(MAGNITUDE if kind == FLOAT32 else 0x7FFF)
    for plane in range(planes):
        most[:] = 0
        for token in range(tokens):
            row = elements[(plane * tokens + token) * width : (plane * tokens + token + 1) * width]
            for i in range(width):
                most[i] = max(most[i], elements.dtype.type(row[i] & mask))
        load(most, 0, width, kind, largest[plane])


@compiled(
    *(types.void(readonly(kind), types.int64, readonly(types.float32, 2), _u8s) for kind in _UINTS)
)
def _fp8_encode(elements: Any, kind: int, largest: Any, codes: Any) -> None:
    planes, width = largest.shape
    tokens = elements.size // largest.size
    values, ups, scales = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.float32),
    )
    for plane in range(planes):
        for i in range(width):
            peak = largest[plane, i]
            ups[i] = _UP if peak < _SMALL else _ONE
            scales[i] = np.float32(0)
            if peak > np.float32(0):
                scales[i] = np.float32(_MOST / np.float32(peak * ups[i]))
        is_small = False
        for i in range(width):
            is_small |= ups[i] != _ONE
        for token in range(tokens):
            begin = (plane * tokens + token) * width
            load(elements, begin, width, kind, values)
            into = codes[begin : begin + width]
            if is_small:
                for i in range(width):
                    values[i] *= ups[i]
            for i in range(width):
                into[i] = _to_e4m3(np.float32(values[i] * scales[i]))


@compiled(
    *(
        types.void(readonly(types.uint8), readonly(types.float32, 2), types.int64, kind[::1])
        for kind in _UINTS
    )
)
def _fp8_decode(codes: Any, largest: Any, kind: int, elements: Any) -> None:
    planes, width = largest.shape
    tokens = elements.size // largest.size
    values = np.empty(width, np.float32)
    for plane in range(planes):
        for token in range(tokens):
            begin = (plane * tokens + token) * width
            for i in range(width):
                values[i] = np.float32(
                    np.float32(_from_e4m3(codes[begin + i]) * _PART) * largest[plane, i]
                )
            store(values, width, kind, elements, begin)
