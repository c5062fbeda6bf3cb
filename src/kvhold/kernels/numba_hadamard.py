"""Rotate vectors and code them in 4 bits, compiled (docs/format.md, turboquant4)."""

from hashlib import blake2b
from typing import Any

import numpy as np
from numba import njit, types

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_floats import (
    FLOAT32,
    KINDS,
    MAGNITUDE,
    Bytes,
    Elements,
    Floats,
    as_bits,
    as_float,
    load,
    store,
)

RUN = 128
KEPT = np.float32(-1)


def turned_size(count: int) -> int:
    return 1 << (count - 1).bit_length()


def run_sizes(head_dim: int) -> list[int]:
    return [min(RUN, head_dim - begin) for begin in range(0, head_dim, RUN)]


def head_bytes(head_dim: int) -> int:
    return sum(-(-turned_size(count) // 2) for count in run_sizes(head_dim))


def encode(
    elements: Elements, dtype: str, *, head_dim: int, limit: float, codes: Bytes, scales: Floats
) -> None:
    """[heads * head_dim] -> codes [heads, head_bytes], scales [heads, runs].

    A scale is KEPT if the error would exceed `limit`.
    """
    _check(elements, head_dim, codes, scales)
    _encode(elements, KINDS[dtype], head_dim, limit, codes, scales, SIGNS, LEVELS)


def decode(codes: Bytes, scales: Floats, dtype: str, *, head_dim: int, elements: Elements) -> None:
    """KEPT vectors become zeros. Scales must be finite."""
    _check(elements, head_dim, codes, scales)
    _decode(codes, scales, KINDS[dtype], head_dim, elements, SIGNS, LEVELS)


def _check(elements: Elements, head_dim: int, codes: Bytes, scales: Floats) -> None:
    heads = elements.size // head_dim
    assert head_dim >= 1 and elements.shape == (heads * head_dim,)
    assert codes.shape == (heads, head_bytes(head_dim)) and scales.shape == (
        heads,
        -(-head_dim // RUN),
    )


def _signs() -> Floats:
    bits = np.unpackbits(
        np.frombuffer(blake2b(b"kvhold-signs-1", digest_size=RUN // 8).digest(), np.uint8),
        bitorder="little",
    )
    return (1 - 2 * bits.astype(np.float32)).astype(np.float32)


SIGNS = _signs()
_UPPER = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326], np.float32)
LEVELS = np.concatenate([_UPPER, -_UPPER])


_UINTS = (types.uint16, types.uint32)
_LARGEST = np.float32(np.finfo(np.float32).max)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)


@njit(inline="always")
def _stage(source: Any, into: Any, half: int) -> None:
    second = source[half:]
    for i in range(half):
        into[2 * i] = np.float32(source[i] + second[i])
        into[2 * i + 1] = np.float32(source[i] - second[i])


@njit(inline="always")
def _turn(row: Any, spare: Any, size: int) -> Any:
    stages = 0
    while 1 << stages < size:
        stages += 1
    for _ in range(stages // 2):
        _stage(row, spare, size // 2)
        _stage(spare, row, size // 2)
    if stages % 2:
        _stage(row, spare, size // 2)
        for i in range(size):
            row[i] = spare[i]


@njit(inline="always")
def _sum(row: Any, size: int) -> Any:
    half = size // 2
    while half >= 1:
        second = row[half:size]
        for i in range(half):
            row[i] = np.float32(row[i] + second[i])
        half //= 2
    return row[0]


@njit(inline="always")
def _restore(
    source: Any, scale: Any, signs: Any, levels: Any, size: int, row: Any, spare: Any
) -> None:
    half = (size + 1) // 2
    for i in range(half):
        row[i] = levels[source[i] & 15]
    for i in range(size - half):
        row[half + i] = levels[source[i] >> 4]
    _turn(row, spare, size)
    for i in range(size):
        row[i] = np.float32(np.float32(row[i] * scale) * signs[i])


@njit(inline="always")
def _middle(levels: Any, lower: int) -> Any:
    return np.float32(np.float32(levels[lower] + levels[lower + 1]) * _HALF)


@njit(inline="always")
def _size_of(count: int) -> int:
    size = 1
    while size < count:
        size *= 2
    return size


@compiled(
    *(
        types.void(
            readonly(kind),
            types.int64,
            types.int64,
            types.float32,
            types.uint8[:, ::1],
            types.float32[:, ::1],
            readonly(types.float32),
            readonly(types.float32),
        )
        for kind in _UINTS
    )
)
def _encode(
    elements: Any,
    kind: int,
    head_dim: int,
    limit: Any,
    codes: Any,
    scales: Any,
    signs: Any,
    levels: Any,
) -> None:
    heads, runs = scales.shape
    values, row, spare = (
        np.empty(RUN, np.float32),
        np.empty(RUN, np.float32),
        np.empty(RUN, np.float32),
    )
    products, squares, code = (
        np.empty(RUN, np.float32),
        np.empty(RUN, np.float32),
        np.empty(RUN, np.uint8),
    )
    b0, b1, b2, b3 = _middle(levels, 0), _middle(levels, 1), _middle(levels, 2), _middle(levels, 3)
    b4, b5, b6 = _middle(levels, 4), _middle(levels, 5), _middle(levels, 6)
    for head in range(heads):
        at = 0
        for run in range(runs):
            count = min(RUN, head_dim - run * RUN)
            size = _size_of(count)
            half = (size + 1) // 2
            into = codes[head, at : at + half]
            at += half
            load(elements, head * head_dim + run * RUN, count, kind, values)
            most = np.uint32(0)
            for i in range(count):
                most = max(most, np.uint32(as_bits(values[i]) & MAGNITUDE))
            exponent = np.uint32(min(np.uint32(most >> np.uint32(23)), np.uint32(253)))
            if exponent == np.uint32(0):
                into[:] = np.uint8(0)
                scales[head, run] = _ZERO if as_float(most) <= limit else KEPT
                continue
            up, down = (
                as_float(np.uint32((np.uint32(254) - exponent) << np.uint32(23))),
                as_float(np.uint32(exponent << np.uint32(23))),
            )
            for i in range(count):
                row[i] = np.float32(np.float32(values[i] * up) * signs[i])
            row[count:size] = _ZERO
            _turn(row, spare, size)
            for i in range(size):
                squares[i] = np.float32(row[i] * row[i])
            inverse = np.float32(_ONE / np.sqrt(np.float32(_sum(squares, size) / np.float32(size))))
            for i in range(size):
                place = np.float32(row[i] * inverse)
                apart = abs(place)
                lower = (
                    np.int32(apart > b0)
                    + np.int32(apart > b1)
                    + np.int32(apart > b2)
                    + np.int32(apart > b3)
                )
                found = np.int32(
                    lower + np.int32(apart > b4) + np.int32(apart > b5) + np.int32(apart > b6)
                )
                code[i] = np.uint8(np.int32(found + (np.int32(place < _ZERO) << np.int32(3))))
            for i in range(size):
                level = levels[code[i] & 15]
                products[i] = np.float32(row[i] * level)
                squares[i] = np.float32(level * level)
            best = np.float32(_sum(products, size) / _sum(squares, size))
            scale = np.float32(np.float32(best / np.float32(size)) * down)
            for i in range(size - half):
                into[i] = np.uint8(code[i] | np.uint8(code[half + i] << np.uint8(4)))
            for i in range(size - half, half):
                into[i] = code[i]
            _restore(into, scale, signs, levels, size, row, spare)
            # as bits, infinity is above all numbers, and NaN above infinity
            worst = np.uint32(0)
            for i in range(count):
                worst = max(worst, np.uint32(as_bits(np.float32(row[i] - values[i])) & MAGNITUDE))
            if as_float(worst) <= limit and scale <= _LARGEST:
                scales[head, run] = scale
            else:
                into[:] = np.uint8(0)
                scales[head, run] = KEPT


@compiled(
    *(
        types.void(
            readonly(types.uint8, 2),
            readonly(types.float32, 2),
            types.int64,
            types.int64,
            kind[::1],
            readonly(types.float32),
            readonly(types.float32),
        )
        for kind in _UINTS
    )
)
def _decode(
    codes: Any, scales: Any, kind: int, head_dim: int, elements: Any, signs: Any, levels: Any
) -> None:
    heads, runs = scales.shape
    row, spare = np.empty(RUN, np.float32), np.empty(RUN, np.float32)
    for head in range(heads):
        at = 0
        for run in range(runs):
            count = min(RUN, head_dim - run * RUN)
            size = _size_of(count)
            half = (size + 1) // 2
            scale = scales[head, run]
            _restore(
                codes[head, at : at + half],
                scale if scale > _ZERO else _ZERO,
                signs,
                levels,
                size,
                row,
                spare,
            )
            at += half
            if kind == FLOAT32:
                for i in range(count):
                    row[i] = min(max(row[i], -_LARGEST), _LARGEST)
            store(row, count, kind, elements, head * head_dim + run * RUN)
