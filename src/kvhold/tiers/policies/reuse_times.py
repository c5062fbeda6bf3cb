"""After how long chunks are used again, by kind (docs/eviction.md). Pure.

Chunks last used at about the same time are a *cohort*. Counted by kind and bucket of age: intervals
that reached the bucket, and that ended there. A *factor* says how much a use saves.

For a new chunk, the time h of a worth is at least the end of the first bucket.

A disk's thread may read `Worths` during calls of `ReuseTimes`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, product
from math import prod
from operator import mul

import numpy as np
import numpy.typing as npt

_SHORTEST_S = 0.5
_BUCKETS_AN_OCTAVE = 2
_NUM_BUCKETS = 44  # the last one begins after 12 days
_COHORTS_A_BUCKET = 4
_COHORTS_A_TIME = 10  # more than can begin within the resolution of `at_s`
_TICK_S = 0.25
_HALF_LIFE_S = 2 * 3600.0
_KINDS_A_TICK = 8  # in a tick after no pause
_MOST_KINDS = 64  # in any tick
_MOST_AGED = 2000  # uses per tick
_COHORT_UNITS = 20  # a cohort takes as long as this many uses

# the prior: an equal hazard in each bucket of the first hour
_PRIOR_HAZARD = 0.04
_PRIOR_S = 3600.0
_PRIOR_USES = 1.0
# after so many uses, a kind's own counts weigh as much as those of similar kinds: in total,
# and per bucket
_SCALE_USES = 5.0
_SHAPE_USES = 50.0
_PRICE = 0.5  # of the mean yield of evicted chunks
_PRICE_SHARE = 0.02  # of the difference, per round of updates
_FEWEST_USES = 25.0  # before, nothing is expected
_EXPECTED = 0.5  # from this probability on, a use is expected

_EDGES_S = [
    0.0,
    *(_SHORTEST_S * 2 ** (i / _BUCKETS_AN_OCTAVE) for i in range(_NUM_BUCKETS - 1)),
]
_PRIOR = np.array([_PRIOR_HAZARD * (edge_s < _PRIOR_S) for edge_s in _EDGES_S])
_WIDTHS_S = np.diff(_EDGES_S, append=2 * _EDGES_S[-1])
_LATER = np.tri(_NUM_BUCKETS, dtype=bool).T
_MOST_HAZARD = 0.999
_TINY = 1e-9

Floats = npt.NDArray[np.float64]


class Cohort:
    __slots__ = ("begun_s", "bucket", "ended_s", "uses")

    def __init__(self, now_s: float) -> None:
        self.begun_s = now_s
        self.ended_s = now_s
        self.bucket = 0
        self.uses: dict[int, Use] = {}


class Use:
    """at_s: the beginning of its first cohort"""

    __slots__ = ("at_s", "cohort", "into", "kind", "num")

    def __init__(self, kind: int, cohort: Cohort) -> None:
        self.at_s = cohort.begun_s
        self.kind = kind
        self.cohort = cohort
        self.num = 0
        self.into: Use | None = None


NO_USE = Use(-1, Cohort(0.0))


class Worths:
    """table: `[factor][kind][bucket]`, not multiplied by the factor. Unused factors share one
    list
    """

    def __init__(self, times: "ReuseTimes", worths: list[list[float]]) -> None:
        self.table = [worths] * len(times.factors)
        self.price = 0.0
        self._times = times
        self._sold = (0.0, 0)
        self._counted = (0.0, 0)

    @property
    def now_s(self) -> float:
        return self._times.now_s

    @property
    def num_ticks(self) -> int:
        """A changed number: results of `worth` may differ."""
        return self._times.num_ticks

    def worth(self, kind: int, age_s: float, factor: int) -> float:
        return self.worth_and_yield(kind, age_s, factor)[0]

    def worth_and_yield(self, kind: int, age_s: float, factor: int) -> tuple[float, float]:
        bucket, by = _bucket(age_s), self._times.factors[factor]
        return self.table[factor][kind][bucket] * by, self._times.yields[kind][bucket] * by

    def sell(self, price: float) -> None:
        self._sold = self._sold[0] + price, self._sold[1] + 1

    def set_price(self) -> None:
        sold, counted = self._sold, self._counted
        if num := sold[1] - counted[1]:
            mean = (sold[0] - counted[0]) / num
            self.price += _PRICE_SHARE * (_PRICE * mean - self.price)
            self._counted = sold


class ReuseTimes:
    def __init__(self, sizes: Sequence[int], factors: Sequence[float] = (1.0,)) -> None:
        """sizes: by number that describes a kind: how many values it has
        factors: must contain 1.0; calls take an index
        """
        self.num_kinds = prod(sizes)
        self._groups = list(accumulate(sizes, mul))
        self._reached = np.zeros((self.num_kinds, _NUM_BUCKETS))
        self._ended = np.zeros((self.num_kinds, _NUM_BUCKETS))
        self._num_chunks = self._num_uses = 0.0
        self._cohorts = [Cohort(0.0)]
        self._to_update = 0
        self._round_hazards = np.zeros((self.num_kinds, _NUM_BUCKETS))
        yields, (worths,) = _evaluate(_PRIOR[None], [0.0])
        self.yields: list[list[float]] = yields.tolist() * self.num_kinds
        self.factors = factors
        self._factors_used = [factors.index(1.0)]
        self._memory = Worths(self, worths.tolist() * self.num_kinds)
        self._places = [self._memory]
        self._worths = self._memory.table
        self.now_s = 0.0
        self.next_tick_s = _TICK_S
        self.num_ticks = 0
        self.version = 0

    @property
    def num_cohorts(self) -> int:
        return len(self._cohorts)

    def num_open(self, use: Use) -> int:
        return _merged(use).num

    def add_place(self) -> Worths:
        place = Worths(self, list(self._worths[self._factors_used[0]]))
        self._places.append(place)
        return place

    def advance(self, now_s: float) -> None:
        if now_s < self.next_tick_s:
            return
        self._count_youngest()
        passed_s = now_s - self.now_s
        fade = 0.5 ** (passed_s / _HALF_LIFE_S)
        self._reached *= fade
        self._ended *= fade
        self._num_chunks *= fade
        self._num_uses *= fade
        self.now_s = now_s
        self.next_tick_s = now_s + _TICK_S
        self.num_ticks += 1
        self.version += 1
        self._age()
        self._merge()
        self._cohorts.append(Cohort(now_s))
        self._update(passed_s)

    def use(self, kind: int, num_chunks: int = 1) -> Use:
        cohort = self._cohorts[-1]
        use = cohort.uses.get(kind)
        if use is None:
            use = cohort.uses[kind] = Use(kind, cohort)
            self.version += 1
        use.num += num_chunks
        return use

    def add(self, use: Use, num_chunks: int = 1) -> None:
        """The use may be an earlier one."""
        use = _merged(use)
        use.num += num_chunks
        cohort = use.cohort
        if cohort is not self._cohorts[-1]:
            self._reached[use.kind, : cohort.bucket + 1] += num_chunks
            self._num_chunks += num_chunks

    def end(self, use: Use, num_chunks: int = 1) -> None:
        use = _merged(use)
        use.num -= num_chunks
        cohort = use.cohort
        if cohort is not self._cohorts[-1]:
            self._ended[use.kind, cohort.bucket] += num_chunks

    def forget(self, use: Use, num_chunks: int = 1) -> None:
        if use.into is not None:
            use = _merged(use)
        use.num -= num_chunks

    def use_at(self, kind: int, at_s: float) -> Use:
        """The latest use of a kind at or before a time, to end or forget it."""
        cohorts = self._cohorts
        place = bisect_right(cohorts, at_s, key=_begun_s) - 1
        for cohort in reversed(cohorts[max(0, place - _COHORTS_A_TIME) : place + 1]):
            if (use := cohort.uses.get(kind)) is not None:
                return use
        return Use(kind, cohorts[max(0, place)])

    def use_factor(self, factor: int) -> None:
        if factor not in self._factors_used:
            self._factors_used.append(factor)
            for place in self._places:
                place.table[factor] = list(place.table[self._factors_used[0]])

    def worth(self, use: Use, factor: int = 0) -> float:
        if use.into is not None:
            use = _merged(use)
        worth = self._worths[factor][use.kind][use.cohort.bucket] * self.factors[factor]
        return worth if worth > 0.0 else 0.0

    def worth_of_new(self, kind: int, factor: int = 0) -> float:
        """Below 0 if the yield is below the price."""
        return self._worths[factor][kind][0] * self.factors[factor]

    def expected_s(self, kind: int, age_s: float) -> float | None:
        """The median time to the next use. None: unknown, or most have none."""
        if self._num_uses < _FEWEST_USES:
            return None
        bucket = bisect_right(_EDGES_S, age_s) - 1
        hazards = np.clip(self._round_hazards[kind, bucket:], 0.0, _MOST_HAZARD)
        used = 1.0 - np.cumprod(1.0 - hazards)
        if used[-1] < _EXPECTED:
            return None
        ends_s = np.maximum(np.array(_EDGES_S[bucket:]) + _WIDTHS_S[bucket:] - age_s, 0.0)
        return float(np.interp(used[-1] / 2, [0.0, *used], [0.0, *ends_s]))

    def evicted(self, use: Use, factor: int = 0) -> None:
        use = _merged(use)
        self._memory.sell(self.yields[use.kind][use.cohort.bucket] * self.factors[factor])

    def declined(self, kind: int, factor: int = 0) -> None:
        self._memory.sell(self.yields[kind][0] * self.factors[factor])

    def _count_youngest(self) -> None:
        uses = self._cohorts[-1].uses.values()
        for use in uses:
            self._reached[use.kind, 0] += use.num
            self._num_chunks += use.num
        self._num_uses += len(uses)

    def _age(self) -> None:
        left = _MOST_AGED
        for cohort in self._cohorts:
            before = cohort.bucket
            bucket = bisect_right(_EDGES_S, self.now_s - cohort.begun_s, lo=before + 1) - 1
            if bucket == before:
                continue
            if left <= 0:
                break
            left -= _COHORT_UNITS + len(cohort.uses)
            nums = np.array([use.num for use in cohort.uses.values()], np.float64)
            self._reached[list(cohort.uses), before + 1 : bucket + 1] += np.maximum(nums, 0.0)[
                :, None
            ]
            cohort.bucket = bucket

    def _merge(self) -> None:
        kept: list[Cohort] = []
        left = _MOST_AGED
        for cohort in self._cohorts:
            if not cohort.uses:
                continue
            if left > 0 and kept and _are_alike(kept[-1], cohort):
                left -= len(cohort.uses)
                _pour(cohort, kept[-1])
            else:
                kept.append(cohort)
        self._cohorts = kept

    def _update(self, passed_s: float) -> None:
        num = min(_KINDS_A_TICK * max(1, int(passed_s / _TICK_S)), _MOST_KINDS)
        first = self._to_update
        last = min(first + num, self.num_kinds)
        self._to_update = last % self.num_kinds
        if not first:
            self._begin_round()
        priced = list(product(self._places, self._factors_used))
        prices = [place.price / self.factors[factor] for place, factor in priced]
        yields, worths = _evaluate(self._round_hazards[first:last], prices)
        self.yields[first:last] = yields.tolist()
        for (place, factor), rows in zip(priced, worths, strict=True):
            place.table[factor][first:last] = rows.tolist()

    def _begin_round(self) -> None:
        self._round_hazards = self._hazards()
        for place in self._places:
            place.set_price()

    def _hazards(self) -> Floats:
        """`[kinds, buckets]`: P(an interval ends in a bucket, given that it reaches it)."""
        chunks_a_use = max(1.0, self._num_chunks / max(1.0, self._num_uses))
        ended, reached = self._ended.sum(0), self._reached.sum(0)
        prior = _PRIOR_USES * chunks_a_use
        hazards: Floats = ((ended + prior * _PRIOR) / (reached + prior))[None]
        scale, shape = _SCALE_USES * chunks_a_use, _SHAPE_USES * chunks_a_use
        for num_groups in self._groups:
            ended = self._ended.reshape(num_groups, -1, _NUM_BUCKETS).sum(1)
            reached = self._reached.reshape(num_groups, -1, _NUM_BUCKETS).sum(1)
            like = np.repeat(hazards, num_groups // len(hazards), axis=0)
            ratio = (ended.sum(1) + scale) / ((reached * like).sum(1) + scale)
            like = np.minimum(like * ratio[:, None], 1.0)
            near = _with_neighbours(reached)
            expected = _with_neighbours(reached * like)
            of_prior = shape * np.where(near > 0.0, expected / (near + _TINY), like) + _TINY
            hazards = like * (_with_neighbours(ended) + of_prior) / (expected + of_prior)
        return np.minimum(hazards, 1.0)


def _with_neighbours(counts: Floats) -> Floats:
    sums = counts.copy()
    sums[:, 1:] += counts[:, :-1]
    sums[:, :-1] += counts[:, 1:]
    return sums


def _merged(use: Use) -> Use:
    while use.into is not None:
        if use.into.into is not None:
            use.into = use.into.into
        use = use.into
    return use


def _pour(younger: Cohort, older: Cohort) -> None:
    older.ended_s = younger.ended_s
    for kind, use in younger.uses.items():
        into = older.uses.get(kind)
        if into is None:
            older.uses[kind] = use
            use.cohort = older
        else:
            into.num += use.num
            use.into = into


def _bucket(age_s: float) -> int:
    return max(bisect_right(_EDGES_S, age_s) - 1, 0)


def _begun_s(cohort: Cohort) -> float:
    return cohort.begun_s


def _are_alike(older: Cohort, younger: Cohort) -> bool:
    return (
        older.bucket == younger.bucket
        and younger.ended_s - older.begun_s <= _WIDTHS_S[older.bucket] / _COHORTS_A_BUCKET
    )


def _evaluate(hazards: Floats, prices: Sequence[float]) -> tuple[Floats, list[Floats]]:
    """Yields, and worths by price, `[kinds, buckets]`, in the middle of a bucket."""
    hazards = np.clip(hazards, 0.0, _MOST_HAZARD)
    left = np.cumprod(np.where(_LATER, 1.0 - hazards[:, None], 1.0), axis=2)
    hits = 1.0 - left
    spent_s = np.where(_LATER, _WIDTHS_S * (1.0 - 0.5 * hazards)[:, None], 0.0)
    half_s = 0.5 * np.diagonal(spent_s, axis1=1, axis2=2)[:, :, None]
    spent_s[:, :, 1:] *= left[:, :, :-1]
    seconds = np.where(_LATER, np.cumsum(spent_s, axis=2) - half_s, 0.0)
    yields = (hits / np.where(_LATER, seconds, 1.0)).max(axis=2)
    worths = [(hits - price * seconds).max(axis=2) for price in prices]
    return yields, worths
