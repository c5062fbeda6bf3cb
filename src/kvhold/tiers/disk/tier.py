"""The disk tier: values as files on this host's own disks.

One folder per disk, one process per folder.

    # disk:///var/cache/kvhold?max_bytes=100GiB&policy=lru
    # several disks: disk:///mnt/a/kv,/mnt/b/kv?max_bytes=1TiB
    tier = DiskTier.from_url(parse_url(...)); await tier.put(...); await tier.close()

**Disks.** Rendezvous hashing of the key and the paths chooses a key's disk. So a dead disk loses
only its own keys, and an added disk takes only its share.

**Durability.** An acknowledged put survives `kill -9`; with `sync=true`, also a power cut. Without
`sync`, a file may have other bytes after a power cut. The frame's checksums and key detect this.

**Index.** It is in memory, about 100 bytes per value (`rows.py`), and is rebuilt from the file
names when a folder is opened. A large folder is used while its rest is listed. Only the event loop
touches the index. Threads read and write files; gets and puts have separate threads.

**Files, not segments.** With 8 MiB values and O_DIRECT, both are read at 2.4 GB/s. A segment is
written at 4.8 GB/s, a new file at 2.5. With an eviction, removing the victim and making a new file
reaches 1.6; overwriting the victim's file reaches 4.1. So victims are overwritten.

Left out: moving values when the paths change (the values of a removed path are lost), and
compaction, which files do not need.
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

    path: str = setting(
        "", "folder for the values; several, separated by commas, for several disks"
    )
    max_bytes: int = size(
        0,
        "most bytes that the files of all folders occupy; 0: what each file system has "
        "free, less reserve_bytes",
    )
    reserve_bytes: int = size(4 << 30, "what max_bytes=0 leaves free on each file system")
    policy: str = setting("lru", "which value is evicted first", choices=tuple(POLICIES))
    direct: str = setting(
        "auto", "O_DIRECT, which spares the page cache", choices=("auto", "never", "always")
    )
    sync: bool = setting(False, "fsync each value and its folder, so that it survives a power cut")
    io_threads: int = setting(
        4, "threads for reading, and as many for writing, a folder", minimum=1
    )
    any_owner: bool = setting(
        False,
        "use folders that belong to other users or that others can write to; who can write "
        "there can forge KV",
    )


class DiskTier:
    """Values on the disks of this host."""

    def __init__(self, config: DiskConfig) -> None:
        paths = [normpath(path) for path in config.path.split(",")]
        if (
            not config.path
            or not all(path.startswith("/") for path in paths)
            or len(set(paths)) != len(paths)
        ):
            raise ConfigError(
                f"disk: path = {config.path!r}: write absolute paths, each once, such as "
                "disk:///var/cache/kvhold"
            )
        if config.policy not in POLICIES:
            raise ConfigError(
                f"disk: policy = {config.policy!r}: must be one of {', '.join(POLICIES)}"
            )
        if 0 < config.max_bytes < len(paths) or config.io_threads < 1:
            raise ConfigError("disk: max_bytes and io_threads must leave something for each path")
        # A batch from the page cache takes about a millisecond, so the fixed cost of a call counts
        # most. A larger batch spreads this cost.
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
        """Make the tier from `disk:///path[,/path...]?options`. Raises ConfigError."""
        if url.netloc:
            raise ConfigError(
                f"{url.shown}: a disk's path is absolute: write disk:///path, with three slashes"
            )
        return cls(url.apply(DiskConfig(path=url.path)))

    @property
    def used_bytes(self) -> int:
        """The bytes that the files occupy, in folders that are open."""
        return sum(store.used_bytes for store in self._stores)

    @property
    def index_bytes(self) -> int:
        """The memory of the indexes, in bytes, without a policy's own order (`lfu`, `s3fifo`)."""
        return sum(store.index_bytes for store in self._stores)

    @property
    def limit_bytes(self) -> int:
        """The bytes that the files may occupy, in folders that are open."""
        return sum(store.limit_bytes for store in self._stores)

    async def check(self) -> None:
        """Tier contract. Opens folders that are not open.

        Passes if at least one disk works, and logs a warning for each of the others.
        """
        faults = await _all(self._fault_of(store.check()) for store in self._stores)
        for fault in faults:
            if fault is not None and all(faults):
                raise fault
            if fault is not None:
                _log.warning("one disk of several cannot be used: %s", fault)

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract. From the index, without I/O."""
        return await self._spread(
            keys, lambda store, chosen: store.probe(_pick(keys, chosen)), lambda fault: None
        )

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract."""
        check_lengths(keys, into, starts)

        async def get(store: DiskStore, chosen: Sequence[int]) -> list[int | TierError | None]:
            return await store.get(
                _pick(keys, chosen),
                _pick(into, chosen),
                None if starts is None else _pick(starts, chosen),
            )

        return await self._spread(keys, get, lambda fault: fault)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        """Tier contract. Ignores ttl_s: eviction removes values that are not used."""
        keys = [key for key, _ in items]
        return await self._spread(
            keys, lambda store, chosen: store.put(_pick(items, chosen)), lambda fault: fault
        )

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Tier contract.

        The new file is whole before the old one is removed. After a crash, the newer counts.
        """
        keys = [key for key, _ in items]
        return await self._spread(
            keys, lambda store, chosen: store.replace(_pick(items, chosen)), lambda fault: fault
        )

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract. A file that cannot be removed is still found; its answer is false."""
        return await self._spread(
            keys, lambda store, chosen: store.delete(_pick(keys, chosen)), lambda fault: False
        )

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
        """Call each disk with the positions of its keys, side by side.

        Raise TierError if all disks fail.

        lost: the answer for each key of a disk that failed
        """
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
    """Await all, side by side, and return their results. Raise the first fault at the end.

    Ends only when all have ended, also when cancelled. Without `return_exceptions`, `gather` would
    end at the first cancelled one.
    """
    tasks = [asyncio.ensure_future(call) for call in work]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def _pick(values: Sequence[Answer], chosen: Sequence[int]) -> list[Answer]:
    return [values[i] for i in chosen]
