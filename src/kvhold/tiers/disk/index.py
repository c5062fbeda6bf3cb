"""What one folder of values holds, and the exact account of its bytes. No I/O; the tier's loop is its only user.

    planned = index.reserve(key, nbytes)        # a place, and the victims that must go first; None: no room; beside `old`, if given
    index.commit(planned.entry, occupied_bytes) # visible; or index.abandon(planned.entry)
    index.swap(old, entry, occupied_bytes)      # in its place
    index.take(entry) ... index.finish(entry)   # not found any more ... its file has gone; or index.restore(entry): it could not be removed

`used_bytes` is what files occupy, those being written and those that are on their way out included: a deleted file that somebody still
reads occupies its place until the last reader has finished. What is read or written is never a victim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvhold.tiers.policies import Policy


class Entry:
    """One value's file. `occupied_bytes` is an estimate until it is committed."""

    __slots__ = ("key", "leaving", "name", "nbytes", "occupied_bytes", "readers", "removed")

    def __init__(self, key: bytes, name: str, nbytes: int, occupied_bytes: int) -> None:
        self.key = key
        self.name = name
        self.nbytes = nbytes
        self.occupied_bytes = occupied_bytes
        self.readers = 0
        self.leaving = False  # taken, and what it occupies will soon be free
        self.removed = False


@dataclass(frozen=True)
class Planned:
    """A place for a new value. The victims' files must be gone before it is written."""

    entry: Entry
    victims: list[Entry]


class Index:
    """The values of one folder, at most `limit_bytes` of it."""

    def __init__(self, policy: Policy, limit_bytes: int, block_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._policy = policy
        self._block_bytes = block_bytes
        self._entries: dict[bytes, Entry] = {}
        self._used_bytes = 0
        self._leaving_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """What all files occupy, rounded to blocks, with what is reserved."""
        return self._used_bytes

    @property
    def excess_bytes(self) -> int:
        """How much more than the limit there is when all that leaves has left."""
        return max(0, self._used_bytes - self._leaving_bytes - self.limit_bytes)

    def find(self, key: bytes) -> Entry | None:
        """The visible entry of `key`."""
        return self._entries.get(key)

    def keys(self, prefix: bytes) -> list[bytes]:
        """Visible keys that begin with `prefix`."""
        return [key for key in self._entries if key.startswith(prefix)]

    def entries(self) -> Iterator[Entry]:
        """All that is visible."""
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """A file that was there already. The one that was used last comes last."""
        self._used_bytes += entry.occupied_bytes
        self._show(entry)

    def reserve(self, key: bytes, name: str, nbytes: int, *, beside: Entry | None = None) -> Planned | None:
        """A place for a file of `nbytes`. None, and nothing taken, when it cannot be had.

        beside: the entry whose place it is to take, and which must be no victim: somebody reads it
        """
        assert self._entries.get(key) is beside
        occupied = -(-nbytes // self._block_bytes) * self._block_bytes
        if occupied > self.limit_bytes:
            return None
        victims = self.evict(self._used_bytes - self._leaving_bytes + occupied - self.limit_bytes)
        if victims is None:
            return None
        self._used_bytes += occupied
        return Planned(Entry(key, name, nbytes, occupied), victims)

    def evict(self, nbytes: int) -> list[Entry] | None:
        """Take victims that free at least `nbytes`; None, and none taken, if there are not enough."""
        if nbytes <= 0:
            return []
        keys = self._policy.victims(nbytes, self._is_read)
        victims = [self._entries[key] for key in keys]
        for victim in victims:
            self._take(victim, evicted=True)
        return victims or None

    def commit(self, entry: Entry, occupied_bytes: int) -> None:
        """Its file is there and occupies so much."""
        self._used_bytes += occupied_bytes - entry.occupied_bytes
        entry.occupied_bytes = occupied_bytes
        self._show(entry)

    def swap(self, old: Entry, entry: Entry, occupied_bytes: int) -> None:
        """The file of `entry` is there, and takes the place of `old`, whose own is to be removed now."""
        self._take(old, evicted=False)
        self.commit(entry, occupied_bytes)

    def abandon(self, entry: Entry) -> None:
        """Its file is not there."""
        self._used_bytes -= entry.occupied_bytes

    def read(self, entry: Entry) -> None:
        """Somebody reads it, until `unread`."""
        entry.readers += 1
        self._policy.touch(entry.key)

    def unread(self, entry: Entry) -> None:
        """One reader less."""
        assert entry.readers > 0
        entry.readers -= 1
        if entry.removed and not entry.readers:
            self._used_bytes -= entry.occupied_bytes

    def take(self, entry: Entry) -> None:
        """It is not found any more: it was deleted, or its file was found broken."""
        self._take(entry, evicted=False)

    def finish(self, entry: Entry) -> None:
        """The file of an entry that was taken has gone."""
        assert not entry.removed
        entry.removed = True
        self._leave(entry)
        if not entry.readers:
            self._used_bytes -= entry.occupied_bytes

    def restore(self, entry: Entry) -> None:
        """The file of an entry that was taken could not be removed: found again, or counted until the next start if its key is new."""
        self._leave(entry)
        if entry.key not in self._entries:
            self._show(entry)

    def _take(self, entry: Entry, *, evicted: bool) -> None:
        assert self._entries.get(entry.key) is entry
        del self._entries[entry.key]
        self._policy.remove(entry.key, evicted=evicted)
        if not entry.readers:
            entry.leaving = True
            self._leaving_bytes += entry.occupied_bytes

    def _leave(self, entry: Entry) -> None:
        if entry.leaving:
            entry.leaving = False
            self._leaving_bytes -= entry.occupied_bytes

    def _show(self, entry: Entry) -> None:
        assert entry.key not in self._entries
        self._entries[entry.key] = entry
        self._policy.insert(entry.key, entry.occupied_bytes)

    def _is_read(self, key: bytes) -> bool:
        return self._entries[key].readers > 0
