"""Clears of single chunks in a tier: hidden at once, then deleted, with retries. Guard's loop.

A chunk is named by its *last key*, that of its highest group and shard; clears include the lower
ones. Deleted chunks are hidden until the deletion is sure: a shared tier may still apply a write
whose answer was lost. A tier that cannot delete hides them until a clear of the namespace.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from kvhold.core.errors import TierError
from kvhold.core.keys import NAME_BYTES, NAMESPACE_BYTES, place_suffix, split_key
from kvhold.tiers.base import KeepsClears
from kvhold.tiers.calls import TierCall, now
from kvhold.tiers.gate import Urgency
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.suppressed import PendingClear

if TYPE_CHECKING:
    from kvhold.tiers.guard import Guard

log = logging.getLogger(__name__)

_LATE_S = 60.0  # a write whose answer was lost may be applied until then
_LONGEST_PAUSE_S = 30.0
_KEYS_AT_ONCE = 250
_MOST_CHUNKS = 50_000  # more become a clear of their namespace


@dataclass(eq=False)
class _Hidden:
    """due_s:  when earlier writes had ended, so that it may be deleted; None: not yet
    sure_s: from then on, no earlier write is applied
    """

    last_key: bytes
    number: int
    since_s: float
    due_s: float | None = None
    sure_s: float = 0.0

    def every_key(self) -> Iterator[bytes]:
        name, last = self.last_key[:NAME_BYTES], split_key(self.last_key)
        for group in range(last.group + 1):
            for shard in range(last.shard + 1):
                yield name + place_suffix(group, shard)


class ChunkClears:
    def __init__(self, guard: "Guard") -> None:
        self._guard = guard
        self._journal: ClearsJournal | None = None
        self._journal_turn = asyncio.Lock()
        self._removing = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None
        self._hidden: dict[bytes, _Hidden] = {}
        self._num_clears = 0
        self._too_many: dict[int, list[PendingClear]] = {}

    @property
    def num_clears(self) -> int:
        return self._num_clears

    @property
    def num_pending(self) -> int:
        return 0 if self._stays_hidden else len(self._hidden)

    @property
    def _stays_hidden(self) -> bool:
        return self._guard.read_only or isinstance(self._guard.tier, KeepsClears)

    def begin(self, last_keys: Sequence[bytes]) -> int:
        """Hide chunks. The number is for `remember` and `end`."""
        self._num_clears += 1
        for key in last_keys:
            earlier = self._hidden.get(key[:NAME_BYTES])
            last_key = key if earlier is None else _later(key, earlier.last_key)
            self._hidden[key[:NAME_BYTES]] = _Hidden(last_key, self._num_clears, now())
            self._guard.suppressed.add_chunk(key[:NAME_BYTES])
        return self._num_clears

    async def remember(self, number: int) -> None:
        """With a journal, the clear is then on the disk."""
        if len(self._hidden) > _MOST_CHUNKS:
            await self._clear_namespaces(number)
        async with self._journal_turn:
            if self._journal is not None and (chosen := self._numbered(number)):
                await self._journal.add_chunks(
                    self._guard.place, [hidden.last_key for hidden in chosen]
                )

    async def end(self, number: int) -> None:
        """Delete the chunks, after the writes that run now."""
        await self._guard.writes_ended()
        for pending_clear in self._too_many.pop(number, ()):
            await self._guard.end_clear(pending_clear)
        if self._stays_hidden:
            return
        self._fall_due(number)
        await self._remove()
        self._retry_later(self._guard.config.breaker_pause_s)

    def resume(self, journal: ClearsJournal) -> None:
        self._journal = journal
        number = self.begin(journal.pending_chunks(self._guard.place))
        self._guard.unsure_write_s = now()  # of the earlier process
        self._fall_due(number)
        if not self._stays_hidden:
            self._retry_later(0.0)

    async def begin_again(self, last_keys: Sequence[bytes]) -> None:
        number = self.begin([*last_keys, *(one.last_key for one in self._due())])
        await self.remember(number)
        await self.end(number)

    async def cleared(self, prefix: bytes, before_s: float) -> None:
        """A clear of the namespace, begun at `before_s`, has removed older values."""
        async with self._journal_turn:
            await self._forget(
                [
                    hidden
                    for name, hidden in self._hidden.items()
                    if name.startswith(prefix) and hidden.since_s < before_s
                ]
            )

    async def close(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.wait((self._retrying,))

    def _numbered(self, number: int) -> list[_Hidden]:
        return [hidden for hidden in self._hidden.values() if hidden.number == number]

    def _fall_due(self, number: int) -> None:
        late_s = _LATE_S if self._guard.traits.shared else 0.0
        for hidden in self._numbered(number):
            hidden.due_s, hidden.sure_s = now(), self._guard.unsure_write_s + late_s

    def _due(self) -> list[_Hidden]:
        return [hidden for hidden in self._hidden.values() if hidden.due_s is not None]

    async def _remove(self) -> None:
        """Chunks stay hidden after a fault, and while a late write may appear."""
        async with self._removing:
            due, guard = self._due(), self._guard
            sure = [
                hidden
                for hidden in due
                if hidden.sure_s <= now() and not guard.has_late_writes(hidden.due_s or 0.0)
            ]
            keys = chain.from_iterable(hidden.every_key() for hidden in due)
            while batch := list(islice(keys, _KEYS_AT_ONCE)):
                async with guard.gate.turn(Urgency.DELETE):
                    if not await self._are_gone(batch):
                        return
            async with self._journal_turn:
                await self._forget(sure)

    async def _are_gone(self, keys: list[bytes]) -> bool:
        guard = self._guard
        deleting = TierCall[list[bool]]("delete", len(keys), guard.config.put_timeout_s)
        await guard.run(deleting, partial(guard.tier.delete, keys))
        if deleting.result is None:
            return False
        num_removed = sum(deleting.result)
        guard.count("delete", removed=num_removed, absent=len(keys) - num_removed)
        # some stores keep values while others read them
        looking = TierCall[Sequence[int | TierError | None]](
            "probe", len(keys), guard.config.probe_timeout_s
        )
        await guard.run(looking, partial(guard.tier.probe, keys))
        return looking.result is not None and not any(size is not None for size in looking.result)

    async def _forget(self, ended: Sequence[_Hidden]) -> None:
        """A chunk that was hidden again stays hidden."""
        still = [one for one in ended if self._hidden.get(one.last_key[:NAME_BYTES]) is one]
        if self._journal is not None and still:
            await self._journal.remove_chunks(
                self._guard.place, [hidden.last_key for hidden in still]
            )
        for hidden in still:
            name = hidden.last_key[:NAME_BYTES]
            if self._hidden.get(name) is hidden:
                del self._hidden[name]
                self._guard.suppressed.chunks.discard(name)

    async def _clear_namespaces(self, number: int) -> None:
        log.warning(
            "tier %s has over %d cleared chunks to hide: their namespaces are cleared",
            self._guard.name,
            _MOST_CHUNKS,
        )
        chosen = self._numbered(number)
        for space in {hidden.last_key[:NAMESPACE_BYTES] for hidden in chosen}:
            self._too_many.setdefault(number, []).append(await self._guard.begin_clear(space))
        for hidden in chosen:
            name = hidden.last_key[:NAME_BYTES]
            if self._hidden.get(name) is hidden:
                del self._hidden[name]
                self._guard.suppressed.chunks.discard(name)

    def _retry_later(self, first_pause_s: float) -> None:
        if self._due() and (self._retrying is None or self._retrying.done()):
            self._retrying = asyncio.ensure_future(self._retry(first_pause_s))

    async def _retry(self, pause_s: float) -> None:
        while self._due():
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, max(self._guard.config.breaker_pause_s, 2 * pause_s))
            if self._guard.available:
                await self._remove()


def _later(one: bytes, other: bytes) -> bytes:
    """The last key that includes both."""
    first, second = split_key(one), split_key(other)
    suffix = place_suffix(max(first.group, second.group), max(first.shard, second.shard))
    return one[:NAME_BYTES] + suffix
