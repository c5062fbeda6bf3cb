"""XXH3-64 of host memory, on several threads, without the GIL."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvhold.kernels.numba_compile import compiled
from kvhold.kernels.numba_copy import SLICE_BYTES, _int64s, _take, on_threads
from kvhold.kernels.numba_xxh3 import SHORT_BYTES, START, STRIPE_BYTES, finish, fold
from kvhold.kernels.view import Int64s


def sum_ranges(addresses: Int64s, nbytes: Int64s, threads: int) -> npt.NDArray[np.uint64]:
    """[ranges]. Ranges must have more than SHORT_BYTES bytes."""
    assert (nbytes > SHORT_BYTES).all()
    sums = np.empty(addresses.size, np.uint64)
    threads = max(1, min(threads, int(nbytes.sum()) // SLICE_BYTES, addresses.size))
    on_threads(_sum_ranges, threads, (np.zeros(1, np.int64), addresses, nbytes, sums))
    return sums


@compiled(types.void(types.int64[::1], _int64s, _int64s, types.uint64[::1]))
def _sum_ranges(counter: Any, addresses: Any, nbytes: Any, sums: Any) -> None:
    state = np.empty(8, np.uint64)
    at = state.ctypes.data
    while True:
        number = _take(counter.ctypes.data, 1)
        if number >= addresses.size:
            break
        start, length = addresses[number], nbytes[number]
        state[:] = START
        fold(at, start, 0, (length - 1) // STRIPE_BYTES)
        sums[number] = finish(at, start + length - STRIPE_BYTES, length)
