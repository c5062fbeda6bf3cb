"""They begin at a page, as direct I/O needs."""

import mmap
from ctypes import addressof, c_char

_MOST_ON_HEAP = 64 << 10


def page_aligned(nbytes: int) -> memoryview:
    if nbytes > _MOST_ON_HEAP:
        return memoryview(mmap.mmap(-1, nbytes))[:nbytes]
    memory = bytearray(nbytes + mmap.PAGESIZE)
    start = -addressof(c_char.from_buffer(memory)) % mmap.PAGESIZE
    return memoryview(memory)[start : start + nbytes]
