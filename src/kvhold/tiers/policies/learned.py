"""Evicts the chunk with the lowest worth, learnt from the times between uses (docs/eviction.md).

Only the oldest leaf of each kind and value is compared. `ghosts.py` has evicted and missing chunks.

A prompt's chunks with equal pasts are a *run*, in all groups and shards. Only one chunk of a run,
the *sample*, is counted, or a few long prompts would determine the counts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TypeAlias

from kvhold.core.keys import NAME_BYTES, NAMESPACE_BYTES, place_suffix
from kvhold.tiers.policies.base import NEUTRAL, NUM_VALUES, PolicyLookup
from kvhold.tiers.policies.chains import ChainPolicy, Chunk, ChunkSpace, Place, Walk
from kvhold.tiers.policies.ghosts import (
    MOST_KINDS,
    SAMPLE,
    TICK_S,
    Ghosts,
    pack_queue,
    queue_of,
    run_of,
    unpack,
    uses_of,
)
from kvhold.tiers.policies.kinds import NEW, PAUSES, USES, kind_of, pasts_of_use, prompt_of
from kvhold.tiers.policies.reuse_times import NO_USE, ReuseTimes, Use
from kvhold.tiers.table import SPREAD

_PAUSES_S = (30.0, 120.0, 480.0)
_UNKNOWN_PROMPT = 0
_UNKNOWN = NEUTRAL * MOST_KINDS  # queue of chunks in no lookup
# At most 2800 queues; their heads are renewed in parts:
_MOST_AGED = 150  # heads per tick
_MOST_CHANGED = 16  # heads per victim
_MOST_BEGUN = 4096  # runs whose use is known exactly
_MOST_FIRSTS = 4096  # namespaces
_FIRST = place_suffix(0, 0)
_FACTORS: list[float] = [2.0 ** ((value - NEUTRAL) / 2) for value in range(NUM_VALUES)]

Head: TypeAlias = tuple[float, int, int]  # worth, rank, queue


class LearnedSpace(ChunkSpace):
    """Each queue with a leaf is in `newest` or in `changed`.

    heads:  a heap of the queues' first leaves; some are out of date
    newest: each queue's latest head in the heap
    aged:   queues whose first leaf may have another worth by now
    """

    __slots__ = ("aged", "changed", "heads", "newest", "tick")

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[Head] = []
        self.newest: dict[int, Head] = {}
        self.changed: set[int] = set()
        self.aged: list[int] = []
        self.tick = -1

    def drop_if_empty(self, number: int) -> None:
        queue = self.queues.get(number)
        if queue is not None and queue.is_surely_empty():
            del self.queues[number]
            self.newest.pop(number, None)
            self.changed.discard(number)


class LearnedPolicy(ChainPolicy):
    """A chunk's `queue` number has its value and kind."""

    learns = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun_s = clock()
        self.times = ReuseTimes((USES, PAUSES, NEW), _FACTORS)
        self.ghosts = Ghosts()
        self._firsts: dict[bytes, bytes] = {}
        self._begun: dict[int, Use] = {}
        self._uses_at: dict[int, Use] = {}
        self._version = 0

    def looked_up(self, keys: Sequence[bytes], num_here: int) -> PolicyLookup:
        self._advance()
        if not keys:
            return PolicyLookup(_UNKNOWN_PROMPT, self.times.now_s)
        self._set_first(keys[0])
        num_known = self._num_known(keys, num_here)
        pause = self._pause(keys[num_known - 1]) if num_known else 0
        prompt = prompt_of(pause, len(keys) - num_known)
        return PolicyLookup(prompt, self.times.now_s)

    def used(
        self,
        keys: Iterable[bytes],
        lookup: PolicyLookup,
        value: int = NEUTRAL,
        *,
        is_repeat: bool = False,
    ) -> None:
        self._advance()
        times, shards, known = self.times, self._chunks.shards, lookup.present
        times.use_factor(value)
        before, after, queue = NO_USE, NO_USE, _UNKNOWN
        uses = uses_now = 0
        for key in keys:
            chunk = shards[key[SPREAD]].get(key)
            if chunk is None:
                continue
            is_first = False
            if chunk.use is not before or chunk.uses != uses:
                assert chunk.use is not None
                before, uses = chunk.use, chunk.uses
                uses_now = uses + 1
                kind = kind_of(uses_now, lookup.prompt)
                queue = value * MOST_KINDS + kind
                run = before, uses
                is_first = not is_repeat and run not in known
                after = known.get(run) or self._use_of(pack_queue(lookup.at_s, kind, uses_now))
                if is_first:
                    known[run] = after
                    times.add(after)
            if chunk.is_sample:
                times.end(before)
            chunk.is_sample = is_first
            chunk.use = after
            chunk.uses = uses_now
            if chunk.queue != queue:
                self._requeue(chunk, queue)

    def missed(
        self,
        keys: Iterable[bytes],
        lookup: PolicyLookup,
        value: int = NEUTRAL,
        *,
        if_known: bool = False,
    ) -> None:
        shards, names, here = self._chunks.shards, [], []
        for key in keys:
            if key in shards[key[SPREAD]]:
                here.append(key)
            else:
                names.append(key[:NAME_BYTES])
        self.used(here, lookup, value)
        pasts = pasts_of_use(lookup.prompt, value, lookup.at_s)
        earlier, replaced = self.ghosts.use_all(names, pasts, self.times.now_s, if_known=if_known)
        firsts = []
        for past, num in Counter(earlier).items():
            if past & SAMPLE:
                self.times.end(self._use_at(past), num)
            run = run_of(past)
            if run not in lookup.absent and (past or not if_known):
                lookup.absent.add(run)
                firsts.append(names[earlier.index(past)])
        for past in replaced:
            self._forget(past)
        for name in firsts:
            if past := self.ghosts.mark(name):
                self.times.add(self._use_of(past))

    def expected_back_s(self, key: bytes, ago_s: float) -> float | None:
        self._advance()
        past = self._ghost(key)
        if not past:
            return None
        ghost = unpack(past, self.times.now_s)
        age_s = self.times.now_s - ago_s - ghost.at_s
        if age_s < -TICK_S:
            return None
        return self.times.expected_s(ghost.kind, max(0.0, age_s))

    def _advance(self) -> None:
        now_s = self._clock() - self._begun_s
        if now_s >= self.times.next_tick_s:
            self.times.advance(now_s)

    def _num_known(self, keys: Sequence[bytes], num_here: int) -> int:
        low, high = num_here, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._is_known(keys[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_known(self, key: bytes) -> bool:
        return key in self._chunks or self._ghost(key) != 0

    def _pause(self, key: bytes) -> int:
        chunk, now_s = self._chunks.get(key), self.times.now_s
        if chunk is not None:
            assert chunk.use is not None
            at_s = chunk.use.at_s
        else:
            at_s = unpack(self._ghost(key), now_s).at_s
        return 1 + sum(now_s - at_s >= most for most in _PAUSES_S)

    def _ghost(self, key: bytes) -> int:
        return self.ghosts.find(key[:NAME_BYTES])

    def _set_first(self, key: bytes) -> None:
        space, suffix, firsts = key[:NAMESPACE_BYTES], key[NAME_BYTES:], self._firsts
        if suffix == _FIRST:
            firsts.pop(space, None)
        elif firsts.get(space) != suffix:
            if len(firsts) >= _MOST_FIRSTS:
                del firsts[next(iter(firsts))]
            firsts[space] = suffix

    def _use_of(self, past: int) -> Use:
        """The use that a lookup begins now. Equal runs of the same moment share it."""
        begun, run = self._begun, run_of(past)
        use = begun.get(run)
        if use is None:
            if len(begun) >= _MOST_BEGUN:
                del begun[next(iter(begun))]
            use = begun[run] = self.times.use(queue_of(run), 0)
        return use

    def _use_at(self, past: int) -> Use:
        times, run = self.times, run_of(past)
        if self._version != times.version:
            self._version = times.version
            self._uses_at.clear()
        use = self._begun.get(run) or self._uses_at.get(run)
        if use is None:
            ghost = unpack(run, times.now_s)
            use = self._uses_at[run] = times.use_at(ghost.kind, ghost.at_s)
        return use

    def _inserted(self, chunk: Chunk) -> None:
        """Its groups and shards share a past.

        The named entry takes it out of the ghosts, and may be the sample.
        """
        self._advance()
        name, times = chunk.key[:NAME_BYTES], self.times
        key = name + self._firsts.get(name[:NAMESPACE_BYTES], _FIRST)
        first = chunk if chunk.key == key else self._chunks.get(key)
        past = self.ghosts.find(name) if first is None else self.ghosts.take(name)
        chunk.rank = 0, self._now()  # it is in no queue yet
        if first is not None and first is not chunk:
            self._forget(past)
            chunk.uses, chunk.queue, chunk.use = first.uses, first.queue, first.use
            return
        chunk.uses, chunk.queue = (uses_of(past), queue_of(past)) if past else (1, _UNKNOWN)
        chunk.is_sample = first is chunk and (not past or past & SAMPLE != 0)
        chunk.use = self._begun.get(run_of(past))
        if chunk.use is None:  # looked up long ago, or never
            if first is chunk:
                self._forget(past)
            chunk.use = times.use(chunk.queue % MOST_KINDS, int(chunk.is_sample))

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._rank(chunk, self._now())

    def _requeue(self, chunk: Chunk, queue: int) -> None:
        before, chunk.queue = chunk.queue, queue
        if chunk.place is not None:
            for space in (self._all, chunk.space):
                space.queue(before).tidy()
            self._place(chunk)
            self._drop_if_empty(before, chunk)

    def _drop_if_empty(self, queue: int, chunk: Chunk) -> None:
        """2800 empty ones would remain."""
        for space in (self._all, chunk.space):
            assert isinstance(space, LearnedSpace)
            space.drop_if_empty(queue)

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:
        assert chunk.use is not None
        self._drop_if_empty(chunk.queue, chunk)
        if not evicted:
            if chunk.is_sample:
                self.times.forget(chunk.use)
            return
        self.times.evicted(chunk.use, chunk.queue // MOST_KINDS)
        past = pack_queue(chunk.use.at_s, chunk.queue, chunk.uses)
        if chunk.is_sample:
            past |= SAMPLE
        self._forget(self.ghosts.add(chunk.key[:NAME_BYTES], past, self.times.now_s))

    def _forget(self, past: int) -> None:
        if past & SAMPLE:
            self.times.forget(self._use_at(past))

    def _new_space(self) -> LearnedSpace:
        return LearnedSpace()

    def _place(self, chunk: Chunk) -> None:
        super()._place(chunk)
        for space in (self._all, chunk.space):
            assert isinstance(space, LearnedSpace)
            space.changed.add(chunk.queue)

    def _walk(
        self, space: ChunkSpace, pinned: Callable[[bytes], bool], wanted: bytes | None
    ) -> Walk:
        assert isinstance(space, LearnedSpace)
        self._advance()
        past = 0 if wanted is None else self._ghost(wanted)
        return _LearnedWalk(self, space, pinned, queue_of(past) if past else None)

    def worth_of(self, place: Place) -> float:
        use = place[2].use
        assert isinstance(use, Use)
        return self.times.worth(use, place[2].queue // MOST_KINDS)


class _LearnedWalk(Walk):
    space: LearnedSpace

    def __init__(
        self,
        policy: LearnedPolicy,
        space: LearnedSpace,
        pinned: Callable[[bytes], bool],
        wanted: int | None,
    ) -> None:
        super().__init__(policy, space, pinned)
        self._learned = policy
        self._wanted = wanted
        self._most_worth = inf
        if wanted is not None:
            value, kind = divmod(wanted, MOST_KINDS)
            self._most_worth = policy.times.worth_of_new(kind, value)
        if space.tick != policy.times.num_ticks:
            space.tick = policy.times.num_ticks
            self._renew_aged()

    def choose(self) -> Chunk | None:
        space = self.space
        while True:
            for _ in range(min(_MOST_CHANGED, len(space.changed))):
                self._renew(space.changed.pop())
            if not space.heads and space.changed:
                continue
            if not space.heads:
                return None
            first = space.heads[0]
            if space.newest.get(first[2]) is not first:
                heappop(space.heads)
                continue
            if self._head(first[2]) != first:
                heappop(space.heads)
                self._renew(first[2])
                continue
            space.changed.add(first[2])
            if (chunk := self.next(first[2])) is None:
                continue
            if chunk.rank[1] != first[1]:
                self._push(self._seen.pop())
                continue
            if first[0] > self._most_worth:
                assert self._wanted is not None
                value, kind = divmod(self._wanted, MOST_KINDS)
                self._learned.times.declined(kind, value)
                self.declined = True
                return None
            return chunk

    def _push(self, place: Place) -> None:
        super()._push(place)
        self.space.changed.add(place[2].queue)

    def _renew_aged(self) -> None:
        space = self.space
        aged = space.aged = space.aged or list(space.queues)
        for _ in range(min(_MOST_AGED, len(aged))):
            self._renew(aged.pop())
        if len(space.heads) > 2 * len(space.newest):
            space.heads = list(space.newest.values())
            heapify(space.heads)

    def _renew(self, queue: int) -> None:
        head, newest = self._head(queue), self.space.newest
        if head is None:
            self.space.drop_if_empty(queue)
            newest.pop(queue, None)
        elif newest.get(queue) != head:
            newest[queue] = head
            heappush(self.space.heads, head)

    def _head(self, queue: int) -> Head | None:
        leaves = self.space.queues.get(queue)
        place = None if leaves is None else leaves.peek()
        return None if place is None else (self._learned.worth_of(place), place[1], queue)
