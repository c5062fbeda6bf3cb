"""Small buffers that begin at a page: `page_aligned(4096)`.

Direct I/O needs this alignment for a frame's header. The arena is aligned anyway.
"""

import mmap


def page_aligned(nbytes: int) -> memoryview:
    """Return writable zeros that begin at a page. They are freed with their last view."""
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]
