"""The values of one folder, and the exact number of their bytes.

    reserve (with victims) -> commit (now visible) / abandon
    take (no longer found) -> finish (its file was removed) / restore (the removal failed)

`used_bytes` includes files being written, removed or read. An *orphan* is a file that could not be
removed and that no entry refers to.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvhold.tiers.base import ValueChanges
from kvhold.tiers.bytes_by_age import SLOT_S, BytesByAge
from kvhold.tiers.disk.folder import FoundValue, parts_of_name, value_name
from kvhold.tiers.disk.learned import UNKNOWN_PAST, LearnedOrder, Learning
from kvhold.tiers.disk.rows import NONE, Rows, Sorting
from kvhold.tiers.policies import Policy, make_policy

_SLOT_NS = SLOT_S * 10**9
_IN_ROWS = ("lru", "fifo", "mru", "learned")


class DiskEntry:
    """Readers share one object. `occupied_bytes` is an estimate until the commit."""

    __slots__ = ("key", "leaving", "nbytes", "occupied_bytes", "readers", "removed", "written_ns")

    def __init__(self, key: bytes, nbytes: int, written_ns: int, occupied_bytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.written_ns = written_ns
        self.occupied_bytes = occupied_bytes
        self.readers = 0
        self.leaving = False
        self.removed = False

    @property
    def name(self) -> str:
        return value_name(self.key, self.nbytes, self.written_ns)


@dataclass(frozen=True)
class PlannedFile:
    entry: DiskEntry
    victims: list[DiskEntry]


class Index:
    def __init__(
        self,
        policy: str,
        limit_bytes: int,
        block_bytes: int,
        learning: Learning | None = None,
        changes: ValueChanges | None = None,
    ) -> None:
        """Policies other than lru, fifo, mru and learned add 400 bytes per value."""
        self.limit_bytes = limit_bytes
        self._order = policy
        self._policy: Policy | None = None if policy in _IN_ROWS else make_policy(policy)
        self._block_bytes = block_bytes
        self._changes = changes or ValueChanges()
        self._learned: LearnedOrder | None = None
        if policy == "learned":
            self._rows = Rows(UNKNOWN_PAST)
            self._learned = LearnedOrder(self._rows, learning or Learning())
        else:
            self._rows = Rows()
        self.held = BytesByAge()
        self._last_slot = 0
        self._busy: dict[bytes, DiskEntry] = {}
        self._used_bytes = 0
        self._leaving_bytes = 0
        self._orphans: dict[str, DiskEntry] = {}

    def __len__(self) -> int:
        return self._rows.num

    @property
    def index_bytes(self) -> int:
        return self._rows.index_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def excess_bytes(self) -> int:
        return max(0, self._used_bytes - self._leaving_bytes - self.limit_bytes)

    def find(self, key: bytes) -> DiskEntry | None:
        row = self._rows.find(key)
        return None if row == NONE else self._entry(row)

    def holds(self, entry: DiskEntry) -> bool:
        found = self.find(entry.key)
        return found is not None and (found.written_ns, found.nbytes) == (
            entry.written_ns,
            entry.nbytes,
        )

    def keys(self, prefix: bytes) -> Iterator[list[bytes]]:
        return self._rows.keys(prefix)

    def entries(self) -> Iterator[DiskEntry]:
        return (self._entry(row) for row in list(self._rows.oldest()))

    def add(self, entry: DiskEntry, used_ns: int) -> None:
        """Call `sort` after the last one."""
        self._used_bytes += entry.occupied_bytes
        self._show(entry, used_ns, UNKNOWN_PAST)

    def add_found(
        self,
        found: Sequence[FoundValue],
        *,
        own: Container[str] = (),
        writing: Container[bytes] = (),
    ) -> list[str]:
        """The names of files that a newer one replaces.

        own:     files written during the listing: the newest of their key
        writing: keys whose new file is being written
        """
        older: list[str] = []
        for value in found:
            if value.name in own:
                continue
            twin = self.find(value.key)
            if value.key in writing or (
                twin is not None and (twin.written_ns > value.written_ns or twin.name in own)
            ):
                older.append(value.name)
                continue
            if twin is not None:
                older.append(twin.name)
                self.take(twin)
                self.finish(twin)
            self.add(
                DiskEntry(value.key, value.nbytes, value.written_ns, value.occupied_bytes),
                value.used_ns,
            )
        return older

    def sort(self) -> None:
        self._rows.sort()

    def sorting(self) -> Sorting:
        return Sorting(self._rows)

    def reserve(
        self, key: bytes, written_ns: int, nbytes: int, *, beside: DiskEntry | None = None
    ) -> PlannedFile | None:
        """Take the victims, too. None: no room, nothing is taken.

        beside: the entry to replace, which must be held or read
        """
        assert beside is not None or self._rows.find(key) == NONE
        occupied = self._occupied_bytes(nbytes)
        if occupied > self.limit_bytes:
            return None
        victims = self.evict(self._used_bytes - self._leaving_bytes + occupied - self.limit_bytes)
        if victims is None:
            return None
        self._used_bytes += occupied
        return PlannedFile(DiskEntry(key, nbytes, written_ns, occupied), victims)

    def admits(self, key: bytes, nbytes: int) -> bool:
        assert self._learned is not None
        left = self.limit_bytes - self._used_bytes + self._leaving_bytes
        return self._occupied_bytes(nbytes) <= left or self._learned.admits(key)

    def evict(self, nbytes: int) -> list[DiskEntry] | None:
        """At least `nbytes`. None: none is taken."""
        if nbytes <= 0:
            return []
        victims = self._victims(nbytes)
        for victim in victims:
            self._take(victim, evicted=True)
        return victims or None

    def commit(self, entry: DiskEntry, occupied_bytes: int, past: int | None = None) -> None:
        self._used_bytes += occupied_bytes - entry.occupied_bytes
        entry.occupied_bytes = occupied_bytes
        self._show(entry, entry.written_ns, past)

    def swap(self, old: DiskEntry, entry: DiskEntry, occupied_bytes: int) -> None:
        past = self._past_on_disk(old.key)
        self._take(old, evicted=False)
        self.commit(entry, occupied_bytes, past)

    def abandon(self, entry: DiskEntry, *, is_orphan: bool = False) -> None:
        if is_orphan:
            self._orphans[entry.name] = entry
        else:
            self._used_bytes -= entry.occupied_bytes

    def read(self, entry: DiskEntry, used_ns: int) -> None:
        self.hold(entry)
        if self._policy is not None:
            self._policy.touch(entry.key)
            return
        row = NONE if self._order == "fifo" else self._rows.find(entry.key)
        if row != NONE and (self._learned is None or self._learned.is_unused(row)):
            self._rows.touch(row, used_ns)

    def used(
        self,
        keys: Iterable[bytes],
        prompt: int,
        value: int,
        at_s: float,
        *,
        are_whole: bool,
    ) -> None:
        assert self._learned is not None
        self._learned.used(keys, prompt, value, at_s, are_whole=are_whole)

    def hold(self, entry: DiskEntry) -> None:
        entry.readers += 1
        self._busy[entry.key] = entry

    def unread(self, entry: DiskEntry) -> None:
        assert entry.readers > 0
        entry.readers -= 1
        if not entry.readers and self._busy.get(entry.key) is entry:
            del self._busy[entry.key]
        if entry.removed and not entry.readers:
            self._used_bytes -= entry.occupied_bytes

    def take(self, entry: DiskEntry) -> None:
        self._take(entry, evicted=False)

    def finish(self, entry: DiskEntry) -> None:
        assert not entry.removed
        entry.removed = True
        self._leave(entry)
        if not entry.readers:
            self._used_bytes -= entry.occupied_bytes

    def restore(self, entry: DiskEntry, *, writing: Container[bytes] = ()) -> None:
        """Its file stays. An orphan if its key has a new entry or is in `writing`."""
        self._leave(entry)
        if self._rows.find(entry.key) == NONE and entry.key not in writing:
            self._show(entry, entry.written_ns)
        else:
            self._orphans[entry.name] = entry

    def orphans(self, chosen: Callable[[bytes], bool]) -> list[DiskEntry]:
        return [entry for entry in self._orphans.values() if chosen(entry.key)]

    def add_orphan(self, name: str) -> None:
        key, nbytes, written_ns = parts_of_name(name)
        entry = DiskEntry(key, nbytes, written_ns, self._occupied_bytes(nbytes))
        self._used_bytes += entry.occupied_bytes
        self._orphans[name] = entry

    def finish_orphan(self, entry: DiskEntry) -> None:
        del self._orphans[entry.name]
        self.finish(entry)

    def _take(self, entry: DiskEntry, *, evicted: bool) -> None:
        assert self.holds(entry)
        row = self._rows.find(entry.key)
        if self._learned is not None:
            self._learned.removed(entry.key, row, evicted=evicted)
        self._note_held(row, entry.key, -1)
        self._rows.remove(row)
        self._changes.tell(entry.key, 0)
        if self._busy.get(entry.key) is entry:
            del self._busy[entry.key]
        if self._policy is not None:
            self._policy.remove(entry.key, evicted=evicted)
        if not entry.readers:
            entry.leaving = True
            self._leaving_bytes += entry.occupied_bytes

    def _occupied_bytes(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes

    def _leave(self, entry: DiskEntry) -> None:
        if entry.leaving:
            entry.leaving = False
            self._leaving_bytes -= entry.occupied_bytes

    def _past_on_disk(self, key: bytes) -> int | None:
        return None if self._learned is None else self._rows.past(self._rows.find(key))

    def _show(self, entry: DiskEntry, used_ns: int, past: int | None = None) -> None:
        assert self._rows.find(entry.key) == NONE
        learned, behind = self._learned, NONE
        is_new = learned is not None and past is None
        if learned is not None and past is None:
            past = learned.past_of(entry.key)
            behind = learned.behind(past)
        row = self._rows.add(
            entry.key,
            nbytes=entry.nbytes,
            occupied_bytes=entry.occupied_bytes,
            written_ns=entry.written_ns,
            used_ns=used_ns,
            past=past,
            behind=behind,
        )
        self._note_held(row, entry.key, 1)
        self._changes.tell(entry.key, entry.nbytes)
        if learned is not None and is_new:
            learned.added(row)
        if entry.readers:
            self._busy[entry.key] = entry
        if self._policy is not None:
            self._policy.insert(entry.key, entry.occupied_bytes)

    def _note_held(self, row: int, key: bytes, sign: int) -> None:
        slot = self._rows.written_ns(row) // _SLOT_NS
        if slot > self._last_slot:
            self._last_slot = max(slot, self.held.slot())
        self.held.add(key, slot, sign * self._rows.occupied_bytes(row))

    def _entry(self, row: int) -> DiskEntry:
        key, rows = self._rows.key(row), self._rows
        return self._busy.get(key) or DiskEntry(
            key, rows.nbytes(row), rows.written_ns(row), rows.occupied_bytes(row)
        )

    def _victims(self, nbytes: int) -> list[DiskEntry]:
        if self._policy is not None:
            return [
                self._found(key)
                for key in self._policy.victims(nbytes, lambda key: key in self._busy)
            ]
        if self._learned is not None:
            rows = self._learned.victims(nbytes, self._is_read)
            return [self._entry(row) for row in rows]
        victims: list[DiskEntry] = []
        for row in self._rows.newest() if self._order == "mru" else self._rows.oldest():
            if nbytes <= 0:
                break
            entry = self._entry(row)
            if not entry.readers:
                victims.append(entry)
                nbytes -= entry.occupied_bytes
        return victims if nbytes <= 0 else []

    def _is_read(self, row: int) -> bool:
        return bool(self._busy) and self._rows.key(row) in self._busy

    def _found(self, key: bytes) -> DiskEntry:
        entry = self.find(key)
        assert entry is not None, "the policy has a key without an entry"
        return entry
