"""They begin at a page, as direct I/O needs."""

import mmap


def page_aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]
