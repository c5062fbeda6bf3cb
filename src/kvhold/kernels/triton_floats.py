"""Numbers as their bits, for Triton kernels: what numba_floats.py is for compiled code, with the
same values.

    values = load_floats(elements + i, mask, BFLOAT16)  # bits of bfloat16, float16 or float32 to
    float32
    store_floats(elements + i, values, mask, BFLOAT16)         # and back, rounded to nearest even

To be called from kernels only. Those that compute with floats are launched with EXACT: a product
and a sum fused into one rounding would give other codes than the host does.
"""

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}

_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)


@triton.jit
def load_floats(at, mask, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of the numbers at `at`; 0 where the mask is not set. kind: as in
    numba_floats.KINDS.
    """
    bits = tl.load(at, mask=mask, other=0)
    if kind == 0:
        values = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif kind == 1:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def store_floats(at, values, mask, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse: to nearest even, and in the 16-bit kinds no larger than the largest finite
    value. No value is NaN.
    """
    if kind == 0:
        bits = values.to(tl.uint32, bitcast=True)
        magnitude = bits & _MAGNITUDE
        rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16
        tl.store(
            at, (tl.minimum(rounded, 0x7F7F) | (bits & 0x8000_0000) >> 16).to(tl.uint16), mask=mask
        )
    elif kind == 1:
        capped = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
        tl.store(at, capped.to(tl.float16).to(tl.uint16, bitcast=True), mask=mask)
    else:
        tl.store(at, values.to(tl.uint32, bitcast=True), mask=mask)


@triton.jit
def magnitudes_of(values):  # type: ignore[no-untyped-def]
    """int32 bits of |values|, which are in the same order."""
    return (values.to(tl.uint32, bitcast=True) & _MAGNITUDE).to(tl.int32, bitcast=True)


@triton.jit
def nearest(values):  # type: ignore[no-untyped-def]
    """The nearest integer, ties to even, as int32, of magnitudes below 2**22: what an addition to
    1.5 * 2**23 rounds to.
    """
    return (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B40_0000
