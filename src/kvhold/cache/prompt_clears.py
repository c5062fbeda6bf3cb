"""Clears of single prompts, from memory at once, then from the tiers. No I/O.

Until the tiers hide the chunks, lookups of the namespace use only memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhold.cache.chores import Turns
from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.cache.query_limits import check_query
from kvhold.cache.transfer.commands import ClearChunksCommand, Command
from kvhold.cache.transfer.searches import Searches
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAME_BYTES, Query, place_suffix
from kvhold.core.layout import Layout
from kvhold.tiers.ram import RamTier

MOST_CHUNKS = 1 << 15
_REMOVE_UNITS = 8
_STEP_KEYS = 16


@dataclass(frozen=True)
class PromptClear:
    """only_end: keep the part that other prompts in memory continue"""

    query: Query
    only_end: bool = False


class PromptClears:
    def __init__(
        self,
        ram: RamTier,
        searches: Searches,
        give_command: Callable[[Command], None],
        *,
        has_tiers: bool,
    ) -> None:
        self._ram = ram
        self._searches = searches
        self._give_command = give_command
        self._has_tiers = has_tiers
        self._num_running = 0

    def __len__(self) -> int:
        return self._num_running

    def clear_turns(self, layout: Layout, clear: PromptClear) -> Turns[int]:
        """Return the number of removed chunks in memory.

        Raises ConfigError (too many chunks), ProtocolError.
        """
        query = clear.query
        check_query(layout, query)
        names = [name for _, name in chunk_names(query)]
        tails = [name for _, name in tail_names(query)]
        if len(names) + len(tails) > MOST_CHUNKS:
            raise ConfigError(
                f"a prompt of {len(names)} chunks; at most {MOST_CHUNKS} are cleared at once: "
                "clear a shorter prompt, or the namespace"
            )
        if clear.only_end:
            names = yield from self._end_turns(query.namespace, names, tails)
        names += tails
        suffixes = [
            place_suffix(group, shard)
            for group in range(len(layout.groups))
            for shard in range(query.shards)
        ]
        # from here on, no chunk comes back from a tier
        self._searches.clear(query.namespace)
        try:
            removed = yield from self._remove_turns(names, suffixes)
        except GeneratorExit:
            self._searches.cleared(query.namespace)
            raise
        self._ram.note_clear()
        if self._has_tiers and names:
            self._num_running += 1
            self._give_command(
                ClearChunksCommand(query.namespace, [name + suffixes[-1] for name in names])
            )
        else:
            self._searches.cleared(query.namespace)
        return removed

    def hidden(self, namespace: bytes) -> None:
        self._searches.cleared(namespace)

    def ended(self) -> None:
        self._num_running -= 1

    def _remove_turns(self, names: Sequence[bytes], suffixes: Sequence[bytes]) -> Turns[int]:
        removed = num_keys = 0
        for name in names:
            for suffix in suffixes:
                removed += self._ram.remove_key(name + suffix)
                num_keys += 1
                if num_keys % _STEP_KEYS == 0:
                    yield _REMOVE_UNITS * _STEP_KEYS
        return removed

    def _end_turns(
        self, namespace: bytes, names: list[bytes], tails: Sequence[bytes]
    ) -> Turns[list[bytes]]:
        """Return the names that no other prompt's chunk continues."""
        own, at_of = {*names, *tails}, {name: at for at, name in enumerate(names)}
        first = 0
        for part in self._ram.parts():
            yield 1 + len(part) // 4
            for entry in part:
                if entry.parent is not None and entry.key.startswith(namespace):
                    at = at_of.get(entry.parent[:NAME_BYTES], -1)
                    if at >= first and entry.key[:NAME_BYTES] not in own:
                        first = at + 1
        return names[first:]
