"""Evicts the chunk that is worth least to keep, as learnt from the times between uses.

A chunk is used when a prompt with it is looked up. Each chunk has a *kind*: how often it was used,
how long its prompt paused before the last use, and how many chunks of that prompt were new.
`reuse_times.py` learns for each kind when such chunks are used again. A chunk's worth follows from
its kind and the time since its last use. Of each kind, the oldest leaf is compared.

A new chunk that is worth less than what it would evict is not admitted.

Chunks that are not here are remembered (`ghosts.py`), so that learning does not depend on what
stayed.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TypeAlias

from kvhold.core.keys import NAME_BYTES
from kvhold.tiers.policies.chains import ChainPolicy, Chunk, Place, Space, Walk
from kvhold.tiers.policies.ghosts import MOST_USES, TICK_S, Ghost, Ghosts
from kvhold.tiers.policies.reuse_times import ReuseTimes, Use

_USES, _PAUSES, _NEW = 7, 5, 8  # numbers of values
_PAUSES_S = (30.0, 120.0, 480.0)
_PROMPTS = _PAUSES * _NEW
_UNKNOWN = 0

Head: TypeAlias = tuple[float, int, int]  # worth, rank, queue


class LearnedSpace(Space):
    """heads:   a heap of the queues' first leaves, of one tick; some are out of date
    changed: queues that may have another first leaf
    """

    __slots__ = ("changed", "heads", "tick")

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[Head] = []
        self.changed: set[int] = set()
        self.tick = -1


class LearnedPolicy(ChainPolicy):
    """A chunk's `queue` is its kind: uses, then pause, then new chunks."""

    learns = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun_s = clock()
        self.times = ReuseTimes((_USES, _PAUSES, _NEW))
        self.ghosts = Ghosts()
        self._inserted_last: tuple[bytes, Ghost | None] = b"", None

    def looked_up(self, keys: Sequence[bytes], num_here: int) -> int:
        self._advance()
        if not keys:
            return _UNKNOWN
        num_known = self._num_known(keys, num_here)
        pause = self._pause(keys[num_known - 1]) if num_known else 0
        return pause * _NEW + min((len(keys) - num_known).bit_length(), _NEW - 1)

    def used(self, keys: Iterable[bytes], prompt: int) -> None:
        self._advance()
        find = self._chunks.get
        chunks = [chunk for key in keys if (chunk := find(key)) is not None]
        begin = 0
        while begin < len(chunks):
            use, uses, end = chunks[begin].use, chunks[begin].uses, begin + 1
            while end < len(chunks) and chunks[end].use is use and chunks[end].uses == uses:
                end += 1
            self._use_again(chunks[begin:end], uses + 1, prompt)
            begin = end

    def missed(self, keys: Iterable[bytes], prompt: int) -> None:
        self._advance()
        now_s, begun = self.times.now_s, Counter[int]()
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                self._use_again([chunk], chunk.uses + 1, prompt)
                continue
            name = key[:NAME_BYTES]
            ghost = self.ghosts.take(name, now_s)
            uses = 1
            if ghost is not None:
                self.times.end(self.times.use_at(ghost.kind, ghost.at_s))
                uses = min(ghost.uses + 1, MOST_USES)
            kind = _kind(uses, prompt)
            begun[kind] += 1
            self._remember(name, Ghost(now_s, kind, uses))
        for kind, num in begun.items():
            self.times.use(kind, num)

    def expected_back_s(self, key: bytes, ago_s: float) -> float | None:
        self._advance()
        ghost = self._ghost(key)
        if ghost is None:
            return None
        age_s = self.times.now_s - ago_s - ghost.at_s
        if age_s < -TICK_S:  # it was used since
            return None
        return self.times.expected_s(ghost.kind, max(0.0, age_s))

    def _remember(self, name: bytes, ghost: Ghost) -> None:
        replaced = self.ghosts.add(name, ghost, self.times.now_s)
        if replaced is not None:
            self.times.forget(self.times.use_at(replaced.kind, replaced.at_s))

    def _advance(self) -> float:
        now_s = self._clock() - self._begun_s
        self.times.advance(now_s)
        return now_s

    def _num_known(self, keys: Sequence[bytes], num_here: int) -> int:
        """Return how many chunks were ever used. Assumes that those known are the first ones."""
        low, high = num_here, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._is_known(keys[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_known(self, key: bytes) -> bool:
        return key in self._chunks or self._ghost(key) is not None

    def _pause(self, key: bytes) -> int:
        """Return the class of the time since the last use of a known chunk."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            assert chunk.use is not None
            pause_s = self.times.now_s - self.times.last_s(chunk.use)
        else:
            ghost = self._ghost(key)
            assert ghost is not None
            pause_s = self.times.now_s - ghost.at_s
        return 1 + sum(pause_s >= most for most in _PAUSES_S)

    def _ghost(self, key: bytes) -> Ghost | None:
        return self.ghosts.find(key[:NAME_BYTES], self.times.now_s)

    def _inserted(self, chunk: Chunk) -> None:
        self._advance()
        name = chunk.key[:NAME_BYTES]
        ghost = self.ghosts.take(name, self.times.now_s)
        if ghost is not None:
            self.times.forget(self.times.use_at(ghost.kind, ghost.at_s))
            self._inserted_last = name, ghost
        elif name == self._inserted_last[0]:  # of another group or shard
            ghost = self._inserted_last[1]
        chunk.uses, chunk.queue = (1, _UNKNOWN) if ghost is None else (ghost.uses, ghost.kind)
        chunk.use = self.times.use(chunk.queue)
        self._rank(chunk, self._now())

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._rank(chunk, self._now())

    def _use_again(self, chunks: Sequence[Chunk], uses: int, prompt: int) -> None:
        """Count chunks with the same last use as used now."""
        before = chunks[0].use
        assert before is not None
        self.times.end(before, len(chunks))
        kind = _kind(uses, prompt)
        use = self.times.use(kind, len(chunks))
        for chunk in chunks:
            chunk.uses, chunk.use = uses, use
            if chunk.queue == kind:
                continue
            before_kind, chunk.queue = chunk.queue, kind
            if chunk.place is not None:
                for space in (self._all, chunk.space):
                    space.queue(before_kind).tidy()
                self._place(chunk)

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:
        assert chunk.use is not None
        if not evicted:
            self.times.forget(chunk.use)
            return
        self.times.evicted(chunk.use)
        ghost = Ghost(self.times.last_s(chunk.use), chunk.queue, min(chunk.uses, MOST_USES))
        self._remember(chunk.key[:NAME_BYTES], ghost)

    def _new_space(self) -> LearnedSpace:
        return LearnedSpace()

    def _place(self, chunk: Chunk) -> None:
        super()._place(chunk)
        for space in (self._all, chunk.space):
            assert isinstance(space, LearnedSpace)
            space.changed.add(chunk.queue)

    def _walk(self, space: Space, pinned: Callable[[bytes], bool], wanted: bytes | None) -> Walk:
        assert isinstance(space, LearnedSpace)
        self._advance()
        return _LearnedWalk(self, space, pinned, None if wanted is None else self._ghost(wanted))

    def worth_of(self, place: Place) -> float:
        use = place[2].use
        assert isinstance(use, Use)
        return self.times.worth(use)


class _LearnedWalk(Walk):
    """The entry of a queue is checked when its turn comes."""

    space: LearnedSpace

    def __init__(
        self,
        policy: LearnedPolicy,
        space: LearnedSpace,
        pinned: Callable[[bytes], bool],
        wanted: Ghost | None,
    ) -> None:
        super().__init__(policy, space, pinned)
        self._learned = policy
        self._wanted = wanted
        self._most_worth = inf if wanted is None else policy.times.worth_of_new(wanted.kind)
        if space.tick != policy.times.num_ticks:
            space.tick = policy.times.num_ticks
            space.heads = [head for queue in space.queues if (head := self._head(queue))]
            space.changed.clear()
            heapify(space.heads)

    def choose(self) -> Chunk | None:
        space = self.space
        while True:
            while space.changed:
                head = self._head(space.changed.pop())
                if head is not None:
                    heappush(space.heads, head)
            if not space.heads:
                return None
            first = space.heads[0]
            if self._head(first[2]) != first:  # a newer entry is there, or is made now
                heappop(space.heads)
                if (head := self._head(first[2])) is not None:
                    heappush(space.heads, head)
                continue
            space.changed.add(first[2])
            if (chunk := self.next(first[2])) is None:  # all of them are pinned
                continue
            if first[0] > self._most_worth:
                assert self._wanted is not None
                self._learned.times.declined(self._wanted.kind)
                self.declined = True
                return None
            return chunk

    def _push(self, place: Place) -> None:
        super()._push(place)
        self.space.changed.add(place[2].queue)

    def _head(self, queue: int) -> Head | None:
        place = self.space.queues[queue].peek()
        return None if place is None else (self._learned.worth_of(place), place[1], queue)


def _kind(uses: int, prompt: int) -> int:
    return (min(uses.bit_length(), _USES) - 1) * _PROMPTS + prompt
