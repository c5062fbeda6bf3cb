"""A bounded queue of lookups for tiers with `policy=learned`; a full one drops. No I/O.

Each counter has one writing thread.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from kvhold.cache.transfer.commands import Command, UsedCommand
from kvhold.core.keys import HASH_BYTES, Query, place_suffix
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.tiers.policies.base import PolicyLookup

_MOST_WAITING = 1 << 18  # keys
_MOST_KEYS = 250  # at once


class UseQueue:
    def __init__(self, metrics: Metrics, give_command: Callable[[Command], None]) -> None:
        self._metrics = metrics
        self._give_command = give_command
        self._has_tiers = False
        self._num_added = 0
        self._num_done = 0

    def begin(self) -> None:
        self._has_tiers = True

    def add(self, query: Query, layout: Layout, lookup: PolicyLookup, value: int) -> None:
        if not self._has_tiers:
            return
        command = UsedCommand(query, len(layout.groups), lookup.prompt, value, lookup.at_s)
        if self._num_added - self._num_done + command.num_keys > _MOST_WAITING:
            self._metrics.add("kvhold_tier_dropped_uses", command.num_keys)
            return
        self._num_added += command.num_keys
        self._give_command(command)

    def done(self, command: UsedCommand) -> None:
        self._num_done += command.num_keys


def keys_of(command: UsedCommand) -> Iterator[tuple[list[bytes], bool]]:
    """In parts, the last chunk first. are_whole: of chunks, not of tails"""
    query = command.query
    suffixes = [
        place_suffix(group, shard)
        for group in range(command.num_groups)
        for shard in query.shard_numbers
    ]
    for hashes, are_whole in ((query.tail_hashes, False), (query.hashes, True)):
        keys = (query.namespace + each + s for each in _reversed(hashes) for s in suffixes)
        while part := list(islice(keys, _MOST_KEYS)):
            yield part, are_whole


def _reversed(hashes: bytes) -> Iterator[bytes]:
    for end in range(len(hashes), 0, -HASH_BYTES):
        yield hashes[end - HASH_BYTES : end]
