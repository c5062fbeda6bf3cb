"""What one folder of values holds, and the exact account of its bytes. No I/O; the tier's loop is its only user.

    planned = index.reserve(key, nbytes)        # a place, and the victims that must go first; None: no room; beside `old`, if given
    index.commit(planned.entry, occupied_bytes) # visible; or index.abandon(planned.entry)
    index.swap(old, entry, occupied_bytes)      # in its place
    index.take(entry) ... index.finish(entry)   # not found any more ... its file has gone; or index.restore(entry): it could not be removed

`used_bytes` is what files occupy, those being written and those that are on their way out included: a deleted file that somebody still
reads occupies its place until the last reader has finished. What is read or written is never a victim.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from kvhold.tiers.disk.folder import FoundValue, value_name
from kvhold.tiers.disk.rows import NONE, Rows, Sorting
from kvhold.tiers.policies import Policy, make_policy

_IN_ROWS = ("lru", "fifo", "mru")  # policies whose order is that of the rows


class Entry:
    """One value's file, made when it is asked for; the same one as long as somebody reads it.

    `occupied_bytes` is an estimate until it is committed.
    """

    __slots__ = ("key", "leaving", "nbytes", "occupied_bytes", "readers", "removed", "written_ns")

    def __init__(self, key: bytes, nbytes: int, written_ns: int, occupied_bytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.written_ns = written_ns
        self.occupied_bytes = occupied_bytes
        self.readers = 0
        self.leaving = False  # taken, and what it occupies will soon be free
        self.removed = False

    @property
    def name(self) -> str:
        """Its file's. No other file of the folder ever has it."""
        return value_name(self.key, self.nbytes, self.written_ns)


@dataclass(frozen=True)
class Planned:
    """A place for a new value. The victims' files must be gone before it is written."""

    entry: Entry
    victims: list[Entry]


class Index:
    """The values of one folder, at most `limit_bytes` of it."""

    def __init__(self, policy: str, limit_bytes: int, block_bytes: int) -> None:
        """policy: its name. With one other than lru, fifo and mru a value takes some 400 bytes more."""
        self.limit_bytes = limit_bytes
        self._order = policy
        self._policy: Policy | None = None if policy in _IN_ROWS else make_policy(policy)
        self._block_bytes = block_bytes
        self._rows = Rows()
        self._busy: dict[bytes, Entry] = {}  # those that somebody reads
        self._used_bytes = 0
        self._leaving_bytes = 0

    def __len__(self) -> int:
        return self._rows.num

    @property
    def index_bytes(self) -> int:
        """What it takes in memory, but for a policy that keeps an order of its own."""
        return self._rows.index_bytes

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
        row = self._rows.find(key)
        return None if row == NONE else self._entry(row)

    def holds(self, entry: Entry) -> bool:
        """Whether its file is the one that is visible."""
        found = self.find(entry.key)
        return found is not None and (found.written_ns, found.nbytes) == (entry.written_ns, entry.nbytes)

    def keys(self, prefix: bytes) -> Iterator[list[bytes]]:
        """Visible keys that begin with `prefix`, a few at a time, while others come and go."""
        return self._rows.keys(prefix)

    def entries(self) -> Iterator[Entry]:
        """All that is visible."""
        return (self._entry(row) for row in list(self._rows.oldest()))

    def add(self, entry: Entry, used_ns: int) -> None:
        """A file that was there already. `sort` when all are there."""
        self._used_bytes += entry.occupied_bytes
        self._show(entry, used_ns)

    def add_found(self, found: Sequence[FoundValue], *, before_ns: int | None = None, writing: Container[bytes] = ()) -> list[str]:
        """Files that a folder has. Returns the names of those that are older than another of the same key, and of no use.

        before_ns: those written from then on are ours, and known; writing: keys whose new file is being written
        """
        older: list[str] = []
        for value in found:
            if before_ns is not None and value.written_ns >= before_ns:
                continue
            twin = self.find(value.key)
            if value.key in writing or (twin is not None and twin.written_ns > value.written_ns):
                older.append(value.name)
                continue
            if twin is not None:
                older.append(twin.name)
                self.take(twin)
                self.finish(twin)
            self.add(Entry(value.key, value.nbytes, value.written_ns, value.occupied_bytes), value.used_ns)
        return older

    def sort(self) -> None:
        """Put all in the order in which they were used. A policy with an order of its own has them as they came."""
        self._rows.sort()

    def sorting(self) -> Sorting:
        """As `sort`, in steps, while values come and go."""
        return Sorting(self._rows)

    def reserve(self, key: bytes, written_ns: int, nbytes: int, *, beside: Entry | None = None) -> Planned | None:
        """A place for a file of `nbytes`. None, and nothing taken, when it cannot be had.

        beside: the entry whose place it is to take, and which must be no victim: somebody reads it
        """
        assert beside is not None or self._rows.find(key) == NONE
        occupied = -(-nbytes // self._block_bytes) * self._block_bytes
        if occupied > self.limit_bytes:
            return None
        victims = self.evict(self._used_bytes - self._leaving_bytes + occupied - self.limit_bytes)
        if victims is None:
            return None
        self._used_bytes += occupied
        return Planned(Entry(key, nbytes, written_ns, occupied), victims)

    def evict(self, nbytes: int) -> list[Entry] | None:
        """Take victims that free at least `nbytes`; None, and none taken, if there are not enough."""
        if nbytes <= 0:
            return []
        victims = self._victims(nbytes)
        for victim in victims:
            self._take(victim, evicted=True)
        return victims or None

    def commit(self, entry: Entry, occupied_bytes: int) -> None:
        """Its file is there and occupies so much."""
        self._used_bytes += occupied_bytes - entry.occupied_bytes
        entry.occupied_bytes = occupied_bytes
        self._show(entry, entry.written_ns)

    def swap(self, old: Entry, entry: Entry, occupied_bytes: int) -> None:
        """The file of `entry` is there, and takes the place of `old`, whose own is to be removed now."""
        self._take(old, evicted=False)
        self.commit(entry, occupied_bytes)

    def abandon(self, entry: Entry) -> None:
        """Its file is not there."""
        self._used_bytes -= entry.occupied_bytes

    def read(self, entry: Entry, used_ns: int) -> None:
        """Somebody reads it, until `unread`."""
        self.hold(entry)
        if self._policy is not None:
            self._policy.touch(entry.key)
        elif self._order != "fifo" and (row := self._rows.find(entry.key)) != NONE:
            self._rows.touch(row, used_ns)

    def hold(self, entry: Entry) -> None:
        """It is no victim until `unread`, and was not asked for."""
        entry.readers += 1
        self._busy[entry.key] = entry

    def unread(self, entry: Entry) -> None:
        """One reader less."""
        assert entry.readers > 0
        entry.readers -= 1
        if not entry.readers and self._busy.get(entry.key) is entry:
            del self._busy[entry.key]
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
        if self._rows.find(entry.key) == NONE:
            self._show(entry, entry.written_ns)

    def _take(self, entry: Entry, *, evicted: bool) -> None:
        assert self.holds(entry)
        self._rows.remove(self._rows.find(entry.key))
        if self._busy.get(entry.key) is entry:
            del self._busy[entry.key]
        if self._policy is not None:
            self._policy.remove(entry.key, evicted=evicted)
        if not entry.readers:
            entry.leaving = True
            self._leaving_bytes += entry.occupied_bytes

    def _leave(self, entry: Entry) -> None:
        if entry.leaving:
            entry.leaving = False
            self._leaving_bytes -= entry.occupied_bytes

    def _show(self, entry: Entry, used_ns: int) -> None:
        assert self._rows.find(entry.key) == NONE
        self._rows.add(entry.key, nbytes=entry.nbytes, occupied_bytes=entry.occupied_bytes, written_ns=entry.written_ns, used_ns=used_ns)
        if entry.readers:
            self._busy[entry.key] = entry
        if self._policy is not None:
            self._policy.insert(entry.key, entry.occupied_bytes)

    def _entry(self, row: int) -> Entry:
        key, rows = self._rows.key(row), self._rows
        return self._busy.get(key) or Entry(key, rows.nbytes(row), rows.written_ns(row), rows.occupied_bytes(row))

    def _victims(self, nbytes: int) -> list[Entry]:
        if self._policy is not None:
            return [self._found(key) for key in self._policy.victims(nbytes, lambda key: key in self._busy)]
        victims: list[Entry] = []
        for row in self._rows.newest() if self._order == "mru" else self._rows.oldest():
            if nbytes <= 0:
                break
            entry = self._entry(row)
            if not entry.readers:
                victims.append(entry)
                nbytes -= entry.occupied_bytes
        return victims if nbytes <= 0 else []

    def _found(self, key: bytes) -> Entry:
        entry = self.find(key)
        assert entry is not None, "a policy knows what is visible"
        return entry
