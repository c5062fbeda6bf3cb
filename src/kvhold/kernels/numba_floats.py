"""Numbers as their bits, for compiled code: what quantising codecs share.

    load(elements, begin, count, kind, row)       # bits of bfloat16, float16 or float32 to float32
    store(row, count, kind, elements, begin)      # and back, rounded to nearest even

To be called from compiled functions only, which take these in as they are compiled. numba's cache
does not look at files that a function
was taken in from: who changes this one deletes the `__pycache__` beside it.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Bytes: TypeAlias = npt.NDArray[np.uint8]
Codes: TypeAlias = npt.NDArray[np.int8]
Floats: TypeAlias = npt.NDArray[np.float32]
Elements: TypeAlias = npt.NDArray[Any]  # uint16 or uint32: the bits of floating-point numbers

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
LEAST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}

SIGN = np.uint32(0x8000_0000)
MAGNITUDE = np.uint32(0x7FFF_FFFF)


@intrinsic
def as_float(_: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), emit


@intrinsic
def as_bits(_: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@intrinsic
def half_to_float(_: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def float_to_half(_: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), emit


@intrinsic
def nearest(_: Any, value: Any) -> Any:
    """The nearest integer, ties to even, as int32; the value is within its range."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.call(
            builder.module.declare_intrinsic("llvm.rint", (ir.FloatType(),)), args
        )
        return builder.fptosi(rounded, ir.IntType(32))

    return types.int32(types.float32), emit


@njit(inline="always")
def to_bfloat16(value: Any) -> Any:
    bits = as_bits(value)
    magnitude = np.uint32(bits & MAGNITUDE)
    rounded = np.uint32(
        np.uint32(magnitude + np.uint32(0x7FFF) + (magnitude >> np.uint32(16) & np.uint32(1)))
        >> np.uint32(16)
    )
    return np.uint16(min(rounded, np.uint32(0x7F7F)) | np.uint32(bits & SIGN) >> np.uint32(16))


@njit(inline="always")
def load(elements: Any, begin: int, count: int, kind: int, row: Any) -> None:
    """`row[:count]` the numbers from `begin` on.

    Through this row, which stays in the nearest cache, the arithmetic is the same for all.
    """
    source = elements[
        begin : begin + count
    ]  # indices from 0 on: none can be negative, and the compiler uses vectors
    if kind == BFLOAT16:
        for i in range(count):
            row[i] = as_float(np.uint32(np.uint32(source[i]) << np.uint32(16)))
    elif kind == FLOAT16:
        for i in range(count):
            row[i] = half_to_float(np.uint16(source[i]))
    else:
        for i in range(count):
            row[i] = as_float(np.uint32(source[i]))


@njit(inline="always")
def store(row: Any, count: int, kind: int, elements: Any, begin: int) -> None:
    """The inverse of `load`: to nearest even, and no larger than the largest finite value."""
    into = elements[begin : begin + count]
    if kind == BFLOAT16:
        for i in range(count):
            into[i] = to_bfloat16(row[i])
    elif kind == FLOAT16:
        for i in range(count):
            into[i] = float_to_half(min(max(row[i], np.float32(-65504)), np.float32(65504)))
    else:
        for i in range(count):
            into[i] = as_bits(row[i])
