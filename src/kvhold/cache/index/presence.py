"""Which chunks of a query are present: in RAM, arrived, or in the tiers.

The caller holds the chunks that `find` returned.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar, overload

from kvhold.cache.chores import Turns, emptied, finish
from kvhold.cache.index.hits import longest_hit_turns, needed_chunks
from kvhold.core.keys import HASH_BYTES, Query, place_suffix, split_hashes
from kvhold.core.layout import Layout

Found = TypeVar("Found")

_MOST_LOOKED = 64  # keys per step
_MOST_ORDERED = 250  # per step


@dataclass(frozen=True)
class Extent:
    whole: int
    tail: int | None
    tail_tokens: int
    num_tokens: int

    @property
    def chunks(self) -> int:
        return self.whole + (self.tail is not None)


def first_group(layout: Layout) -> int:
    """With full attention, if there is one."""
    full = (i for i, group in enumerate(layout.groups) if group.attention == "full")
    return next(full, 0)


class FirstKeys(Sequence[bytes]):
    """The whole chunks' keys in one group and shard.

    place: the first group, and the query's first shard
    """

    def __init__(self, query: Query, layout: Layout) -> None:
        self.place = first_group(layout), query.shard_numbers[0]
        self._namespace = query.namespace
        self._hashes = query.hashes
        self._suffix = place_suffix(*self.place)

    def __len__(self) -> int:
        return len(self._hashes) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            assert step == 1
            hashes = self._hashes[first * HASH_BYTES : last * HASH_BYTES]
            namespace, suffix = self._namespace, self._suffix
            return [namespace + one + suffix for one in split_hashes(hashes)]
        chain_hash = self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        return self._namespace + chain_hash + self._suffix


class Need(NamedTuple, Generic[Found]):
    """One group's and shard's chunk of a hit. parent: the preceding chunk's key"""

    shard: int
    group: int
    chunk: int
    num_tokens: int
    key: bytes
    parent: bytes | None
    found: Found


@dataclass(frozen=True)
class Prefix(Generic[Found]):
    """rows: `{(group, shard): [chunk]}`; None: not needed"""

    extent: Extent
    rows: dict[tuple[int, int], list[Found | None]]

    def in_order_turns(self) -> Turns[list[Found]]:
        columns, ordered = self.columns(), list[Found]()
        while part := list(islice(columns, 1 + _MOST_ORDERED // max(1, len(self.rows)))):
            ordered += [found for column in part for found in column if found is not None]
            yield _MOST_ORDERED // 4
        return ordered

    def columns(self) -> Iterator[tuple[Found | None, ...]]:
        return zip(*self.rows.values(), strict=True)

    def empty_turns(self) -> Iterator[int]:
        return emptied(*self.rows.values())


@dataclass(frozen=True)
class Gap:
    key: bytes
    keys: Callable[[], Iterator[bytes]]

    def siblings(self) -> Iterator[bytes]:
        return (key for key in self.keys() if key != self.key)


class Presence(Generic[Found]):
    def __init__(self, query: Query, layout: Layout, find: Callable[[bytes], Found | None]) -> None:
        self._find_key = find
        self._query = query
        self._layout = layout
        self._num_whole = len(query.hashes) // HASH_BYTES
        self.asked_tokens = self._num_whole * layout.tokens_per_chunk + max(
            query.tail_lengths, default=0
        )
        self._suffixes = [
            {shard: place_suffix(group, shard) for shard in query.shard_numbers}
            for group in range(len(layout.groups))
        ]
        self._runs: dict[tuple[int, int], list[Found]] = {}
        # kept even if they expire
        self._seen: dict[bytes, Found] = {}

    def extent_turns(self) -> Turns[Extent]:
        layout, query = self._layout, self._query
        reach = yield from self._reach_turns()
        whole, tail = yield from longest_hit_turns(
            layout,
            reach,
            self._num_whole,
            query.tail_lengths,
            self._has_chunk,
            self._has_tail,
            units=query.num_shards,
        )
        tail_tokens = 0 if tail is None else query.tail_lengths[tail]
        return Extent(whole, tail, tail_tokens, whole * layout.tokens_per_chunk + tail_tokens)

    def take_turns(self) -> Turns[Prefix[Found]]:
        """The longest hit; keep no reference to its entries."""
        extent = yield from self.extent_turns()
        rows: dict[tuple[int, int], list[Found | None]] = {}
        for group in range(len(self._layout.groups)):
            first = needed_chunks(self._layout, group, extent.num_tokens).start
            for shard in self._query.shard_numbers:
                rows[group, shard] = self._take_row(group, shard, first, extent)
                yield 1 + len(rows[group, shard]) // 32
        return Prefix(extent, rows)

    def remember(self, prefix: Prefix[Found]) -> None:
        whole = prefix.extent.whole
        for (group, shard), row in prefix.rows.items():
            if self._layout.groups[group].attention == "full":
                del row[whole:]
                self._runs[group, shard] = row  # type: ignore[assignment]

    def shard_rows(self, shard: int, extent: Extent) -> list[list[Found | None]]:
        """`[group][chunk]`"""
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
        if extent.num_tokens == self.asked_tokens:
            return None
        layout = self._layout
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
            of_tail = tail if chunk == extent.whole else None
            groups = [group for group, first in enumerate(firsts) if chunk >= first]
            for key in self._keys(groups, chunk, of_tail):
                if self._find_key(key) is None:
                    return Gap(key, partial(self._keys, range(len(firsts)), chunk, of_tail))
        return None

    def _keys(self, groups: Iterable[int], chunk: int, tail: int | None) -> Iterator[bytes]:
        for group in groups:
            for shard in self._query.shard_numbers:
                yield self._key(group, shard, chunk, tail)

    def missing(self) -> list[bytes]:
        return finish(self.missing_turns())

    def missing_turns(self) -> Turns[list[bytes]]:
        find, query, absent = self._find_key, self._query, list[bytes]()
        suffixes = [suffix for of_group in self._suffixes for suffix in of_group.values()]
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
        reach = self._num_whole
        for group, geometry in enumerate(self._layout.groups):
            if geometry.attention == "full":
                for shard in self._query.shard_numbers:
                    run = self._runs.setdefault((group, shard), [])
                    while len(run) < reach and self._extend(
                        run, group, shard, min(reach, len(run) + _MOST_LOOKED)
                    ):
                        yield _MOST_LOOKED
                    yield 1 + len(run) % _MOST_LOOKED
                    reach = min(reach, len(run))
        return reach

    def _extend(self, run: list[Found], group: int, shard: int, most: int) -> bool:
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
        row: list[Found | None]
        if (run := self._runs.pop((group, shard), None)) is not None:
            del run[extent.whole :]
            row = run  # type: ignore[assignment]  # popped, so only `row` refers to it
        else:
            row = [None] * first
            row += [self._chunk(group, shard, chunk) for chunk in range(first, extent.whole)]
        if extent.tail is not None:
            row.append(self._tail(group, shard, extent.tail))
        assert None not in row[first:], "a hit has a missing chunk"
        assert len(row) == extent.chunks, "a row is not as long as its hit"
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
            self._chunk(group, shard, chunk) is not None for shard in self._query.shard_numbers
        )

    def _has_tail(self, group: int, tail: int) -> bool:
        return all(
            self._tail(group, shard, tail) is not None for shard in self._query.shard_numbers
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
