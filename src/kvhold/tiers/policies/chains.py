"""What all policies share: who continues whom, who may go, and how many bytes each namespace has.

    class FifoPolicy(ChainPolicy):
        def _inserted(self, chunk: Chunk) -> None:
            self._rank(chunk, self._now())            # the lower the rank, the earlier it goes

A policy ranks chunks; here the *leaves*, those that nothing here continues, are kept in queues by rank, one for each namespace and one
for all. A chunk that becomes a leaf takes the place of the rank that it has had all along. Insert, touch and remove cost O(log leaves)
at most (touching a chunk that is no leaf, O(1)); victims costs O((victims + pinned leaves before them) log leaves), however many chunks
they protect. No single call takes long, however many leaves there are: tables and queues are made of small parts, and each call tidies a
little. Loop and thread: see base.py.
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
_SWEPT_A_CALL = 3  # places for each call: a queue holds at most some two places a leaf


class Chunk:
    """One known key.

    rank:  lower goes first; no two chunks have the same
    queue: number of the queue it waits in; 0 for policies that have one alone
    uses:  for the policy to count in
    place: its present entry in the heaps; None while it is no leaf
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


Place: TypeAlias = tuple[int, int, Chunk]  # a rank, and whose; compared by the rank, which is unique


class Queue:
    """Chunks of one namespace, or all, that one policy ranks together: how many, their bytes, and the leaves among them.

    Places are in buckets of neighbouring ranks, each a heap. A chunk that gets another place leaves its old one behind; such places are
    dropped when they are met, and bucket by bucket as other calls come.
    """

    __slots__ = ("_buckets", "_credit", "_order", "_to_sweep", "nbytes", "num_chunks")

    def __init__(self) -> None:
        self.num_chunks = 0
        self.nbytes = 0
        self._buckets: dict[tuple[int, int], list[Place]] = {}
        self._order: list[tuple[int, int]] = []  # a heap of the buckets' names, some of which are gone
        self._to_sweep: list[tuple[int, int]] = []
        self._credit = 0

    @property
    def num_places(self) -> int:
        """Those that were left behind included."""
        return sum(map(len, self._buckets.values()))

    def push(self, place: Place) -> None:
        """Add a leaf's new place."""
        name = place[0], place[1] >> _BUCKET_BITS
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = []
            heappush(self._order, name)
        heappush(bucket, place)
        self.tidy()

    def pop(self) -> Place | None:
        """Take out the leaf of the lowest rank."""
        while self._order:
            bucket = self._buckets.get(self._order[0], [])
            while bucket:
                place = heappop(bucket)
                if place[2].place is place:
                    return place
            self._buckets.pop(heappop(self._order), None)
        return None

    def tidy(self) -> None:
        """Drop a few of the places that were left behind."""
        self._credit += _SWEPT_A_CALL
        if self._credit < _SWEPT_AT_ONCE:
            return
        while self._credit > 0:
            if not self._to_sweep:
                self._credit = 0  # enough for now: the next round begins with the next call
                self._to_sweep = list(self._buckets)
                if len(self._order) > 2 * len(self._buckets):
                    self._order = sorted(self._to_sweep)
                return
            self._credit -= 1 + self._sweep(self._to_sweep.pop())

    def take_buckets(self) -> list[list[Place]]:
        """Empty the queue. Returns what it consisted of."""
        buckets, self._buckets, self._order, self._to_sweep = list(self._buckets.values()), {}, [], []
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
    """All of a policy but its order. A policy overrides `_inserted` and whichever of the other hooks it needs."""

    num_queues: ClassVar[int] = 1

    def __init__(self) -> None:
        self._chunks: KeyTable[Chunk] = KeyTable()
        self._continued: KeyTable[int] = KeyTable()  # by how many known chunks each key is continued, whether it is known itself or not
        self._all = [Queue() for _ in range(self.num_queues)]
        self._spaces: dict[bytes, list[Queue]] = {}
        self._dropped: list[list[Place]] = []  # of namespaces that have no chunks any more, to be freed a little at a time
        self._now: Callable[[], int] = count(1).__next__  # a number higher than all before

    def insert(self, key: bytes, nbytes: int, parent: bytes | None = None) -> None:
        """Policy contract."""
        namespace = key[:NAMESPACE_BYTES]
        assert parent is None or parent.startswith(namespace), "a prompt's chunks are in one namespace"
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
        if not chunk.space[chunk.queue].num_chunks and not any(queue.num_chunks for queue in chunk.space):
            for queue in self._spaces.pop(key[:NAMESPACE_BYTES]):
                self._dropped += queue.take_buckets()
        self._removed(chunk, evicted=evicted)

    def victims(self, nbytes: int, pinned: Callable[[bytes], bool], namespace: bytes | None = None) -> list[bytes]:
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
        """Give a new chunk its first rank, with `_rank`."""
        raise NotImplementedError

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        """They were asked for, one after the other."""

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:
        """It is not known any more."""

    def _walk(self, queues: list[Queue], pinned: Callable[[bytes], bool]) -> "Walk":
        """How victims are chosen: the lowest rank first."""
        return Walk(self, queues, pinned)

    def _rank(self, chunk: Chunk, minor: int, major: int = 0) -> None:
        """Rank `chunk` by `major`, then by `minor`, which must differ from those of all others."""
        chunk.rank = (major, minor)
        if chunk.place is not None:
            self._place(chunk)

    def _move(self, chunk: Chunk, queue: int) -> None:
        """To the end of a queue, of its own or another."""
        self._count(chunk, -1)
        chunk.queue = queue
        self._count(chunk, 1)
        self._rank(chunk, self._now())

    def _above(self, chunk: Chunk) -> Iterator[Chunk]:
        """Its prefix, as far as that is here: the chunk before it, the one before that ..."""
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
        """One chunk more (1) or less (-1)."""
        for queue in (self._all[chunk.queue], chunk.space[chunk.queue]):
            queue.num_chunks += sign
            queue.nbytes += sign * chunk.nbytes

    def _place(self, chunk: Chunk) -> None:
        """It is a leaf, of this rank."""
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
        """Whether `chunk` is `first` or a continuation of it. Short: whoever inserts a prompt in order, either way, walks no step."""
        if chunk is first or first.key not in self._continued:
            return chunk is first
        return any(above.parent == first.key for above in (chunk, *self._above(chunk)))


class Walk:
    """One search for victims: leaves in order, and those that become leaves by it. A `with` leaves the policy as it was."""

    def __init__(self, policy: ChainPolicy, queues: list[Queue], pinned: Callable[[bytes], bool]) -> None:
        self.queues = queues
        self.taken: list[bytes] = []
        self.freed_bytes = 0
        self._policy = policy
        self._pinned = pinned
        self._seen: list[Place] = []
        self._opened: list[Chunk] = []
        self._fewer: dict[bytes, int] = {}  # by how many of the taken each key was continued

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for chunk in self._opened:
            chunk.place = None
        for place in self._seen:
            if place[2].place is place:
                self.queues[place[2].queue].push(place)

    def next(self, queue: int) -> Chunk | None:
        """The next leaf of a queue that nobody has pinned; each comes once."""
        while (place := self.queues[queue].pop()) is not None:
            self._seen.append(place)
            if not self._pinned(place[2].key):
                return place[2]
        return None

    def take(self, chunk: Chunk) -> None:
        """It is a victim. If it was the last that continued another, that one is a leaf from here on."""
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
        """The next victim, not yet taken."""
        return self.next(0)

    def settle(self) -> None:
        """The victims are found and will go: a policy may now move those that it passed over."""
