"""Floats as bits, for Triton kernels, with the results of numba_floats.py.

Launch with EXACT: a fused product and sum would give other codes.
"""

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}

_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)


@triton.jit
def load_floats(at, mask, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32; 0 outside the mask."""
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
    """Round to nearest even. 16-bit kinds are capped at their largest value. No NaN."""
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
    """int32 bits, which sort like |values|."""
    return (values.to(tl.uint32, bitcast=True) & _MAGNITUDE).to(tl.int32, bitcast=True)


@triton.jit
def nearest(values):  # type: ignore[no-untyped-def]
    """int32, ties to even, of magnitudes below 2**22."""
    return (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B40_0000
