"""The store of a central cache: opaque values in memory, and in tiers below.

One event loop. A put is answered before lower tiers have its value. At most `write_behind_bytes`
are queued; further values stay in memory only.

A cancelled caller only stops waiting. A read that was given up may still write, so its memory stays
reserved until it ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, inf
from typing import Any

from kvhold.core.config import Config
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena, Toucher, default_arena_bytes
from kvhold.node.scans import Scans
from kvhold.tiers.gate import Urgency
from kvhold.tiers.guard import Guard
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier, Wanted
from kvhold.tiers.stack import Stack, TierPlace, make_stack

log = logging.getLogger(__name__)

_NEVER = (
    1 << 63
) - 1  # `expires_at` of a value that no lower tier may expire, whatever its settings


class CentralStore:
    def __init__(self, config: Config) -> None:
        """Raises CapacityError; ConfigError: tiers that cannot be used."""
        metrics = Metrics()
        stack = make_stack(config.tiers, plugins=config.plugins, metrics=metrics)
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
            make_policy(config.policy),
            metrics,
            quota_bytes=config.namespace_quota_bytes,
            clock=clock,
        )
        self._toucher = Toucher(self.arena.regions)
        self._limit_bytes = config.write_behind_bytes or self.arena.nbytes // 4
        self._drain_timeout_s = config.drain_timeout_s
        self._writing_bytes = 0
        self.scans = Scans(self.ram, self._stack.guards)
        self._bringing: dict[bytes, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._toucher.start()
        self._begin(self._stack.check())

    async def probe(
        self, keys: Sequence[bytes], silent: set[str] | None = None
    ) -> list[int | None]:
        """Return the size of each value, in memory or below.

        silent: gets the names of failing tiers, which may have what is missing
        """
        sizes = await self.ram.probe(keys)
        missing = [key for key, size in zip(keys, sizes, strict=True) if size is None]
        places = await self._stack.probe(missing, silent) if missing and len(self._stack) else {}
        return [
            size if size is not None else places[key].nbytes if key in places else None
            for key, size in zip(keys, sizes, strict=True)
        ]

    async def bring(self, keys: Sequence[bytes]) -> None:
        """Load values into memory, if it has space. Also waits for other calls' loads."""
        if not len(self._stack):
            return
        missing = [key for key in dict.fromkeys(keys) if not self.ram.holds(key)]
        for_others = [self._bringing[key] for key in keys if key in self._bringing]
        places = await self._stack.probe(missing) if missing else {}
        by_tier: dict[int, list[tuple[bytes, TierPlace]]] = {}
        for key, place in places.items():
            by_tier.setdefault(place.tier, []).append((key, place))
        reads = [
            self._begin(self._bring_from(self._stack.guards[tier], found))
            for tier, found in by_tier.items()
        ]
        if waiting := [*reads, *for_others]:
            await asyncio.wait(waiting)  # unlike `gather`, it cancels nothing

    @contextmanager
    def all_lent(self, keys: Sequence[bytes]) -> Iterator[list[memoryview | None]]:
        """Yield values, pinned until the block ends; None: not in memory."""
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

    def reserve(self, key: bytes, nbytes: int, ttl_s: float | None) -> "Entry | str":
        """Return reserved memory, or why there is none.

        "":     the key has a value already
        "busy": another call is writing it
        "full": there is no space
        """
        if self.ram.holds(key):
            return "" if self.ram.find(key) else "busy"
        if ttl_s is None:
            expires_at = 0
        else:
            expires_at = _NEVER if ttl_s == inf else ceil(self.ram.now() + ttl_s)
        entries = self.ram.reserve_all(
            [Wanted(key, nbytes)], num_tokens=0, first_token=0, expires_at=expires_at
        )
        return "full" if entries is None else entries[0]

    def commit(self, entry: Entry) -> None:
        """Make a complete value visible, and queue it for lower tiers."""
        self.ram.commit(entry)
        if len(self._stack) and not entry.doomed:
            self._write_behind(entry)

    async def delete(self, keys: Sequence[bytes], silent: set[str]) -> list[bool]:
        """Return whether each value was removed, in memory or below.

        silent: gets the names of failing tiers
        """
        removed = await self.ram.delete(keys)
        below = await asyncio.gather(
            *(
                guard.delete(keys, silent)
                for guard in self._stack.guards
                if not guard.config.read_only
            )
        )
        return [any(answers) for answers in zip(removed, *below, strict=True)]

    def status(self) -> dict[str, Any]:
        return {
            "arena_bytes": self.ram.capacity_bytes,
            "used_bytes": self.ram.used_bytes,
            "values": self.ram.num_chunks,
            "writing_bytes": self._writing_bytes,
            "tiers": self._stack.status(),
            "counters": self.metrics.as_dict(),
        }

    async def close(self) -> None:
        """Write queued values for at most `drain_timeout_s`."""
        self._toucher.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._drain_timeout_s)
        for task in list(self._tasks):
            task.cancel()
        await self._stack.close()
        self.arena.close()

    async def _bring_from(self, guard: Guard, found: list[tuple[bytes, TierPlace]]) -> None:
        """Only `close` cancels this; the memory is then not reused."""
        entries: list[Entry] = []
        for key, place in found:
            entry = self.reserve(key, place.nbytes, None)
            if isinstance(entry, Entry):
                entries.append(entry)
                self._bringing[key] = asyncio.get_running_loop().create_future()
        if not entries:
            return
        try:
            async with guard.gate.turn(Urgency.READ):
                outcome = await guard.get(
                    [entry.key for entry in entries], [[self.ram.view(entry)] for entry in entries]
                )
            if outcome.pending is not None:  # the tier may still write
                outcome.pending.add_done_callback(lambda _: self._abandon(entries))
                return
            for entry, nbytes in zip(entries, outcome.items, strict=True):
                if nbytes == entry.nbytes:
                    self.ram.commit(entry)
                else:
                    self.ram.abandon(entry)
        finally:
            for entry in entries:
                self._bringing.pop(entry.key).set_result(None)

    def _abandon(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.ram.abandon(entry)

    def _write_behind(self, entry: Entry) -> None:
        if self._writing_bytes + entry.nbytes > self._limit_bytes:
            self.metrics.add("kvhold_tier_dropped_chunks", tier="all", reason="queue full")
            return
        self._writing_bytes += entry.nbytes
        self.ram.hold(entry)
        self._begin(self._write(entry))

    def _ttl_s(self, entry: Entry) -> float | None:
        """Return the `ttl_s` of `Tier.put` for this entry."""
        if entry.expires_at in (0, _NEVER):
            return inf if entry.expires_at else None
        return entry.expires_at - self.ram.now()

    async def _write(self, entry: Entry) -> None:
        """The entry stays held until no tier uses its memory."""
        pending = []
        try:
            for guard in self._stack.guards:
                if guard.config.read_only:
                    continue
                async with guard.gate.turn(Urgency.WRITE):
                    ttl_s = self._ttl_s(entry)
                    if ttl_s is not None and ttl_s <= 0:
                        break
                    if entry.doomed:
                        break
                    outcome = await guard.put([(entry.key, [self.ram.view(entry)])], ttl_s=ttl_s)
                if outcome.pending is not None:
                    pending.append(outcome.pending)
            if pending:
                await asyncio.wait(pending)
            # the delete came before this write
            if entry.doomed and not self.ram.holds(entry.key):
                await self.delete([entry.key], set())
        finally:
            self._writing_bytes -= entry.nbytes
            self.ram.unpin(entry)

    def _begin(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call of a lower tier failed", exc_info=error)
