"""Pending clears, on the guard's loop, retried until their values are removed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvhold.core.errors import TierCannotList
from kvhold.core.turns import next_turn
from kvhold.tiers.base import KeepsClears
from kvhold.tiers.calls import SCAN_TIMEOUT_S, TierCall, now
from kvhold.tiers.gate import Urgency
from kvhold.tiers.generations import GenerationTier
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.suppressed import PendingClear, Suppressed
from kvhold.tiers.table import KeyList

if TYPE_CHECKING:
    from kvhold.tiers.guard import Guard

log = logging.getLogger(__name__)

_CLEAR_TIMEOUT_S = 60.0
_LONGEST_PAUSE_S = 30.0
_MOST_GARBAGE = 10_000
_MOST_PENDING = 1000
_SPARE_S = 60.0  # the clear of a tier that keeps clears may have been asked for earlier


class Clears:
    def __init__(self, guard: "Guard") -> None:
        self.suppressed = Suppressed(now)
        self.garbage: dict[bytes, int] = {}
        self.remember_generation: Callable[[], Awaitable[None]] | None = None
        self._guard = guard
        self._retrying: asyncio.Task[None] | None = None
        self._payers: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._journal_turn = asyncio.Lock()
        self._journal: ClearsJournal | None = None
        self._resumed = set[bytes]()
        # prefix -> number of a pending clear -> see `KeepsClears.advance`
        self._asked_s: dict[bytes, dict[int, float]] = {}

    async def begin(self, prefix: bytes, asked_s: float | None = None) -> PendingClear:
        """Suppress all values with this prefix. The result is for `end`.

        asked_s: see `KeepsClears.advance`

        With a journal, the clear is then on the disk. Too many pending clears of a private tier
        become one of everything. A read-only tier stays suppressed.
        """
        if (
            not self._guard.traits.shared
            and not self.suppressed.number(prefix)
            and len(self.suppressed.pending) >= _MOST_PENDING
        ):
            log.warning(
                "tier %s has over %d pending clears: all its values are removed",
                self._guard.name,
                _MOST_PENDING,
            )
            pending_clear = PendingClear(b"", self.suppressed.add_everything_instead())
        else:
            pending_clear = PendingClear(prefix, self.suppressed.add(prefix))
        if asked_s is not None and isinstance(self._guard.tier, KeepsClears):
            self._asked_s.setdefault(prefix, {})[pending_clear.number] = asked_s
        await self._write_journal(pending_clear.prefix)
        return pending_clear

    async def begin_again(self, pending_clear: PendingClear) -> None:
        """For a clear whose values are back. An earlier clear may be ending now."""
        await self._write_journal(pending_clear.prefix)
        await self.end(pending_clear)

    async def end(self, pending_clear: PendingClear) -> int:
        """Remove the values; return their number.

        Call this after the prefix's writes from before `begin`. A background task retries faults.
        """
        if self._stays_suppressed:
            log.warning(
                "tier %s is read_only: cleared values stay there, and this host does not use them",
                self._guard.name,
            )
            return 0
        self.suppressed.fall_due(pending_clear.prefix, pending_clear.number)
        removed = await self._clear_pending(pending_clear.prefix)
        if (self.suppressed.due(pending_clear.prefix) or self.garbage) and (
            self._retrying is None or self._retrying.done()
        ):
            log.warning(
                "tier %s could not be cleared now; the cleared values are not used, and are "
                "removed later",
                self._guard.name,
            )
            self._retrying = asyncio.ensure_future(self._retry_clears())
        return removed

    @property
    def _stays_suppressed(self) -> bool:
        return self._guard.read_only and not isinstance(self._guard.tier, KeepsClears)

    async def _write_journal(self, prefix: bytes) -> None:
        if self._journal is not None:
            async with self._journal_turn:
                if self.suppressed.number(prefix):
                    await self._journal.add(self._guard.place, prefix)
                else:
                    await self._journal.remove(self._guard.place, prefix)

    def hide(self, prefix: bytes) -> None:
        self.suppressed.add(prefix)

    async def remember(self) -> None:
        if self._journal is not None:
            for prefix in set(self.suppressed.pending) - set(
                self._journal.pending(self._guard.place)
            ):
                await self._write_journal(prefix)

    def resume(self, journal: ClearsJournal) -> None:
        self._journal = journal
        pending = journal.pending(self._guard.place)
        self._resumed = set(pending)
        for prefix in pending:
            self.suppressed.fall_due(prefix, self.suppressed.add(prefix))
        if (
            self.suppressed.pending
            and (self._retrying is None or self._retrying.done())
            and not self._stays_suppressed
        ):
            self._retrying = asyncio.ensure_future(self._retry_clears(first_pause_s=0.0))

    async def _clear_pending(self, prefix: bytes) -> int:
        turn = self._payers.get(prefix)
        if turn is None:
            turn = self._payers[prefix] = asyncio.Lock()
        async with turn:
            pending_clear = self.suppressed.due(prefix)
            if not pending_clear:
                return 0
            began_s = self.suppressed.began_s(prefix)
            if isinstance(self._guard.tier, KeepsClears):
                removed = await self._clear_by_number(self._guard.tier, prefix, pending_clear)
            elif isinstance(self._guard.tier, GenerationTier):
                removed = await self._clear_by_generation(self._guard.tier, prefix, pending_clear)
            else:
                removed = await self._clear_by_scan(prefix, pending_clear)
        if not self.suppressed.number(prefix):
            spare_s = _SPARE_S if isinstance(self._guard.tier, KeepsClears) else 0.0
            await self._guard.chunk_clears.cleared(prefix, began_s - spare_s)
        return removed

    async def _ended(self, prefix: bytes, pending_clear: int) -> None:
        """End it first in the journal: otherwise a restart would repeat it."""
        async with self._journal_turn:
            if self._journal is not None and self.suppressed.number(prefix) == pending_clear:
                await self._journal.remove(self._guard.place, prefix)
            self.suppressed.settle(prefix, pending_clear)

    async def _clear_by_number(self, tier: KeepsClears, prefix: bytes, pending_clear: int) -> int:
        asked_s = self._asked_s.pop(prefix, {})
        later = {number: at_s for number, at_s in asked_s.items() if number > pending_clear}
        if later:
            self._asked_s[prefix] = later
        tier.advance(prefix, max((asked_s[one] for one in asked_s.keys() - later), default=None))
        if prefix in self._resumed:
            # memory is new, and each tier resumes the clear
            self._resumed.remove(prefix)
            tier.announce(prefix)
        if self.remember_generation is not None:
            await self.remember_generation()
        await self._ended(prefix, pending_clear)
        return 0

    async def _clear_by_generation(
        self, tier: GenerationTier, prefix: bytes, pending_clear: int
    ) -> int:
        call = TierCall[bytes]("clear", 0, _CLEAR_TIMEOUT_S)
        await self._guard.run(call, lambda: tier.advance(prefix))
        if call.result is None:
            return 0
        if self.remember_generation is not None:
            # the clear's marker may be lost
            await self.remember_generation()
        await self._ended(prefix, pending_clear)
        removed, is_done = await self._remove_garbage(tier, call.result)
        if not is_done:
            while len(self.garbage) >= _MOST_GARBAGE:
                self.garbage.pop(next(iter(self.garbage)))
            self.garbage[call.result] = pending_clear
        return removed

    async def _remove_garbage(self, tier: GenerationTier, old: bytes) -> tuple[int, bool]:
        removed, scan = 0, TierCall[KeyList]("scan", 0, SCAN_TIMEOUT_S, is_vital=False)
        fault = await self._guard.run(scan, lambda: tier.names_of(old))
        if isinstance(fault, TierCannotList):
            log.info(
                "tier %s cannot list its values: the cleared ones are not used, and stay until "
                "the tier removes them",
                self._guard.name,
            )
            return 0, True
        if scan.result is None:
            return 0, False
        for batch in scan.result.taken():
            async with self._guard.gate.turn(Urgency.DELETE):
                deleting = TierCall[list[bool]](
                    "delete", len(batch), self._guard.config.put_timeout_s, is_vital=False
                )
                if (
                    await self._guard.run(deleting, partial(tier.remove_names, batch)) is not None
                    or deleting.result is None
                ):
                    return removed, False
            removed += sum(deleting.result)
            self._guard.count(
                "delete", removed=sum(deleting.result), absent=len(batch) - sum(deleting.result)
            )
        return removed, True

    async def _clear_by_scan(self, prefix: bytes, pending_clear: int) -> int:
        """The clear stays pending while an earlier write runs past its deadline."""
        may_appear = self._guard.has_late_writes(self.suppressed.due_s(prefix))
        keys, fault = await self._guard.scan_all(prefix)
        num_keys, left = len(keys), set[bytes]()
        for batch in keys.taken():
            async with self._guard.gate.turn(Urgency.DELETE):
                left.update(
                    key
                    for key, gone in zip(batch, await self._guard.delete(batch), strict=True)
                    if not gone
                )
        removed = num_keys - len(left)
        if left and fault is None:
            there, fault = await self._guard.scan_all(prefix)
            still = set[bytes]()
            for part in there.taken():
                still.update(left.intersection(part))
                await next_turn()
            left = still
        if not left and fault is None and not may_appear:
            await self._ended(prefix, pending_clear)
        return removed

    async def _retry_clears(self, first_pause_s: float | None = None) -> None:
        pause_s = self._guard.config.breaker_pause_s if first_pause_s is None else first_pause_s
        while self.suppressed.all_due or self.garbage:
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, max(self._guard.config.breaker_pause_s, 2 * pause_s))
            for prefix in self.suppressed.all_due if self._guard.available else ():
                await self._clear_pending(prefix)
            for old, pending_clear in list(self.garbage.items()) if self._guard.available else ():
                assert isinstance(self._guard.tier, GenerationTier)
                _, is_done = await self._remove_garbage(self._guard.tier, old)
                if not is_done:
                    break
                if self.garbage.get(old) == pending_clear:
                    del self.garbage[old]

    async def close(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.wait((self._retrying,))
