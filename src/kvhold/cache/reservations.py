"""Reserves memory for missing chunks. No I/O.

After `stalled_after_s`, another writer may reserve the chunks in other memory; a late commit is
ignored.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from kvhold.cache.chores import Turns
from kvhold.cache.counts import count_entries
from kvhold.cache.index.eviction_history import EvictionHistory
from kvhold.cache.transfer.write_queue import WriteQueue
from kvhold.core.api import ABSENT
from kvhold.core.checksums import BYTES
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    ChunkNames,
    place_suffix,
    split_hashes,
    split_key,
)
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import DECLINED
from kvhold.core.store_options import StoreOptions
from kvhold.tiers.ram import Entry, RamTier, Wanted

MAX_SHARDS = 0xFFFF
_MOST_COMMITTED = 16  # per step
_MOST_CHECKSUMS = 125  # per step
_RESERVE_UNITS, _COMMIT_UNITS, _ABANDON_UNITS = 8, 5, 3  # per entry


@dataclass(frozen=True)
class Grant:
    """reservation: 0: nothing was granted
    offsets:     `[group][chunk]`; ABSENT: not granted
    """

    reservation: int
    offsets: list["array[int]"]


@dataclass
class ReservedChunks:
    """chunks:      `{chunk number: entries of the granted groups}`
    is_given_up: others may reserve the same chunks at once
    """

    layout: Layout
    store_options: StoreOptions
    chunks: dict[int, list[Entry]]
    numa_node: int | None = None
    nbytes: int = 0
    is_given_up: bool = False

    @property
    def num_entries(self) -> int:
        return len(self.chunks) * len(self.layout.groups)

    def add(self, chunk: int, entries: list[Entry]) -> None:
        self.chunks[chunk] = entries
        self.nbytes += sum([entry.taken_bytes for entry in entries])

    def take(self, chunk: int) -> list[Entry]:
        entries = self.chunks.pop(chunk)
        self.nbytes -= sum([entry.taken_bytes for entry in entries])
        return entries


class Reservations:
    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        evictions: EvictionHistory,
        writes: WriteQueue | None,
        *,
        stalled_after_s: float = inf,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        """refused: called with each key that got no memory"""
        self._ram = ram
        self._metrics = metrics
        self._evictions = evictions
        self._writes = writes
        self._stalled_after_s = stalled_after_s
        self._clock = clock
        self._refused = refused
        # by key: entry, time of reservation, reservation
        self._writing: dict[bytes, tuple[Entry, float, ReservedChunks]] = {}

    def reserve_turns(
        self,
        reservation: ReservedChunks,
        names: ChunkNames,
        shard: int,
        *,
        groups: bytes | None = None,
    ) -> Turns[list["array[int]"]]:
        """Offsets, `[group][chunk]`. Raises ProtocolError, LayoutError."""
        layout, store_options = reservation.layout, reservation.store_options
        _check_names(layout, names, shard)
        if groups is not None and len(groups) != len(layout.groups) * len(names):
            raise ProtocolError(
                f"groups has {len(groups)} bytes for {len(layout.groups)} groups of "
                f"{len(names)} chunks; it needs one byte per group and chunk"
            )
        expires_at = (
            0 if store_options.ttl_s is None else ceil(self._ram.now() + store_options.ttl_s)
        )
        offsets = [array("q", [ABSENT]) * len(names) for _ in layout.groups]
        now_s = self._clock()
        every_group, num_tokens, first_token = (
            range(len(layout.groups)),
            layout.tokens_per_chunk,
            names.first_token,
        )
        suffixes, sizes = (
            [place_suffix(g, shard) for g in every_group],
            [layout.chunk_bytes(g, num_tokens) for g in every_group],
        )
        parents: Sequence[bytes | None] = [
            names.namespace + names.parent + s if names.parent else None for s in suffixes
        ]
        for chunk, chain_hash in enumerate(split_hashes(names.hashes)):
            if names.tail_tokens and chunk == len(names) - 1:
                num_tokens = names.tail_tokens
                sizes = [layout.chunk_bytes(g, num_tokens) for g in every_group]
            keys = [names.namespace + chain_hash + suffix for suffix in suffixes]
            asked = (
                every_group
                if groups is None
                else [g for g in every_group if groups[g * len(names) + chunk]]
            )
            missing, there = self._split(keys, asked)
            if missing:
                wanted = [Wanted(keys[g], sizes[g], parents[g]) for g in missing]
                self._ram.hold_all(there)  # new entries must not evict them
                entries = self._ram.reserve_all(
                    wanted,
                    num_tokens=num_tokens,
                    first_token=first_token,
                    expires_at=expires_at,
                    # with tiers, memory may decline none
                    if_worth=self._writes is None,
                    numa_node=reservation.numa_node,
                )
                self._ram.unpin_all(there)
                if entries is None:
                    why = self._ram.refusal
                    self._metrics.add(
                        "kvhold_store_skipped_chunks",
                        len(missing),
                        reason="declined" if why == DECLINED else "no room",
                    )
                    for one in wanted:
                        self._evictions.add(one.key, why)
                        self._refused(one.key)
                    break
                reservation.add(chunk, entries)
                self._writing.update((entry.key, (entry, now_s, reservation)) for entry in entries)
                for g, entry in zip(missing, entries, strict=True):
                    offsets[g][chunk] = entry.offset
                count_entries(self._metrics, "reserved", entries)
            first_token, parents = first_token + num_tokens, keys
            yield _RESERVE_UNITS * len(keys)
        return offsets

    def commit_turns(
        self, reservation: ReservedChunks, chunks: Sequence[int], checksums: bytes | None
    ) -> Turns[None]:
        """The last chunk becomes visible first: eviction by age never takes a prefix first.

        checksums: `checksums.BYTES` bytes per chunk, granted group and layer; None: keep none

        Raises ProtocolError for a wrong size of `checksums`; nothing is committed then.
        """
        if checksums is not None:
            yield from _keep_checksums(
                reservation,
                [chunk for chunk in dict.fromkeys(chunks) if chunk in reservation.chunks],
                checksums,
            )
        numbers = sorted(set(chunks) & reservation.chunks.keys(), reverse=True)
        committed: list[list[Entry]] = []
        held: list[Entry] = []
        try:
            size = max(1, _MOST_COMMITTED // len(reservation.layout.groups))
            for begin in range(0, len(numbers), size):
                part = [
                    reservation.take(number)
                    for number in numbers[begin : begin + size]
                    if number in reservation.chunks
                ]
                committed += part
                entries = [entry for of_chunk in part for entry in of_chunk]
                self._commit(entries)
                if self._writes is not None:
                    visible = [entry for entry in entries if entry.committed]
                    self._ram.hold_all(visible)
                    held += visible
                yield _COMMIT_UNITS * sum(map(len, part))
            if self._writes is None:
                return
            # tiers are written from the first chunk on
            for of_chunk in reversed(committed):
                for entry in of_chunk:
                    self._writes.add(entry, reservation.layout, reservation.store_options)
                self._ram.unpin_all([held.pop() for entry in of_chunk if entry.committed])
                yield len(of_chunk)
        finally:  # the client may disconnect between steps
            self._ram.unpin_all(held)

    def _commit(self, entries: list[Entry]) -> None:
        self._is_written(entries)
        stored = [entry for entry in entries if not self._ram.is_doomed(entry)]
        count_entries(self._metrics, "stored", stored)
        if len(stored) < len(entries):
            count_entries(
                self._metrics,
                "abandoned",
                [entry for entry in entries if self._ram.is_doomed(entry)],
            )
        for entry in entries:
            self._ram.commit(entry)

    def abandon_turns(self, reservation: ReservedChunks) -> Turns[None]:
        """The reservation keeps chunks not freed yet."""
        while reservation.chunks:
            entries = reservation.take(next(reversed(reservation.chunks)))
            self._is_written(entries)
            for entry in entries:
                self._ram.abandon(entry)
            count_entries(self._metrics, "abandoned", entries)
            yield _ABANDON_UNITS * len(entries)

    def _split(self, keys: Sequence[bytes], groups: Iterable[int]) -> tuple[list[int], list[Entry]]:
        missing, there = [], []
        for group in groups:
            key = keys[group]
            if (entry := self._ram.find(key)) is not None:
                self._metrics.add("kvhold_store_skipped_chunks", reason="present")
                there.append(entry)
            elif self._ram.holds(key) and not self._take_over(key):
                self._metrics.add("kvhold_store_skipped_chunks", reason="in progress")
            else:
                missing.append(group)
        return missing, there

    def _take_over(self, key: bytes) -> bool:
        entry, since_s, reservation = self._writing.get(key, (None, inf, None))
        if entry is None or reservation is None or not self._ram.is_being_written(entry):
            return False
        if not reservation.is_given_up and self._clock() - since_s < self._stalled_after_s:
            return False
        self._ram.remove(entry)
        del self._writing[key]
        self._metrics.add("kvhold_stalled_chunks")
        return True

    def _is_written(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if self._writing.get(entry.key, (None,))[0] is entry:
                del self._writing[entry.key]


def _keep_checksums(
    reservation: ReservedChunks, chunks: Sequence[int], packed: bytes
) -> Turns[None]:
    entries = [entry for chunk in chunks for entry in reservation.chunks[chunk]]
    by_group = [BYTES * group.layers for group in reservation.layout.groups]
    sizes: list[int] = []
    for begin in range(0, len(entries), _MOST_CHECKSUMS):
        sizes += [
            by_group[split_key(entry.key).group]
            for entry in entries[begin : begin + _MOST_CHECKSUMS]
        ]
        yield _MOST_CHECKSUMS
    if len(packed) != sum(sizes):
        raise ProtocolError(
            f"checksums has {len(packed)} bytes for {len(entries)} chunks; {sum(sizes)} "
            f"are needed, {BYTES} per layer"
        )
    at = 0
    for number, (entry, size) in enumerate(zip(entries, sizes, strict=True), 1):
        entry.checksums = packed[at : at + size]
        at += size
        if number % _MOST_CHECKSUMS == 0:
            yield _MOST_CHECKSUMS // 4


def _check_names(layout: Layout, names: ChunkNames, shard: int) -> None:
    if (
        len(names.namespace) != NAMESPACE_BYTES
        or len(names.hashes) % HASH_BYTES
        or not 0 <= shard < MAX_SHARDS
    ):
        raise ProtocolError(
            f"chunk names with {len(names.namespace)} bytes of namespace and {len(names.hashes)} "
            f"bytes of hashes, in shard {shard}; needed are {NAMESPACE_BYTES} bytes, a multiple of "
            f"{HASH_BYTES} bytes and a shard below {MAX_SHARDS}"
        )
    if len(names.parent) not in (0, HASH_BYTES):
        raise ProtocolError(
            f"parent has {len(names.parent)} bytes; it must be empty or a hash of {HASH_BYTES} "
            "bytes"
        )
    if names.tail_tokens:
        if not names.hashes:
            raise ProtocolError(
                f"tail_tokens is {names.tail_tokens}, but hashes is empty; a tail needs its hash"
            )
        layout.check_tokens(names.tail_tokens)
