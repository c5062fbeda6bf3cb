"""Opaque values in memory, and in tiers below.

The memory of a given-up read stays reserved until the read ends. One event loop.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from kvhold.cache.transfer.commands import Command, FetchCommand, PendingRead, WriteCommand
from kvhold.cache.transfer.tasks import Tasks
from kvhold.cache.transfer.tier_reader import TierReader, remove
from kvhold.cache.transfer.write_behind import WriteBehind
from kvhold.cache.transfer.write_queue import WriteQueue
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import TIER_DOWN, Reason
from kvhold.core.status import CentralStatus
from kvhold.memory.arena import Arena, Toucher, default_arena_bytes
from kvhold.node.scans import Scans
from kvhold.tiers.base import Origin
from kvhold.tiers.guard import Guard
from kvhold.tiers.policies import TIER_POLICIES, make_policy
from kvhold.tiers.ram import NEVER, Entry, RamTier, Wanted
from kvhold.tiers.stack import Stack, learning_tiers, make_stack

NotReserved = Literal["stored", "busy", "full"]
"""stored: the key has a value already; busy: another call is writing it; full: there is no space"""


@dataclass(frozen=True)
class _Reading:
    entry: Entry
    ended: asyncio.Future[None]


class CentralStore:
    def __init__(self, config: Config) -> None:
        """Raises CapacityError; ConfigError: unusable tiers or policy."""
        metrics = Metrics()
        stack = make_stack(config.tiers, plugins=config.plugins, metrics=metrics)
        for name in learning_tiers(stack):
            raise ConfigError(
                f"tier {name}: policy=learned: a central cache is told of no lookups; use one of "
                f"{', '.join(TIER_POLICIES)}"
            )
        self._prepare(
            config,
            Arena.create(config.ram_bytes or default_arena_bytes(), huge_pages=config.huge_pages),
            stack,
            metrics,
        )

    def _prepare(
        self,
        config: Config,
        arena: Arena,
        stack: Stack,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.metrics = metrics
        self.arena = arena
        self._stack = stack
        self.ram = RamTier(
            arena,
            make_policy(_policy(config)),
            metrics,
            quota_bytes=config.namespace_quota_bytes,
            clock=clock,
        )
        self._toucher = Toucher(self.arena.regions)
        self._drain_timeout_s = config.drain_timeout_s
        self._tasks = Tasks()
        self._reader = TierReader(self, stack, metrics, self._tasks, post=_call)
        self._write_behind = WriteBehind(self, stack.guards, metrics)
        self._writes = WriteQueue(
            self.ram,
            metrics,
            self._give_command,
            limit_bytes=config.write_behind_bytes or arena.nbytes // 4,
        )
        self.scans = Scans(self.ram, self._stack.guards)
        self._bringing: dict[bytes, _Reading] = {}
        self._deleting: Counter[bytes] = Counter()

    async def start(self) -> None:
        self._toucher.start()
        self._write_behind.start()
        self._tasks.start(self._stack.check())

    async def probe(
        self, keys: Sequence[bytes], silent: set[str] | None = None
    ) -> list[int | None]:
        """silent: gets the names of failing tiers, which may have missing values"""
        sizes = await self.ram.probe(keys)
        missing = [key for key, size in zip(keys, sizes, strict=True) if size is None]
        places = await self._stack.probe(missing, silent) if missing and len(self._stack) else {}
        return [
            size if size is not None else places[key].nbytes if key in places else None
            for key, size in zip(keys, sizes, strict=True)
        ]

    async def bring(self, keys: Sequence[bytes]) -> None:
        if not len(self._stack):
            return
        missing = [key for key in dict.fromkeys(keys) if not self.ram.holds(key)]
        places = await self._stack.probe(missing) if missing else {}
        pending_reads = [
            PendingRead(entry, None, place)
            for key, place in places.items()
            if key not in self._deleting
            and isinstance(entry := self.reserve(key, place.nbytes, None), Entry)
        ]
        loop = asyncio.get_running_loop()
        for pending_read in pending_reads:
            self._bringing[pending_read.entry.key] = _Reading(
                pending_read.entry, loop.create_future()
            )
        self._reader.fetch(FetchCommand(pending_reads))
        if waiting := [self._bringing[key].ended for key in keys if key in self._bringing]:
            await asyncio.wait(waiting)  # unlike `gather`, it cancels nothing

    @contextmanager
    def all_lent(self, keys: Sequence[bytes]) -> Iterator[list[memoryview | None]]:
        """Pinned until the block ends; None: not in memory."""
        entries = [self.ram.find(key) for key in keys]
        for entry in entries:
            if entry is not None:
                self.ram.pin(entry)
        try:
            yield [None if entry is None else self.ram.view(entry) for entry in entries]
        finally:
            for entry in entries:
                if entry is not None:
                    self.ram.unpin(entry)

    def reserve(self, key: bytes, nbytes: int, ttl_s: float | None) -> Entry | NotReserved:
        if self.ram.holds(key):
            return "stored" if self.ram.find(key) else "busy"
        if ttl_s is None:
            expires_at = 0
        else:
            expires_at = NEVER if ttl_s == inf else ceil(self.ram.now() + ttl_s)
        entries = self.ram.reserve_all(
            [Wanted(key, nbytes)], num_tokens=0, first_token=0, expires_at=expires_at
        )
        return "full" if entries is None else entries[0]

    def commit(self, entry: Entry) -> None:
        self.ram.commit(entry)
        if len(self._stack):
            self._writes.add(entry, None)

    async def delete(self, keys: Sequence[bytes], silent: set[str]) -> list[bool]:
        """True: the value was removed.

        silent: gets the names of tiers that failed, or are still writing a key
        """
        for key in keys:
            if (reading := self._bringing.get(key)) is not None:
                self.ram.remove(reading.entry)
                self._end_reading(reading.entry)
        silent |= self._write_behind.writing_tiers(set(keys))
        silent |= {guard.name for guard in self._stack.guards if guard.has_late_writes()}
        self._deleting.update(keys)
        try:
            removed = await self.ram.delete(keys)
            below = await asyncio.gather(
                *(guard.delete(keys, silent) for guard in self._stack.guards if not guard.read_only)
            )
        finally:
            self._deleting -= Counter(keys)
        self._write_again(keys)
        return [any(answers) for answers in zip(removed, *below, strict=True)]

    def status(self) -> CentralStatus:
        return {
            "arena_bytes": self.ram.capacity_bytes,
            "used_bytes": self.ram.used_bytes,
            "values": self.ram.num_chunks,
            "writing_bytes": self._writes.queued_bytes,
            "tiers": self._stack.status(),
            "counters": self.metrics.as_dict(),
        }

    async def close(self) -> None:
        self._toucher.stop()
        await self._write_behind.drain(self._drain_timeout_s)
        await asyncio.gather(self._write_behind.end(), self._tasks.end())
        await self._stack.close()
        self.arena.close()

    def fetched(
        self,
        entry: Entry,
        ok: bool,
        expires_at: int = 0,
        *,
        why: Reason = TIER_DOWN,
        origin: Origin | None = None,
    ) -> None:
        if ok:
            self.ram.commit(entry)
        else:
            self.ram.abandon(entry)
        self._end_reading(entry)

    def given_up(self, entry: Entry) -> None:
        self._end_reading(entry)

    def let_go(self, entry: Entry) -> None:
        self.ram.abandon(entry)

    def written(self, number: int) -> None:
        self._writes.done(number)

    def found_damaged(self, entry: Entry) -> None:
        raise AssertionError("opaque frames are not checked")

    def wrote_removed(self, guard: Guard, entries: Sequence[Entry]) -> None:
        self._tasks.start(self._remove_again(guard, [entry.key for entry in entries]))

    async def _remove_again(self, guard: Guard, keys: list[bytes]) -> None:
        """For values whose write ended after their delete."""
        await remove(guard, keys)
        self._write_again(keys)

    def _write_again(self, keys: Sequence[bytes]) -> None:
        """For values that came during a delete, which may have removed them."""
        for key in keys:
            if len(self._stack) and (entry := self.ram.find(key)) is not None:
                self._writes.add(entry, None)

    def _end_reading(self, entry: Entry) -> None:
        reading = self._bringing.get(entry.key)
        if reading is not None and reading.entry is entry:
            del self._bringing[entry.key]
            reading.ended.set_result(None)

    def _give_command(self, command: Command) -> None:
        assert isinstance(command, WriteCommand)
        self._write_behind.add(command)


def _call(work: Callable[[], None]) -> None:
    work()


def _policy(config: Config) -> str:
    if config.policy not in TIER_POLICIES:
        raise ConfigError(
            f"policy = {config.policy!r}: a central cache sees no lookups; use one of "
            f"{', '.join(TIER_POLICIES)}"
        )
    return config.policy
