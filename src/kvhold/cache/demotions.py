"""A prompt's chunks go first in eviction until their next use, also those stored within seconds.

Pinned chunks are left alone. No I/O.
"""

from collections.abc import Callable

from kvhold.cache.chores import Turns
from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.cache.kept_chunks import suffixes
from kvhold.core.api import DemoteAnswer
from kvhold.core.keys import NAME_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.tiers.ram import Entry, RamTier

_PENDING_S = 10.0  # a chunk is stored by then, after its computing
_MOST_PENDING = 16_384
_KEYS_A_TURN = 64


class Demotions:
    def __init__(self, ram: RamTier, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._ram = ram
        self._metrics = metrics
        self._clock = clock
        self._pending: dict[bytes, float] = {}  # name -> deadline, the oldest first

    def demote_turns(self, query: Query, layout: Layout, first_chunk: int) -> Turns[DemoteAnswer]:
        """From `first_chunk` on, and all tails."""
        names = [name for _, name in chunk_names(query, first_chunk)]
        names += [name for _, name in tail_names(query)]
        all_suffixes = suffixes(query, layout)
        keys: list[bytes] = []
        num_demoted = num_pinned = units = 0
        for name in names:
            found = [
                entry
                for suffix in all_suffixes
                if (entry := self._ram.find(name + suffix)) is not None
            ]
            idle = [entry.key for entry in found if not entry.pins]
            num_demoted += len(idle)
            num_pinned += len(found) - len(idle)
            keys += idle
            if not found:
                self._await(name)
            units += 1 + 2 * len(all_suffixes)
            if units >= _KEYS_A_TURN:
                self._demote(keys)
                keys = []
                yield units
                units = 0
        self._demote(keys)
        return DemoteAnswer(num_demoted, num_pinned)

    def stored(self, entry: Entry) -> None:
        if not self._pending:
            return
        name = entry.key[:NAME_BYTES]
        due_s = self._pending.get(name)
        if due_s is None:
            return
        if self._clock() < due_s:
            self._demote([entry.key])
        else:
            del self._pending[name]

    def clear(self) -> None:
        self._pending.clear()

    def _await(self, name: bytes) -> None:
        self._pending.pop(name, None)
        while len(self._pending) >= _MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[name] = self._clock() + _PENDING_S

    def _demote(self, keys: list[bytes]) -> None:
        self._ram.policy.demote(keys)
        if keys:
            self._metrics.add("kvhold_demoted_chunks", len(keys))
