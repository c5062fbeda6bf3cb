"""Vectors turned so that their numbers become alike, then into 4 bits, compiled.

    encode(elements, "bfloat16", head_dim=128, limit=limit, codes=codes, scales=scales)
    decode(codes, scales, "bfloat16", head_dim=128, elements=elements)

A vector is a run of 128 channels of a head, the last one of a head shorter, filled up with zeros to
a power of two. It is turned by random signs and a Hadamard matrix, which spreads whatever it is
over all places like normal numbers; these become the nearest of 16 levels, which for normal numbers
are the best (Lloyd and Max). What an encoder writes it decodes too, by the same operations on
float32 in the same order, so it knows each error.

Any thread; the GIL is released. Sizes are asserted before compiled code is entered.
"""

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
KEPT = np.float32(-1)  # the scale of a vector whose error would be larger than the limit


def turned_size(count: int) -> int:
    """Places of a vector of `count` elements: the next power of two."""
    return 1 << (count - 1).bit_length()


def run_sizes(head_dim: int) -> list[int]:
    """Elements of each run of a head."""
    return [min(RUN, head_dim - begin) for begin in range(0, head_dim, RUN)]


def head_bytes(head_dim: int) -> int:
    """Of the codes of a head: half a byte a place."""
    return sum(-(-turned_size(count) // 2) for count in run_sizes(head_dim))


def encode(
    elements: Elements, dtype: str, *, head_dim: int, limit: float, codes: Bytes, scales: Floats
) -> None:
    """elements [heads * head_dim] to codes [heads, head_bytes] and scales [heads, runs], KEPT where
    the error would be above `limit`.
    """
    _check(elements, head_dim, codes, scales)
    _encode(elements, KINDS[dtype], head_dim, limit, codes, scales, SIGNS, LEVELS)


def decode(codes: Bytes, scales: Floats, dtype: str, *, head_dim: int, elements: Elements) -> None:
    """The inverse, as near as the bits allow; zeros for vectors that are KEPT.

    Scales are finite.
    """
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
    """[RUN] 1 and -1."""
    bits = np.unpackbits(
        np.frombuffer(blake2b(b"kvhold-signs-1", digest_size=RUN // 8).digest(), np.uint8),
        bitorder="little",
    )
    return (1 - 2 * bits.astype(np.float32)).astype(np.float32)


SIGNS = _signs()
_UPPER = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326], np.float32)
LEVELS = np.concatenate([_UPPER, -_UPPER])


# --- compiled -------------------------------------------------------------------------------------

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
    """The Hadamard transform of `row[:size]`: sums and differences of what is half of `size` apart,
    then a quarter, and so on.

    What was `i` and `i + half` apart goes to `2 * i` and `2 * i + 1`: after all stages everything
    is back in its place, and each stage is the same loop over whole vectors.
    """
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
    """Of `row[:size]`, a power of two, by halves; `row` is lost."""
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
    """`row[:size]` of the codes, packed."""
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
            if exponent == np.uint32(
                0
            ):  # all zeros, or so near that a layer's limit does not see it
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
            # The scale that leaves the least error, which is nearly the vector's own.
            best = np.float32(_sum(products, size) / _sum(squares, size))
            scale = np.float32(np.float32(best / np.float32(size)) * down)
            for i in range(size - half):
                into[i] = np.uint8(code[i] | np.uint8(code[half + i] << np.uint8(4)))
            for i in range(size - half, half):
                into[i] = code[i]
            _restore(into, scale, signs, levels, size, row, spare)
            worst = np.uint32(
                0
            )  # as bits, of which infinity is above all numbers and NaN above that
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
