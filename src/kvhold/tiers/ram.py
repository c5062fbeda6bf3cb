"""Chunks in the arena, which readers use in place.

A reserved entry is its writer's. A committed one is visible, and readable while pinned. Not
evicted: pinned entries, entries being written, and the parents of these. A *doomed* entry was
removed while in use: its last user frees it. One thread.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import ClassVar

from kvhold.core.errors import TierError, TierFull
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import CLEARED, DECLINED, EVICTED, EXPIRED, NO_ROOM, Reason
from kvhold.core.turns import next_turn
from kvhold.memory.arena import Arena
from kvhold.memory.slab import SlabAllocator, ZonedSlabs, size_class
from kvhold.tiers.base import Parts, TierTraits, check_lengths, size_of
from kvhold.tiers.memory_limits import MemoryLimits
from kvhold.tiers.policies import Policy
from kvhold.tiers.spare_chunks import SpareChunks
from kvhold.tiers.table import SPREAD, KeyTable

ADMITTED, REPLACED = "admitted", "replaced"
NEVER = (1 << 63) - 1
_REMOVE_UNITS = 8  # see `cache/chores.py`
_TRIES_NEAR = 4  # evictions for the wanted NUMA node


@dataclass(slots=True)
class Wanted:
    """parent: key of the previous chunk, of the same group and shard"""

    key: bytes
    nbytes: int
    parent: bytes | None = None


class Entry:
    """expires_at: Unix time; 0: never; NEVER: whatever a tier sets
    checksums:  of the layers; empty for frames
    epoch:      number of clears before the entry
    root:       key of its prompt's first chunk here
    """

    __slots__ = (
        "checksums",
        "committed",
        "doomed",
        "epoch",
        "expires_at",
        "first_token",
        "key",
        "nbytes",
        "num_tokens",
        "offset",
        "parent",
        "pins",
        "root",
        "slot",
        "taken_bytes",
    )

    def __init__(
        self,
        wanted: Wanted,
        offset: int,
        taken_bytes: int,
        num_tokens: int,
        first_token: int,
        expires_at: int,
    ) -> None:
        self.key = self.root = wanted.key
        self.nbytes = wanted.nbytes
        self.parent = wanted.parent
        self.offset = offset
        self.taken_bytes = taken_bytes
        self.num_tokens = num_tokens
        self.first_token = first_token
        self.expires_at = expires_at
        self.checksums = b""
        self.pins = 0
        self.epoch = self.slot = 0
        self.committed = False
        self.doomed = False


class RamTier:
    traits: ClassVar[TierTraits] = TierTraits(name="ram", expires=True, replaces=True)

    def __init__(
        self,
        arena: Arena,
        policy: Policy,
        metrics: Metrics,
        *,
        quota_bytes: int = 0,
        numa_nodes: Sequence[int] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """quota_bytes: of a namespace, which then evicts its own chunks; 0: no limit
        numa_nodes: each has an equal part of the arena; below two: undivided
        """
        self._arena = arena
        self._zones: dict[int | None, int] = {node: zone for zone, node in enumerate(numa_nodes)}
        self._slabs = (
            ZonedSlabs(arena.nbytes, len(numa_nodes))
            if len(numa_nodes) > 1
            else SlabAllocator(arena.nbytes)
        )
        self._policy = policy
        self._metrics = metrics
        self.limits = MemoryLimits(namespace_bytes=quota_bytes)
        self._clock = clock
        self._entries: KeyTable[Entry] = KeyTable()
        self.spares = SpareChunks(self._entries.__getitem__)
        self._num_by: dict[bytes, int] = {}
        self._num_live = 0
        self._num_pinned = 0
        self._epoch = 0
        self._cleared: dict[bytes, int] = {}  # prefix -> epoch
        self._sweeping = False
        # each entry that becomes visible (ADMITTED) or is removed (the reason)
        self.watch: Callable[[str, Entry], None] | None = None
        # each key whose reserved entry never becomes visible
        self.watch_lost: Callable[[bytes], None] | None = None
        # before evictions; it may unpin entries
        self.before_eviction: Callable[[], None] | None = None
        self._to_be_continued: dict[bytes, int] = {}
        self._used_by: dict[bytes, int] = {}
        # each namespace at its first memory, after `used_bytes_of` counts it
        self.new_namespaces: deque[bytes] | None = None
        self._doomed = 0
        self.refusal: Reason = NO_ROOM

    @property
    def num_chunks(self) -> int:
        return len(self._entries) + self._doomed

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity

    @property
    def used_bytes(self) -> int:
        return self._slabs.used_bytes

    @property
    def used_by_namespace(self) -> dict[bytes, int]:
        return dict(self._used_by)

    def used_bytes_of(self, namespace: bytes) -> int:
        """Includes reserved entries, and removed ones still in use. Any thread."""
        return self._used_by.get(namespace, 0)

    @property
    def num_namespaces(self) -> int:
        return len(self._used_by)

    @property
    def num_pinned(self) -> int:
        return self._num_pinned + self._doomed

    @property
    def num_clears(self) -> int:
        return self._epoch

    @property
    def num_clearing(self) -> int:
        return len(self._entries) - self._num_live

    @property
    def policy(self) -> Policy:
        return self._policy

    def now(self) -> float:
        return self._clock()

    def view(self, entry: Entry) -> memoryview:
        """The entry must be reserved or pinned."""
        return self._arena.view(entry.offset, entry.nbytes)

    def holds(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            return False
        if self._cleared and self._was_cleared(entry):
            self.remove(entry)
            return False
        return True

    def is_being_written(self, entry: Entry) -> bool:
        return not entry.committed and self._entries.get(entry.key) is entry

    def find(self, key: bytes) -> Entry | None:
        entry = self._entries.shards[key[SPREAD]].get(key)
        if entry is None or not entry.committed:
            return None
        if self._cleared and self._was_cleared(entry):
            self.remove(entry)
            return None
        if entry.expires_at and entry.expires_at <= self._clock():
            self._metrics.add("kvhold_expired_chunks", tier="ram")
            self._metrics.add("kvhold_expired_bytes", entry.nbytes, tier="ram")
            self.remove(entry, why=EXPIRED)
            return None
        return entry

    def reserve_all(
        self,
        wanted: Sequence[Wanted],
        *,
        num_tokens: int,
        first_token: int,
        expires_at: int = 0,
        if_worth: bool = False,
        numa_node: int | None = None,
    ) -> list[Entry] | None:
        """Reserve memory for `wanted`, all of one namespace, and evict to make room.

        None: nothing is reserved; `refusal` says why. Replaces visible entries. No key may be being
        written.

        if_worth:  the policy may decline, if victims are worth more
        numa_node: of the writer
        """
        namespace, sizes = wanted[0].key[:NAMESPACE_BYTES], []
        for one in wanted:
            sizes.append(size_class(one.nbytes))
            if one.parent is not None:
                self._to_be_continued[one.parent] = self._to_be_continued.get(one.parent, 0) + 1
        self.refusal = NO_ROOM
        offsets = self._allocate(
            namespace, sizes, wanted[0].key if if_worth else None, self._zones.get(numa_node)
        )
        if offsets is None:
            for one in wanted:
                self._end_continuation(one.parent)
            return None
        used_bytes = self._used_by.get(namespace, 0)
        self._used_by[namespace] = used_bytes + sum(sizes)
        if not used_bytes and self.new_namespaces is not None:
            self.new_namespaces.append(namespace)
        entries = []
        for one, offset, size in zip(wanted, offsets, sizes, strict=True):
            if self.holds(one.key):
                old = self._entries[one.key]
                assert old.committed, "reserved twice"
                self.remove(old, why=REPLACED)
            entry = self._entries[one.key] = Entry(
                one, offset, size, num_tokens, first_token, expires_at
            )
            entry.epoch = self._epoch
            if one.parent is not None and (above := self._entries.get(one.parent)) is not None:
                entry.root = above.root
            entries.append(entry)
        self._num_by[namespace] = self._num_by.get(namespace, 0) + len(entries)
        self._num_live += len(entries)
        return entries

    def commit(self, entry: Entry) -> None:
        assert not entry.committed
        self._end_continuation(entry.parent)
        if self.is_doomed(entry):
            if not entry.doomed:
                self.remove(entry)
            self._doomed -= 1
            self._free(entry)
            self._report_lost(entry)
            return
        entry.committed = True
        self._policy.insert(entry.key, entry.taken_bytes, entry.parent)
        if self.watch is not None:
            self.watch(ADMITTED, entry)

    def abandon(self, entry: Entry) -> None:
        assert not entry.committed
        self._end_continuation(entry.parent)
        if entry.doomed:
            self._doomed -= 1
        else:
            self._forget(entry)
        self._free(entry)
        self._report_lost(entry)

    def is_doomed(self, entry: Entry) -> bool:
        """Any thread."""
        return entry.doomed or (bool(self._cleared) and self._was_cleared(entry))

    def pin(self, entry: Entry) -> None:
        self.pin_all((entry,))

    def pin_all(self, entries: Sequence[Entry]) -> None:
        """Keep in place until `unpin_all`. Counts as a use, in this order."""
        self.hold_all(entries)
        self.touch_all(entries)

    def touch_all(self, entries: Sequence[Entry]) -> None:
        self._policy.touch_all([entry.key for entry in entries])

    def hold(self, entry: Entry) -> None:
        self.hold_all((entry,))

    def hold_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.committed, "only visible entries are read"
            if not entry.pins and not entry.doomed:
                self._num_pinned += 1
            entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        self.unpin_all((entry,))

    def unpin_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.pins > 0
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.doomed:
                self._doomed -= 1
                self._free(entry)
            else:
                self._num_pinned -= 1

    def remove(self, entry: Entry, *, why: str = CLEARED) -> None:
        assert self._entries.get(entry.key) is entry, "removed already"
        self._forget(entry)
        if entry.committed:
            self._policy.remove(entry.key, evicted=why == EVICTED)
            if self.watch is not None:
                self.watch(why, entry)
        if entry.pins or not entry.committed:
            entry.doomed = True
            self._doomed += 1
            if entry.pins:
                self._num_pinned -= 1
        else:
            self._free(entry)

    def entries(self, prefix: bytes = b"") -> list[Entry]:
        """Includes reserved entries. Slow."""
        return [
            entry
            for entry in self._entries.values()
            if entry.key.startswith(prefix) and not self.is_doomed(entry)
        ]

    def parts(self) -> Iterator[list[Entry]]:
        for part in self._entries.parts():
            yield [entry for entry in part if entry.committed and not self.is_doomed(entry)]

    def clear(self, prefix: bytes) -> int:
        """Returns the number of entries. `sweep` frees them. prefix: a namespace; empty: all"""
        self._epoch += 1
        self._cleared[prefix] = self._epoch
        if prefix:
            removed = self._num_by.pop(prefix, 0)
        else:
            removed = self._num_live
            self._num_by.clear()
        self._num_live -= removed
        return removed

    def sweep(self) -> Iterator[int]:
        """Yields the cost of each step (`cache/chores.py`)."""
        if self._sweeping:
            return
        self._sweeping = True
        while self._cleared:
            epoch = self._epoch
            for part in self._entries.parts():
                yield 1 + len(part) // 4
                for entry in part:
                    if self._was_cleared(entry) and self._entries.get(entry.key) is entry:
                        self.remove(entry)
                        yield _REMOVE_UNITS
            self._cleared = {prefix: at for prefix, at in self._cleared.items() if at > epoch}
        self._sweeping = False

    def remove_key(self, key: bytes) -> bool:
        """Also a reserved entry. False: there is none."""
        if not self.holds(key):
            return False
        self.remove(self._entries[key])
        return True

    def evict(self, entry: Entry) -> bool:
        """False: the entry is in use, or no longer there."""
        if self.find(entry.key) is not entry or self._is_kept(entry.key):
            return False
        self._metrics.add("kvhold_evicted_chunks", tier="ram")
        self._metrics.add("kvhold_evicted_bytes", entry.nbytes, tier="ram")
        self.remove(entry, why=EVICTED)
        return True

    def note_clear(self) -> None:
        """Entries were cleared one by one; lookups begin again."""
        self._epoch += 1

    async def check(self) -> None: ...

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        return [entry.nbytes if (entry := self.find(key)) else None for key in keys]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        return [
            self._copy_out(key, parts, None if starts is None else starts[i])
            for i, (key, parts) in enumerate(zip(keys, into, strict=True))
        ]

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        expires_at = 0 if ttl_s is None or ttl_s == inf else ceil(self._clock() + ttl_s)
        return [self._copy_in(key, parts, expires_at) for key, parts in items]

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        first = dict(reversed(items))
        answers = {key: self._copy_over(key, parts) for key, parts in first.items()}
        return [answers[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        removed = []
        for key in keys:
            entry = self.find(key)
            if entry is not None:
                self.remove(entry)
            removed.append(entry is not None)
        return removed

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        for part in self.parts():
            for entry in part:
                if entry.key.startswith(prefix):
                    yield entry.key
            await next_turn()

    async def close(self) -> None:
        """The arena belongs to its maker."""

    def _copy_out(self, key: bytes, parts: Parts, start: int | None) -> int | None:
        entry = self.find(key)
        wanted = size_of(parts)
        if entry is None or (
            entry.nbytes > wanted if start is None else start + wanted > entry.nbytes
        ):
            return None
        at, left = entry.offset + (start or 0), entry.nbytes if start is None else wanted
        for part in parts:
            step = min(left, part.nbytes)
            part.cast("B")[:step] = self._arena.view(at, step)
            at, left = at + step, left - step
        self._policy.touch(key)
        return entry.nbytes if start is None else wanted

    def _copy_in(self, key: bytes, parts: Parts, expires_at: int) -> TierError | None:
        if self.holds(key):
            return (
                None if self.find(key) else TierError("ram", "put", "another writer is storing it")
            )
        nbytes = size_of(parts)
        entries = self.reserve_all(
            [Wanted(key, nbytes)], num_tokens=0, first_token=0, expires_at=expires_at
        )
        if entries is None:
            return TierFull("ram", "put", f"no room for {nbytes} bytes")
        self._fill(entries[0], parts)
        return None

    def _copy_over(self, key: bytes, parts: Parts) -> bool | TierError:
        old, nbytes = self.find(key), size_of(parts)
        if old is None:
            return False
        self.hold(old)  # the new value must not evict it
        wanted = Wanted(key, nbytes, old.parent)
        entries = self.reserve_all(
            [wanted],
            num_tokens=old.num_tokens,
            first_token=old.first_token,
            expires_at=old.expires_at,
        )
        self.unpin(old)
        if entries is None:
            return TierFull("ram", "replace", f"no room for {nbytes} bytes next to the old value")
        self._fill(entries[0], parts)
        return True

    def _fill(self, entry: Entry, parts: Parts) -> None:
        at = entry.offset
        for part in parts:
            self._arena.view(at, part.nbytes)[:] = part.cast("B")
            at += part.nbytes
        self.commit(entry)

    def _allocate(
        self, namespace: bytes, sizes: list[int], wanted: bytes | None, zone: int | None
    ) -> list[int] | None:
        needed = sum(sizes)
        self.spares.begin(len(sizes))
        if needed > self._slabs.capacity or not self._keep_limits(namespace, needed, wanted):
            return None
        tries = 0
        while (offsets := self._slabs.allocate_all(sizes, zone)) is None:
            # the missing bytes, then one entry at a time until a slab has room
            if not self._evict(
                max(1, needed - (self._slabs.capacity - self._slabs.used_bytes)), wanted=wanted
            ):
                return self._slabs.allocate_all(sizes)
            tries += 1
            if tries == _TRIES_NEAR:
                zone = None
        return offsets

    def _keep_limits(self, namespace: bytes, needed: int, wanted: bytes | None) -> bool:
        for of in (namespace, None):
            limit, over = self._limit(of), self._over(of) + needed
            if limit and over > 0 and (needed > limit or not self._evict(over, of, wanted)):
                return False
        return True

    def shrink(self) -> Iterator[int]:
        """To the limits. Yields the cost of each step (`cache/chores.py`)."""
        for of in (None, *self._used_by):
            yield 1
            while self._limit(of) and self._over(of) > 0 and self._evict(1, of):
                yield _REMOVE_UNITS

    def _limit(self, namespace: bytes | None) -> int:
        return self.limits.total_bytes if namespace is None else self.limits.of(namespace)

    def _over(self, namespace: bytes | None) -> int:
        used = self.used_bytes if namespace is None else self.used_bytes_of(namespace)
        return used - self._limit(namespace)

    def _end_continuation(self, parent: bytes | None) -> None:
        if parent is None:
            return
        left = self._to_be_continued[parent] - 1
        if left:
            self._to_be_continued[parent] = left
        else:
            del self._to_be_continued[parent]

    def _was_cleared(self, entry: Entry) -> bool:
        find = self._cleared.get
        return entry.epoch < find(b"", 0) or entry.epoch < find(entry.key[:NAMESPACE_BYTES], 0)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        if self._cleared and self._was_cleared(entry):
            return
        namespace = entry.key[:NAMESPACE_BYTES]
        self._num_live -= 1
        left = self._num_by[namespace] - 1
        if left:
            self._num_by[namespace] = left
        else:
            del self._num_by[namespace]

    def _report_lost(self, entry: Entry) -> None:
        if self.watch_lost is not None:
            self.watch_lost(entry.key)

    def _free(self, entry: Entry) -> None:
        self._slabs.free(entry.offset)
        namespace = entry.key[:NAMESPACE_BYTES]
        left = self._used_by[namespace] - entry.taken_bytes
        if left:
            self._used_by[namespace] = left
        else:
            del self._used_by[namespace]

    def _evict(
        self, nbytes: int, namespace: bytes | None = None, wanted: bytes | None = None
    ) -> bool:
        if self.before_eviction is not None:
            self.before_eviction()
        victims = self.spares.victims(self._policy, nbytes, self._is_kept, namespace, wanted)
        if self._policy.declined:
            self.refusal = DECLINED
        for key in victims:
            entry = self._entries[key]
            if self.is_doomed(entry):
                self.remove(entry)
                continue
            self._metrics.add("kvhold_evicted_chunks", tier="ram")
            self._metrics.add("kvhold_evicted_bytes", entry.nbytes, tier="ram")
            self.remove(entry, why=EVICTED)
        return bool(victims)

    def _is_kept(self, key: bytes) -> bool:
        return self._entries[key].pins > 0 or key in self._to_be_continued
