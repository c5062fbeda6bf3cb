"""Floats as bits, for the compiled code of quantising codecs.

After a change, delete `__pycache__`: numba misses changes of inlined functions.
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
Elements: TypeAlias = npt.NDArray[Any]

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
    """Ties to even. The value must be in range."""

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
    source = elements[begin : begin + count]
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
    """Round to nearest even. 16-bit kinds are capped at their largest value."""
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
