import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from kvhold.kernels.ranges import Ranges


@dataclass(frozen=True)
class EndedSums:
    found: npt.NDArray[np.uint64]

    def read(self) -> npt.NDArray[np.uint64]:
        return self.found


def begin_sums(ranges: Ranges, device: str) -> EndedSums:
    assert device == "cpu", "the reference reads host memory"
    return EndedSums(sum_ranges(ranges))


def sum_ranges(ranges: Ranges) -> npt.NDArray[np.uint64]:
    """[ranges]"""
    sums = np.empty(ranges.count, np.uint64)
    for number, (first, stop) in enumerate(
        zip(ranges.first[:-1].tolist(), ranges.first[1:].tolist(), strict=True)
    ):
        digest = xxh3_64()
        for piece in range(first, stop):
            nbytes = int(ranges.nbytes[piece])
            digest.update(
                memoryview((ctypes.c_uint8 * nbytes).from_address(int(ranges.addresses[piece])))
            )
        sums[number] = digest.intdigest()
    return sums
