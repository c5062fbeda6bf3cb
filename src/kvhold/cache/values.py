"""A chunk's value per byte, by `policy_for` (docs/tiers.md).

Values are classes of half an octave (`tiers/policies/base.py`); the first above 0 becomes
`NEUTRAL`. Pure.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, log2
from typing import NamedTuple

from kvhold.cache.transfer.speeds import TierSpeed
from kvhold.core.keys import Query
from kvhold.core.layout import Layout
from kvhold.core.planning import ComputeCost
from kvhold.tiers.policies.base import NEUTRAL, NUM_VALUES

_MOST_COSTS = 256


class ValueRun(NamedTuple):
    """Chunks `first` to `last - 1`, of one value."""

    first: int
    last: int
    value: int


def split_runs(runs: Iterable[ValueRun], first: int, last: int, most: int) -> Iterator[ValueRun]:
    for run in runs:
        end = min(run.last, last)
        for begin in range(max(run.first, first), end, most):
            yield ValueRun(begin, min(begin + most, end), run.value)


class ChunkValues:
    def __init__(self, policy_for: str, speeds: Sequence[TierSpeed] = ()) -> None:
        self._policy_for = policy_for
        self._speeds = speeds
        self._costs: dict[bytes, ComputeCost] = {}
        self._neutral = 0.0

    def runs(
        self, query: Query, layout: Layout, num_chunks: int, cost: ComputeCost | None = None
    ) -> list[ValueRun]:
        nbytes = query.num_shards * sum(
            layout.chunk_bytes(group, layout.tokens_per_chunk)
            for group in range(len(layout.groups))
        )
        if self._policy_for == "tokens":
            return [ValueRun(0, num_chunks, self._class_of(layout.tokens_per_chunk / nbytes))]
        if self._policy_for == "ttft":
            known = self._known_cost(query.namespace, cost)
            if known is not None:
                saved_s = self._saved_s(layout.tokens_per_chunk, nbytes, known)
                return _runs(num_chunks, lambda chunk: self._class_of(saved_s(chunk) / nbytes))
        return [ValueRun(0, num_chunks, NEUTRAL)]

    def _known_cost(self, namespace: bytes, cost: ComputeCost | None) -> ComputeCost | None:
        if cost is None or not cost.is_known:
            return self._costs.get(namespace)
        self._costs.pop(namespace, None)
        self._costs[namespace] = cost
        if len(self._costs) > _MOST_COSTS:
            del self._costs[next(iter(self._costs))]
        return cost

    def _saved_s(self, num_tokens: int, nbytes: int, cost: ComputeCost) -> Callable[[int], float]:
        token_s = cost.token_s + cost.step_s / cost.step_tokens + cost.pair_s * num_tokens / 2
        # 0 seconds: not measured yet
        below_s = min((c[1] * nbytes for s in self._speeds if (c := s.costs) and c[1]), default=inf)

        def saved_s(chunk: int) -> float:
            before = chunk * num_tokens
            seconds = num_tokens * (token_s + cost.pair_s * before) - nbytes * cost.load_byte_s
            return max(min(seconds, below_s), 0.0)

        return saved_s

    def _class_of(self, value: float) -> int:
        if not value:
            return 0
        if not self._neutral:
            self._neutral = value
        octaves = log2(value) - log2(self._neutral)
        return min(max(NEUTRAL + round(2 * octaves), 0), NUM_VALUES - 1)


def _runs(num_chunks: int, class_of: Callable[[int], int]) -> list[ValueRun]:
    """class_of: never decreases"""
    runs: list[ValueRun] = []
    first = 0
    while first < num_chunks:
        value = class_of(first)
        last = bisect_right(range(num_chunks), value, lo=first, key=class_of)
        runs.append(ValueRun(first, last, value))
        first = last
    return runs
