"""The arena: one region of host memory that the node owns and engines map.

    arena = Arena.create(4 << 30)  # the owner: a memfd, in huge pages where the host has them
    other = Arena.attach(fd, nbytes)            # a reader; the fd came over the Unix socket
    third = Arena.attach(fd, nbytes, writable=True)     # a writer: an engine that stores
    arena.view(offset, nbytes)                  # bytes, not copied

The first write to a page is slow (1.4 GB/s, against 5 GB/s later). So a background thread of the
owner (`Toucher`) faults pages in, in order, while the arena already serves. The memory stays as
long as any process maps it: if the owner dies, its readers keep their bytes. `slab.py` allocates
inside the arena.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvhold.core.errors import CapacityError
from kvhold.core.sizes import format_size
from kvhold.memory.host import HUGE_PAGE_BYTES, all_huge_pages, available_bytes, free_huge_pages

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
# A step takes 1 ms. Other calls that need the address space (malloc, mmap, a new thread) wait
# at most so long.
_TOUCH_STEP = HUGE_PAGE_BYTES
_KEEP_FREE = 256 << 20  # bytes that the host must have left beside an arena

# mmap.madvise of the standard library holds the GIL while the kernel clears pages; ctypes does not.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class Region:
    """A range of this process's addresses."""

    address: int
    nbytes: int
    writable: bool = True

    def whole_pages(self) -> "Region":
        """Return the part that consists of whole pages."""
        start = -(-self.address // PAGE_BYTES) * PAGE_BYTES
        end = (self.address + self.nbytes) // PAGE_BYTES * PAGE_BYTES
        return Region(start, max(0, end - start), self.writable)

    def first(self, nbytes: int) -> "Region":
        """Return the first `nbytes` of the region; the whole region if it is smaller."""
        return Region(self.address, min(nbytes, self.nbytes), self.writable)


class Arena:
    """A mapping of the shared memory.

    fd:     can be sent to other processes
    nbytes: a multiple of the page size
    """

    def __init__(self, fd: int, nbytes: int, huge: bool, writable: bool = True) -> None:
        """Map `fd`.

        writable: False: a write through this mapping ends the process (SIGSEGV) and changes nothing
        """
        self.fd = fd
        self.nbytes = nbytes
        self.huge = huge
        self._writable = writable
        self._map = mmap.mmap(
            fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        )
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int, *, huge_pages: str = "auto") -> Self:
        """Create an arena of at least `nbytes`. Raises CapacityError if the host lacks the memory.

        huge_pages: "auto": use huge pages if enough are free; "always": fail if they are not;
                    "never": use normal pages
        """
        nbytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if nbytes <= 0:
            raise CapacityError("ram_bytes: an arena needs at least one byte")
        ready = free_huge_pages()
        huge = huge_pages != "never" and ready * HUGE_PAGE_BYTES >= nbytes
        if huge_pages == "always" and not huge:
            raise CapacityError(
                f"huge_pages = 'always', but {nbytes // HUGE_PAGE_BYTES} pages of 2 MiB "
                f"are needed and {ready} are free; "
                f"raise vm.nr_hugepages, or set huge_pages = 'auto'"
            )
        if not huge:
            _check_fits(nbytes)
        fd = os.memfd_create(
            "kvhold-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0)
        )
        try:
            os.ftruncate(fd, nbytes)
            # A process that receives the fd must not be able to shrink the memory of the others.
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            arena = cls(fd, nbytes, huge)
        except OSError as error:
            os.close(fd)
            raise CapacityError(
                f"ram_bytes: the host refused an arena of {format_size(nbytes)}: {error}"
            ) from None
        log.debug("arena of %s, %s pages", format_size(nbytes), "huge" if huge else "normal")
        return arena

    @classmethod
    def attach(cls, fd: int, nbytes: int, huge: bool = False, *, writable: bool = False) -> Self:
        """Map the arena of another process. Takes ownership of `fd`.

        Raises CapacityError if the memory has fewer than `nbytes`, or cannot be mapped.
        """
        actual = os.fstat(fd).st_size
        if actual < nbytes:
            os.close(fd)
            raise CapacityError(f"the arena has {actual} bytes where {nbytes} were announced")
        try:
            return cls(fd, nbytes, huge, writable)
        except OSError as error:
            os.close(fd)
            raise CapacityError(
                f"the host refused to map an arena of {format_size(nbytes)}: {error}"
            ) from None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the arena without a copy. They are writable if the mapping is."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, "outside the arena"
        return self.buffer[offset : offset + nbytes]

    @property
    def regions(self) -> list[Region]:
        """The address ranges at which this process maps the arena."""
        return [Region(np.frombuffer(self._map, np.uint8).ctypes.data, self.nbytes, self._writable)]

    def close(self) -> None:
        """Unmap the arena, at once or when its last view is deleted. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            log.debug("the arena is still viewed; it goes with its last view")
        # A closed Arena object that is still referenced must not keep the memory.
        self.buffer = memoryview(b"")
        del self._map

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Toucher:
    """Faults in pages in order, in its own thread. Changes no bytes.

    Stop it before the pages are unmapped.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        on_progress: Callable[[int], None] | None = None,
        *,
        after_s: float = 0.0,
    ) -> None:
        """Prepare the thread.

        regions:     whole pages, such as `arena.regions`
        on_progress: called with `touched_bytes` after each step
        after_s:     the pause between `start` and the first page
        """
        self._regions = regions
        self._after_s = after_s
        self._on_progress = on_progress
        self._stop = threading.Event()
        self.touched_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvhold-touch", daemon=True)

    def start(self) -> Self:
        """Start the thread, if there are regions."""
        if self._regions:
            self._thread.start()
        return self

    @property
    def done(self) -> bool:
        """Whether every page has been faulted in."""
        return self.touched_bytes >= sum(region.nbytes for region in self._regions)

    def stop(self) -> None:
        """Stop after the current step, and wait for the thread to end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> None:
        """Wait until every page has been faulted in, or the thread was stopped."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        if self._stop.wait(self._after_s):
            return
        for region in self._regions:
            for offset in range(0, region.nbytes, _TOUCH_STEP):
                if self._stop.is_set():
                    return
                step = min(_TOUCH_STEP, region.nbytes - offset)
                advice = _MADV_POPULATE_WRITE if region.writable else _MADV_POPULATE_READ
                if _madvise(region.address + offset, step, advice) != 0:
                    # An old kernel, or no memory left. Pages are then faulted in at their first
                    # write, which is slower.
                    log.warning(
                        "pages are not faulted in ahead: %s", os.strerror(ctypes.get_errno())
                    )
                    return
                self.touched_bytes += step
                if self._on_progress is not None:
                    self._on_progress(self.touched_bytes)


def default_arena_bytes() -> int:
    """Return the size for `ram_bytes = 0`: a quarter of the free memory, at most 4 GiB."""
    return max(HUGE_PAGE_BYTES, min(4 << 30, available_bytes() // 4))


def has_room(nbytes: int, huge_pages: str) -> bool:
    """Return whether an arena of this size fits now.

    If the host has enough huge pages in all, they must be free; else normal memory must be.
    """
    if huge_pages != "never" and all_huge_pages() * HUGE_PAGE_BYTES >= nbytes:
        return free_huge_pages() * HUGE_PAGE_BYTES >= nbytes
    return nbytes + _KEEP_FREE <= available_bytes()


def _check_fits(nbytes: int) -> None:
    free = available_bytes()
    if nbytes + _KEEP_FREE > free:
        raise CapacityError(
            f"ram_bytes = {format_size(nbytes)} does not fit: this host has "
            f"{format_size(free)} free and must keep "
            f"{format_size(_KEEP_FREE)}; set ram_bytes to at most "
            f"{format_size(max(0, free - _KEEP_FREE))}"
        )
