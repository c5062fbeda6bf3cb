"""A clock, keys, and what a learned policy has learnt, for tests."""

from collections import Counter
from unittest.mock import patch

from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, place_suffix
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.reuse_times import Use


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_key(number: int) -> bytes:
    return b"a" * NAMESPACE_BYTES + number.to_bytes(HASH_BYTES, "big") + place_suffix(0, 0)


def samples(policy: LearnedPolicy) -> Counter[int]:
    """Count the samples whose next use is awaited, by kind."""
    found = Counter[int]()
    for cohort in policy.times._cohorts:
        for use in cohort.uses.values():
            found[use.kind] += use.num
    return +found


_STEPS = 1200
_EVALUATED = 12  # steps; three compute the worths of all kinds


def teach(policy: LearnedPolicy, clock: Clock, *, back: int, gone: int) -> None:
    """For 40 minutes, chunks of one kind come back after a minute, and those of another never.

    Worths are computed in the first and last steps alone: the last ones replace all others.
    """
    times, evaluate = policy.times, policy.times._update
    waiting: list[tuple[float, Use]] = []
    for step in range(_STEPS):
        is_replaced = _EVALUATED <= step < _STEPS - _EVALUATED
        with patch.object(times, "_update", _no_update if is_replaced else evaluate):
            clock.now_s += 2.0
            times.advance(clock.now_s)
        while waiting and waiting[0][0] <= times.now_s:
            times.end(waiting.pop(0)[1])
        waiting.append((times.now_s + 60.0, times.use(back)))
        times.use(gone)


def _no_update(passed_s: float) -> None:
    pass
