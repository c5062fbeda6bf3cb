"""The chunks that engines compute, and the lookups that wait for them. No I/O.

An announcement names the whole chunks after a hit, that of a hand-over also the tail. It ends when
they are stored, its owner withdraws it or leaves, or it is late and another engine announces them.
A chunk is stored when memory has it for every shard and full-attention group.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, Query, place_suffix
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait, prefill_s
from kvhold.tiers.ram import RamTier

_MOST_KEYS = 1024  # per announcement, made in one turn
_MOST_ANNOUNCEMENTS = 1024  # per owner
_MOST_CHUNKS = 16_384  # per owner
_LEAST_S = 0.05  # shorter computing is not waited for
_AS_FAST = 1.1
_LATE = 1.5  # promises and estimates may be off by this factor


class WaitEnd(StrEnum):
    """STORED: in memory. ENDED: the announcement ended without them. SLOWER: computing the rest is
    faster. CUT_SHORT: the caller waits no more. Of a handover also DEADLINE, ANNOUNCED,
    NOT_ANNOUNCED. ASK_AGAIN: peers may have more.
    """

    STORED = "stored"
    ENDED = "ended"
    LATE = "late"
    SLOWER = "slower"
    CUT_SHORT = "cut short"
    DEADLINE = "deadline"
    ANNOUNCED = "announced"
    NOT_ANNOUNCED = "not announced"
    ASK_AGAIN = "ask again"

    @property
    def is_futile(self) -> bool:
        return self not in (WaitEnd.STORED, WaitEnd.ANNOUNCED, WaitEnd.ASK_AGAIN)


@dataclass(eq=False)
class Announcement:
    """chunks:       names, not stored yet, in the prompt's order
    progress_s:   time of the last stored chunk, or of the announcement
    tails:        names, which come with the preceding chunk
    is_withdrawn: only chunks being written are left
    mark:         the last whole chunk's name, for other hosts
    """

    number: int
    owner: Hashable
    cost: ComputeCost
    start_tokens: int
    done_tokens: int
    began_s: float
    progress_s: float
    token_bytes: float
    tails: frozenset[bytes]
    chunks: dict[bytes, "_Chunk"] = field(default_factory=dict)
    waits: "set[Wait]" = field(default_factory=set)
    is_withdrawn: bool = False
    mark: bytes = b""

    def promised_s(self, cost: ComputeCost, last: int) -> float:
        step, begin = cost.step_tokens, self.start_tokens
        end = min(begin + -(-(last - begin) // step) * step, self.cost.num_tokens)
        return prefill_s(cost, begin, max(end, last)) + _copy_s(cost, last - begin, self)


@dataclass
class _Chunk:
    """missing: the keys that memory lacks. end: in tokens"""

    missing: set[bytes]
    end: int


@dataclass(eq=False)
class Wait:
    """names:      the awaited chunks that are not stored
    end_tokens: end of the last
    hit_end:    end of the hit with these, and perhaps a tail
    longest_s:  of a handover; None: it lasts while it is faster than computing
    """

    announcement: Announcement
    names: set[bytes]
    cost: ComputeCost
    hit_tokens: int
    end_tokens: int
    hit_end: int
    began_s: float
    longest_s: float | None = None
    is_broken: bool = False


@dataclass(frozen=True, eq=False)
class AnnouncementWait:
    """keys: of the awaited chunk"""

    keys: tuple[bytes, ...]
    began_s: float
    longest_s: float


@dataclass(frozen=True, eq=False)
class PeerWait:
    """Until peers are asked again (`peer_waits.py`)."""

    began_s: float
    longest_s: float


AnyWait = Wait | AnnouncementWait | PeerWait


class Computing:
    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        has_peers: bool = False,
    ) -> None:
        self.tell_peers: Callable[[bytes, bool], None] = lambda name, is_computed: None
        self._has_peers = has_peers
        self._ram = ram
        self._metrics = metrics
        self._clock = clock
        self._by_name: dict[bytes, Announcement] = {}
        self._by_owner: dict[Hashable, dict[int, Announcement]] = {}
        self._num_expecting = 0
        self._has_news = False

    @property
    def num_chunks(self) -> int:
        return len(self._by_name)

    def announce(
        self,
        owner: Hashable,
        number: int,
        query: Query,
        layout: Layout,
        hit_tokens: int,
        intent: ComputeIntent | None,
    ) -> bool:
        """Announce the chunks after a hit that no engine computes.

        False: none, late, or much slower.
        """
        if intent is None or not intent.announces:
            return False
        held = self._by_owner.get(owner, {})
        suffixes = _suffixes(query, layout)
        left = _MOST_CHUNKS - sum(len(one.chunks) for one in held.values())
        if len(held) >= _MOST_ANNOUNCEMENTS or left <= 0 or not suffixes:
            return False
        size, now_s = layout.tokens_per_chunk, self._clock()
        start = max(hit_tokens, intent.cost.computed_tokens)
        announcement = Announcement(
            number,
            owner,
            intent.cost,
            start_tokens=start,
            done_tokens=start,
            began_s=now_s,
            progress_s=now_s,
            token_bytes=_token_bytes(query, layout),
            tails=frozenset(name for _, name in tail_names(query)),
        )
        lost: dict[Announcement, bool] = {}
        chunks = chunk_names(query, hit_tokens // size)
        last = len(query.hashes) // HASH_BYTES * size
        for at, name in islice(chunks, min(left, _MOST_KEYS // len(suffixes))):
            other = self._by_name.get(name)
            if other is not None:
                if other not in lost:
                    lost[other] = self._is_beaten(other, announcement, last)
                if not lost[other]:
                    continue
                self._drop(other, name)
            missing = {key for suffix in suffixes if self._ram.find(key := name + suffix) is None}
            if missing:
                announcement.chunks[name] = _Chunk(missing, (at + 1) * size)
                self._by_name[name] = announcement
        if intent.keep_s > 0 and announcement.chunks:
            announcement.mark = next(reversed(announcement.chunks))
            self.tell_peers(announcement.mark, True)
        if intent.announces_tail and query.tail_lengths:
            self._announce_tail(announcement, query, last, suffixes)
        if not announcement.chunks:
            return False
        self._by_owner.setdefault(owner, {})[number] = announcement
        self._has_news = self._has_news or self._num_expecting > 0
        self._metrics.add("kvhold_announced_chunks", len(announcement.chunks))
        return True

    def _announce_tail(
        self, announcement: Announcement, query: Query, last: int, suffixes: list[bytes]
    ) -> None:
        *_, (length, name) = tail_names(query)
        missing = {key for suffix in suffixes if self._ram.find(key := name + suffix) is None}
        if missing and name not in self._by_name:
            announcement.chunks[name] = _Chunk(missing, last + length)
            self._by_name[name] = announcement

    def withdraw(self, owner: Hashable, number: int) -> None:
        announcement = self._by_owner.get(owner, {}).get(number)
        if announcement is None:
            return
        announcement.is_withdrawn = True
        for name, chunk in list(announcement.chunks.items()):
            if not self._is_being_written(chunk):
                self._drop(announcement, name)

    def withdraw_all(self, owner: Hashable) -> None:
        for announcement in list(self._by_owner.get(owner, {}).values()):
            for name in list(announcement.chunks):
                self._drop(announcement, name)

    def stored(self, key: bytes) -> None:
        if not self._by_name:
            return
        name = key[:NAME_BYTES]
        announcement = self._by_name.get(name)
        if announcement is None:
            return
        chunk = announcement.chunks[name]
        chunk.missing.discard(key)
        if chunk.missing:
            if announcement.is_withdrawn and not self._is_being_written(chunk):
                self._drop(announcement, name)
            return
        announcement.done_tokens = max(announcement.done_tokens, chunk.end)
        announcement.progress_s = self._clock()
        for wait in announcement.waits:
            wait.names.discard(name)
            self._has_news = self._has_news or not wait.names
        self._forget(announcement, name)

    def not_stored(self, key: bytes) -> None:
        announcement = self._by_name.get(name := key[:NAME_BYTES])
        if announcement is not None and key in announcement.chunks[name].missing:
            self._drop(announcement, name)

    def is_computed(self, key: bytes, owner: Hashable) -> bool:
        announcement = self._by_name.get(key[:NAME_BYTES])
        return announcement is not None and announcement.owner != owner

    def begin_wait(
        self,
        owner: Hashable,
        query: Query,
        layout: Layout,
        hit_tokens: int,
        intent: ComputeIntent | None,
        *,
        waited_s: float = 0.0,
    ) -> Wait | AnnouncementWait | None:
        """None: computing the chunks is faster. waited_s: by earlier waits of the same lookup"""
        if intent is None:
            return None
        handover = intent.handover
        if handover is not None and not handover.timeout_s - waited_s > 0:  # NaN, too
            handover = None
        if handover is None and not intent.waits:
            return None
        wait = self._next_wait(owner, query, layout, hit_tokens, intent.cost)
        if handover is not None:
            if wait is None:
                is_first = not (waited_s or self._has_peers)
                return self._expect(query, layout, hit_tokens, handover) if is_first else None
            wait.longest_s = handover.timeout_s - waited_s
        elif wait is None or not self._is_faster(wait):
            return None
        wait.announcement.waits.add(wait)
        return wait

    def _is_faster(self, wait: Wait) -> bool:
        if not wait.cost.is_known or self._is_late(wait.announcement, wait.cost):
            return False
        alone_s = self._alone_s(wait, wait.hit_tokens)
        return alone_s >= _LEAST_S and self._waiting_s(wait) <= _AS_FAST * alone_s

    def _expect(
        self, query: Query, layout: Layout, hit_tokens: int, handover: HandoverWait
    ) -> AnnouncementWait | None:
        grace_s = min(handover.grace_s, handover.timeout_s)
        if not grace_s:
            return None
        following = next(chunk_names(query, hit_tokens // layout.tokens_per_chunk), None)
        if following is None or following[1] in self._by_name:
            return None  # nothing is missing, or this engine computes it
        keys = tuple(following[1] + suffix for suffix in _suffixes(query, layout))
        if not keys:
            return None
        self._num_expecting += 1
        return AnnouncementWait(keys, self._clock(), grace_s)

    def _next_wait(
        self,
        owner: Hashable,
        query: Query,
        layout: Layout,
        hit_tokens: int,
        cost: ComputeCost,
    ) -> Wait | None:
        if not self._by_name:
            return None
        size, names = layout.tokens_per_chunk, set[bytes]()
        announcement, end = None, hit_tokens
        for number, name in islice(chunk_names(query, hit_tokens // size), _MOST_KEYS):
            other = self._by_name.get(name)
            if other is None or (announcement is not None and other is not announcement):
                break
            announcement, end = other, (number + 1) * size
            names.add(name)
        whole, hit_end = len(query.hashes) // HASH_BYTES * size, end
        for length, name in tail_names(query) if end >= whole else ():
            other = self._by_name.get(name)
            if other is not None and whole + length > hit_tokens and announcement in (None, other):
                announcement, end = other, whole + length
                names.add(name)
            if announcement is not None and name in announcement.tails:
                hit_end = whole + length
        if announcement is None or announcement.owner == owner:
            return None
        return Wait(
            announcement,
            names,
            _known(cost, announcement.cost),
            hit_tokens,
            end,
            hit_end,
            self._clock(),
        )

    def expected_s(self, wait: Wait) -> float:
        return max(0.0, self._due_s(wait.announcement, wait.cost, wait.end_tokens) - self._clock())

    def end_of(self, wait: AnyWait) -> WaitEnd | None:
        """None: not over. Cheap."""
        waited_s = self._clock() - wait.began_s
        if isinstance(wait, PeerWait):
            return None if waited_s < wait.longest_s else WaitEnd.ASK_AGAIN
        if isinstance(wait, AnnouncementWait):
            return self._end_of_grace(wait, waited_s)
        if wait.is_broken:
            return WaitEnd.ENDED
        if not wait.names:
            return WaitEnd.STORED
        if wait.longest_s is not None:
            return None if waited_s < wait.longest_s else WaitEnd.DEADLINE
        announcement = wait.announcement
        if self._is_late(announcement, wait.cost):
            return WaitEnd.LATE
        here = max(wait.hit_tokens, min(announcement.done_tokens, wait.end_tokens))
        if self._waiting_s(wait) > _LATE * self._alone_s(
            wait, here
        ) or waited_s > _LATE * self._alone_s(wait, wait.hit_tokens):
            return WaitEnd.SLOWER
        return None

    def _end_of_grace(self, wait: AnnouncementWait, waited_s: float) -> WaitEnd | None:
        is_announced = wait.keys[0][:NAME_BYTES] in self._by_name
        if is_announced or all(self._ram.find(key) is not None for key in wait.keys):
            return WaitEnd.ANNOUNCED
        return None if waited_s < wait.longest_s else WaitEnd.NOT_ANNOUNCED

    def leave(self, wait: AnyWait, end: WaitEnd) -> None:
        if end is WaitEnd.ASK_AGAIN:
            return
        if isinstance(wait, AnnouncementWait):
            self._num_expecting -= 1
        elif isinstance(wait, Wait):
            wait.announcement.waits.discard(wait)
        self._metrics.add("kvhold_waited_for_computing", result=end)
        self._metrics.add("kvhold_waited_for_computing_seconds", self._clock() - wait.began_s)

    def take_news(self) -> bool:
        news, self._has_news = self._has_news, False
        return news

    def _is_being_written(self, chunk: _Chunk) -> bool:
        return any(self._ram.holds(key) and self._ram.find(key) is None for key in chunk.missing)

    def _drop(self, announcement: Announcement, name: bytes) -> None:
        for wait in announcement.waits:
            if name in wait.names:
                wait.is_broken = self._has_news = True
        self._forget(announcement, name)

    def _forget(self, announcement: Announcement, name: bytes) -> None:
        del self._by_name[name]
        del announcement.chunks[name]
        if not announcement.chunks:
            if announcement.mark:
                self.tell_peers(announcement.mark, False)
            held = self._by_owner[announcement.owner]
            del held[announcement.number]
            if not held:
                del self._by_owner[announcement.owner]

    def _is_beaten(self, announcement: Announcement, by: Announcement, last: int) -> bool:
        cost = _known(by.cost, announcement.cost)
        if not cost.is_known or announcement.owner == by.owner:
            return False
        end = min(last, next(reversed(announcement.chunks.values())).end)
        left_s = self._due_s(announcement, cost, end) - self._clock()
        return self._is_late(announcement, cost) or left_s > _LATE * by.promised_s(cost, end)

    def _is_late(self, announcement: Announcement, cost: ComputeCost) -> bool:
        cost = _speed(announcement.cost, cost)
        following = next(iter(announcement.chunks.values()), None)
        if following is None or not cost.is_known:
            return False
        allowed_s = (_LATE - 1) * announcement.promised_s(cost, following.end)
        return self._clock() > self._due_s(announcement, cost, following.end) + allowed_s

    def _due_s(self, announcement: Announcement, cost: ComputeCost, last: int) -> float:
        cost = _speed(announcement.cost, cost)
        done_s = (
            announcement.promised_s(cost, announcement.done_tokens)
            if announcement.done_tokens > announcement.start_tokens
            else 0.0
        )
        took_s = announcement.progress_s - announcement.began_s
        pace = max(1.0, took_s / done_s) if done_s else 1.0
        left_s = max(0.0, announcement.promised_s(cost, last) - done_s)
        return announcement.progress_s + pace * left_s

    def _waiting_s(self, wait: Wait) -> float:
        cost, end = wait.cost, wait.hit_end
        begin = cost.computed_tokens
        loading_s = _copy_s(cost, end - begin, wait.announcement) if end > begin else 0.0
        return self.expected_s(wait) + loading_s + _rest_s(cost, end)

    def _alone_s(self, wait: Wait, hit_tokens: int) -> float:
        cost = wait.cost
        begin = cost.computed_tokens
        loading_s = (
            _copy_s(cost, hit_tokens - begin, wait.announcement) if hit_tokens > begin else 0.0
        )
        return loading_s + _rest_s(cost, hit_tokens)


def _rest_s(cost: ComputeCost, hit_tokens: int) -> float:
    """The last token is always computed."""
    begin = min(max(hit_tokens, cost.computed_tokens), cost.num_tokens - 1)
    return prefill_s(cost, begin, cost.num_tokens)


def _copy_s(cost: ComputeCost, num_tokens: int, announcement: Announcement) -> float:
    return cost.load_s + num_tokens * announcement.token_bytes * cost.load_byte_s


def _known(cost: ComputeCost, other: ComputeCost) -> ComputeCost:
    return cost if cost.is_known or not other.is_known else _with_speed(cost, other)


def _speed(cost: ComputeCost, other: ComputeCost) -> ComputeCost:
    """The other engine's own speeds count, unless the two differ much."""
    alike = _with_speed(cost, other)
    if not cost.is_known or not other.is_known:
        return alike if other.is_known else cost
    own_s, alike_s = _rest_s(cost, 0), _rest_s(alike, 0)
    return alike if own_s <= _LATE * alike_s and alike_s <= _LATE * own_s else cost


def _with_speed(cost: ComputeCost, other: ComputeCost) -> ComputeCost:
    return ComputeCost(
        cost.request,
        cost.num_tokens,
        cost.computed_tokens,
        cost.step_tokens,
        other.step_s,
        other.token_s,
        other.pair_s,
        cost.load_s or other.load_s,
        cost.load_byte_s or other.load_byte_s,
    )


def _suffixes(query: Query, layout: Layout) -> list[bytes]:
    return [
        place_suffix(number, shard)
        for number, group in enumerate(layout.groups)
        if group.attention == "full"
        for shard in query.shard_numbers
    ]


def _token_bytes(query: Query, layout: Layout) -> float:
    size = layout.tokens_per_chunk
    nbytes = sum(
        layout.chunk_bytes(number, size)
        for number, group in enumerate(layout.groups)
        if group.attention == "full"
    )
    return query.num_shards * nbytes / size
