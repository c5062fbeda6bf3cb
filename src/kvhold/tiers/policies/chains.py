"""The shared part of all policies: chains of chunks, candidates for eviction, bytes per namespace.

    class FifoPolicy(ChainPolicy):
        def _inserted(self, chunk: Chunk) -> None:
            self._rank(chunk, self._now())            # the lowest rank is evicted first

A policy ranks chunks. This module keeps the *leaves*, chunks without a continuation here, in queues
by
rank: one for each namespace and one for all. A chunk that becomes a leaf enters the queue at the
      rank
that it already has.

Insert, touch and remove cost O(log leaves) at most; touching a chunk that is no leaf costs O(1).
`victims` costs O((victims + pinned leaves before them) log leaves), independent of the number of
chunks that the leaves protect. No single call takes long: tables and queues consist of small parts,
and each call removes some stale places. Threads: see base.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.tiers.table import KeyTable

_BUCKET_BITS = 8  # ranks of one bucket: 256
_SWEPT_AT_ONCE = 128  # places
_SWEPT_A_CALL = 3  # places per call: keeps a queue at some two places per leaf at most


class Chunk:
    """One known key.

    rank:  the lowest is evicted first; unique
    queue: number of its queue; 0 for policies with a single queue
    uses:  a counter for the policy
    place: its current entry in the heaps; None if it is no leaf
    space: the queues of its namespace
    """

    __slots__ = ("key", "nbytes", "parent", "place", "queue", "rank", "space", "uses")

    def __init__(self, key: bytes, nbytes: int, space: "list[Queue]") -> None:
        self.key = key
        self.nbytes = nbytes
        self.space = space
        self.parent: bytes | None = None
        self.rank = (0, 0)
        self.queue = 0
        self.uses = 0
        self.place: Place | None = None


Place: TypeAlias = tuple[int, int, Chunk]  # rank and chunk; compared by the rank, which is unique


class Queue:
    """Chunks of one namespace, or of all, that are ranked together: their number, bytes and leaves.

    Places are in buckets of neighbouring ranks, each a heap. A chunk that gets a new place leaves a
    stale one behind. Stale places are dropped when they are popped, and bucket by bucket in later
    calls.
    """

    __slots__ = ("_buckets", "_credit", "_order", "_to_sweep", "nbytes", "num_chunks")

    def __init__(self) -> None:
        self.num_chunks = 0
        self.nbytes = 0
        self._buckets: dict[tuple[int, int], list[Place]] = {}
        self._order: list[tuple[int, int]] = []  # a heap of bucket names; some are obsolete
        self._to_sweep: list[tuple[int, int]] = []
        self._credit = 0

    @property
    def num_places(self) -> int:
        """Number of places, stale ones included."""
        return sum(map(len, self._buckets.values()))

    def push(self, place: Place) -> None:
        """Add the new place of a leaf."""
        name = place[0], place[1] >> _BUCKET_BITS
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = []
            heappush(self._order, name)
        heappush(bucket, place)
        self.tidy()

    def pop(self) -> Place | None:
        """Remove and return the place of the leaf with the lowest rank; None if there is none."""
        while self._order:
            bucket = self._buckets.get(self._order[0], [])
            while bucket:
                place = heappop(bucket)
                if place[2].place is place:
                    return place
            self._buckets.pop(heappop(self._order), None)
        return None

    def tidy(self) -> None:
        """Drop some stale places."""
        self._credit += _SWEPT_A_CALL
        if self._credit < _SWEPT_AT_ONCE:
            return
        while self._credit > 0:
            if not self._to_sweep:
                self._credit = 0  # the next round begins in a later call
                self._to_sweep = list(self._buckets)
                if len(self._order) > 2 * len(self._buckets):
                    self._order = sorted(self._to_sweep)
                return
            self._credit -= 1 + self._sweep(self._to_sweep.pop())

    def take_buckets(self) -> list[list[Place]]:
        """Empty the queue. Returns its buckets."""
        buckets, self._buckets, self._order, self._to_sweep = (
            list(self._buckets.values()),
            {},
            [],
            [],
        )
        return buckets

    def _sweep(self, name: tuple[int, int]) -> int:
        bucket = self._buckets.get(name)
        if bucket is None:
            return 0
        if kept := [place for place in bucket if place[2].place is place]:
            heapify(kept)
            self._buckets[name] = kept
        else:
            del self._buckets[name]
        return len(bucket)


class ChainPolicy:
    """A policy without an order. Subclasses override `_inserted`, and other hooks if needed."""

    num_queues: ClassVar[int] = 1

    def __init__(self) -> None:
        self._chunks: KeyTable[Chunk] = KeyTable()
        # Key, known or not -> number of known chunks that continue it.
        self._continued: KeyTable[int] = KeyTable()
        self._all = [Queue() for _ in range(self.num_queues)]
        self._spaces: dict[bytes, list[Queue]] = {}
        # Buckets of namespaces without chunks, freed one per call.
        self._dropped: list[list[Place]] = []
        self._now: Callable[[], int] = count(1).__next__  # a number higher than all before

    def insert(self, key: bytes, nbytes: int, parent: bytes | None = None) -> None:
        """Policy contract."""
        namespace = key[:NAMESPACE_BYTES]
        assert parent is None or parent.startswith(namespace), (
            "a prompt's chunks are in one namespace"
        )
        self._tidy()
        chunk = self._chunks.get(key)
        if chunk is None:
            space = self._spaces.get(namespace) or self._begin_space(namespace)
            chunk = self._chunks[key] = Chunk(key, nbytes, space)
            self._inserted(chunk)
            self._count(chunk, 1)
            if key not in self._continued:
                self._place(chunk)
        if chunk.parent is None and parent is not None:
            self._link(chunk, parent)

    def touch(self, key: bytes) -> None:
        """Policy contract."""
        self.touch_all((key,))

    def touch_all(self, keys: Iterable[bytes]) -> None:
        """Policy contract."""
        find = self._chunks.get
        self._touched([chunk for key in keys if (chunk := find(key)) is not None])

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        """Policy contract."""
        self._tidy()
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        del self._chunks[key]
        chunk.place = None
        self._count(chunk, -1)
        self._unlink(chunk)
        for queue in (self._all[chunk.queue], chunk.space[chunk.queue]):
            queue.tidy()
        if not chunk.space[chunk.queue].num_chunks and not any(
            queue.num_chunks for queue in chunk.space
        ):
            for queue in self._spaces.pop(key[:NAMESPACE_BYTES]):
                self._dropped += queue.take_buckets()
        self._removed(chunk, evicted=evicted)

    def victims(
        self, nbytes: int, pinned: Callable[[bytes], bool], namespace: bytes | None = None
    ) -> list[bytes]:
        """Policy contract."""
        if not 0 < nbytes <= self.nbytes(namespace):
            return []
        with self._walk(self._queues(namespace), pinned) as walk:
            while walk.freed_bytes < nbytes:
                chunk = walk.choose()
                if chunk is None:
                    return []
                walk.take(chunk)
        walk.settle()
        return walk.taken

    def nbytes(self, namespace: bytes | None = None) -> int:
        """Policy contract."""
        return sum(queue.nbytes for queue in self._queues(namespace))

    def __len__(self) -> int:
        return len(self._chunks)

    def _inserted(self, chunk: Chunk) -> None:
        """Give a new chunk its first rank, by `_rank`."""
        raise NotImplementedError

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        """Update chunks that were used, in this order."""

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:
        """Update the policy after a chunk was removed."""

    def _walk(self, queues: list[Queue], pinned: Callable[[bytes], bool]) -> "Walk":
        """Return the search for victims: by default, the lowest rank first."""
        return Walk(self, queues, pinned)

    def _rank(self, chunk: Chunk, minor: int, major: int = 0) -> None:
        """Rank a chunk by `major`, then by `minor`. Each chunk needs its own `minor`."""
        chunk.rank = (major, minor)
        if chunk.place is not None:
            self._place(chunk)

    def _move(self, chunk: Chunk, queue: int) -> None:
        """Move a chunk to the end of a queue, its own or another one."""
        self._count(chunk, -1)
        chunk.queue = queue
        self._count(chunk, 1)
        self._rank(chunk, self._now())

    def _above(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the known chunks of its prefix, the nearest first."""
        while chunk.parent is not None and (above := self._chunks.get(chunk.parent)) is not None:
            yield above
            chunk = above

    def _tidy(self) -> None:
        if self._dropped:
            self._dropped.pop()

    def _queues(self, namespace: bytes | None) -> list[Queue]:
        return self._all if namespace is None else self._spaces.get(namespace, [])

    def _begin_space(self, namespace: bytes) -> list[Queue]:
        space = self._spaces[namespace] = [Queue() for _ in range(self.num_queues)]
        return space

    def _count(self, chunk: Chunk, sign: int) -> None:
        """Add a chunk to the counts (sign 1) or subtract it (-1)."""
        for queue in (self._all[chunk.queue], chunk.space[chunk.queue]):
            queue.num_chunks += sign
            queue.nbytes += sign * chunk.nbytes

    def _place(self, chunk: Chunk) -> None:
        """Put a leaf into its queues, at its rank."""
        chunk.place = place = (*chunk.rank, chunk)
        self._all[chunk.queue].push(place)
        chunk.space[chunk.queue].push(place)

    def _link(self, chunk: Chunk, parent: bytes) -> None:
        above = self._chunks.get(parent)
        if above is not None:
            if self._continues(above, chunk):
                return
            above.place = None
        chunk.parent = parent
        self._continued[parent] = (self._continued.get(parent) or 0) + 1

    def _unlink(self, chunk: Chunk) -> None:
        parent = chunk.parent
        if parent is None:
            return
        left = self._continued[parent] - 1
        if left:
            self._continued[parent] = left
            return
        del self._continued[parent]
        if (above := self._chunks.get(parent)) is not None:
            self._place(above)

    def _continues(self, chunk: Chunk, first: Chunk) -> bool:
        """Return whether `chunk` is `first` or one of its continuations.

        Takes no step for a prompt that is inserted in order, forwards or backwards.
        """
        if chunk is first or first.key not in self._continued:
            return chunk is first
        return any(above.parent == first.key for above in (chunk, *self._above(chunk)))


class Walk:
    """One search for victims: leaves in order, also those that become leaves in the search.

    The exit from the `with` restores the policy.
    """

    def __init__(
        self, policy: ChainPolicy, queues: list[Queue], pinned: Callable[[bytes], bool]
    ) -> None:
        self.queues = queues
        self.taken: list[bytes] = []
        self.freed_bytes = 0
        self._policy = policy
        self._pinned = pinned
        self._seen: list[Place] = []
        self._opened: list[Chunk] = []
        self._fewer: dict[bytes, int] = {}  # key -> taken chunks that continue it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for chunk in self._opened:
            chunk.place = None
        for place in self._seen:
            if place[2].place is place:
                self.queues[place[2].queue].push(place)

    def next(self, queue: int) -> Chunk | None:
        """Return the next unpinned leaf of a queue, each once; None at the end."""
        while (place := self.queues[queue].pop()) is not None:
            self._seen.append(place)
            if not self._pinned(place[2].key):
                return place[2]
        return None

    def take(self, chunk: Chunk) -> None:
        """Take a chunk as a victim. A parent without other continuations becomes a leaf."""
        self.taken.append(chunk.key)
        self.freed_bytes += chunk.nbytes
        if chunk.parent is None:
            return
        fewer = self._fewer[chunk.parent] = self._fewer.get(chunk.parent, 0) + 1
        above = self._policy._chunks.get(chunk.parent)
        if above is not None and fewer == self._policy._continued[chunk.parent]:
            above.place = place = (*above.rank, above)
            self._opened.append(above)
            self.queues[above.queue].push(place)

    def choose(self) -> Chunk | None:
        """Return the next victim, not yet taken; None if there is none."""
        return self.next(0)

    def settle(self) -> None:
        """Accept the victims. A policy may now move the chunks that the search passed over."""
