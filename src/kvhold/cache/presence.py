"""Which chunks of a query are present: in RAM, among the arrived chunks, or in the tiers.

    presence = Presence(query, layout, ram.find)
    prefix = finish(presence.take_turns())            # the longest hit, and its entries
    needs = presence.needs(prefix, range(4))          # with their keys, for the first 4 chunks

A function finds the keys. Pure. A presence remembers the chunks that it has found; another `extent`
looks only for the missing ones. So a key that `find` has found once must stay found, as pinned
chunks do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from kvhold.cache.chores import Turns, emptied, finish
from kvhold.cache.hits import longest_hit_turns, needed_chunks
from kvhold.core.keys import HASH_BYTES, Query, place_suffix, split_hashes
from kvhold.core.layout import Layout

Found = TypeVar("Found")

_MOST_LOOKED = 250  # keys per step
_MOST_ORDERED = 2000


@dataclass(frozen=True)
class Extent:
    """The length of a hit: whole chunks, then a tail or none.

    tail: its index among the query's tails
    """

    whole: int
    tail: int | None
    tail_tokens: int
    num_tokens: int

    @property
    def chunks(self) -> int:
        """The number of chunks, with the tail."""
        return self.whole + (self.tail is not None)


class Need(NamedTuple, Generic[Found]):
    """One value that a hit needs.

    parent: the key of the chunk before it, in the same group and shard; None for the first
    """

    shard: int
    group: int
    chunk: int
    num_tokens: int
    key: bytes
    parent: bytes | None
    found: Found


@dataclass(frozen=True)
class Prefix(Generic[Found]):
    """The longest hit, and its entries.

    rows: `{(group, shard): [chunk]}`, None for the chunks of a group that the hit does not need
    """

    extent: Extent
    rows: dict[tuple[int, int], list[Found | None]]

    def in_order_turns(self) -> Turns[list[Found]]:
        """List the entries in steps, chunk by chunk from the prompt's start."""
        columns, ordered = self.columns(), list[Found]()
        while part := list(islice(columns, 1 + _MOST_ORDERED // max(1, len(self.rows)))):
            ordered += [found for column in part for found in column if found is not None]
            yield _MOST_ORDERED // 8
        return ordered

    def columns(self) -> Iterator[tuple[Found | None, ...]]:
        """Yield the entries of each chunk, in the order of `rows`."""
        return zip(*self.rows.values(), strict=True)

    def empty_turns(self) -> Iterator[int]:
        """Empty the rows in steps."""
        return emptied(*self.rows.values())


@dataclass(frozen=True)
class Gap:
    """Why a hit is not longer: the first missing key.

    siblings: the keys of the other groups and shards of its chunk
    """

    key: bytes
    siblings: list[bytes]


class Presence(Generic[Found]):
    """The present chunks of one query."""

    def __init__(self, query: Query, layout: Layout, find: Callable[[bytes], Found | None]) -> None:
        self._find_key = find
        self._query = query
        self._layout = layout
        self._num_whole = len(query.hashes) // HASH_BYTES
        # the longest possible hit
        self.asked_tokens = self._num_whole * layout.tokens_per_chunk + max(
            query.tail_lengths, default=0
        )
        self._suffixes = [
            [place_suffix(g, s) for s in range(query.shards)] for g in range(len(layout.groups))
        ]
        self._runs: dict[tuple[int, int], list[Found]] = {}
        # chunks outside runs: once found they stay, even if they expire
        self._seen: dict[bytes, Found] = {}

    def extent_turns(self) -> Turns[Extent]:
        """Return the longest prefix that all shards and groups have, in steps (`chores.py`)."""
        layout, query = self._layout, self._query
        reach = yield from self._reach_turns()
        whole, tail = yield from longest_hit_turns(
            layout,
            reach,
            self._num_whole,
            query.tail_lengths,
            self._has_chunk,
            self._has_tail,
            units=query.shards,
        )
        tail_tokens = 0 if tail is None else query.tail_lengths[tail]
        return Extent(whole, tail, tail_tokens, whole * layout.tokens_per_chunk + tail_tokens)

    def take_turns(self) -> Turns[Prefix[Found]]:
        """Return the longest hit with its entries, in steps.

        The presence forgets them, so that each is in only one list.
        """
        extent = yield from self.extent_turns()
        rows: dict[tuple[int, int], list[Found | None]] = {}
        for group in range(len(self._layout.groups)):
            first = needed_chunks(self._layout, group, extent.num_tokens).start
            for shard in range(self._query.shards):
                rows[group, shard] = self._take_row(group, shard, first, extent)
                yield 1 + len(rows[group, shard]) // 32
        return Prefix(extent, rows)

    def remember(self, prefix: Prefix[Found]) -> None:
        """Start from the entries that another presence of the same query has taken.

        The rows now belong to this one.
        """
        whole = prefix.extent.whole
        for (group, shard), row in prefix.rows.items():
            if self._layout.groups[group].attention == "full":
                del row[whole:]
                # a full group needs every chunk: no None
                self._runs[group, shard] = row  # type: ignore[assignment]

    def shard_rows(self, shard: int, extent: Extent) -> list[list[Found | None]]:
        """Return the whole chunks of one shard that a hit of `extent` needs, `[group][chunk]`."""
        rows: list[list[Found | None]] = []
        for group in range(len(self._layout.groups)):
            first = needed_chunks(self._layout, group, extent.num_tokens).start
            row: list[Found | None] = [None] * first
            if len(run := self._runs.get((group, shard), [])) >= extent.whole:
                row += run[first : extent.whole]
            else:
                row += [self._chunk(group, shard, chunk) for chunk in range(first, extent.whole)]
            rows.append(row)
        return rows

    def needs(self, prefix: Prefix[Found], chunks: range) -> list[Need[Found]]:
        """Return the values that the hit needs of some chunks, with keys, in the prompt's order."""
        needs, extent, size = list[Need[Found]](), prefix.extent, self._layout.tokens_per_chunk
        for chunk in chunks:
            is_tail = chunk == extent.whole
            num_tokens, tail = (extent.tail_tokens, extent.tail) if is_tail else (size, None)
            for (group, shard), row in prefix.rows.items():
                if (found := row[chunk]) is not None:
                    key = self._key(group, shard, chunk, tail)
                    parent = self._key(group, shard, chunk - 1, None) if chunk else None
                    needs.append(Need(shard, group, chunk, num_tokens, key, parent, found))
        return needs

    def gap(self, extent: Extent) -> Gap | None:
        """Return the first key that is missing for the next longer hit; None if there is none."""
        if extent.num_tokens == self.asked_tokens:
            return None
        layout, shards = self._layout, range(self._query.shards)
        tail = len(self._query.tail_lengths) - 1 if extent.whole == self._num_whole else None
        end = (
            self.asked_tokens if tail is not None else (extent.whole + 1) * layout.tokens_per_chunk
        )
        firsts = [
            extent.whole
            if geometry.attention == "full"
            else needed_chunks(layout, group, end).start
            for group, geometry in enumerate(layout.groups)
        ]
        for chunk in range(min(firsts), extent.whole + 1):
            keys = [
                [self._key(g, s, chunk, tail if chunk == extent.whole else None) for s in shards]
                for g in range(len(firsts))
            ]
            absent = [
                key
                for first, row in zip(firsts, keys, strict=True)
                if chunk >= first
                for key in row
                if self._find_key(key) is None
            ]
            if absent:
                return Gap(absent[0], [key for row in keys for key in row if key != absent[0]])
        return None

    def missing(self) -> list[bytes]:
        """Return the keys of all missing chunks and tails, in the prompt's order, for a probe."""
        return finish(self.missing_turns())

    def missing_turns(self) -> Turns[list[bytes]]:
        """Do `missing` in steps."""
        find, query, absent = self._find_key, self._query, list[bytes]()
        suffixes = [suffix for of_group in self._suffixes for suffix in of_group]
        tails = list(split_hashes(query.tail_hashes))
        looked = 0
        for chain_hash in chain(split_hashes(query.hashes), reversed(tails)):
            name = query.namespace + chain_hash
            absent += [key for suffix in suffixes if find(key := name + suffix) is None]
            looked += len(suffixes)
            if looked >= _MOST_LOOKED:
                yield looked
                looked = 0
        return absent

    def _reach_turns(self) -> Turns[int]:
        """Return how many whole chunks from the start all full-attention groups and shards have."""
        reach = self._num_whole
        for group, geometry in enumerate(self._layout.groups):
            if geometry.attention == "full":
                for shard in range(self._query.shards):
                    run = self._runs.setdefault((group, shard), [])
                    while len(run) < reach and self._extend(
                        run, group, shard, min(reach, len(run) + _MOST_LOOKED)
                    ):
                        yield _MOST_LOOKED
                    yield 1 + len(run) % _MOST_LOOKED
                    reach = min(reach, len(run))
        return reach

    def _extend(self, run: list[Found], group: int, shard: int, most: int) -> bool:
        """Extend a run up to chunk `most`. Return whether all those chunks are present."""
        find, namespace, suffix = (
            self._find_key,
            self._query.namespace,
            self._suffixes[group][shard],
        )
        for chain_hash in split_hashes(
            self._query.hashes[len(run) * HASH_BYTES : most * HASH_BYTES]
        ):
            found = find(namespace + chain_hash + suffix)
            if found is None:
                return False
            run.append(found)
        return True

    def _take_row(self, group: int, shard: int, first: int, extent: Extent) -> list[Found | None]:
        """Return the values of one group and shard that a hit needs, from chunk `first` on.

        A None stands for each chunk before `first`.
        """
        row: list[Found | None]
        if (run := self._runs.pop((group, shard), None)) is not None:
            del run[extent.whole :]
            row = run  # type: ignore[assignment]  # no other list has it now
        else:
            row = [None] * first
            row += [self._chunk(group, shard, chunk) for chunk in range(first, extent.whole)]
        if extent.tail is not None:
            row.append(self._tail(group, shard, extent.tail))
        assert None not in row[first:], "a hit counts only what is present"
        assert len(row) == extent.chunks, "a run is as long as the hit"
        return row

    def _chunk(self, group: int, shard: int, chunk: int) -> Found | None:
        run = self._runs.get((group, shard), ())
        return run[chunk] if chunk < len(run) else self._look(self._key(group, shard, chunk, None))

    def _tail(self, group: int, shard: int, tail: int) -> Found | None:
        return self._look(self._key(group, shard, self._num_whole, tail))

    def _look(self, key: bytes) -> Found | None:
        found = self._seen.get(key)
        if found is None and (found := self._find_key(key)) is not None:
            self._seen[key] = found
        return found

    def _has_chunk(self, group: int, chunk: int) -> bool:
        return all(
            self._chunk(group, shard, chunk) is not None for shard in range(self._query.shards)
        )

    def _has_tail(self, group: int, tail: int) -> bool:
        return all(
            self._tail(group, shard, tail) is not None for shard in range(self._query.shards)
        )

    def _key(self, group: int, shard: int, chunk: int, tail: int | None) -> bytes:
        hashes, at = (
            (self._query.hashes, chunk) if tail is None else (self._query.tail_hashes, tail)
        )
        return (
            self._query.namespace
            + hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            + self._suffixes[group][shard]
        )
