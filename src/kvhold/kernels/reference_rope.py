from typing import Any

import numpy as np

from kvhold.kernels.rope import Rope
from kvhold.kernels.rotary import Rotations


def rotate(keys: Any, rotations: Rotations, rope: Rope, out: Any) -> None:
    """numpy, or torch on any device."""
    is_numpy = isinstance(keys, np.ndarray)
    cos, sin = (rotations.cos, rotations.sin) if is_numpy else rotations.on(str(keys.device))
    cos, sin = cos[:, None], sin[:, None]
    one, other = pairs(rope)
    x, y = _floats(keys[..., one]), _floats(keys[..., other])
    turned = x * cos - y * sin, y * cos + x * sin  # before `out`, which may be `keys`
    if out is not keys:
        out[...] = keys
    out[..., one], out[..., other] = (_rounded(values, keys) for values in turned)


def pairs(rope: Rope) -> tuple[slice, slice]:
    first, half, end = rope.first, rope.rotary_dim // 2, rope.first + rope.rotary_dim
    if rope.layout == "half":
        return slice(first, first + half), slice(first + half, end)
    return slice(first, end, 2), slice(first + 1, end, 2)


def _floats(keys: Any) -> Any:
    """float32"""
    if not isinstance(keys, np.ndarray):
        return keys.float()
    if keys.dtype == np.uint16:
        return (keys.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return keys.astype(np.float32)


def _rounded(values: Any, keys: Any) -> Any:
    """To nearest even."""
    if not isinstance(keys, np.ndarray):
        return values.to(keys.dtype)
    if keys.dtype != np.uint16:
        return values.astype(keys.dtype)
    bits = values.view(np.uint32)
    return (
        bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    ).astype(np.uint16)
