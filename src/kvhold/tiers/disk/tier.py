"""The disk tier: values as files on this host's own disks, one folder a disk, one process a folder.

    disk:///var/cache/kvhold?max_bytes=100GiB&policy=lru            # several disks: disk:///mnt/a/kv,/mnt/b/kv?max_bytes=1TiB
    tier = DiskTier.from_url(parse_url(...)); await tier.put(...); await tier.close()

A key's disk is a stable function of the key and of the paths (rendezvous hashing), so a dead disk loses its own keys alone and an added
one moves only its share. An acknowledged put survives `kill -9`; with `sync=true`, a power cut too. Without it, a file may come back
from a power cut with other bytes, which the frame's checksums and key tell. The index is in memory, about 100 bytes a value
(`rows.py`), rebuilt from the files' names when a folder is opened; a large folder is served while the rest of it is listed. Only the loop
touches the index; files are read and written in threads, those of gets and of puts apart.

Files, not segments: for 8 MiB values O_DIRECT read both at the same rate (2.4 GB/s), wrote a new file at 2.5 and a segment at 4.8;
a file that is written over instead of removing the victim's and making another reached 4.1 (removing and making: 1.6), so that is done.
Left out: moving values when paths change (those of a path that is gone are lost), and compaction, which files do not need.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from os.path import normpath
from typing import Self, TypeVar

from kvhold.core.config import setting, size
from kvhold.core.errors import ConfigError, TierError
from kvhold.tiers.base import Parts, TierTraits, check_lengths
from kvhold.tiers.disk.jobs import StoreSettings
from kvhold.tiers.disk.store import DiskStore
from kvhold.tiers.policies import POLICIES
from kvhold.tiers.url import TierUrl

_log = logging.getLogger(__name__)

_CACHED_BATCH_BYTES = 16 << 20

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class DiskConfig:
    """Settings of a disk tier."""

    path: str = setting("", "folder for the values; several, separated by commas, for several disks")
    max_bytes: int = size(0, "most bytes that the files of all folders occupy; 0: what each file system has free, less reserve_bytes")
    reserve_bytes: int = size(4 << 30, "what max_bytes=0 leaves free on each file system")
    policy: str = setting("lru", "which value is evicted first", choices=tuple(POLICIES))
    direct: str = setting("auto", "O_DIRECT, which spares the page cache", choices=("auto", "never", "always"))
    sync: bool = setting(False, "fsync each value and its folder, so that it survives a power cut")
    io_threads: int = setting(4, "threads for reading, and as many for writing, a folder", minimum=1)
    any_owner: bool = setting(False, "use folders that belong to other users or that others can write to; who can write there can forge KV")


class DiskTier:
    """Values on disks of this host."""

    def __init__(self, config: DiskConfig) -> None:
        paths = [normpath(path) for path in config.path.split(",")]
        if not config.path or not all(path.startswith("/") for path in paths) or len(set(paths)) != len(paths):
            raise ConfigError(f"disk: path = {config.path!r}: write absolute paths, each once, such as disk:///var/cache/kvhold")
        if config.policy not in POLICIES:
            raise ConfigError(f"disk: policy = {config.policy!r}: must be one of {', '.join(POLICIES)}")
        if 0 < config.max_bytes < len(paths) or config.io_threads < 1:
            raise ConfigError("disk: max_bytes and io_threads must leave something for each path")
        # Out of the page cache a batch comes in a millisecond, and what it takes beside that is what counts.
        batch_bytes = _CACHED_BATCH_BYTES if config.direct == "never" else TierTraits.batch_bytes
        self.traits = TierTraits(name="disk", durable=True, replaces=True, batch_bytes=batch_bytes)
        settings = StoreSettings(
            max_bytes=config.max_bytes // len(paths),
            reserve_bytes=config.reserve_bytes,
            policy=config.policy,
            direct=config.direct,
            sync=config.sync,
            io_threads=config.io_threads,
            any_owner=config.any_owner,
        )
        self._stores = [DiskStore(path, settings) for path in paths]

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        """`disk:///path[,/path...]?options`. Raises ConfigError."""
        if url.netloc:
            raise ConfigError(f"{url.shown}: a disk's path is absolute: write disk:///path, with three slashes")
        return cls(url.apply(DiskConfig(path=url.path)))

    @property
    def used_bytes(self) -> int:
        """What the files occupy on their file systems, those of folders that are open."""
        return sum(store.used_bytes for store in self._stores)

    @property
    def index_bytes(self) -> int:
        """What the indexes take in memory, but for a policy's own order (`lfu`, `s3fifo`)."""
        return sum(store.index_bytes for store in self._stores)

    @property
    def limit_bytes(self) -> int:
        """The most they may occupy, of folders that are open."""
        return sum(store.limit_bytes for store in self._stores)

    async def check(self) -> None:
        """Tier contract. Opens what is not open; fine if at least one disk is, with a warning for each of the others."""
        faults = await _all(self._fault_of(store.check()) for store in self._stores)
        for fault in faults:
            if fault is not None and all(faults):
                raise fault
            if fault is not None:
                _log.warning("one disk of several cannot be used: %s", fault)

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract. From the index, without I/O."""
        return await self._spread(keys, lambda store, chosen: store.probe(_pick(keys, chosen)), lambda fault: None)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract."""
        check_lengths(keys, into, starts)

        async def get(store: DiskStore, chosen: Sequence[int]) -> list[int | TierError | None]:
            return await store.get(_pick(keys, chosen), _pick(into, chosen), None if starts is None else _pick(starts, chosen))

        return await self._spread(keys, get, lambda fault: fault)

    async def put(self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None) -> list[TierError | None]:
        """Tier contract. ttl_s is ignored: what nobody asks for is evicted."""
        keys = [key for key, _ in items]
        return await self._spread(keys, lambda store, chosen: store.put(_pick(items, chosen)), lambda fault: fault)

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Tier contract. The new file is whole before the old one is removed; after a crash the newer one counts."""
        keys = [key for key, _ in items]
        return await self._spread(keys, lambda store, chosen: store.replace(_pick(items, chosen)), lambda fault: fault)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract. A file that cannot be removed stays found, and false is its answer."""
        return await self._spread(keys, lambda store, chosen: store.delete(_pick(keys, chosen)), lambda fault: False)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract. From the index."""
        faults = await _all(self._fault_of(store.probe([])) for store in self._stores)
        if all(faults) and faults[0] is not None:
            raise faults[0]
        for store, fault in zip(self._stores, faults, strict=True):
            if fault is None:
                async for keys in store.keys(prefix):
                    for key in keys:
                        yield key

    async def close(self) -> None:
        """Tier contract. Waits for calls that are under way."""
        await _all(store.close() for store in self._stores)

    async def _spread(
        self,
        keys: Sequence[bytes],
        call: Callable[[DiskStore, Sequence[int]], Awaitable[list[Answer]]],
        lost: Callable[[TierError], Answer],
    ) -> list[Answer]:
        """Ask each disk for its keys (given by position), side by side. `lost` answers for those of a dead one; raises if all are dead."""
        if len(self._stores) == 1:
            return await call(self._stores[0], range(len(keys)))
        shares: dict[DiskStore, list[int]] = {}
        for i, key in enumerate(keys):
            shares.setdefault(max(self._stores, key=lambda store: store.weight(key)), []).append(i)
        faults: list[TierError] = []
        answers: dict[int, Answer] = {}

        async def ask(store: DiskStore, chosen: list[int]) -> None:
            try:
                answers.update(zip(chosen, await call(store, chosen), strict=True))
            except TierError as fault:
                faults.append(fault)
                answers.update((i, lost(fault)) for i in chosen)

        await _all(ask(store, chosen) for store, chosen in shares.items())
        if faults and len(faults) == len(self._stores):
            raise faults[0]
        return [answers[i] for i in range(len(keys))]

    async def _fault_of(self, work: Awaitable[object]) -> TierError | None:
        try:
            await work
        except TierError as fault:
            return fault
        return None


async def _all(work: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """What each returns, side by side. It ends when all have ended, cancelled or not: a bare `gather` ends with the first that is."""
    tasks = [asyncio.ensure_future(call) for call in work]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def _pick(values: Sequence[Answer], chosen: Sequence[int]) -> list[Answer]:
    return [values[i] for i in chosen]
