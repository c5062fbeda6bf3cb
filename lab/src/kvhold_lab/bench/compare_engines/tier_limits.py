import mmap
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from errno import EINVAL, EOPNOTSUPP
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np

from kvhold.codecs.frame import checksum
from kvhold.tiers.redis.settings import RedisConfig
from kvhold_lab.bench.compare_engines.child import drop_pages
from kvhold_lab.bench.compare_engines.systems import CHECKED_LIMIT, DISK_LIMITS, REDIS_LIMIT
from kvhold_lab.bench.limits import RawFiles, RawRedis


@dataclass(frozen=True)
class Moved:
    write_s: float | None
    read_s: float


class Limits(Protocol):
    def measure(self) -> dict[str, Moved]:
        pass


class DiskLimits:
    def __init__(
        self, nbytes: int, chunk_bytes: int, folder: Path, *, threads: int, page_cache: bool
    ) -> None:
        self._values, self._into, self._blocks = _memory(nbytes, chunk_bytes, regions=3)
        self._folder = folder
        self._threads = threads
        self._page_cache = page_cache

    def measure(self) -> dict[str, Moved]:
        """Without O_DIRECT if the file system lacks it."""
        moved = {}
        for name, direct in DISK_LIMITS.items():
            try:
                moved[name] = self._moved(direct=direct)
            except OSError as error:
                if not direct or error.errno not in (EINVAL, EOPNOTSUPP):
                    raise
        checked = self._moved(direct=False, then=self._check_and_copy)
        return moved | {CHECKED_LIMIT: replace(checked, write_s=None)}

    def _check_and_copy(self, at: int) -> None:
        checksum(self._into[at])
        np.copyto(
            np.frombuffer(self._blocks[at], np.uint8), np.frombuffer(self._into[at], np.uint8)
        )

    def _moved(self, *, direct: bool, then: Callable[[int], None] | None = None) -> Moved:
        with (
            TemporaryDirectory(prefix="limit-", dir=self._folder) as folder,
            closing(
                RawFiles(Path(folder), self._values, threads=self._threads, direct=direct)
            ) as files,
        ):
            write_s = _seconds(files.write)
            if not self._page_cache:
                drop_pages(Path(folder))
            return Moved(write_s, _seconds(lambda: files.read(self._into, then)))


class RedisLimit:
    def __init__(self, nbytes: int, chunk_bytes: int, port: int) -> None:
        self._values, self._into = _memory(nbytes, chunk_bytes, regions=2)
        self._port = port

    def measure(self) -> dict[str, Moved]:
        with closing(
            RawRedis(self._port, "", self._values, connections=RedisConfig.connections)
        ) as redis:
            return {
                REDIS_LIMIT: Moved(_seconds(redis.set), _seconds(lambda: redis.get(self._into)))
            }


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _memory(nbytes: int, chunk_bytes: int, *, regions: int) -> list[list[memoryview]]:
    data = np.random.default_rng(0).bytes(nbytes)
    mapped = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(regions)]
    for region in mapped:
        region[:] = data
    return [
        [region[at : at + chunk_bytes] for at in range(0, nbytes, chunk_bytes)] for region in mapped
    ]
