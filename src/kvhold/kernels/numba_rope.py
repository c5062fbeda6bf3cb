from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.lib.stride_tricks import as_strided

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_copy import LINE, prefetch
from kvhold.kernels.numba_floats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    KINDS,
    as_bits,
    as_float,
    float_to_half,
    half_to_float,
)
from kvhold.kernels.rope import Rope, dtype_of
from kvhold.kernels.rotary import Rotations


def rotate(keys: Any, rotations: Rotations, rope: Rope, out: Any) -> None:
    """Host memory."""
    source, into = _bits(keys), _bits(out)
    if out is not keys:
        for rest in (slice(0, rope.first), slice(rope.first + rope.rotary_dim, None)):
            into[..., rest] = source[..., rest]
    turned = slice(rope.first, rope.first + rope.rotary_dim)
    call = _BY_KIND[rope.layout][KINDS[dtype_of(keys)]]
    for at in np.ndindex(source.shape[:-3]):
        _turn_part(call, source[at][..., turned], rotations, into[at][..., turned])


def _turn_part(call: Callable[..., None], source: Any, rotations: Rotations, into: Any) -> None:
    """[tokens, heads, rotary_dim], as bits"""
    if not source.size:
        return
    if (flat := _flat(source)) is None:
        source = np.ascontiguousarray(source)
        flat = source.reshape(-1)
    spare = into
    if (flat_out := _flat(into)) is None:
        spare = np.empty(into.shape, into.dtype)
        flat_out = spare.reshape(-1)
    call(
        flat,
        *(stride // source.itemsize for stride in source.strides[:2]),
        flat_out,
        *(stride // spare.itemsize for stride in spare.strides[:2]),
        rotations.cos.reshape(-1),
        rotations.sin.reshape(-1),
        source.shape[1],
        source.shape[2] // 2,
    )
    if spare is not into:
        into[...] = spare


def _bits(keys: Any) -> Any:
    if not isinstance(keys, np.ndarray):
        import torch

        keys = keys.detach().view(torch.int32 if keys.itemsize == 4 else torch.int16).numpy()
    return keys.view(np.uint32 if keys.itemsize == 4 else np.uint16)


def _flat(part: Any) -> Any:
    """From the first element to the last, [n]; None: in another order."""
    size = part.itemsize
    if part.strides[-1] != size or any(stride < 0 or stride % size for stride in part.strides):
        return None
    extent = 1 + sum(
        (count - 1) * stride // size for count, stride in zip(part.shape, part.strides, strict=True)
    )
    return as_strided(part, (extent,), (size,), writeable=part.flags.writeable)


# unsigned indices cannot be negative, so the loops vectorise
_U = np.uint64
_HALF_BITS = np.uint32(16)
_LEAD_BYTES = 4096


@intrinsic
def _prefetch(_: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@njit(inline="always")
def _to_bfloat16(value: Any) -> Any:
    """To nearest even."""
    bits = as_bits(value)
    lowest = np.uint32(bits >> _HALF_BITS & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + lowest) >> _HALF_BITS)


@njit(inline="always")
def _value(source: Any, at: Any, kind: int) -> Any:
    if kind == BFLOAT16:
        return as_float(np.uint32(np.uint32(source[at]) << _HALF_BITS))
    if kind == FLOAT16:
        return half_to_float(np.uint16(source[at]))
    return as_float(np.uint32(source[at]))


@njit(inline="always")
def _write(values: Any, count: int, kind: int, into: Any, at: Any) -> None:
    if kind == BFLOAT16:
        for i in range(count):
            into[at + _U(i)] = _to_bfloat16(values[i])
    elif kind == FLOAT16:
        for i in range(count):
            into[at + _U(i)] = float_to_half(values[i])
    else:
        for i in range(count):
            into[at + _U(i)] = as_bits(values[i])


@njit(inline="always")
def _fetch_ahead(source: Any, at: Any, half: int, kind: int) -> None:
    """Twice as fast, if not cached."""
    item = 4 if kind == FLOAT32 else 2
    begin = source.ctypes.data + item * np.int64(at) + _LEAD_BYTES
    for line in range(0, 2 * half * item, LINE):
        _prefetch(begin + line)


@njit(inline="always")
def _turn_halves(
    source: Any,
    source_token: int,
    source_head: int,
    into: Any,
    into_token: int,
    into_head: int,
    cos: Any,
    sin: Any,
    heads: int,
    half: int,
    kind: int,
) -> None:
    xs, ys = np.empty(half, np.float32), np.empty(half, np.float32)
    for token in range(cos.size // half):
        of_token = _U(token * half)
        for head in range(heads):
            at = _U(token * source_token + head * source_head)
            to = _U(token * into_token + head * into_head)
            _fetch_ahead(source, at, half, kind)
            for i in range(half):
                x = _value(source, at + _U(i), kind)
                y = _value(source, at + _U(half) + _U(i), kind)
                c, s = cos[of_token + _U(i)], sin[of_token + _U(i)]
                xs[i] = np.float32(np.float32(x * c) - np.float32(y * s))
                ys[i] = np.float32(np.float32(y * c) + np.float32(x * s))
            _write(xs, half, kind, into, to)
            _write(ys, half, kind, into, to + _U(half))


@njit(inline="always")
def _turn_pairs(
    source: Any,
    source_token: int,
    source_head: int,
    into: Any,
    into_token: int,
    into_head: int,
    cos: Any,
    sin: Any,
    heads: int,
    half: int,
    kind: int,
) -> None:
    row = np.empty(2 * half, np.float32)
    for token in range(cos.size // half):
        of_token = _U(token * half)
        for head in range(heads):
            at = _U(token * source_token + head * source_head)
            to = _U(token * into_token + head * into_head)
            _fetch_ahead(source, at, half, kind)
            for i in range(half):
                x = _value(source, at + _U(2 * i), kind)
                y = _value(source, at + _U(2 * i + 1), kind)
                c, s = cos[of_token + _U(i)], sin[of_token + _U(i)]
                row[2 * i] = np.float32(np.float32(x * c) - np.float32(y * s))
                row[2 * i + 1] = np.float32(np.float32(y * c) + np.float32(x * s))
            _write(row, 2 * half, kind, into, to)


def _signature(kind: Any) -> Any:
    strides = types.int64, types.int64
    tables = readonly(types.float32), readonly(types.float32)
    return types.void(readonly(kind), *strides, kind[::1], *strides, *tables, *strides)


# one for each kind and layout: with constants the loops vectorise


@compiled(_signature(types.uint16))
def _bfloat16_half(
    k: Any, a: int, b: int, o: Any, c: int, d: int, cos: Any, sin: Any, h: int, n: int
) -> None:
    _turn_halves(k, a, b, o, c, d, cos, sin, h, n, BFLOAT16)


@compiled(_signature(types.uint16))
def _bfloat16_interleaved(
    k: Any, a: int, b: int, o: Any, c: int, d: int, cos: Any, sin: Any, h: int, n: int
) -> None:
    _turn_pairs(k, a, b, o, c, d, cos, sin, h, n, BFLOAT16)


@compiled(_signature(types.uint16))
def _float16_half(
    k: Any, a: int, b: int, o: Any, c: int, d: int, cos: Any, sin: Any, h: int, n: int
) -> None:
    _turn_halves(k, a, b, o, c, d, cos, sin, h, n, FLOAT16)


@compiled(_signature(types.uint16))
def _float16_interleaved(
    k: Any, a: int, b: int, o: Any, c: int, d: int, cos: Any, sin: Any, h: int, n: int
) -> None:
    _turn_pairs(k, a, b, o, c, d, cos, sin, h, n, FLOAT16)


@compiled(_signature(types.uint32))
def _float32_half(
    k: Any, a: int, b: int, o: Any, c: int, d: int, cos: Any, sin: Any, h: int, n: int
) -> None:
    _turn_halves(k, a, b, o, c, d, cos, sin, h, n, FLOAT32)


@compiled(_signature(types.uint32))
def _float32_interleaved(
    k: Any, a: int, b: int, o: Any, c: int, d: int, cos: Any, sin: Any, h: int, n: int
) -> None:
    _turn_pairs(k, a, b, o, c, d, cos, sin, h, n, FLOAT32)


_BY_KIND = {
    "half": {BFLOAT16: _bfloat16_half, FLOAT16: _float16_half, FLOAT32: _float32_half},
    "interleaved": {
        BFLOAT16: _bfloat16_interleaved,
        FLOAT16: _float16_interleaved,
        FLOAT32: _float32_interleaved,
    },
}
