"""The values of one folder, and the exact number of their bytes.

No I/O; used by the tier's loop only.

    planned = index.reserve(key, written_ns, nbytes)  # a place and its victims; None: no room
    index.commit(planned.entry, occupied_bytes)  # visible from here on
    index.abandon(planned.entry)  # or: the file was not written
    index.swap(old, entry, occupied_bytes)  # or: it replaces `old`, if reserved beside `old`
    index.take(entry)  # not found from here on; then one of:
    index.finish(entry)  # its file is removed
    index.restore(entry)  # its file could not be removed

`used_bytes` includes files that are being written or removed. A removed file that is still being
read occupies its space until its last reader has finished. A file that is being read or written is
never a victim.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from kvhold.tiers.disk.folder import FoundValue, value_name
from kvhold.tiers.disk.rows import NONE, Rows, Sorting
from kvhold.tiers.policies import Policy, make_policy

_IN_ROWS = ("lru", "fifo", "mru")  # policies that use the order of the rows


class Entry:
    """One value's file. Made on demand; while the file is being read, always the same object.

    `occupied_bytes` is an estimate until the entry is committed.
    """

    __slots__ = ("key", "leaving", "nbytes", "occupied_bytes", "readers", "removed", "written_ns")

    def __init__(self, key: bytes, nbytes: int, written_ns: int, occupied_bytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.written_ns = written_ns
        self.occupied_bytes = occupied_bytes
        self.readers = 0
        self.leaving = False  # taken, and its bytes will soon be free
        self.removed = False

    @property
    def name(self) -> str:
        """The file's name. No other file of the folder ever has this name."""
        return value_name(self.key, self.nbytes, self.written_ns)


@dataclass(frozen=True)
class Planned:
    """A place for a new value. The victims' files must be gone before it is written."""

    entry: Entry
    victims: list[Entry]


class Index:
    """The values of one folder, with at most `limit_bytes` in total."""

    def __init__(self, policy: str, limit_bytes: int, block_bytes: int) -> None:
        """Make an empty index.

        policy: its name. Policies other than lru, fifo and mru take about 400 bytes more per value
        """
        self.limit_bytes = limit_bytes
        self._order = policy
        self._policy: Policy | None = None if policy in _IN_ROWS else make_policy(policy)
        self._block_bytes = block_bytes
        self._rows = Rows()
        self._busy: dict[bytes, Entry] = {}  # key -> entry that is being read or held
        self._used_bytes = 0
        self._leaving_bytes = 0

    def __len__(self) -> int:
        return self._rows.num

    @property
    def index_bytes(self) -> int:
        """The memory of this index, in bytes, without a policy's own order."""
        return self._rows.index_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of all files, rounded up to blocks, including reserved places."""
        return self._used_bytes

    @property
    def excess_bytes(self) -> int:
        """The bytes above the limit that stay after all removals under way."""
        return max(0, self._used_bytes - self._leaving_bytes - self.limit_bytes)

    def find(self, key: bytes) -> Entry | None:
        """Return the visible entry of `key`, or None."""
        row = self._rows.find(key)
        return None if row == NONE else self._entry(row)

    def holds(self, entry: Entry) -> bool:
        """Return whether the entry's file is the visible one of its key."""
        found = self.find(entry.key)
        return found is not None and (found.written_ns, found.nbytes) == (
            entry.written_ns,
            entry.nbytes,
        )

    def keys(self, prefix: bytes) -> Iterator[list[bytes]]:
        """Yield the visible keys that begin with `prefix`, a few at a time.

        Keys may come and go between.
        """
        return self._rows.keys(prefix)

    def entries(self) -> Iterator[Entry]:
        """Iterate over all visible entries."""
        return (self._entry(row) for row in list(self._rows.oldest()))

    def add(self, entry: Entry, used_ns: int) -> None:
        """Add a file that was there before. Call `sort` after the last one."""
        self._used_bytes += entry.occupied_bytes
        self._show(entry, used_ns)

    def add_found(
        self,
        found: Sequence[FoundValue],
        *,
        before_ns: int | None = None,
        writing: Container[bytes] = (),
    ) -> list[str]:
        """Add files that were found in the folder. Return the names of outdated files.

        A file is outdated if a newer file of the same key exists.

        before_ns: skip files that were written from this time on; they are ours and known already
        writing:   keys whose new file is being written
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
            self.add(
                Entry(value.key, value.nbytes, value.written_ns, value.occupied_bytes),
                value.used_ns,
            )
        return older

    def sort(self) -> None:
        """Sort all entries by time of use.

        A policy with an order of its own keeps the order of arrival.
        """
        self._rows.sort()

    def sorting(self) -> Sorting:
        """Return the same sort in steps; values may come and go between the steps."""
        return Sorting(self._rows)

    def reserve(
        self, key: bytes, written_ns: int, nbytes: int, *, beside: Entry | None = None
    ) -> Planned | None:
        """Reserve a place for a file of `nbytes`.

        Return None, and take nothing, if there is no room.

        beside: the entry to be replaced. It must be held or read, so that it is no victim
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
        """Take victims that free at least `nbytes`.

        Return None, and take none, if there are not enough.
        """
        if nbytes <= 0:
            return []
        victims = self._victims(nbytes)
        for victim in victims:
            self._take(victim, evicted=True)
        return victims or None

    def commit(self, entry: Entry, occupied_bytes: int) -> None:
        """Make an entry visible: its file is written and occupies `occupied_bytes`."""
        self._used_bytes += occupied_bytes - entry.occupied_bytes
        entry.occupied_bytes = occupied_bytes
        self._show(entry, entry.written_ns)

    def swap(self, old: Entry, entry: Entry, occupied_bytes: int) -> None:
        """Make `entry` visible in the place of `old`, whose file must be removed next."""
        self._take(old, evicted=False)
        self.commit(entry, occupied_bytes)

    def abandon(self, entry: Entry) -> None:
        """Free a reserved place: its file was not written."""
        self._used_bytes -= entry.occupied_bytes

    def read(self, entry: Entry, used_ns: int) -> None:
        """Note a read of the entry: protect it until `unread`, and count it as used."""
        self.hold(entry)
        if self._policy is not None:
            self._policy.touch(entry.key)
        elif self._order != "fifo" and (row := self._rows.find(entry.key)) != NONE:
            self._rows.touch(row, used_ns)

    def hold(self, entry: Entry) -> None:
        """Protect the entry from eviction until `unread`, without counting it as used."""
        entry.readers += 1
        self._busy[entry.key] = entry

    def unread(self, entry: Entry) -> None:
        """End one `read` or `hold`."""
        assert entry.readers > 0
        entry.readers -= 1
        if not entry.readers and self._busy.get(entry.key) is entry:
            del self._busy[entry.key]
        if entry.removed and not entry.readers:
            self._used_bytes -= entry.occupied_bytes

    def take(self, entry: Entry) -> None:
        """Hide the entry: it was deleted, or its file was found broken."""
        self._take(entry, evicted=False)

    def finish(self, entry: Entry) -> None:
        """Note that the file of a taken entry is removed."""
        assert not entry.removed
        entry.removed = True
        self._leave(entry)
        if not entry.readers:
            self._used_bytes -= entry.occupied_bytes

    def restore(self, entry: Entry) -> None:
        """Note that the file of a taken entry could not be removed.

        The entry is visible again. If its key has a new entry, the old file's bytes are only
        counted, until the next start.
        """
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
        self._rows.add(
            entry.key,
            nbytes=entry.nbytes,
            occupied_bytes=entry.occupied_bytes,
            written_ns=entry.written_ns,
            used_ns=used_ns,
        )
        if entry.readers:
            self._busy[entry.key] = entry
        if self._policy is not None:
            self._policy.insert(entry.key, entry.occupied_bytes)

    def _entry(self, row: int) -> Entry:
        key, rows = self._rows.key(row), self._rows
        return self._busy.get(key) or Entry(
            key, rows.nbytes(row), rows.written_ns(row), rows.occupied_bytes(row)
        )

    def _victims(self, nbytes: int) -> list[Entry]:
        if self._policy is not None:
            return [
                self._found(key)
                for key in self._policy.victims(nbytes, lambda key: key in self._busy)
            ]
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
