"""A node's chunks as numbered changes for its followers, and as snapshots.

Any thread notes changes. The peers' loop numbers and indexes them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from secrets import randbits
from typing import NamedTuple

from kvhold.core.keys import KEY_BYTES
from kvhold.core.turns import next_turn
from kvhold.net import peers as p
from kvhold.net.wire import encode
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.peers.index import PeerIndex, digest_of, pack, unpack

_MOST_CHANGES = 500  # in one record: about a millisecond
_MOST_KEPT = 200_000  # changes, for followers that were away
_PAGE_CHUNKS = 4000

SizeOf = Callable[[bytes, int, int], int]
"""Returns the size of a chunk's frame, from its key, bytes and tokens; 0: it cannot be framed."""


class _Note(NamedTuple):
    """A change of one chunk. nbytes: 0: removed"""

    place: PeerIndex
    key: bytes
    nbytes: int
    num_tokens: int


class PeerFeed:
    def __init__(self, frame_size: SizeOf) -> None:
        self.incarnation = randbits(60) | 1
        self.number = randbits(40)
        self.bus_key = b""
        """Seals the records on a bus; empty: they are published on none."""
        self._numbers = ClearNumbers()
        self._frame_size = frame_size
        self._memory, self._disks = PeerIndex(), PeerIndex()
        self._num_chunks = 0
        self._notes: deque[_Note] = deque()
        self._clears: deque[p.ClearNumber] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False
        self._changed = asyncio.Event()
        # number before the changes -> record, number after
        self._kept: dict[int, tuple[bytes, int]] = {}
        self._num_kept = 0

    def follow_clears(self, numbers: ClearNumbers) -> None:
        """Call this before there are any."""
        self._numbers = numbers
        numbers.watch = self.note_cleared

    def start(self) -> None:
        """In the running loop. Before, changes queue."""
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._number_notes)

    # Any thread.

    def note(self, key: bytes, nbytes: int, num_tokens: int) -> None:
        """nbytes: without a frame's header; 0: removed"""
        self._notes.append(_Note(self._memory, key, nbytes, num_tokens))
        self._wake()

    def note_on_disk(self, key: bytes, frame_bytes: int) -> None:
        """frame_bytes: 0: removed"""
        self._notes.append(_Note(self._disks, key, frame_bytes, 0))
        self._wake()

    def note_cleared(self, prefix: bytes, number: int) -> None:
        self._clears.append(p.ClearNumber(prefix, number))
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken and self._loop is not None:
            self._is_woken = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._number_notes)

    # The peers' loop.

    @property
    def index_bytes(self) -> int:
        return self._memory.nbytes + self._disks.nbytes

    def __len__(self) -> int:
        return self._num_chunks

    @property
    def num_waiting(self) -> int:
        return len(self._notes)

    def size_of(self, key: bytes) -> int:
        """0: it is not here."""
        return self._size(digest_of(key))

    async def latest(self) -> int:
        while self._notes or self._clears:
            self._number_notes()
            await next_turn()
        return self.number

    async def wait(self, number: int) -> None:
        """At most `BEAT_S`."""
        if number == self.number:
            self._changed.clear()
            # Python 3.11's `wait_for` swallows a cancellation that comes with the change
            with suppress(TimeoutError):
                async with asyncio.timeout(p.BEAT_S):
                    await self._changed.wait()

    def changes_after(self, number: int) -> tuple[bytes, int] | None:
        if number == self.number:
            return bytes(encode(p.PeerChanges(number, [], []))), number
        return self._kept.get(number)

    def pages(self) -> Iterator[p.Page]:
        """Changes between two pages are in later events."""
        number, digests, sizes = self.number, bytearray(), bytearray()
        clears = [p.ClearNumber(*clear) for clear in self._numbers.announced.items()]
        is_first = True
        for some_digests, some_sizes in self._parts():
            digests += some_digests
            sizes += some_sizes
            if len(digests) >= 8 * _PAGE_CHUNKS:
                yield p.Page(number, is_first, False, clears, bytes(digests), bytes(sizes))
                is_first, clears = False, []
                digests.clear()
                sizes.clear()
        yield p.Page(number, is_first, True, clears, bytes(digests), bytes(sizes))

    def _parts(self) -> Iterator[tuple[bytes, bytes]]:
        for part in self._memory.parts(0):
            yield part
        for part in self._disks.parts(0):
            chunks = zip(*unpack(part.digests, part.sizes), strict=True)
            # its size may have changed since its part was read
            yield pack([one for one in chunks if self._size(one[0]) == one[1]])

    def _number_notes(self) -> None:
        self._is_woken = False
        runs: list[p.Run] = []
        removed, changes = False, list[tuple[int, int]]()
        num_changes = 0

        def end_run() -> None:
            nonlocal num_changes
            if changes:
                digests, sizes = pack(changes)
                runs.append(p.Run(digests, b"" if removed else sizes))
                num_changes += len(changes)
                changes.clear()

        for _ in range(min(len(self._notes), _MOST_CHANGES)):
            change = self._apply(self._notes.popleft())
            if change is None:
                continue
            if removed != (not change[1]):
                end_run()
                removed = not change[1]
            changes.append(change)
        end_run()
        clears = [self._clears.popleft() for _ in range(min(len(self._clears), _MOST_CHANGES))]
        if runs or clears:
            self._keep(runs, clears, num_changes + len(clears))
        if self._notes or self._clears:
            self._wake()

    def _keep(self, runs: list[p.Run], clears: list[p.ClearNumber], num_changes: int) -> None:
        before, self.number = self.number, self.number + num_changes
        self._kept[before] = bytes(encode(p.PeerChanges(before, runs, clears))), self.number
        self._num_kept += num_changes
        while self._num_kept > _MOST_KEPT:
            oldest = next(iter(self._kept))
            self._num_kept -= self._kept.pop(oldest)[1] - oldest
        self._changed.set()

    def _apply(self, note: _Note) -> tuple[int, int] | None:
        """Return digest and new size; None: unchanged. A chunk in memory is sent from there."""
        assert len(note.key) == KEY_BYTES
        digest = digest_of(note.key)
        before = self._size(digest)
        nbytes = note.nbytes
        if nbytes and note.place is self._memory:
            nbytes = self._frame_size(note.key, nbytes, note.num_tokens)
        if nbytes:
            note.place.add(digest, nbytes, peer=0)
        else:
            note.place.remove(digest, peer=0)
        after = self._size(digest)
        self._num_chunks += bool(after) - bool(before)
        return None if after == before else (digest, after)

    def _size(self, digest: int) -> int:
        found = self._memory.find(digest) or self._disks.find(digest)
        return 0 if found is None else found.nbytes
