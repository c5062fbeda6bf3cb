"""Values as files on this host's own disks.

Rendezvous hashing of key and path chooses the disk. An acknowledged put survives `kill -9`; with
`sync=true`, also a power cut.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from os.path import normpath
from typing import Self, TypeVar

from kvhold.core.errors import ConfigError, TierError, TierIncomplete
from kvhold.core.setting import setting, size
from kvhold.tiers.base import FolderMet, Parts, TierTraits, ValueChanges, check_lengths
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.disk.jobs import StoreSettings
from kvhold.tiers.disk.learned import Learning
from kvhold.tiers.disk.store import DiskStore
from kvhold.tiers.policies import POLICIES
from kvhold.tiers.policies.reuse_times import Worths
from kvhold.tiers.url import TierUrl

_log = logging.getLogger(__name__)

_CACHED_BATCH_BYTES = 16 << 20

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class DiskConfig:
    path: str = setting(
        "", "folder for the values; for several disks, their folders, separated by commas"
    )
    max_bytes: int = size(
        0,
        "most bytes that the files of all folders occupy; 0: the free bytes of each file "
        "system, less reserve_bytes",
    )
    reserve_bytes: int = size(4 << 30, "bytes that max_bytes=0 leaves free on each file system")
    policy: str = setting("lru", "which value is evicted first", choices=tuple(POLICIES))
    direct: str = setting(
        "auto", "O_DIRECT, which spares the page cache", choices=("auto", "never", "always")
    )
    sync: bool = setting(False, "fsync each value and its folder, so that it survives a power cut")
    io_threads: int = setting(
        4, "threads per folder for reading, and as many for writing", minimum=1
    )
    any_owner: bool = setting(
        False,
        "use folders that belong to other users or that others can write to; who can write "
        "there can forge KV",
    )


class DiskTier:
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
            raise ConfigError(
                f"disk: max_bytes = {config.max_bytes}, io_threads = {config.io_threads}: "
                "max_bytes must be 0, or at least 1 for each path; io_threads at least 1"
            )
        batch_bytes = _CACHED_BATCH_BYTES if config.direct == "never" else TierTraits.batch_bytes
        self.traits = TierTraits(name="disk", durable=True, replaces=True, batch_bytes=batch_bytes)
        self._learning = Learning() if config.policy == "learned" else None
        self.changes = ValueChanges()
        settings = StoreSettings(
            max_bytes=config.max_bytes // len(paths),
            reserve_bytes=config.reserve_bytes,
            policy=config.policy,
            direct=config.direct,
            sync=config.sync,
            io_threads=config.io_threads,
            any_owner=config.any_owner,
            learning=self._learning,
            changes=self.changes,
        )
        self._stores = [DiskStore(path, settings) for path in paths]

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if url.netloc:
            raise ConfigError(
                f"{url.shown}: a disk's path is absolute: write disk:///path, with three slashes"
            )
        return cls(url.apply(DiskConfig(path=url.path)))

    @property
    def used_bytes(self) -> int:
        return sum(store.used_bytes for store in self._stores)

    @property
    def index_bytes(self) -> int:
        ghosts_bytes = 0 if self._learning is None else self._learning.ghosts.nbytes
        return ghosts_bytes + sum(store.index_bytes for store in self._stores)

    @property
    def held(self) -> list[BytesByAge]:
        """Any thread."""
        return [held for store in self._stores if (held := store.held) is not None]

    @property
    def limit_bytes(self) -> int:
        return sum(store.limit_bytes for store in self._stores)

    @property
    def learns(self) -> bool:
        return self._learning is not None

    def learn_from(self, worths: Worths) -> None:
        assert self._learning is not None
        self._learning.worths = worths

    def used(
        self, keys: Sequence[bytes], prompt: int, value: int, at_s: float, *, are_whole: bool
    ) -> None:
        for store, chosen in self._by_store(keys).items():
            store.used(_pick(keys, chosen), prompt, value, at_s, are_whole=are_whole)

    def admits(self, key: bytes, nbytes: int) -> bool:
        return self._store_of(key).admits(key, nbytes)

    def watch_folders(self, met: FolderMet) -> None:
        for store in self._stores:
            store.met = met

    async def check(self) -> None:
        faults = await _all(_fault_of(store.check) for store in self._stores)
        for fault in faults:
            if fault is not None and all(faults):
                raise fault
            if fault is not None:
                _log.warning("one disk of several cannot be used: %s", fault)

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        async def probe(store: DiskStore, chosen: Sequence[int]) -> list[int | TierError | None]:
            return [*await store.probe(_pick(keys, chosen))]

        return await self._spread(keys, probe, lambda fault: fault)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
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
        keys = [key for key, _ in items]
        return await self._spread(
            keys, lambda store, chosen: store.put(_pick(items, chosen)), lambda fault: fault
        )

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """A crash may leave both files; then the next start uses the newer one."""
        keys = [key for key, _ in items]
        return await self._spread(
            keys, lambda store, chosen: store.replace(_pick(items, chosen)), lambda fault: fault
        )

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        faults: list[TierError] = []

        def lost(fault: TierError) -> bool:
            faults.append(fault)
            return False

        removed = await self._spread(
            keys, lambda store, chosen: store.delete(_pick(keys, chosen)), lost
        )
        if faults:
            raise _incomplete("delete", faults[0])
        return removed

    async def scan(self, prefix: bytes) -> AsyncGenerator[bytes, None]:
        opened = await _all(_fault_of(partial(store.probe, [])) for store in self._stores)
        faults = [fault for fault in opened if fault is not None]
        if len(faults) == len(self._stores):
            raise faults[0]
        for store, fault in zip(self._stores, opened, strict=True):
            if fault is None:
                try:
                    async with aclosing(store.keys(prefix)) as parts:
                        async for keys in parts:
                            for key in keys:
                                yield key
                except TierError as failed:
                    faults.append(failed)
        if faults:
            everything_failed = len(faults) == len(self._stores)
            raise faults[0] if everything_failed else _incomplete("scan", faults[0])

    async def close(self) -> None:
        await _all(store.close() for store in self._stores)

    async def _spread(
        self,
        keys: Sequence[bytes],
        call: Callable[[DiskStore, Sequence[int]], Awaitable[list[Answer]]],
        lost: Callable[[TierError], Answer],
    ) -> list[Answer]:
        """lost: the answer for each key of a failed disk."""
        if len(self._stores) == 1:
            return await call(self._stores[0], range(len(keys)))
        shares = self._by_store(keys)
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

    def _by_store(self, keys: Sequence[bytes]) -> dict[DiskStore, list[int]]:
        shares: dict[DiskStore, list[int]] = {}
        for i, key in enumerate(keys):
            shares.setdefault(self._store_of(key), []).append(i)
        return shares

    def _store_of(self, key: bytes) -> DiskStore:
        if len(self._stores) == 1:
            return self._stores[0]
        return max(self._stores, key=lambda store: store.weight(key))


def _incomplete(operation: str, fault: TierError) -> TierIncomplete:
    return TierIncomplete("disk", operation, f"one disk of several failed: {fault}")


async def _fault_of(work: Callable[[], Awaitable[object]]) -> TierError | None:
    """A coroutine, cancelled before it begins, would be left without a task."""
    try:
        await work()
    except TierError as fault:
        return fault
    return None


async def _all(work: Iterable[Awaitable[Answer]]) -> list[Answer]:
    tasks = [asyncio.ensure_future(call) for call in work]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def _pick(values: Sequence[Answer], chosen: Sequence[int]) -> list[Answer]:
    return [values[i] for i in chosen]
