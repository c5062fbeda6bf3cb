"""Guard one tier with deadlines, fault counters and a circuit breaker.

    got = await guard.get(keys, into)  # a fault gives misses, never an exception

While the breaker is open, calls return misses at once. A background task tries `check`; its success
closes the breaker. A call past its deadline is cancelled, but not awaited. Runs on one event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from kvhold.core.config import setting, size
from kvhold.core.errors import TierDenied, TierError, TierIncomplete, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.tiers.base import Parts, Tier, replace, size_of
from kvhold.tiers.breaker import Breaker
from kvhold.tiers.gate import Gate, Urgency
from kvhold.tiers.generations import GenerationTier
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.suppressed import PendingClear, Suppressed
from kvhold.tiers.table import KEYS_A_PART, KeyList, KeySet

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_SCAN_TIMEOUT_S = 60.0
_CLEAR_TIMEOUT_S = 60.0
_LONGEST_PAUSE_S = 30.0
_MOST_GARBAGE = 10_000
_MOST_PENDING = 1000
_PER_ITEM = ("probe", "get", "put", "replace", "delete")
_LEAVE_S = 5.0  # wait of a cancelled caller for its memory


@dataclass(frozen=True)
class GuardConfig:
    name: str = setting("", "what the tier is called in metrics and logs; empty: its scheme")
    read_only: bool = setting(False, "never write to it")
    codec: str = setting(
        "raw",
        "what chunks are written by: raw, lossless, or one with a loss (`kvhold bench codecs`)",
    )
    encrypt: bool = setting(
        False,
        "write frames that are encrypted, and read no others; the keys are in `encryption.keys`",
    )
    probe_timeout_s: float = setting(
        0.5, "deadline of a probe, which a lookup waits for", minimum=0.001
    )
    get_timeout_s: float = setting(5.0, "deadline of one batch of reads", minimum=0.001)
    put_timeout_s: float = setting(
        10.0, "deadline of one batch of writes, or of deletes", minimum=0.001
    )
    batch_bytes: int = size(
        0,
        "bytes of chunks in one call; a batch is checked while the next one is read; 0: as "
        "suits the tier",
    )
    concurrent_calls: int = setting(4, "calls at once", minimum=1)
    breaker_failures: int = setting(
        3, "after so many failures in a row the tier is left alone", minimum=1
    )
    clears_check_s: float = setting(
        5.0, "of a shared tier: how often to ask what other hosts have cleared", minimum=0.001
    )
    breaker_pause_s: float = setting(
        1.0, "then it is tried after so long, later less often, at least every 30 s", minimum=0.001
    )


@dataclass(frozen=True)
class TierOutcome(Generic[Result]):
    """One answer per key.

    pending: a task that still uses the caller's memory, which must stay reserved
    failed:  of a read: true for a fault, false for a plain miss
    """

    items: list[Result]
    pending: "asyncio.Task[Any] | None" = None
    failed: list[bool] = field(default_factory=list)


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Call(Generic[Result]):
    operation: str
    keys: int
    deadline_s: float
    result: Result | None = None
    pending: "asyncio.Task[Any] | None" = None
    is_vital: bool = True  # its faults count for the breaker
    began_s: float = field(default_factory=_now)

    def check(self, result: Any) -> None:
        if self.operation in _PER_ITEM and (
            not isinstance(result, list) or len(result) != self.keys
        ):
            raise ValueError(
                f"{self.operation} of {self.keys} keys was answered with {str(result)[:100]}"
            )


class Guard:
    """A tier behind a breaker, deadlines and counters."""

    def __init__(
        self, tier: Tier, config: GuardConfig, *, name: str, metrics: Metrics, place: str = ""
    ) -> None:
        """place: under which the journal of clears keeps its pending clears; empty: the name.

        A name may pass to another tier when the settings change. A place may not.
        """
        self.name = name
        self.place = place or name
        self.config = config
        self.gate = Gate(config.concurrent_calls)
        self.traits = tier.traits
        self.batch_bytes = config.batch_bytes or self.traits.batch_bytes
        self._tier = tier
        self._metrics = metrics
        self._breaker = Breaker(
            failures=config.breaker_failures, first_pause_s=config.breaker_pause_s
        )
        self._suppressed = Suppressed()
        # name prefix of old values to remove -> number of its clear
        self._garbage: dict[bytes, int] = {}
        self._remember: Callable[[], Awaitable[None]] | None = None
        self._mending: asyncio.Task[None] | None = None
        self._retrying: asyncio.Task[None] | None = None
        self._payers: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._journal_turn = asyncio.Lock()
        self._journal: ClearsJournal | None = None
        self._stuck: set[asyncio.Task[Any]] = set()
        self._last_fault = ""
        metrics.set("kvhold_tier_available", 1, tier=name)

    @property
    def last_fault(self) -> str:
        return self._last_fault

    @property
    def available(self) -> bool:
        return self._breaker.allows

    async def check(self) -> TierError | None:
        call = _Call[None]("check", 0, self.config.get_timeout_s)
        return await self._attempt(call, self._tier.check)

    async def probe(
        self, keys: Sequence[bytes], silent: set[str] | None = None
    ) -> list[int | None]:
        """Return the size of each value. A failed tier is added to `silent`."""
        call = _Call[list[int | None]]("probe", len(keys), self.config.probe_timeout_s)
        if keys:
            await self._run(call, lambda: self._tier.probe(keys))
            if call.result is None and silent is not None:
                silent.add(self.name)
        found: list[int | None] = [None] * len(keys) if call.result is None else call.result
        found = [
            None if size is None or self._suppressed.hides(key) else size
            for key, size in zip(keys, found, strict=True)
        ]
        self._count(
            "probe",
            hit=sum(size is not None for size in found),
            miss=sum(size is None for size in found),
        )
        return found

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> TierOutcome[int | None]:
        call = _Call[list[int | TierError | None]]("get", len(keys), self.config.get_timeout_s)
        await self._run(call, lambda: self._tier.get(keys, into, starts=starts))
        answers = call.result or [None] * len(keys)
        items = [
            self._without_fault("get", key, item) for key, item in zip(keys, answers, strict=True)
        ]
        arrived = [size for size in items if size is not None]
        self._count("get", hit=len(arrived), miss=len(keys) - len(arrived))
        self._metrics.add("kvhold_tier_bytes", sum(arrived), tier=self.name, operation="get")
        failed = [call.result is None or isinstance(item, TierError) for item in answers]
        return TierOutcome(items, call.pending, failed)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> TierOutcome[bool]:
        call = _Call[list[TierError | None]]("put", len(items), self.config.put_timeout_s)
        tier = self._tier
        put = (
            tier.putting(items, ttl_s=ttl_s)
            if isinstance(tier, GenerationTier)
            else lambda: tier.put(items, ttl_s=ttl_s)
        )
        fault = await self._run(call, put)
        faults = call.result if call.result is not None else [fault] * len(items)
        for item_fault in faults:
            if item_fault is not None:
                self._metrics.add(
                    "kvhold_tier_dropped_chunks", tier=self.name, reason=item_fault.reason
                )
                if call.result is not None:
                    self._fault("put", item_fault)
        stored = [item_fault is None for item_fault in faults]
        self._count("put", stored=sum(stored), failed=len(stored) - sum(stored))
        written = sum(
            size_of(parts) for (_, parts), there in zip(items, stored, strict=True) if there
        )
        self._metrics.add("kvhold_tier_bytes", written, tier=self.name, operation="put")
        return TierOutcome(stored, call.pending)

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the current names, which change with each clear of a shared tier."""
        return (
            [self._tier.name_of(key) for key in keys]
            if isinstance(self._tier, GenerationTier)
            else list(keys)
        )

    async def replace(
        self, items: Sequence[tuple[bytes, Parts]], *, names: Sequence[bytes] | None = None
    ) -> TierOutcome[bool | None]:
        """Replace stored values, as `base.replace`; `None` where it failed.

        names: taken before the read, so that no value from before a clear replaces a later one
        """
        call = _Call[list[bool | TierError]]("replace", len(items), self.config.put_timeout_s)
        tier = self._tier
        if names is not None and isinstance(tier, GenerationTier):
            shared, named = (
                tier,
                [(name, parts) for name, (_, parts) in zip(names, items, strict=True)],
            )
            await self._run(call, lambda: shared.replace_named(named))
        else:
            await self._run(call, lambda: replace(tier, items))
        answers: Sequence[bool | TierError | None] = (
            call.result if call.result is not None else [None] * len(items)
        )
        for answer in answers:
            if isinstance(answer, TierError):
                self._fault("replace", answer)
        done = [None if isinstance(answer, TierError) else answer for answer in answers]
        self._count(
            "replace", replaced=done.count(True), absent=done.count(False), failed=done.count(None)
        )
        written = sum(
            size_of(parts) for (_, parts), answer in zip(items, done, strict=True) if answer
        )
        self._metrics.add("kvhold_tier_bytes", written, tier=self.name, operation="replace")
        return TierOutcome(done, call.pending)

    def drop(self, count: int, *, reason: str) -> None:
        self._metrics.add("kvhold_tier_dropped_chunks", count, tier=self.name, reason=reason)

    async def delete(self, keys: Sequence[bytes], silent: set[str] | None = None) -> list[bool]:
        call = _Call[list[bool]]("delete", len(keys), self.config.put_timeout_s)
        if (
            await self._run(call, lambda: self._tier.delete(keys)) is not None
            and silent is not None
        ):
            silent.add(self.name)
        removed = call.result if call.result is not None else [False] * len(keys)
        for key, gone in zip(keys, removed, strict=True):
            if gone:
                self._suppressed.removed(key)
        self._count("delete", removed=sum(removed), absent=len(removed) - sum(removed))
        return removed

    async def scan(self, prefix: bytes, silent: set[str] | None = None) -> KeyList:
        keys, fault = await self._scan(prefix)
        if fault is not None and silent is not None:
            silent.add(self.name)
        visible = KeyList()
        for part in keys.taken():
            for key in part:
                if not self._suppressed.hides(key):
                    visible.append(key)
            await asyncio.sleep(0)
        return visible

    async def clear(self, prefix: bytes) -> int:
        return await self.end_clear(await self.begin_clear(prefix))

    async def begin_clear(self, prefix: bytes) -> PendingClear:
        """Suppress all values with this prefix. Return the pending clear, for `end_clear`.

        If there is a journal, the clear is on the disk when this returns. A tier that is not shared
        and has too many pending clears gets one of everything instead, which is due when all
        writes of now have ended. In a read-only tier the values stay suppressed.
        """
        if (
            not self.traits.shared
            and not self._suppressed.number(prefix)
            and len(self._suppressed.pending) >= _MOST_PENDING
        ):
            log.warning(
                "tier %s has over %d pending clears: all its values are removed",
                self.name,
                _MOST_PENDING,
            )
            pending_clear = PendingClear(b"", self._suppressed.add_everything_instead())
        else:
            pending_clear = PendingClear(prefix, self._suppressed.add(prefix))
        await self._write_journal(pending_clear.prefix)
        return pending_clear

    async def end_clear(self, pending_clear: PendingClear) -> int:
        """Remove the values of a pending clear. Return the number of removed values.

        Call this when the writes of its prefix that ran at `begin_clear` have ended. If
        the tier fails now, a background task tries again.
        """
        if self.config.read_only:
            log.warning(
                "tier %s is read_only: what was cleared stays there, and this host does not use it",
                self.name,
            )
            return 0
        self._suppressed.fall_due(pending_clear.prefix, pending_clear.number)
        removed = await self._clear_pending(pending_clear.prefix)
        if (self._suppressed.due(pending_clear.prefix) or self._garbage) and (
            self._retrying is None or self._retrying.done()
        ):
            log.warning(
                "tier %s could not be cleared now; what was to go is not used, and goes "
                "when it can",
                self.name,
            )
            self._retrying = asyncio.ensure_future(self._retry_clears())
        return removed

    async def _write_journal(self, prefix: bytes) -> None:
        if self._journal is not None:
            async with self._journal_turn:
                if self._suppressed.number(prefix):
                    await self._journal.add(self.place, prefix)
                else:
                    await self._journal.remove(self.place, prefix)

    def share(
        self,
        learned: Callable[[bytes], None],
        journal: ClearsJournal | None = None,
        *,
        may_hold: Callable[[bytes], bool] = lambda space: True,
        remember: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Make clears hold for all hosts, if the tier is shared (`generations.py`)."""
        if self.traits.shared:
            self._remember = remember
            numbers = journal.reached(self.place) if journal is not None else None
            self._tier = GenerationTier(
                self._tier,
                learned,
                read_only=self.config.read_only,
                numbers=numbers,
                may_hold=may_hold,
            )

    def use(self, space: bytes) -> None:
        if isinstance(self._tier, GenerationTier):
            self._tier.use(space)

    async def meet(self, spaces: Sequence[bytes]) -> None:
        if isinstance(self._tier, GenerationTier) and not self._tier.has_met(spaces):
            tier = self._tier
            await self._run(
                _Call[None]("check", 0, self.config.probe_timeout_s), lambda: tier.meet(spaces)
            )

    @property
    def generations(self) -> dict[bytes, int]:
        return self._tier.numbers if isinstance(self._tier, GenerationTier) else {}

    def hide(self, prefix: bytes) -> None:
        """`remember` writes the clear to the disk."""
        self._suppressed.add(prefix)

    async def remember(self) -> None:
        if self._journal is not None:
            for prefix in set(self._suppressed.pending) - set(self._journal.pending(self.place)):
                await self._write_journal(prefix)

    def resume_clears(self, journal: ClearsJournal) -> None:
        self._journal = journal
        for prefix in journal.pending(self.place):
            self._suppressed.fall_due(prefix, self._suppressed.add(prefix))
        if (
            self._suppressed.pending
            and (self._retrying is None or self._retrying.done())
            and not self.config.read_only
        ):
            self._retrying = asyncio.ensure_future(self._retry_clears(first_pause_s=0.0))

    async def refresh(self) -> None:
        if isinstance(self._tier, GenerationTier) and self.available:
            await self._run(
                _Call[None]("check", 0, self.config.probe_timeout_s), self._tier.refresh
            )

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.traits.name,
            "available": self.available,
            "last_fault": self._last_fault,
            "stuck_calls": len(self._stuck),
            "durable": self.traits.durable,
            "shared": self.traits.shared,
            "replaces": self.traits.replaces,
            "read_only": self.config.read_only,
            "pending_clears": len(self._suppressed.pending),
            "used_bytes": getattr(self._tier, "used_bytes", None),
            "index_bytes": getattr(self._tier, "index_bytes", None),
        }

    async def close(self) -> None:
        for task in (self._mending, self._retrying):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
        call = _Call[None]("close", 0, self.config.get_timeout_s)
        await self._attempt(call, self._tier.close)

    async def _run(
        self, call: _Call[Result], work: Callable[[], Awaitable[Result]]
    ) -> TierError | None:
        """Return the fault, or None.

        A retryable fault is retried once within the deadline, but never a put or a replace.
        """
        if not self.available:
            fault: TierError = TierUnavailable(
                self.name, call.operation, f"left alone for now: {self._last_fault}"
            )
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
        if call.pending is not None:  # it may still write to the buffers
            return first
        if _now() - call.began_s >= call.deadline_s:
            return first
        return await self._attempt(call, work)

    async def _attempt(
        self, call: _Call[Result], work: Callable[[], Awaitable[Result]]
    ) -> TierError | None:
        began_s = _now()
        failed = self._failed if call.is_vital else self._fault
        task = asyncio.ensure_future(_awaited(work))
        try:
            await asyncio.wait(
                (task,), timeout=max(0.0, call.deadline_s - (began_s - call.began_s))
            )
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,), timeout=_LEAVE_S)
            raise
        self._metrics.observe(
            "kvhold_tier_seconds", _now() - began_s, tier=self.name, operation=call.operation
        )
        if not task.done():
            task.cancel()
            call.pending = task
            self._watch(task)
            fault: TierError = TierUnavailable(
                self.name, call.operation, f"no answer within {call.deadline_s:g} s"
            )
            failed(call.operation, fault, reason="timeout")
            return fault
        try:
            result = task.result()
            call.check(result)
        except TierError as error:
            if isinstance(error, TierIncomplete):
                self._fault(call.operation, error)
            else:
                failed(call.operation, error)
            return error
        # A bad plugin must not stop other tiers. A CancelledError here is the tier's: ours is
        # handled above.
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
        if self._breaker.failed(_now(), for_good=isinstance(fault, TierDenied)):
            self._metrics.set("kvhold_tier_available", 0, tier=self.name)
            log.warning("tier %s is left alone until it answers again: %s", self.name, fault)
            if self._mending is not None:
                self._mending.cancel()
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
            self._suppressed.unreadable(key)
            return None
        return item

    async def _scan(self, prefix: bytes) -> tuple[KeyList, TierError | None]:
        keys, seen = KeyList(), KeySet()

        async def collect() -> None:
            async for key in self._tier.scan(prefix):
                if seen.add((key,)) and keys.append(key):
                    await asyncio.sleep(0)

        fault = await self._run(_Call[None]("scan", 0, _SCAN_TIMEOUT_S), collect)
        num_freed = 0
        for num_gone in seen.emptied():
            num_freed += num_gone
            if num_freed >= KEYS_A_PART:
                num_freed = 0
                await asyncio.sleep(0)
        return keys, fault

    async def _clear_pending(self, prefix: bytes) -> int:
        """Remove the values of one pending clear, but none stored meanwhile."""
        turn = self._payers.get(prefix)
        if turn is None:
            turn = self._payers[prefix] = asyncio.Lock()
        async with turn:
            pending_clear = self._suppressed.due(prefix)
            if not pending_clear:  # the call before has ended it
                return 0
            if isinstance(self._tier, GenerationTier):
                removed = await self._clear_by_generation(self._tier, prefix, pending_clear)
            else:
                removed = await self._clear_by_scan(prefix, pending_clear)
        return removed

    async def _ended(self, prefix: bytes, pending_clear: int) -> None:
        """End a pending clear, first in the journal: else a restart would clear once more."""
        async with self._journal_turn:
            if self._journal is not None and self._suppressed.number(prefix) == pending_clear:
                await self._journal.remove(self.place, prefix)
            self._suppressed.settle(prefix, pending_clear)

    async def _clear_by_generation(
        self, tier: GenerationTier, prefix: bytes, pending_clear: int
    ) -> int:
        call = _Call[bytes]("clear", 0, _CLEAR_TIMEOUT_S)
        await self._run(call, lambda: tier.advance(prefix))
        if call.result is None:
            return 0
        if self._remember is not None:
            # a restarted node would know this clear only by its marker, which the store may lose
            await self._remember()
        await self._ended(prefix, pending_clear)
        removed, is_done = await self._remove_garbage(tier, call.result)
        if not is_done:
            while len(self._garbage) >= _MOST_GARBAGE:
                self._garbage.pop(next(iter(self._garbage)))
            self._garbage[call.result] = pending_clear
        return removed

    async def _remove_garbage(self, tier: GenerationTier, old: bytes) -> tuple[int, bool]:
        removed, scan = 0, _Call[KeyList]("scan", 0, _SCAN_TIMEOUT_S, is_vital=False)
        await self._run(scan, lambda: tier.names_of(old))
        if scan.result is None:
            return 0, False
        for batch in scan.result.taken():
            async with self.gate.turn(Urgency.DELETE):
                deleting = _Call[list[bool]](
                    "delete", len(batch), self.config.put_timeout_s, is_vital=False
                )
                if (
                    await self._run(deleting, partial(tier.remove_names, batch)) is not None
                    or deleting.result is None
                ):
                    return removed, False
            removed += sum(deleting.result)
            self._count(
                "delete", removed=sum(deleting.result), absent=len(batch) - sum(deleting.result)
            )
        return removed, True

    async def _clear_by_scan(self, prefix: bytes, pending_clear: int) -> int:
        keys, fault = await self._scan(prefix)
        num_keys, left = len(keys), set[bytes]()
        for batch in keys.taken():
            async with self.gate.turn(Urgency.DELETE):
                left.update(
                    key
                    for key, gone in zip(batch, await self.delete(batch), strict=True)
                    if not gone
                )
        removed = num_keys - len(left)
        if left and fault is None:
            there, fault = await self._scan(prefix)
            still = set[bytes]()
            for part in there.taken():
                still.update(left.intersection(part))
                await asyncio.sleep(0)
            left = still
        if not left and fault is None:
            await self._ended(prefix, pending_clear)
        return removed

    async def _retry_clears(self, first_pause_s: float | None = None) -> None:
        pause_s = self.config.breaker_pause_s if first_pause_s is None else first_pause_s
        while self._suppressed.all_due or self._garbage:
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, max(self.config.breaker_pause_s, 2 * pause_s))
            for prefix in self._suppressed.all_due if self.available else ():
                await self._clear_pending(prefix)
            for old, pending_clear in list(self._garbage.items()) if self.available else ():
                assert isinstance(self._tier, GenerationTier)
                _, is_done = await self._remove_garbage(self._tier, old)
                if not is_done:
                    break
                if self._garbage.get(old) == pending_clear:
                    del self._garbage[old]

    async def _mend(self) -> None:
        while self._breaker.next_try_s is not None:
            await asyncio.sleep(max(0.0, self._breaker.next_try_s - _now()))
            if self._stuck:
                self._breaker.failed(_now())
            else:
                await self.check()

    def _watch(self, task: "asyncio.Task[Any]") -> None:
        self._stuck.add(task)
        self._metrics.set("kvhold_tier_stuck_calls", len(self._stuck), tier=self.name)
        task.add_done_callback(self._let_go)

    def _let_go(self, task: "asyncio.Task[Any]") -> None:
        self._stuck.discard(task)
        self._metrics.set("kvhold_tier_stuck_calls", len(self._stuck), tier=self.name)
        if not task.cancelled():
            task.exception()  # else asyncio logs it

    def _count(self, operation: str, **results: int) -> None:
        for result, count in results.items():
            if count:
                self._metrics.add(
                    "kvhold_tier_items", count, tier=self.name, operation=operation, result=result
                )


async def _awaited(work: Callable[[], Awaitable[Result]]) -> Result:
    return await work()
