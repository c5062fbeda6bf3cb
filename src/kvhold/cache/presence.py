"""What of a query is present, by a function that finds keys: in RAM, in what has arrived for a lookup, or anywhere in the tiers.

    presence = Presence(query, layout, ram.find)
    extent = presence.extent()                        # how far a hit goes
    for need in presence.needed(extent): need.found   # and what it needs, the prompt's beginning first

Pure. A key is looked for once where that matters: the run of whole chunks from the start.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvhold.cache.hits import longest_hit, needed_chunks
from kvhold.core.keys import HASH_BYTES, Query, place_suffix
from kvhold.core.layout import Layout

Found = TypeVar("Found")


@dataclass(frozen=True)
class Extent:
    """How far a hit goes: so many whole chunks, then a tail (its number among the query's), or none."""

    whole: int
    tail: int | None
    tail_tokens: int
    num_tokens: int

    @property
    def chunks(self) -> int:
        """Whole ones and the tail."""
        return self.whole + (self.tail is not None)


@dataclass(frozen=True)
class Need(Generic[Found]):
    """One value that a hit needs. parent: the key of the chunk before it, in the same group and shard; None for the first."""

    shard: int
    group: int
    chunk: int
    num_tokens: int
    key: bytes
    parent: bytes | None
    found: Found


@dataclass(frozen=True)
class Gap:
    """Why a hit is not longer: the first missing key. siblings: those of the other groups and shards of its chunk."""

    key: bytes
    siblings: list[bytes]


class Presence(Generic[Found]):
    """One look at one query."""

    def __init__(self, query: Query, layout: Layout, find: Callable[[bytes], Found | None]) -> None:
        self._find_key = find
        self._query = query
        self._layout = layout
        self._num_whole = len(query.hashes) // HASH_BYTES
        self._suffixes = [[place_suffix(g, s) for s in range(query.shards)] for g in range(len(layout.groups))]
        self._runs: dict[tuple[int, int], list[Found]] = {}

    @property
    def asked_tokens(self) -> int:
        """The most that a hit can have."""
        return self._num_whole * self._layout.tokens_per_chunk + max(self._query.tail_lengths, default=0)

    def extent(self) -> Extent:
        """The longest prefix of which every shard and every group has what it needs."""
        layout, query = self._layout, self._query
        whole, tail = longest_hit(layout, self._reach(), self._num_whole, query.tail_lengths, self._has_chunk, self._has_tail)
        tail_tokens = 0 if tail is None else query.tail_lengths[tail]
        return Extent(whole, tail, tail_tokens, whole * layout.tokens_per_chunk + tail_tokens)

    def found(self, extent: Extent) -> dict[tuple[int, int, int], Found]:
        """`{(shard, group, chunk): what was found}`, all that a hit of `extent` needs, chunk by chunk from the prompt's start."""
        groups = [needed_chunks(self._layout, group, extent.num_tokens) for group in range(len(self._layout.groups))]
        found: dict[tuple[int, int, int], Found | None] = {}
        for chunk in range(extent.chunks):
            is_tail = chunk == extent.whole
            for group, chunks in enumerate(groups):
                if chunk in chunks:
                    for shard in range(self._query.shards):
                        here = self._tail(group, shard, extent.tail or 0) if is_tail else self._chunk(group, shard, chunk)
                        found[shard, group, chunk] = here
        assert None not in found.values(), "a hit counts only what is present"
        return found  # type: ignore[return-value]

    def needed(self, extent: Extent) -> Iterator[Need[Found]]:
        """The same with their names."""
        for (shard, group, chunk), found in self.found(extent).items():
            is_tail = chunk == extent.whole
            num_tokens = extent.tail_tokens if is_tail else self._layout.tokens_per_chunk
            key = self._key(group, shard, chunk, extent.tail if is_tail else None)
            parent = self._key(group, shard, chunk - 1, None) if chunk else None
            yield Need(shard, group, chunk, num_tokens, key, parent, found)

    def gap(self, extent: Extent) -> Gap | None:
        """What keeps the longest hit from ending at the next place where one may end; None if it could not be longer."""
        if extent.num_tokens == self.asked_tokens:
            return None
        layout, shards = self._layout, range(self._query.shards)
        tail = len(self._query.tail_lengths) - 1 if extent.whole == self._num_whole else None
        end = self.asked_tokens if tail is not None else (extent.whole + 1) * layout.tokens_per_chunk
        firsts = [
            extent.whole if geometry.attention == "full" else needed_chunks(layout, group, end).start
            for group, geometry in enumerate(layout.groups)
        ]
        for chunk in range(min(firsts), extent.whole + 1):
            keys = [[self._key(g, s, chunk, tail if chunk == extent.whole else None) for s in shards] for g in range(len(firsts))]
            absent = [key for first, row in zip(firsts, keys, strict=True) if chunk >= first for key in row if self._find_key(key) is None]
            if absent:
                return Gap(absent[0], [key for row in keys for key in row if key != absent[0]])
        return None

    def missing(self) -> list[bytes]:
        """The keys of all chunks, and tails, that are not present, in the prompt's order: what lower tiers are asked for."""
        places = [(group, shard) for group in range(len(self._layout.groups)) for shard in range(self._query.shards)]
        keys = [self._key(group, shard, chunk, None) for chunk in range(self._num_whole) for group, shard in places]
        tails = range(len(self._query.tail_lengths))
        keys += [self._key(group, shard, self._num_whole, tail) for tail in reversed(tails) for group, shard in places]
        return [key for key in keys if self._find_key(key) is None]

    def _reach(self) -> int:
        """How many whole chunks from the start all full-attention groups have in all shards."""
        reach = self._num_whole
        for group, geometry in enumerate(self._layout.groups):
            if geometry.attention == "full":
                for shard in range(self._query.shards):
                    run = self._runs[group, shard] = self._run(group, shard, reach)
                    reach = len(run)
        return reach

    def _run(self, group: int, shard: int, most: int) -> list[Found]:
        find, namespace, hashes, suffix = self._find_key, self._query.namespace, self._query.hashes, self._suffixes[group][shard]
        run: list[Found] = []
        for start in range(0, most * HASH_BYTES, HASH_BYTES):
            found = find(namespace + hashes[start : start + HASH_BYTES] + suffix)
            if found is None:
                break
            run.append(found)
        return run

    def _chunk(self, group: int, shard: int, chunk: int) -> Found | None:
        run = self._runs.get((group, shard))
        return self._find_key(self._key(group, shard, chunk, None)) if run is None else run[chunk]

    def _tail(self, group: int, shard: int, tail: int) -> Found | None:
        return self._find_key(self._key(group, shard, self._num_whole, tail))

    def _has_chunk(self, group: int, chunk: int) -> bool:
        return all(self._chunk(group, shard, chunk) is not None for shard in range(self._query.shards))

    def _has_tail(self, group: int, tail: int) -> bool:
        return all(self._tail(group, shard, tail) is not None for shard in range(self._query.shards))

    def _key(self, group: int, shard: int, chunk: int, tail: int | None) -> bytes:
        hashes, at = (self._query.hashes, chunk) if tail is None else (self._query.tail_hashes, tail)
        return self._query.namespace + hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] + self._suffixes[group][shard]
