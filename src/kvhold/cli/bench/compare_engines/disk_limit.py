"""What the disk and the page cache give the plainest program, in the same rounds: as many files of the same sizes, by as many threads.

    limits = DiskLimits(nbytes, chunk_bytes, folder, threads=2)
    limits.measure(page_cache=False)        # {"limit: O_DIRECT": Moved(write_s, read_s), "limit: page cache": ...}

New files with their space set aside, then reads into memory that is there already; no names to find, no checks, no copy into blocks.
With `page_cache` files are read while the kernel still has them, as far as it keeps any; without, they are written out and dropped before.
"""

import mmap
import time
from contextlib import closing
from dataclasses import dataclass
from errno import EINVAL, EOPNOTSUPP
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvhold.cli.bench.compare_engines.child import drop_pages
from kvhold.cli.bench.compare_engines.systems import LIMITS
from kvhold.cli.bench.limits import RawFiles


@dataclass(frozen=True)
class Moved:
    """Seconds for all bytes."""

    write_s: float
    read_s: float


class DiskLimits:
    """Memory for the values and for what comes back, every page of it present."""

    def __init__(self, nbytes: int, chunk_bytes: int, folder: Path, *, threads: int) -> None:
        """nbytes: whole chunks."""
        self._values, self._into = ([memory[at : at + chunk_bytes] for at in range(0, nbytes, chunk_bytes)] for memory in _memory(nbytes))
        self._folder = folder
        self._threads = threads

    def measure(self, *, page_cache: bool) -> dict[str, Moved]:
        """One round of each; without O_DIRECT where the file system has none."""
        moved = {}
        for name, direct in LIMITS.items():
            try:
                moved[name] = self._moved(direct=direct, page_cache=page_cache)
            except OSError as error:
                if not direct or error.errno not in (EINVAL, EOPNOTSUPP):
                    raise
        return moved

    def _moved(self, *, direct: bool, page_cache: bool) -> Moved:
        with (
            TemporaryDirectory(prefix="limit-", dir=self._folder) as folder,
            closing(RawFiles(Path(folder), self._values, threads=self._threads, direct=direct)) as files,
        ):
            began = time.perf_counter()
            files.write()
            write_s = time.perf_counter() - began
            if not page_cache:
                drop_pages(Path(folder))
            began = time.perf_counter()
            files.read(self._into)
            read_s = time.perf_counter() - began
        return Moved(write_s, read_s)


def _memory(nbytes: int) -> list[memoryview]:
    """Two regions of random bytes, at pages' beginnings."""
    data = np.random.default_rng(0).bytes(nbytes)
    regions = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(2)]
    for region in regions:
        region[:] = data
    return regions
