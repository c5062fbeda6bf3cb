"""Arrays of one length that grow without a copy, in reserved addresses for 16 million items."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

_RESERVED = 1 << 24  # items
_FEWEST = 1 << 12
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which `mmap` lacks before Python 3.13


class Columns:
    def __init__(self, formats: Sequence[str], item_bytes: Sequence[int]) -> None:
        """formats: of `memoryview.cast`; item_bytes: by column. Raises OSError."""
        self.num_items = 0
        self._formats = formats
        self._item_bytes = item_bytes
        self._capacity = _RESERVED
        while True:
            try:
                self._maps = [_reserve(self._capacity * nbytes) for nbytes in item_bytes]
                break
            except OSError:
                if self._capacity == _FEWEST:
                    raise
                self._capacity //= 8
        self._views: list[memoryview[int]] = []

    @property
    def nbytes(self) -> int:
        return self.num_items * sum(self._item_bytes)

    @property
    def is_full(self) -> bool:
        return self.num_items == self._capacity

    def append(self) -> int:
        self.num_items += 1
        return self.num_items - 1

    def grow(self) -> None:
        """Double the room. The views have ended. Raises OSError; the items stay."""
        for view in self._views:
            view.release()
        for memory, nbytes in zip(self._maps, self._item_bytes, strict=True):
            memory.resize(2 * self._capacity * nbytes)
        self._capacity *= 2

    def views(self) -> "list[memoryview[int]]":
        """Only the first `num_items` items are in use."""
        self._views = [
            memoryview(memory).cast(code)  # type: ignore[call-overload]
            for memory, code in zip(self._maps, self._formats, strict=True)
        ]
        return self._views


def _reserve(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    with suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a small index takes 2 MiB a column
    return memory
