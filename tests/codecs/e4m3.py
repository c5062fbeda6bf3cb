"""The codecs' float8_e4m3fn arithmetic, applied to arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_quantise import _from_e4m3, _to_e4m3


def float_to_e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Convert to nearest even, above 448 to 448, NaN to NaN."""
    codes = np.empty(values.size, np.uint8)
    _convert_to_e4m3(np.ascontiguousarray(values).reshape(-1), codes)
    return codes.reshape(values.shape)


def e4m3_to_float(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    values = np.empty(codes.size, np.float32)
    _convert_from_e4m3(np.ascontiguousarray(codes).reshape(-1), values)
    return values.reshape(codes.shape)


@compiled(types.void(readonly(types.float32), types.uint8[::1]))  # type: ignore[untyped-decorator]
def _convert_to_e4m3(values: Any, codes: Any) -> None:
    for i in range(values.size):
        codes[i] = _to_e4m3(values[i])
        if np.isnan(values[i]):
            codes[i] |= np.uint8(0x7F)


@compiled(types.void(readonly(types.uint8), types.float32[::1]))  # type: ignore[untyped-decorator]
def _convert_from_e4m3(codes: Any, values: Any) -> None:
    for i in range(codes.size):
        value = _from_e4m3(codes[i])
        if codes[i] & 0x7F == 0x7F:
            value = np.float32(np.nan)
        values[i] = value
