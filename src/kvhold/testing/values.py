"""Exact and slow, for every dtype of a layout."""

from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def as_float64(data: bytes | bytearray | memoryview, dtype: str) -> Floats:
    """[n] elements; exact, with infinities and NaN kept."""
    if dtype.startswith("float8"):
        return _float8_values(dtype)[np.frombuffer(data, np.uint8)]
    if dtype == "bfloat16":
        narrow = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        narrow = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes quiet
        return narrow.astype(np.float64)


def from_float64(values: Floats, dtype: str) -> bytes:
    if dtype == "bfloat16":
        bits = np.clip(values, -_BFLOAT16_MAX, _BFLOAT16_MAX).astype("<f4").view("<u4")
        return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))
    if dtype.startswith("float8"):
        return bytes(_nearest_float8(values, dtype))
    kind = np.dtype(dtype).newbyteorder("<")
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return bytes(np.clip(np.rint(values), limits.min, limits.max).astype(kind))
    return bytes(np.clip(values, np.finfo(kind).min, np.finfo(kind).max).astype(kind))


_BFLOAT16_MAX = 2.0**127 * (2 - 2**-7)


@cache
def _float8_values(dtype: str) -> Floats:
    """[256], the value of each byte.

    e4m3fn and e5m2: OCP 8-bit floating point specification. fnuz: bias 8, no infinity, one NaN at
    minus zero.
    """
    codes = np.arange(256)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (codes.astype("<u2") << 8).view("<f2").astype(np.float64)
    bias = {"float8_e4m3fn": 7, "float8_e4m3fnuz": 8}[dtype]
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(
        exponent == 0,
        mantissa / 8 * 2.0 ** (1 - bias),
        (1 + mantissa / 8) * 2.0 ** (exponent - bias),
    )
    values = np.where(codes & 128, -values, values)
    values[codes == 0x80 if bias == 8 else codes & 127 == 127] = np.nan
    return values


def _nearest_float8(values: Floats, dtype: str) -> npt.NDArray[np.uint8]:
    table = _float8_values(dtype)
    codes = np.flatnonzero(np.isfinite(table))
    codes = codes[np.argsort(table[codes], kind="stable")]
    known = table[codes]
    above = np.clip(np.searchsorted(known, values), 1, len(known) - 1)
    nearer = np.where(values - known[above - 1] <= known[above] - values, above - 1, above)
    found: npt.NDArray[np.uint8] = codes[nearer].astype(np.uint8)
    return found
