from typing import Any

import numpy as np
from numba import njit, types
from numpy.lib.stride_tricks import as_strided

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_floats import BFLOAT16, FLOAT16, FLOAT32, as_bits, float_to_half, load
from kvhold.kernels.rope import Rope
from kvhold.kernels.rotary import Turns

_KINDS = {
    np.dtype(np.uint16): BFLOAT16,
    np.dtype(np.float16): FLOAT16,
    np.dtype(np.float32): FLOAT32,
}


def rotate(keys: Any, turns: Turns, rope: Rope, out: Any) -> None:
    """Host memory."""
    source, into = _bits(keys), _bits(out)
    kind = _KINDS[keys.dtype] if isinstance(keys, np.ndarray) else _KINDS_OF_TORCH[str(keys.dtype)]
    for at in np.ndindex(source.shape[:-3]):
        _rotate_part(source[at], turns, rope, into[at], kind, is_same=out is keys)


def _rotate_part(
    source: Any, turns: Turns, rope: Rope, into: Any, kind: int, *, is_same: bool
) -> None:
    """[tokens, heads, head_dim], as bits"""
    if not source.size:
        return
    flat_source, flat_into = _flat(source), _flat(into)
    if flat_source is None:
        source, is_same = np.ascontiguousarray(source), False
        flat_source = source.reshape(-1)
    spare = into if flat_into is not None else np.empty(into.shape, into.dtype)
    if flat_into is None:
        flat_into, is_same = spare.reshape(-1), False
    _rotate(
        flat_source,
        *(stride // source.itemsize for stride in source.strides[:2]),
        flat_into,
        *(stride // spare.itemsize for stride in spare.strides[:2]),
        turns.cos,
        turns.sin,
        source.shape[1],
        rope.head_dim,
        rope.first,
        kind,
        rope.layout == "interleaved",
        not is_same,
    )
    if spare is not into:
        into[...] = spare


def _bits(keys: Any) -> Any:
    if not isinstance(keys, np.ndarray):
        import torch

        keys = keys.detach().view(torch.int32 if keys.itemsize == 4 else torch.int16).numpy()
    return keys.view(np.uint32 if keys.itemsize == 4 else np.uint16)


def _flat(part: Any) -> Any:
    """The elements from the first to the last, [n]; None: in another order."""
    size = part.itemsize
    if part.strides[-1] != size or any(stride < 0 or stride % size for stride in part.strides):
        return None
    extent = 1 + sum(
        (count - 1) * stride // size for count, stride in zip(part.shape, part.strides, strict=True)
    )
    return as_strided(part, (extent,), (size,), writeable=part.flags.writeable)


_KINDS_OF_TORCH = {"torch.bfloat16": BFLOAT16, "torch.float16": FLOAT16, "torch.float32": FLOAT32}


# --- compiled -------------------------------------------------------------------------------------


@njit(inline="always")
def _store(row: Any, count: int, kind: int, into: Any) -> None:
    """Round to nearest even."""
    if kind == BFLOAT16:
        for i in range(count):
            bits = as_bits(row[i])
            lowest = np.uint32(bits >> np.uint32(16) & np.uint32(1))
            into[i] = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + lowest) >> np.uint32(16))
    elif kind == FLOAT16:
        for i in range(count):
            into[i] = float_to_half(row[i])
    else:
        for i in range(count):
            into[i] = as_bits(row[i])


@compiled(
    *(
        types.void(
            readonly(kind),
            types.int64,
            types.int64,
            kind[::1],
            types.int64,
            types.int64,
            readonly(types.float32, 2),
            readonly(types.float32, 2),
            types.int64,
            types.int64,
            types.int64,
            types.int64,
            types.boolean,
            types.boolean,
        )
        for kind in (types.uint16, types.uint32)
    )
)
def _rotate(
    source: Any,
    source_token: int,
    source_head: int,
    into: Any,
    into_token: int,
    into_head: int,
    cos: Any,
    sin: Any,
    heads: int,
    head_dim: int,
    first: int,
    kind: int,
    is_interleaved: bool,
    copies_rest: bool,
) -> None:
    tokens, half = cos.shape
    row, turned = np.empty(2 * half, np.float32), np.empty(2 * half, np.float32)
    for token in range(tokens):
        c, s = cos[token], sin[token]
        for head in range(heads):
            at = token * source_token + head * source_head
            to = token * into_token + head * into_head
            load(source, at + first, 2 * half, kind, row)
            if is_interleaved:
                for i in range(half):
                    x, y = row[2 * i], row[2 * i + 1]
                    turned[2 * i] = np.float32(np.float32(x * c[i]) - np.float32(y * s[i]))
                    turned[2 * i + 1] = np.float32(np.float32(y * c[i]) + np.float32(x * s[i]))
            else:
                xs, ys = row[:half], row[half:]
                ones, others = turned[:half], turned[half:]
                for i in range(half):
                    ones[i] = np.float32(np.float32(xs[i] * c[i]) - np.float32(ys[i] * s[i]))
                    others[i] = np.float32(np.float32(ys[i] * c[i]) + np.float32(xs[i] * s[i]))
            if copies_rest:
                into[to : to + first] = source[at : at + first]
                rest = first + 2 * half
                into[to + rest : to + head_dim] = source[at + rest : at + head_dim]
            _store(turned, 2 * half, kind, into[to + first : to + first + 2 * half])
