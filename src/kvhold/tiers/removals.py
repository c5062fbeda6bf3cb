"""Removals of a shared tier's values, retried until they are gone. Other hosts keep their copies.

A clear would begin a generation, so that each host drops its memory and disks. Guard's loop.
"""

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from kvhold.core.errors import TierCannotList
from kvhold.tiers.calls import SCAN_TIMEOUT_S, TierCall
from kvhold.tiers.gate import Urgency
from kvhold.tiers.generations import GenerationTier
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.suppressed import PendingClear
from kvhold.tiers.table import KeyList

if TYPE_CHECKING:
    from kvhold.tiers.guard import Guard

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0


class Removals:
    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self._journal: ClearsJournal | None = None
        self._journal_turn = asyncio.Lock()
        self._removing = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None
        self._num_begun = 0
        self._pending: dict[bytes, int] = {}
        # when its earlier writes have ended
        self._due: dict[bytes, int] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def begin(self, prefix: bytes) -> PendingClear:
        """With a journal, the removal is then on the disk. The result is for `end`."""
        pending = PendingClear(prefix, self._note(prefix))
        async with self._journal_turn:
            if self._journal is not None:
                await self._journal.add_removal(self._guard.place, prefix)
        return pending

    async def end(self, pending: PendingClear) -> None:
        await self._guard.writes_ended()
        self._due[pending.prefix] = max(pending.number, self._due.get(pending.prefix, 0))
        await self._remove(pending.prefix)
        self._retry_later(self._guard.config.breaker_pause_s)

    def resume(self, journal: ClearsJournal) -> None:
        self._journal = journal
        for prefix in journal.removals(self._guard.place):
            self._due[prefix] = self._note(prefix)
        self._retry_later(0.0)

    async def close(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.wait((self._retrying,))

    def _note(self, prefix: bytes) -> int:
        self._num_begun += 1
        self._pending[prefix] = self._num_begun
        return self._num_begun

    async def _remove(self, prefix: bytes) -> None:
        async with self._removing:
            number, guard, tier = self._due.get(prefix), self._guard, self._guard.tier
            if number is None:
                return
            assert isinstance(tier, GenerationTier), "a private tier is cleared"
            may_appear = guard.has_late_writes()
            scan = TierCall[KeyList]("scan", 0, SCAN_TIMEOUT_S, is_vital=False)
            fault = await guard.run(scan, lambda: tier.names_under(prefix))
            if isinstance(fault, TierCannotList):
                log.warning("tier %s cannot list its values, so they stay: %s", guard.name, fault)
                await self._ended(prefix, number)
                return
            if scan.result is None:
                return
            for batch in scan.result.taken():
                async with guard.gate.turn(Urgency.DELETE):
                    deleting = TierCall[list[bool]](
                        "delete", len(batch), guard.config.put_timeout_s, is_vital=False
                    )
                    await guard.run(deleting, partial(tier.remove_names, batch))
                if deleting.result is None:
                    return
                num_removed = sum(deleting.result)
                guard.count("delete", removed=num_removed, absent=len(batch) - num_removed)
            guard.suppressed.tell(prefix)
            if not may_appear:
                await self._ended(prefix, number)

    async def _ended(self, prefix: bytes, number: int) -> None:
        async with self._journal_turn:
            if self._due.get(prefix) == number:
                del self._due[prefix]
            if self._pending.get(prefix) == number:
                del self._pending[prefix]
                if self._journal is not None:
                    await self._journal.remove_removal(self._guard.place, prefix)

    def _retry_later(self, first_pause_s: float) -> None:
        if self._due and (self._retrying is None or self._retrying.done()):
            self._retrying = asyncio.ensure_future(self._retry(first_pause_s))

    async def _retry(self, pause_s: float) -> None:
        while self._due:
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, max(self._guard.config.breaker_pause_s, 2 * pause_s))
            for prefix in list(self._due) if self._guard.available else ():
                await self._remove(prefix)
