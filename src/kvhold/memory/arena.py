"""The arena: host memory that the node owns and engines map."""

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
# takes 1 ms; malloc and mmap wait
_TOUCH_STEP = HUGE_PAGE_BYTES
_KEEP_FREE = 256 << 20

# mmap.madvise holds the GIL while the kernel clears pages
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class Region:
    address: int
    nbytes: int
    writable: bool = True

    def whole_pages(self) -> "Region":
        start = -(-self.address // PAGE_BYTES) * PAGE_BYTES
        end = (self.address + self.nbytes) // PAGE_BYTES * PAGE_BYTES
        return Region(start, max(0, end - start), self.writable)

    def first(self, nbytes: int) -> "Region":
        return Region(self.address, min(nbytes, self.nbytes), self.writable)


class Arena:
    def __init__(self, fd: int, nbytes: int, huge: bool, writable: bool = True) -> None:
        """writable: False: a write ends the process (SIGSEGV)."""
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
        """Raises CapacityError if the host lacks the memory.

        huge_pages: "auto": if enough are free; "always": fail if not; "never"
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
            # receivers of the fd may not shrink it
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
        """Takes ownership of `fd`. Raises CapacityError."""
        actual = os.fstat(fd).st_size
        if actual < nbytes:
            os.close(fd)
            raise CapacityError(f"the arena has {actual} bytes, but {nbytes} were announced")
        try:
            return cls(fd, nbytes, huge, writable)
        except OSError as error:
            os.close(fd)
            raise CapacityError(
                f"the host refused to map an arena of {format_size(nbytes)}: {error}"
            ) from None

    def view(self, offset: int, nbytes: int) -> memoryview:
        assert 0 <= offset <= offset + nbytes <= self.nbytes, "outside the arena"
        return self.buffer[offset : offset + nbytes]

    @property
    def regions(self) -> list[Region]:
        return [Region(np.frombuffer(self._map, np.uint8).ctypes.data, self.nbytes, self._writable)]

    def close(self) -> None:
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            log.debug("the arena is still viewed; it is unmapped with its last view")
        self.buffer = memoryview(b"")
        del self._map

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Toucher:
    """Faults in pages, in its own thread. Stop it before the pages are unmapped."""

    def __init__(
        self,
        regions: Sequence[Region],
        on_progress: Callable[[int], None] | None = None,
        *,
        after_s: float = 0.0,
    ) -> None:
        self._regions = regions
        self._after_s = after_s
        self._on_progress = on_progress
        self._stop = threading.Event()
        self.touched_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvhold-touch", daemon=True)

    def start(self) -> Self:
        if self._regions:
            self._thread.start()
        return self

    @property
    def done(self) -> bool:
        return self.touched_bytes >= sum(region.nbytes for region in self._regions)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> None:
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
                    log.warning(
                        "pages are not faulted in ahead: %s", os.strerror(ctypes.get_errno())
                    )
                    return
                self.touched_bytes += step
                if self._on_progress is not None:
                    self._on_progress(self.touched_bytes)


def default_arena_bytes() -> int:
    return max(HUGE_PAGE_BYTES, min(4 << 30, available_bytes() // 4))


def has_room(nbytes: int, huge_pages: str) -> bool:
    """In huge pages if the host has enough, free or not."""
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
