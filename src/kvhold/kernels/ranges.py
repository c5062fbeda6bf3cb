from dataclasses import dataclass

import numpy as np

from kvhold.kernels.view import Int64s
from kvhold.kernels.xxh3 import SHORT_BYTES

_WORD_BYTES = 8
_BLOCK_BYTES = 1024  # of XXH3


@dataclass(frozen=True)
class Ranges:
    """Ranges of device memory. Range i has the pieces `first[i]` to `first[i + 1]`, end to end.

    first:             int64 [ranges + 1]
    addresses, nbytes: int64 [pieces]
    """

    first: Int64s
    addresses: Int64s
    nbytes: Int64s

    @property
    def count(self) -> int:
        return self.first.size - 1

    def suits(self, device: str) -> bool:
        """On a GPU, all words are aligned, and only a range's last piece ends within a block."""
        if device == "cpu":
            return True
        if not self.count or int(np.diff(self.first).min()) < 1:
            return False
        is_last = np.zeros(self.nbytes.size, bool)
        is_last[self.first[1:] - 1] = True
        bits = int(np.bitwise_or.reduce(self.addresses | self.nbytes))
        return (
            bits % _WORD_BYTES == 0
            and not (self.nbytes[~is_last] % _BLOCK_BYTES).any()
            and int(self.nbytes.min()) > SHORT_BYTES
        )
