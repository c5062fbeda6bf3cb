"""Keeps the chunks of prompts, also those stored later, in memory until a deadline or a release.

Its owner's end, or a clear, ends a retain. The first chunks are kept, up to `hints.max_bytes`, and
a quarter of the quota. No I/O.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from kvhold.cache.chores import Turns
from kvhold.cache.index.pins import Pins
from kvhold.cache.kept_chunks import KeptChunks, name_bytes, stored_names, suffixes
from kvhold.core.api import RetainAnswer
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.tiers.ram import Entry, RamTier

_MOST_KEYS = 65_536  # per owner
_MOST_RETAINS = 1024  # per owner
_KEYS_A_TURN = 64


class RetainEnd(StrEnum):
    RELEASED = "released"
    DEADLINE = "deadline"
    OWNER_LEFT = "owner left"
    CLEARED = "cleared"


@dataclass(eq=False)
class _Retain:
    """names:  of its chunks and its tail, as far as they are kept"""

    owner: Hashable
    number: int
    namespace: bytes
    due_s: float
    num_keys: int = 0
    has_ended: bool = False
    names: list[bytes] = field(default_factory=list)


class Retains:
    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        pins: Pins,
        clock: Callable[[], float],
        max_bytes: int = 0,
    ) -> None:
        self._ram = ram
        self._metrics = metrics
        self._clock = clock
        self._kept: KeptChunks[_Retain] = KeptChunks(ram, pins, max_bytes)
        self._by_owner: dict[Hashable, dict[int, _Retain]] = {}
        self._next_due_s = inf

    @property
    def num_chunks(self) -> int:
        return self._kept.num_chunks

    def kept(self) -> list[Entry]:
        return self._kept.entries()

    def begin_turns(
        self, owner: Hashable, number: int, query: Query, layout: Layout, ttl_s: float
    ) -> Turns[RetainAnswer]:
        """number: a new one. `RetainAnswer.number` is 0 if nothing is kept."""
        self.expire()
        held = self._by_owner.get(owner, {})
        all_suffixes, nbytes = suffixes(query, layout), name_bytes(query, layout)
        left = _MOST_KEYS - sum(retain.num_keys for retain in held.values())
        most = max(0, left // len(all_suffixes)) if len(held) < _MOST_RETAINS and ttl_s > 0 else 0
        names = stored_names(query, most)
        if not names:
            return RetainAnswer(0, 0, 0)
        retain = _Retain(owner, number, query.namespace, self._clock() + ttl_s)
        self._by_owner.setdefault(owner, {})[number] = retain
        self._next_due_s = min(self._next_due_s, retain.due_s)
        units = num_here = 0
        is_here = True
        for name in names:
            if retain.has_ended:
                break
            if name not in self._kept and self._kept.free_bytes(query.namespace) < nbytes:
                break
            is_here = self._keep(retain, name, all_suffixes, nbytes) and is_here
            num_here += is_here
            units += 1 + len(all_suffixes)
            if units >= _KEYS_A_TURN:
                yield units
                units = 0
        if not retain.has_ended and not retain.names:
            self._forget(retain)
        if retain.has_ended:
            return RetainAnswer(0, 0, 0)
        return RetainAnswer(
            number,
            _num_tokens(query, layout, len(retain.names)),
            _num_tokens(query, layout, num_here),
        )

    def stored(self, entry: Entry) -> None:
        if not self._kept:
            return
        self.expire()
        name = entry.key[:NAME_BYTES]
        if name in self._kept:
            self._kept.keep(name, entry)

    def removed(self, entry: Entry) -> None:
        self._kept.removed(entry)

    def expire(self) -> None:
        """Cheap if nothing is due."""
        now_s = self._clock()
        if now_s < self._next_due_s:
            return
        for retain in self._retains():
            if retain.due_s <= now_s:
                self._end(retain, RetainEnd.DEADLINE)
        self._next_due_s = min([retain.due_s for retain in self._retains()], default=inf)

    def release(self, owner: Hashable, number: int) -> bool:
        """False: the owner has none."""
        retain = self._by_owner.get(owner, {}).get(number)
        if retain is None:
            return False
        self._end(retain, RetainEnd.RELEASED)
        return True

    def release_owner(self, owner: Hashable) -> None:
        for retain in list(self._by_owner.get(owner, {}).values()):
            self._end(retain, RetainEnd.OWNER_LEFT)

    def clear(self, prefix: bytes) -> None:
        for retain in self._retains():
            if retain.namespace.startswith(prefix):
                self._end(retain, RetainEnd.CLEARED)

    def _retains(self) -> list[_Retain]:
        return [retain for held in self._by_owner.values() for retain in held.values()]

    def _keep(self, retain: _Retain, name: bytes, all_suffixes: list[bytes], nbytes: int) -> bool:
        """False: memory has no part of the chunk. One suffices: windows need no older ones."""
        self._kept.add(name, retain, nbytes)
        retain.names.append(name)
        retain.num_keys += len(all_suffixes)
        is_here = False
        for suffix in all_suffixes:
            if (entry := self._ram.find(name + suffix)) is not None:
                self._kept.keep(name, entry)
                is_here = True
        return is_here

    def _end(self, retain: _Retain, why: RetainEnd) -> None:
        self._forget(retain)
        self._kept.drop(retain.names, retain)
        self._metrics.add("kvhold_retains", result=why)

    def _forget(self, retain: _Retain) -> None:
        retain.has_ended = True
        held = self._by_owner[retain.owner]
        del held[retain.number]
        if not held:
            del self._by_owner[retain.owner]


def _num_tokens(query: Query, layout: Layout, num_names: int) -> int:
    num_whole = len(query.hashes) // HASH_BYTES
    whole = min(num_names, num_whole) * layout.tokens_per_chunk
    return whole + (query.tail_lengths[-1] if num_names > num_whole else 0)
