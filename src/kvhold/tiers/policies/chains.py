"""Chains, candidates for eviction and bytes per namespace, for all policies.

*Leaves* are chunks without a continuation here. Queues order them by rank, per namespace and for
all; demoted ones go first, in a queue of their own. Insert, touch and remove cost O(log leaves).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from itertools import count
from types import TracebackType
from typing import Self, TypeAlias

from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.tiers.policies.base import NEUTRAL, EndOfSearch, PolicyLookup
from kvhold.tiers.policies.reuse_times import Use
from kvhold.tiers.table import KeyTable

_BUCKET_BITS = 8
_SWEPT_AT_ONCE = 128
_SWEPT_A_CALL = 3  # keeps about two places per leaf at most


class Chunk:
    """rank:      unique; the lowest is evicted first
    uses:      a counter for the policy
    is_sample: the use is counted, for `LearnedPolicy`
    demoted:   goes before all others, until its next use
    place:     its entry in the heaps; None: no leaf
    """

    __slots__ = (
        "demoted",
        "is_sample",
        "key",
        "nbytes",
        "parent",
        "place",
        "queue",
        "rank",
        "space",
        "use",
        "uses",
    )

    def __init__(self, key: bytes, nbytes: int, space: "ChunkSpace") -> None:
        self.key = key
        self.nbytes = nbytes
        self.space = space
        self.parent: bytes | None = None
        self.rank = (0, 0)
        self.queue = 0
        self.uses = 0
        self.use: Use | None = None
        self.is_sample = False
        self.demoted = False
        self.place: Place | None = None


Place: TypeAlias = tuple[int, int, Chunk]


class Queue:
    """Each heap has the places of 256 neighbouring ranks; each call sweeps a few stale ones."""

    __slots__ = ("_buckets", "_credit", "_order", "_to_sweep")

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], list[Place]] = {}
        self._order: list[tuple[int, int]] = []
        self._to_sweep: list[tuple[int, int]] = []
        self._credit = 0

    def push(self, place: Place) -> None:
        name = place[0], place[1] >> _BUCKET_BITS
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = []
            heappush(self._order, name)
        heappush(bucket, place)
        self.tidy()

    def pop(self) -> Place | None:
        while self._order:
            bucket = self._buckets.get(self._order[0], [])
            while bucket:
                place = heappop(bucket)
                if place[2].place is place:
                    return place
            self._buckets.pop(heappop(self._order), None)
        return None

    def peek(self) -> Place | None:
        while self._order:
            bucket = self._buckets.get(self._order[0], [])
            while bucket:
                if bucket[0][2].place is bucket[0]:
                    return bucket[0]
                heappop(bucket)
            self._buckets.pop(heappop(self._order), None)
        return None

    def is_surely_empty(self) -> bool:
        """False if finding out would take long."""
        if len(self._buckets) > 1 or len(self._order) > _SWEPT_AT_ONCE:
            return not self._buckets
        return self.peek() is None

    def tidy(self) -> None:
        self._credit += _SWEPT_A_CALL
        if self._credit < _SWEPT_AT_ONCE:
            return
        while self._credit > 0:
            if not self._to_sweep:
                self._credit = 0
                self._to_sweep = list(self._buckets)
                if len(self._order) > 2 * len(self._buckets):
                    self._order = sorted(self._to_sweep)
                return
            self._credit -= 1 + self._sweep(self._to_sweep.pop())

    def take_buckets(self) -> list[list[Place]]:
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


class ChunkSpace:
    __slots__ = ("demoted", "nbytes", "num_chunks", "queues", "small_bytes")

    def __init__(self) -> None:
        self.num_chunks = 0
        self.nbytes = 0
        self.small_bytes = 0
        self.queues: dict[int, Queue] = {}
        self.demoted = Queue()

    def queue(self, number: int) -> Queue:
        queue = self.queues.get(number)
        if queue is None:
            queue = self.queues[number] = Queue()
        return queue

    def queue_of(self, chunk: Chunk) -> Queue:
        return self.demoted if chunk.demoted else self.queue(chunk.queue)


class ChainPolicy(ABC):
    learns = False

    def __init__(self) -> None:
        self._chunks: KeyTable[Chunk] = KeyTable()
        self._continued: KeyTable[int] = KeyTable()
        self._all = self._new_space()
        self._spaces: dict[bytes, ChunkSpace] = {}
        self._num_demoted = 0
        # buckets of removed namespaces; each call frees one
        self._dropped: list[list[Place]] = []
        self._now: Callable[[], int] = count(1).__next__
        self.declined = False

    def insert(self, key: bytes, nbytes: int, parent: bytes | None = None) -> None:
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
        self.touch_all((key,))

    def touch_all(self, keys: Iterable[bytes]) -> None:
        find = self._chunks.get
        chunks = [chunk for key in keys if (chunk := find(key)) is not None]
        if self._num_demoted:
            for chunk in chunks:
                self._set_demoted(chunk, False)
        self._touched(chunks)

    def demote(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                self._set_demoted(chunk, True)

    def looked_up(self, keys: Sequence[bytes], num_here: int) -> PolicyLookup:
        return PolicyLookup()

    def used(  # noqa: B027
        self,
        keys: Iterable[bytes],
        lookup: PolicyLookup,
        value: int = NEUTRAL,
        *,
        is_repeat: bool = False,
    ) -> None:
        pass

    def missed(  # noqa: B027
        self,
        keys: Iterable[bytes],
        lookup: PolicyLookup,
        value: int = NEUTRAL,
        *,
        if_known: bool = False,
    ) -> None:
        pass

    def expected_back_s(self, key: bytes, ago_s: float) -> float | None:
        return None

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._tidy()
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        del self._chunks[key]
        chunk.place = None
        self._count(chunk, -1)
        self._unlink(chunk)
        for space in (self._all, chunk.space):
            space.queue_of(chunk).tidy()
        self._num_demoted -= chunk.demoted
        if not chunk.space.num_chunks:
            space = self._spaces.pop(key[:NAMESPACE_BYTES])
            for queue in (space.demoted, *space.queues.values()):
                self._dropped += queue.take_buckets()
        self._removed(chunk, evicted=evicted)

    def victims(
        self,
        nbytes: int,
        pinned: Callable[[bytes], bool],
        namespace: bytes | None = None,
        wanted: bytes | None = None,
    ) -> list[bytes]:
        self.declined = False
        if not 0 < nbytes <= self.nbytes(namespace):
            return []
        space = self._all if namespace is None else self._spaces[namespace]
        with self._walk(space, pinned, wanted) as walk:
            if not self._take(walk, nbytes):
                self.declined = walk.declined
                return []
        walk.settle()
        return walk.taken

    def some_victims(
        self, nbytes: int, pinned: Callable[[bytes], bool], namespace: bytes | None = None
    ) -> list[bytes]:
        space = self._all if namespace is None else self._spaces.get(namespace)
        if space is None:
            return []
        is_enough = False
        with self._walk(space, pinned, None) as walk, suppress(EndOfSearch):
            is_enough = self._take(walk, nbytes)
        if is_enough:
            walk.settle()
        return walk.taken

    def _take(self, walk: "Walk", nbytes: int) -> bool:
        while walk.freed_bytes < nbytes:
            chunk = walk.next_demoted() if self._num_demoted else None
            chunk = chunk or walk.choose()
            if chunk is None:
                return False
            walk.take(chunk)
        return True

    def nbytes(self, namespace: bytes | None = None) -> int:
        if namespace is None:
            return self._all.nbytes
        space = self._spaces.get(namespace)
        return 0 if space is None else space.nbytes

    def __len__(self) -> int:
        return len(self._chunks)

    @abstractmethod
    def _inserted(self, chunk: Chunk) -> None: ...

    def _touched(self, chunks: Sequence[Chunk]) -> None:  # noqa: B027
        pass

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:  # noqa: B027
        pass

    def _new_space(self) -> ChunkSpace:
        return ChunkSpace()

    def _walk(
        self, space: ChunkSpace, pinned: Callable[[bytes], bool], wanted: bytes | None
    ) -> "Walk":
        return Walk(self, space, pinned)

    def _rank(self, chunk: Chunk, minor: int, major: int = 0) -> None:
        """`minor` must be unique."""
        chunk.rank = (major, minor)
        if chunk.place is not None:
            self._place(chunk)

    def _above(self, chunk: Chunk) -> Iterator[Chunk]:
        while chunk.parent is not None and (above := self._chunks.get(chunk.parent)) is not None:
            yield above
            chunk = above

    def _tidy(self) -> None:
        if self._dropped:
            self._dropped.pop()

    def _begin_space(self, namespace: bytes) -> ChunkSpace:
        space = self._spaces[namespace] = self._new_space()
        return space

    def _count(self, chunk: Chunk, sign: int) -> None:
        for space in (self._all, chunk.space):
            space.num_chunks += sign
            space.nbytes += sign * chunk.nbytes

    def _place(self, chunk: Chunk) -> None:
        chunk.place = place = (*chunk.rank, chunk)
        self._all.queue_of(chunk).push(place)
        chunk.space.queue_of(chunk).push(place)

    def _set_demoted(self, chunk: Chunk, demoted: bool) -> None:
        if chunk.demoted == demoted:
            return
        chunk.demoted = demoted
        self._num_demoted += 1 if demoted else -1
        if chunk.place is not None:
            self._place(chunk)

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
        if chunk is first or first.key not in self._continued:
            return chunk is first
        return any(above.parent == first.key for above in (chunk, *self._above(chunk)))


class Walk:
    """Its exit restores the policy."""

    def __init__(
        self, policy: ChainPolicy, space: ChunkSpace, pinned: Callable[[bytes], bool]
    ) -> None:
        self.space = space
        self.taken: list[bytes] = []
        self.freed_bytes = 0
        self.declined = False
        self._policy = policy
        self._pinned = pinned
        self._seen: list[Place] = []
        self._opened: list[Chunk] = []
        self._fewer: dict[bytes, int] = {}

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
                self._push(place)

    def next(self, queue: int) -> Chunk | None:
        return self._next(self.space.queue(queue))

    def next_demoted(self) -> Chunk | None:
        return self._next(self.space.demoted)

    def _next(self, queue: Queue) -> Chunk | None:
        while (place := queue.pop()) is not None:
            self._seen.append(place)
            if not self._pinned(place[2].key):
                return place[2]
        return None

    def take(self, chunk: Chunk) -> None:
        self.taken.append(chunk.key)
        self.freed_bytes += chunk.nbytes
        if chunk.parent is None:
            return
        fewer = self._fewer[chunk.parent] = self._fewer.get(chunk.parent, 0) + 1
        above = self._policy._chunks.get(chunk.parent)
        if above is not None and fewer == self._policy._continued[chunk.parent]:
            above.place = place = (*above.rank, above)
            self._opened.append(above)
            self._push(place)

    def choose(self) -> Chunk | None:
        return self.next(0)

    def _push(self, place: Place) -> None:
        self.space.queue_of(place[2]).push(place)

    def settle(self) -> None:
        """A policy may now move the chunks that it passed over."""
