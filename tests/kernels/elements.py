"""Numbers as their bits, of the kinds that quantising code may meet."""

from typing import Any

import numpy as np

DTYPES = ["bfloat16", "float16", "float32"]
CONTENTS = ["normal", "any finite", "tiny", "zeros", "ties"]


def bits_of(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Cut to a bfloat16, rounded to the others."""
    values = values.astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return (
        values.view(np.uint32) if dtype == "float32" else values.astype(np.float16).view(np.uint16)
    )


def content(kind: str, dtype: str, size: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(size)
    if kind == "normal":
        return bits_of(rng.normal(0, 1, size) * 2.0 ** rng.integers(-5, 5, size), dtype)
    if kind == "any finite":  # denormals, the largest, both signs of zero
        bits = rng.integers(0, 1 << 32, size, np.uint32)
        bits = bits if dtype == "float32" else (bits >> 16).astype(np.uint16)
        mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}[dtype]
        return np.where(bits & mask == mask, bits & ~np.asarray(mask, bits.dtype), bits)
    if kind == "tiny":  # denormals of float32 and what lies just above; of float16, its own
        return bits_of(
            rng.normal(0, 1, size) * (2.0**-24 if dtype == "float16" else 2.0**-126), dtype
        )
    if kind == "zeros":
        return bits_of(rng.choice([0.0, -0.0], size), dtype)
    # Halves: beside the largest, 127 or 448, they fall between two codes.
    values = rng.integers(-256, 257, size) / 2
    values[:: size // 3 + 1] = rng.choice([127.0, 448.0])
    return bits_of(values, dtype)
