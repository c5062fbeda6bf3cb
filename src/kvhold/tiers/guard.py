"""Guard one tier with deadlines, fault counters and a breaker. A fault is a miss.

While the breaker is open, a background task tries `check`. A late call is cancelled, but not
awaited. One event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from kvhold.core.errors import (
    TierCannotList,
    TierDenied,
    TierError,
    TierIncomplete,
    TierUnavailable,
)
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import TIER_DOWN, Reason
from kvhold.core.status import TierPeersStatus, TierStatus
from kvhold.core.turns import next_turn
from kvhold.tiers.base import (
    FollowsPeers,
    HasFolders,
    KeepsClears,
    Learns,
    Origin,
    Parts,
    TellsOrigins,
    Tier,
    replace,
    size_of,
)
from kvhold.tiers.breaker import Breaker
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.calls import SCAN_TIMEOUT_S, Result, TierCall, now
from kvhold.tiers.chunk_clears import ChunkClears
from kvhold.tiers.clears import Clears
from kvhold.tiers.folder_clears import FolderClears
from kvhold.tiers.gate import Gate
from kvhold.tiers.generations import GenerationTier
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.outcomes import TierOutcome, Unknown
from kvhold.tiers.removals import Removals
from kvhold.tiers.scans import closing_scan
from kvhold.tiers.suppressed import PendingClear, Suppressed
from kvhold.tiers.table import KEYS_A_PART, KeyList, KeySet

log = logging.getLogger(__name__)

_REFRESH_TIMEOUT_S = 30.0
_LEAVE_S = 5.0
_WRITES = ("put", "replace")


class Guard:
    def __init__(
        self,
        tier: Tier,
        config: GuardConfig,
        *,
        name: str,
        metrics: Metrics,
        place: str | None = None,
    ) -> None:
        """place: the tier's permanent name in the journal of clears; None: `name`."""
        self.name = name
        self.place = name if place is None else place
        self.config = config
        self.gate = Gate(config.concurrent_calls)
        self.traits = tier.traits
        self.batch_bytes = config.batch_bytes or self.traits.batch_bytes
        self._tier = tier
        self._learning = tier if isinstance(tier, Learns) and tier.learns else None
        self._metrics = metrics
        self._breaker = Breaker(
            failures=config.breaker_failures, first_pause_s=config.breaker_pause_s
        )
        self.clears = Clears(self)
        self.chunk_clears = ChunkClears(self)
        self._removals = Removals(self)
        self._suppressed = self.clears.suppressed
        self._folder_clears: FolderClears | None = None
        self._writing: set[asyncio.Future[None]] = set()
        # when a write ended without an answer, so that it may be applied later
        self.unsure_write_s = -inf
        self._mending: asyncio.Task[None] | None = None
        self._stuck: dict[asyncio.Task[Any], TierCall[Any]] = {}
        self._is_closing = False
        self._last_fault = ""
        self._left_alone_for: Reason = TIER_DOWN
        metrics.set("kvhold_tier_available", 1, tier=name)

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def suppressed(self) -> Suppressed:
        return self._suppressed

    @property
    def last_fault(self) -> str:
        return self._last_fault

    @property
    def available(self) -> bool:
        return self._breaker.allows

    @property
    def read_only(self) -> bool:
        return self.config.read_only or self.traits.read_only

    async def check(self) -> TierError | None:
        call = TierCall[None]("check", 0, self.config.get_timeout_s)
        return await self._attempt(call, self._tier.check)

    async def probe(
        self,
        keys: Sequence[bytes],
        silent: set[str] | None = None,
        unknown: Unknown | None = None,
    ) -> list[int | None]:
        """silent:  receives the tier's name if it failed for a key
        unknown: receives the reasons of failures
        """
        call = TierCall[Sequence[int | TierError | None]](
            "probe", len(keys), self.config.probe_timeout_s
        )
        if keys:
            failure = await self.run(call, lambda: self._tier.probe(keys))
            if call.result is None and silent is not None:
                silent.add(self.name)
            if failure is not None and unknown is not None:
                unknown.why = unknown.why or failure.miss
        answers = [None] * len(keys) if call.result is None else call.result
        fault = next((answer for answer in answers if isinstance(answer, TierError)), None)
        if fault is not None:
            self._fault("probe", fault)
            if silent is not None:
                silent.add(self.name)
            if unknown is not None:
                for key, answer in zip(keys, answers, strict=True):
                    if isinstance(answer, TierError) and not self._suppressed.hides(key):
                        unknown.keys[key] = answer.miss
        found = [
            size if isinstance(size, int) and not self._suppressed.hides(key) else None
            for key, size in zip(keys, answers, strict=True)
        ]
        self.count(
            "probe",
            hit=sum(size is not None for size in found),
            miss=sum(size is None for size in found),
        )
        return found

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> TierOutcome[int | None]:
        call = TierCall[list[int | TierError | None]](
            "get", len(keys), self.config.get_timeout_s, sum(map(size_of, into))
        )
        tier, origins = self._tier, list[Origin | None]([None]) * len(keys)
        failure = await self.run(
            call,
            partial(tier.get_from, keys, into, starts=starts, origins=origins)
            if isinstance(tier, TellsOrigins)
            else partial(tier.get, keys, into, starts=starts),
        )
        answers = call.result or [None] * len(keys)
        items = [
            self._without_fault("get", key, item) for key, item in zip(keys, answers, strict=True)
        ]
        # cleared since the probe
        items = [
            None if self._suppressed.was_cleared(key) else size
            for key, size in zip(keys, items, strict=True)
        ]
        arrived = [size for size in items if size is not None]
        self.count("get", hit=len(arrived), miss=len(keys) - len(arrived))
        self._metrics.add("kvhold_tier_bytes", sum(arrived), tier=self.name, operation="get")
        failed = [call.result is None or isinstance(item, TierError) for item in answers]
        why = [
            failure.miss
            if failure is not None
            else item.miss
            if isinstance(item, TierError)
            else self.traits.lost
            for item in answers
        ]
        return TierOutcome(items, call.pending, failed, why, origins)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> TierOutcome[bool]:
        nbytes = sum(size_of(parts) for _, parts in items)
        call = TierCall[list[TierError | None]](
            "put", len(items), self.config.put_timeout_s, nbytes
        )
        tier = self._tier
        put = (
            tier.putting(items, ttl_s=ttl_s)
            if isinstance(tier, GenerationTier)
            else lambda: tier.put(items, ttl_s=ttl_s)
        )
        fault = await self._run_write(call, put)
        faults = call.result if call.result is not None else [fault] * len(items)
        for item_fault in faults:
            if item_fault is not None:
                self._metrics.add(
                    "kvhold_tier_dropped_chunks", tier=self.name, reason=item_fault.reason
                )
                if call.result is not None:
                    self._fault("put", item_fault)
        stored = [item_fault is None for item_fault in faults]
        self.count("put", stored=sum(stored), failed=len(stored) - sum(stored))
        written = sum(
            size_of(parts) for (_, parts), there in zip(items, stored, strict=True) if there
        )
        self._metrics.add("kvhold_tier_bytes", written, tier=self.name, operation="put")
        return TierOutcome(stored, call.pending)

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """The names change with each clear of a shared tier."""
        return (
            [self._tier.name_of(key) for key in keys]
            if isinstance(self._tier, GenerationTier)
            else list(keys)
        )

    async def replace(
        self, items: Sequence[tuple[bytes, Parts]], *, names: Sequence[bytes] | None = None
    ) -> TierOutcome[bool | None]:
        """`None` where it failed.

        names: taken before the read, so that no value from before a clear replaces a later one
        """
        nbytes = sum(size_of(parts) for _, parts in items)
        call = TierCall[list[bool | TierError]](
            "replace", len(items), self.config.put_timeout_s, nbytes
        )
        tier = self._tier
        if names is not None and isinstance(tier, GenerationTier):
            named = [(name, parts) for name, (_, parts) in zip(names, items, strict=True)]
            await self._run_write(call, partial(tier.replace_named, named))
        else:
            await self._run_write(call, lambda: replace(tier, items))
        answers: Sequence[bool | TierError | None] = (
            call.result if call.result is not None else [None] * len(items)
        )
        for answer in answers:
            if isinstance(answer, TierError):
                self._fault("replace", answer)
        done = [None if isinstance(answer, TierError) else answer for answer in answers]
        self.count(
            "replace", replaced=done.count(True), absent=done.count(False), failed=done.count(None)
        )
        written = sum(
            size_of(parts) for (_, parts), answer in zip(items, done, strict=True) if answer
        )
        self._metrics.add("kvhold_tier_bytes", written, tier=self.name, operation="replace")
        return TierOutcome(done, call.pending)

    def admits(self, key: bytes, nbytes: int) -> bool:
        if self._learning is None or self._learning.admits(key, nbytes):
            return True
        self.drop(1, reason="declined")
        return False

    def drop(self, count: int, *, reason: str) -> None:
        self._metrics.add("kvhold_tier_dropped_chunks", count, tier=self.name, reason=reason)

    async def delete(self, keys: Sequence[bytes], silent: set[str] | None = None) -> list[bool]:
        call = TierCall[list[bool]]("delete", len(keys), self.config.put_timeout_s)
        if await self.run(call, lambda: self._tier.delete(keys)) is not None and silent is not None:
            silent.add(self.name)
        removed = call.result if call.result is not None else [False] * len(keys)
        for key, gone in zip(keys, removed, strict=True):
            if gone:
                self._suppressed.removed(key)
        self.count("delete", removed=sum(removed), absent=len(removed) - sum(removed))
        return removed

    async def scan(self, prefix: bytes, silent: set[str] | None = None) -> KeyList:
        keys, fault = await self.scan_all(prefix)
        if fault is not None and silent is not None:
            silent.add(self.name)
        visible = KeyList()
        for part in keys.taken():
            for key in part:
                if not self._suppressed.hides(key):
                    visible.append(key)
            await next_turn()
        return visible

    async def clear(self, prefix: bytes) -> int:
        return await self.end_clear(await self.begin_clear(prefix))

    async def begin_clear(self, prefix: bytes, asked_s: float | None = None) -> PendingClear:
        return await self.clears.begin(prefix, asked_s)

    async def end_clear(self, pending_clear: PendingClear) -> int:
        return await self.clears.end(pending_clear)

    async def begin_removal(self, prefix: bytes) -> PendingClear:
        """As `begin_clear`, but only here: other hosts learn nothing."""
        return await (self._removals if self.traits.shared else self.clears).begin(prefix)

    async def end_removal(self, pending_clear: PendingClear) -> None:
        await (self._removals if self.traits.shared else self.clears).end(pending_clear)

    def hide(self, prefix: bytes) -> None:
        self.clears.hide(prefix)

    async def remember(self) -> None:
        await self.clears.remember()

    def resume_clears(self, journal: ClearsJournal) -> None:
        self.clears.resume(journal)
        self.chunk_clears.resume(journal)
        self._removals.resume(journal)
        if isinstance(self._tier, HasFolders):
            self._folder_clears = FolderClears(self, journal)
            self._tier.watch_folders(self._folder_clears.meet)

    def share(
        self,
        learned: Callable[[bytes], None],
        journal: ClearsJournal | None = None,
        *,
        may_hold: Callable[[bytes], bool] = lambda space: True,
        holds: Callable[[bytes], bool] = lambda space: False,
        remember: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if self.traits.shared:
            self.clears.remember_generation = remember
            numbers = journal.reached(self.place) if journal is not None else None
            if isinstance(self._tier, KeepsClears):
                self._tier.keep_clears(learned, numbers)
                return
            self._tier = GenerationTier(
                self._tier,
                learned,
                read_only=self.config.read_only,
                numbers=numbers,
                may_hold=may_hold,
                holds=holds,
            )

    def use(self, space: bytes) -> None:
        if isinstance(self._tier, GenerationTier):
            self._tier.use(space)

    async def meet(self, spaces: Sequence[bytes]) -> None:
        if isinstance(self._tier, GenerationTier) and not self._tier.has_met(spaces):
            tier = self._tier
            await self.run(
                TierCall[None]("check", 0, self.config.probe_timeout_s), lambda: tier.meet(spaces)
            )

    @property
    def generations(self) -> dict[bytes, int]:
        if isinstance(self._tier, (GenerationTier, KeepsClears)):
            return self._tier.numbers
        return {}

    async def refresh(self) -> None:
        if isinstance(self._tier, GenerationTier) and self.available:
            # no request waits, so slowness does not open the breaker
            deadline_s = max(_REFRESH_TIMEOUT_S, self.config.probe_timeout_s)
            call = TierCall[None]("check", 0, deadline_s, is_vital=False)
            await self.run(call, self._tier.refresh)

    @property
    def held(self) -> list[BytesByAge]:
        """Any thread."""
        held: list[BytesByAge] = getattr(self._tier, "held", [])
        return held

    def status(self) -> TierStatus:
        peers: TierPeersStatus = {}
        if isinstance(self._tier, FollowsPeers):
            peers = {"followed_peers": self._tier.peers_status()}
        return {
            **peers,
            "name": self.name,
            "kind": self.traits.name,
            "available": self.available,
            "last_fault": self._last_fault,
            "stuck_calls": len(self._stuck),
            "durable": self.traits.durable,
            "shared": self.traits.shared,
            "replaces": self.traits.replaces,
            "read_only": self.read_only,
            "pending_clears": len(self._suppressed.pending)
            + self.chunk_clears.num_pending
            + self._removals.num_pending,
            "used_bytes": getattr(self._tier, "used_bytes", None),
            "index_bytes": getattr(self._tier, "index_bytes", None),
        }

    async def close(self) -> None:
        self._is_closing = True
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait((self._mending,))
        if self._folder_clears is not None:
            await self._folder_clears.close()
        await self.clears.close()
        await self.chunk_clears.close()
        await self._removals.close()
        call = TierCall[None]("close", 0, self.config.get_timeout_s)
        await self._attempt(call, self._tier.close)

    async def run(
        self, call: TierCall[Result], work: Callable[[], Awaitable[Result]]
    ) -> TierError | None:
        """Return the fault. A retryable one is retried once within the deadline, except in a put or
        a replace.
        """
        if not self.available:
            fault: TierError = TierUnavailable(
                self.name, call.operation, f"left alone for now: {self._last_fault}"
            )
            fault.miss = self._left_alone_for
            self._metrics.add(
                "kvhold_tier_errors",
                tier=self.name,
                operation=call.operation,
                reason="breaker open",
            )
            return fault
        first = await self._attempt(call, work)
        if (
            first is None
            or not first.retryable
            or call.operation in ("put", "replace")
            or not self.available
        ):
            return first
        if call.pending is not None or now() - call.began_s >= call.deadline_s:
            return first
        return await self._attempt(call, work)

    async def writes_ended(self) -> None:
        """The writes that run now, but no late ones (`has_late_writes`)."""
        if self._writing:
            await asyncio.wait(list(self._writing))

    async def _run_write(
        self, call: TierCall[Result], work: Callable[[], Awaitable[Result]]
    ) -> TierError | None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.add(ended)
        try:
            return await self.run(call, work)
        finally:
            if call.result is None:
                self.unsure_write_s = now()
            self._writing.discard(ended)
            ended.set_result(None)

    async def _attempt(
        self, call: TierCall[Result], work: Callable[[], Awaitable[Result]]
    ) -> TierError | None:
        began_s = now()
        failed = self._failed if call.is_vital else self._fault
        task = asyncio.ensure_future(_awaited(work))
        try:
            await asyncio.wait(
                (task,), timeout=max(0.0, call.deadline_s - (began_s - call.began_s))
            )
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait((task,), timeout=_LEAVE_S)
            finally:
                if not task.done():
                    self._watch(task, call)
            raise
        call.observe(self._metrics, self.name, now() - began_s)
        if not task.done():
            task.cancel()
            call.pending = task
            self._watch(task, call)
            fault: TierError = TierUnavailable(
                self.name, call.operation, f"no answer within {call.deadline_s:g} s"
            )
            failed(call.operation, fault, reason="timeout")
            return fault
        try:
            result = task.result()
            call.check(result)
        except TierError as error:
            if isinstance(error, (TierIncomplete, TierCannotList)):
                self._fault(call.operation, error)
            else:
                failed(call.operation, error)
            return error
        # A bad plugin must not stop other tiers. A CancelledError here comes from the tier.
        except (Exception, asyncio.CancelledError) as error:
            log.exception("tier %s: %s broke the contract of a tier", self.name, call.operation)
            fault = TierError(self.name, call.operation, f"{type(error).__name__}: {error}")
            failed(call.operation, fault, reason="internal")
            return fault
        call.result = result
        self._succeeded()
        return None

    def _succeeded(self) -> None:
        if self._breaker.succeeded():
            self._metrics.set("kvhold_tier_available", 1, tier=self.name)
            self._suppressed.mended()
            log.info("tier %s is back", self.name)

    def _failed(self, operation: str, fault: TierError, *, reason: str | None = None) -> None:
        self._fault(operation, fault, reason=reason)
        self._left_alone_for = fault.miss
        if self._breaker.failed(now(), for_good=isinstance(fault, TierDenied)):
            self._metrics.set("kvhold_tier_available", 0, tier=self.name)
            log.warning("tier %s is left alone until it answers again: %s", self.name, fault)
            if self._mending is not None:
                self._mending.cancel()
            if not self._is_closing:
                self._mending = asyncio.ensure_future(self._mend())

    def _fault(self, operation: str, fault: TierError, *, reason: str | None = None) -> None:
        self._last_fault = str(fault)
        self._metrics.add(
            "kvhold_tier_errors", tier=self.name, operation=operation, reason=reason or fault.reason
        )
        log.debug("tier %s: %s: %s", self.name, operation, fault)

    def _without_fault(
        self, operation: str, key: bytes, item: int | TierError | None
    ) -> int | None:
        if isinstance(item, TierError):
            self._fault(operation, item)
            if not isinstance(item, TierUnavailable):
                self._suppressed.unreadable(key)
            return None
        return item

    async def scan_all(self, prefix: bytes) -> tuple[KeyList, TierError | None]:
        keys, seen = KeyList(), KeySet()

        async def collect() -> None:
            async with closing_scan(self._tier, prefix) as scanned:
                async for key in scanned:
                    if seen.add((key,)) and keys.append(key):
                        await next_turn()

        fault = await self.run(TierCall[None]("scan", 0, SCAN_TIMEOUT_S), collect)
        num_freed = 0
        for num_gone in seen.emptied():
            num_freed += num_gone
            if num_freed >= KEYS_A_PART:
                num_freed = 0
                await next_turn()
        return keys, fault

    async def _mend(self) -> None:
        while self._breaker.next_try_s is not None:
            await asyncio.sleep(max(0.0, self._breaker.next_try_s - now()))
            if self._stuck:
                self._breaker.failed(now())
            else:
                await self.check()

    def has_late_writes(self, from_before_s: float = inf) -> bool:
        return any(
            call.operation in _WRITES and call.began_s <= from_before_s
            for call in self._stuck.values()
        )

    def _watch(self, task: "asyncio.Task[Any]", call: TierCall[Any]) -> None:
        self._stuck[task] = call
        self._metrics.set("kvhold_tier_stuck_calls", len(self._stuck), tier=self.name)
        task.add_done_callback(self._let_go)

    def _let_go(self, task: "asyncio.Task[Any]") -> None:
        self._stuck.pop(task, None)
        self._metrics.set("kvhold_tier_stuck_calls", len(self._stuck), tier=self.name)
        if not task.cancelled():
            task.exception()

    def count(self, operation: str, **results: int) -> None:
        for result, count in results.items():
            if count:
                self._metrics.add(
                    "kvhold_tier_items", count, tier=self.name, operation=operation, result=result
                )


async def _awaited(work: Callable[[], Awaitable[Result]]) -> Result:
    return await work()
