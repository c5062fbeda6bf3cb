"""The RAM tier: chunks in the arena, lent without a copy.

    entry = tier.reserve(key, nbytes, num_tokens, first_token)    # nobody sees it yet
    tier.commit(entry)                                            # visible; or tier.abandon(entry)
    entry = tier.find(key); tier.pin(entry) ... tier.unpin(entry)

A reserved entry belongs to its writer; a committed one may be read by whoever has pinned it; only committed entries that nobody pins
are evicted. A key cleared while it is pinned is *doomed*: not found any more, its memory free when the last pin falls.
Besides lending it meets the Tier contract, by copying. Synchronous and single-threaded: a cache's lock or a node's loop owns it.
"""

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from kvhold.core.errors import TierError, TierFull
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.memory.slab import SlabAllocator, size_class
from kvhold.tiers.base import Parts, TierTraits, check_lengths, size_of
from kvhold.tiers.policies import Policy


class Entry:
    """One chunk in the arena."""

    __slots__ = ("committed", "doomed", "first_token", "key", "nbytes", "num_tokens", "offset", "pins")

    def __init__(self, key: bytes, offset: int, nbytes: int, num_tokens: int, first_token: int) -> None:
        self.key = key
        self.offset = offset
        self.nbytes = nbytes
        self.num_tokens = num_tokens
        self.first_token = first_token
        self.pins = 0
        self.committed = False
        self.doomed = False


class RamTier:
    """The chunks of one arena."""

    traits: ClassVar[TierTraits] = TierTraits(name="ram")

    def __init__(self, arena: Arena, policy: Policy, metrics: Metrics) -> None:
        self._arena = arena
        self._slabs = SlabAllocator(arena.nbytes)
        self._policy = policy
        self._metrics = metrics
        self._entries: dict[bytes, Entry] = {}
        self._doomed = 0

    @property
    def num_chunks(self) -> int:
        """Entries, reserved ones included."""
        return len(self._entries) + self._doomed

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self._slabs.capacity

    @property
    def used_bytes(self) -> int:
        """Arena bytes taken, rounding included. 0 when every entry has gone: the baseline."""
        return self._slabs.used_bytes

    @property
    def num_pinned(self) -> int:
        """Entries that somebody is reading."""
        return sum(entry.pins > 0 for entry in self._entries.values()) + self._doomed

    def holds(self, key: bytes) -> bool:
        """Whether `key` is here, visible or still being written."""
        return key in self._entries

    def find(self, key: bytes) -> Entry | None:
        """The visible entry of `key`."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.committed else None

    def reserve_all(self, wanted: Sequence[tuple[bytes, int]], num_tokens: int, first_token: int) -> list[Entry] | None:
        """Memory for every `(key, bytes)` of `wanted`, evicting what must go; None (and nothing taken) when there is no room."""
        sizes = [nbytes for _, nbytes in wanted]
        needed = sum(map(size_class, sizes))
        if needed > self._slabs.capacity:
            return None  # evicting everything would not help
        while (offsets := self._slabs.allocate_all(sizes)) is None:
            # What is short, no more; where enough is free but in pieces, one victim after another until a whole slab is.
            if not self._evict(max(1, needed - (self._slabs.capacity - self._slabs.used_bytes))):
                return None
        entries = [Entry(key, at, nbytes, num_tokens, first_token) for (key, nbytes), at in zip(wanted, offsets, strict=True)]
        for entry in entries:
            assert entry.key not in self._entries, "reserved twice"
            self._entries[entry.key] = entry
        return entries

    def commit(self, entry: Entry) -> None:
        """Make it visible."""
        assert not entry.committed
        if entry.doomed:  # cleared while it was written
            self._doomed -= 1
            self._slabs.free(entry.offset)
            return
        entry.committed = True
        self._policy.insert(entry.key, size_class(entry.nbytes))  # what evicting it gives back

    def abandon(self, entry: Entry) -> None:
        """Give its memory back unseen."""
        assert not entry.committed
        if entry.doomed:
            self._doomed -= 1
        else:
            del self._entries[entry.key]
        self._slabs.free(entry.offset)

    def pin(self, entry: Entry) -> None:
        """Keep it where it is until `unpin`."""
        assert entry.committed, "only what is visible is read"
        entry.pins += 1
        self._policy.touch(entry.key)

    def unpin(self, entry: Entry) -> None:
        """One reader less."""
        assert entry.pins > 0
        entry.pins -= 1
        if entry.doomed and not entry.pins:
            self._doomed -= 1
            self._slabs.free(entry.offset)

    def remove(self, entry: Entry) -> None:
        """Forget it now; its memory goes when its readers (or its writer) have finished."""
        assert self._entries.get(entry.key) is entry, "removed already"
        del self._entries[entry.key]
        if entry.committed:
            self._policy.remove(entry.key)
        if entry.pins or not entry.committed:
            entry.doomed = True
            self._doomed += 1
        else:
            self._slabs.free(entry.offset)

    def entries(self, prefix: bytes = b"") -> list[Entry]:
        """Every entry whose key begins with `prefix`, reserved ones included."""
        return [entry for key, entry in self._entries.items() if key.startswith(prefix)]

    async def check(self) -> None:
        """Tier contract."""

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract."""
        return [entry.nbytes if (entry := self.find(key)) else None for key in keys]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract: a copy."""
        check_lengths(keys, into, starts)
        return [
            self._copy_out(key, parts, None if starts is None else starts[i]) for i, (key, parts) in enumerate(zip(keys, into, strict=True))
        ]

    async def put(self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None) -> list[TierError | None]:
        """Tier contract: a copy. ttl_s is ignored."""
        return [self._copy_in(key, parts) for key, parts in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract."""
        removed = []
        for key in keys:
            entry = self.find(key)
            if entry is not None:
                self.remove(entry)
            removed.append(entry is not None)
        return removed

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract."""
        for entry in self.entries(prefix):
            if entry.committed:
                yield entry.key

    async def close(self) -> None:
        """The arena belongs to whoever made it."""

    def _copy_out(self, key: bytes, parts: Parts, start: int | None) -> int | None:
        entry = self.find(key)
        wanted = size_of(parts)
        if entry is None or (entry.nbytes > wanted if start is None else start + wanted > entry.nbytes):
            return None
        at, left = entry.offset + (start or 0), entry.nbytes if start is None else wanted
        for part in parts:
            step = min(left, part.nbytes)
            part.cast("B")[:step] = self._arena.view(at, step)
            at, left = at + step, left - step
        self._policy.touch(key)
        return entry.nbytes if start is None else wanted

    def _copy_in(self, key: bytes, parts: Parts) -> TierError | None:
        if self.holds(key):
            return None if self.find(key) else TierError("ram", "put", "somebody else is writing it")
        nbytes = size_of(parts)
        entries = self.reserve_all([(key, nbytes)], num_tokens=0, first_token=0)
        if entries is None:
            return TierFull("ram", "put", f"no room for {nbytes} bytes")
        at = entries[0].offset
        for part in parts:
            self._arena.view(at, part.nbytes)[:] = part.cast("B")
            at += part.nbytes
        self.commit(entries[0])
        return None

    def _evict(self, nbytes: int) -> bool:
        victims = self._policy.victims(nbytes, self._is_pinned)
        for key in victims:
            entry = self._entries[key]
            self._metrics.add("kvhold_evicted_chunks", tier="ram")
            self._metrics.add("kvhold_evicted_bytes", entry.nbytes, tier="ram")
            self.remove(entry)
        return bool(victims)

    def _is_pinned(self, key: bytes) -> bool:
        return self._entries[key].pins > 0
