"""Keeps chunks in memory by their names, also chunks that are not stored yet. No I/O.

Their bytes count against a share of memory, and of a namespace's quota.
"""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Generic, TypeVar

from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.cache.index.pins import Pins
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, NAMESPACE_BYTES, Query, place_suffix
from kvhold.core.layout import Layout
from kvhold.memory.slab import size_class
from kvhold.tiers.ram import Entry, RamTier

_SHARE = 4

Keeper = TypeVar("Keeper")


class KeptChunks(Generic[Keeper]):
    def __init__(self, ram: RamTier, pins: Pins, max_bytes: int = 0) -> None:
        """max_bytes: 0: a quarter of memory"""
        self._ram = ram
        self._pins = pins
        self._max_bytes = max_bytes
        self._keepers: dict[bytes, dict[Keeper, None]] = {}
        self._entries: dict[bytes, dict[bytes, Entry]] = {}
        self._bytes: dict[bytes, int] = {}
        self._bytes_by: dict[bytes, int] = {}
        self._all_bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._keepers

    def __len__(self) -> int:
        return len(self._keepers)

    @property
    def num_chunks(self) -> int:
        """In memory, of one group and shard each."""
        return sum(map(len, self._entries.values()))

    def entries(self) -> list[Entry]:
        return [entry for entries in self._entries.values() for entry in entries.values()]

    def keepers(self, name: bytes) -> Collection[Keeper]:
        return self._keepers.get(name, ())

    def free_bytes(self, namespace: bytes) -> int:
        free_bytes = (self._max_bytes or self._ram.capacity_bytes // _SHARE) - self._all_bytes
        quota_bytes = self._ram.limits.of(namespace)
        if quota_bytes:
            of_namespace = quota_bytes // _SHARE - self._bytes_by.get(namespace, 0)
            free_bytes = min(free_bytes, of_namespace)
        return free_bytes

    def add(self, name: bytes, keeper: Keeper, nbytes: int) -> None:
        if name not in self._keepers:
            self._charge(name, nbytes)
        self._keepers.setdefault(name, {})[keeper] = None

    def keep(self, name: bytes, entry: Entry) -> None:
        entries = self._entries.setdefault(name, {})
        if entry.key not in entries:
            self._ram.hold(entry)
            entries[entry.key] = entry

    def removed(self, entry: Entry) -> None:
        name = entry.key[:NAME_BYTES]
        entries = self._entries.get(name)
        if entries is None or entries.get(entry.key) is not entry:
            return
        del entries[entry.key]
        if not entries:
            del self._entries[name]
        self._pins.unpin([entry])

    def drop(self, names: Collection[bytes], keeper: Keeper) -> None:
        unpinned: list[Entry] = []
        for name in names:
            keepers = self._keepers[name]
            del keepers[keeper]
            if not keepers:
                del self._keepers[name]
                self._discharge(name)
                unpinned += self._entries.pop(name, {}).values()
        self._pins.unpin(unpinned)

    def _charge(self, name: bytes, nbytes: int) -> None:
        namespace = name[:NAMESPACE_BYTES]
        self._bytes[name] = nbytes
        self._all_bytes += nbytes
        self._bytes_by[namespace] = self._bytes_by.get(namespace, 0) + nbytes

    def _discharge(self, name: bytes) -> None:
        namespace = name[:NAMESPACE_BYTES]
        nbytes = self._bytes.pop(name)
        self._all_bytes -= nbytes
        left = self._bytes_by[namespace] - nbytes
        if left:
            self._bytes_by[namespace] = left
        else:
            del self._bytes_by[namespace]


def stored_names(query: Query, most: int) -> list[bytes]:
    """Each once: whole chunks, then the longest tail, which engines store. most: names"""
    num_whole = len(query.hashes) // HASH_BYTES
    names = [name for _, name in islice(chunk_names(query), most)]
    if names and len(names) == num_whole < most:
        names += [name for _, name in tail_names(query)][-1:]
    return list(dict.fromkeys(names))  # a client may repeat some


def suffixes(query: Query, layout: Layout, groups: Sequence[int] = ()) -> list[bytes]:
    """groups: empty: all"""
    return [
        place_suffix(group, shard)
        for group in groups or range(len(layout.groups))
        for shard in range(query.shards)
    ]


def name_bytes(query: Query, layout: Layout) -> int:
    size = layout.tokens_per_chunk
    sizes = [layout.chunk_bytes(group, size) for group in range(len(layout.groups))]
    return query.shards * sum(map(size_class, sizes))
