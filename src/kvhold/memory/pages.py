"""Small buffers that begin at a page: `page_aligned(4096)`. What direct I/O wants of a frame's header; the arena is aligned anyway."""

import mmap


def page_aligned(nbytes: int) -> memoryview:
    """Zeros, writable, from a page's beginning on; they go with their last view."""
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]
