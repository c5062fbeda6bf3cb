"""The order of eviction with `policy = "learned"`: the row with the lowest worth first.

The rows of one kind and value are one list; only its first row is compared. One event loop.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple, TypeAlias

from kvhold.core.keys import NAME_BYTES, place_suffix
from kvhold.tiers.disk.rows import NONE, Rows
from kvhold.tiers.policies.base import NEUTRAL
from kvhold.tiers.policies.ghosts import (
    MOST_KINDS,
    MOST_USES,
    Ghost,
    Ghosts,
    age_s_of,
    pack,
    queue_of,
    uses_of,
)
from kvhold.tiers.policies.kinds import pasts_of_use
from kvhold.tiers.policies.reuse_times import Worths

UNKNOWN_PAST = pack(Ghost(0.0, 0, 0, NEUTRAL))
_FIRST = place_suffix(0, 0)
_MOST_AGED = 150  # lists whose first row is compared again in a tick of the learner
_MOST_KNOWN = 4096

# worth, time of the last use, list, past of its first row, tick
Head: TypeAlias = tuple[float, float, int, int, int]


class KnownPast(NamedTuple):
    worth: float
    at_s: float
    number: int
    price: float


class Learning:
    """worths: of memory's policy; None before `DiskTier.learn_from`
    ghosts: of chunks not in this tier
    """

    def __init__(self) -> None:
        self.worths: Worths | None = None
        self.ghosts = Ghosts()

    def used_elsewhere(
        self, keys: Iterable[bytes], prompt: int, value: int, at_s: float, *, are_whole: bool
    ) -> None:
        if are_whole:
            names = [key[:NAME_BYTES] for key in keys if key.endswith(_FIRST)]
            self.ghosts.use_all(names, pasts_of_use(prompt, value, at_s), at_s)


class LearnedOrder:
    def __init__(self, rows: Rows, learning: Learning) -> None:
        self._rows = rows
        self._learning = learning
        self._heads: list[Head] = []
        self._newest: dict[int, Head] = {}
        self._first: dict[int, int] = {}
        self._aged: list[int] = []
        self._known: dict[int, KnownPast] = {}
        self._tick, self._now_s = -1, 0.0
        self._added = NONE

    def used(
        self, keys: Iterable[bytes], prompt: int, value: int, at_s: float, *, are_whole: bool
    ) -> None:
        """Within one kind, the first chunks are evicted first."""
        rows, pasts, absent = self._rows, pasts_of_use(prompt, value, at_s), []
        for key in keys:
            row = rows.find(key)
            if row != NONE:
                rows.set_past(row, pasts[rows.past(row) & MOST_USES])
            else:
                absent.append(key)
        if absent:
            self._learning.used_elsewhere(absent, prompt, value, at_s, are_whole=are_whole)

    def past_of(self, key: bytes) -> int:
        worths, past = self._learning.worths, self._learning.ghosts.find(key[:NAME_BYTES])
        if past or worths is None:
            return past or UNKNOWN_PAST
        return pack(Ghost(worths.now_s, 0, 0, NEUTRAL))

    def is_unused(self, row: int) -> bool:
        return uses_of(self._rows.past(row)) == 0

    def behind(self, past: int) -> int:
        """Insert the next row before this one; NONE: at the end.

        A prompt's chunks are written in order, but the last one must be evicted first.
        """
        row = self._added
        is_same = row != NONE and self._rows.past(row) == past and uses_of(past)
        return row if is_same else NONE

    def added(self, row: int) -> None:
        self._added = row

    def removed(self, key: bytes, row: int, *, evicted: bool) -> None:
        if row == self._added:
            self._added = NONE
        worths = self._learning.worths
        if not evicted or worths is None:
            return
        past = self._rows.past(row)
        worths.sell(self._of(past).price)
        if past != UNKNOWN_PAST:
            self._learning.ghosts.add(key[:NAME_BYTES], past, self._now_s)

    def admits(self, key: bytes) -> bool:
        worths, past = self._learning.worths, self.past_of(key)
        if worths is None or not uses_of(past):
            return True
        self._renew()
        heads, newest = self._heads, self._newest
        while heads and newest.get(heads[0][2]) is not heads[0]:
            heappop(heads)
        known = self._of(past)
        if not heads or known.worth >= heads[0][0]:
            return True
        worths.sell(known.price)
        return False

    def victims(self, nbytes: int, is_held: Callable[[int], bool]) -> Sequence[int]:
        self._renew()
        rows, heads, newest, first = self._rows, self._heads, self._newest, self._first
        victims: list[int] = []
        while heads and nbytes > 0:
            head = heads[0]
            number = head[2]
            if newest.get(number) is not head:
                heappop(heads)
                continue
            rows.changed.add(number)
            row = first[number]
            if not is_held(row):
                victims.append(row)
                nbytes -= rows.occupied_bytes(row)
            after = first[number] = rows.after(row)
            if after == NONE:
                heappop(heads)
                del newest[number], first[number]
            elif head[3] != rows.past(after) or head[4] != self._tick:
                newest[number] = head = self._head(after)
                heapreplace(heads, head)
        return victims if nbytes <= 0 else []

    def _renew(self) -> None:
        rows, worths = self._rows, self._learning.worths
        if worths is not None and self._tick != (tick := worths.num_ticks):
            self._tick, self._now_s = tick, worths.now_s
            self._known.clear()
            self._aged = self._aged or rows.lists()
            for _ in range(min(_MOST_AGED, len(self._aged))):
                number = self._aged.pop()
                self._push(number, rows.first(number))
        while rows.changed:
            number = rows.changed.pop()
            row, head = rows.first(number), self._newest.get(number)
            if row == NONE or head is None or head[3] != rows.past(row):
                self._push(number, row)
            elif head[4] == self._tick:
                self._first[number] = row
            elif self._first[number] != row:
                self._push(number, row)
        if len(self._heads) > 2 * len(self._newest) + 16:
            self._heads = list(self._newest.values())
            heapify(self._heads)

    def _push(self, number: int, row: int) -> None:
        if row == NONE:
            if number in self._newest:
                del self._newest[number], self._first[number]
            return
        self._first[number] = row
        head = self._newest[number] = self._head(row)
        heappush(self._heads, head)

    def _head(self, row: int) -> Head:
        past = self._rows.past(row)
        worth, at_s, number, _ = self._of(past)
        return worth if worth > 0.0 else 0.0, at_s, number, past, self._tick

    def _of(self, past: int) -> KnownPast:
        return self._known.get(past) or self._know(past)

    def _know(self, past: int) -> KnownPast:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        worths, number, now_s = self._learning.worths, queue_of(past), self._now_s
        known = KnownPast(0.0, 0.0, number, 0.0)
        if worths is not None:
            age_s = now_s if past == UNKNOWN_PAST else age_s_of(past, now_s)
            value, kind = divmod(number, MOST_KINDS)
            worth, price = worths.worth_and_yield(kind, age_s, value)
            known = KnownPast(worth, now_s - age_s, number, price)
        self._known[past] = known
        return known
