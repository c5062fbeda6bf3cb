"""Replays a trace on a cache, with any class that has the methods of `Policy`.

A request touches chunks in memory, promotes the next ones, and stores the rest. Below `learned`,
the tier is a real disk index.
"""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhold.cache.values import ValueRun
from kvhold.core.errors import ConfigError
from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.policies import POLICIES, LearnedPolicy, LruPolicy, Policy
from kvhold.tiers.policies.base import NEUTRAL, PolicyLookup
from kvhold_lab.simulate.learned_disk import LearnedDisk
from kvhold_lab.simulate.trace import Ids, Starts, Times

_NAMESPACE = bytes(NAMESPACE_BYTES)


@dataclass(frozen=True)
class Replayed:
    """found:    [requests, 2] int32, in memory, and promoted
    victims:  int32, the first evicted from memory
    """

    found: npt.NDArray[np.int32]
    stored: int
    promoted: int
    written: int
    evicted: int
    evicted_below: int
    victims: Ids


def find_policy(name: str) -> Callable[[], Policy]:
    """name: such as lru, or module:Class. Raises ConfigError"""
    if name in POLICIES:
        return POLICIES[name]
    try:
        made = pkgutil.resolve_name(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"policy is {name}, which cannot be imported: {error}") from None
    if not callable(made):
        raise ConfigError(f"policy is {name}, which is not a class")
    return made  # type: ignore[no-any-return]


def replay_class(
    chunks: Ids,
    starts: Starts,
    parents: Ids,
    *,
    make: Callable[[], Policy],
    capacity: int,
    lower_capacity: int = 0,
    num_victims: int = 0,
    times_s: Times | None = None,
    values: Sequence[ValueRun] | None = None,
) -> Replayed:
    """chunks:   [events] int32, of all requests
    starts:   [requests + 1] int64, of requests in `chunks`, and the end
    parents:  [ids] int32, the preceding chunks; -1: none
    times_s:  [requests], of arrival; `learned` needs them
    values:   of a prompt's chunks, for `learned`; None: all are equal

    Raises ConfigError.
    """
    arrivals = Arrivals(times_s)
    if make is LearnedPolicy:
        make = partial(learned_policy, arrivals)
    keys = [_key(number) for number in range(parents.size)]
    above = [keys[parent] if parent >= 0 else None for parent in parents.tolist()]
    memory = _Tier(make(), capacity, dict(zip(keys, above, strict=True)))
    lower: _Lower
    if isinstance(memory.policy, LearnedPolicy) and lower_capacity:
        lower = LearnedDisk(memory.policy, lower_capacity)
    else:
        policy_below = LruPolicy() if memory.policy.learns else make()
        lower = _Tier(policy_below, lower_capacity, dict.fromkeys(keys))
    found = np.zeros((starts.size - 1, 2), np.int32)
    stored = promoted = written = 0

    for request, (start, end) in enumerate(pairwise(starts.tolist())):
        arrivals.reach(request)
        prompt = [keys[chunk] for chunk in chunks[start:end].tolist()]

        here = memory.num_found(prompt)
        if memory.policy.learns:
            lookup = memory.policy.looked_up(prompt, here)
            for run in values or (ValueRun(0, len(prompt), NEUTRAL),):
                first, last = run.first, min(run.last, len(prompt))
                memory.policy.used(prompt[first : min(last, here)], lookup, run.value)
                memory.policy.missed(prompt[max(first, here) : last], lookup, run.value)
            lower.used(prompt, lookup)
        memory.policy.touch_all(reversed(prompt[:here]))
        missing = prompt[here:]

        if lower_capacity:
            below = memory.reserve(missing[: lower.num_found(missing)], if_worth=False)
            lower.read(below)
            for key in below:
                memory.commit(key)
                memory.policy.touch(key)
            found[request, 1] = len(below)
            promoted += len(below)
            missing = missing[len(below) :]

        new = memory.reserve(missing, if_worth=not lower_capacity)
        for key in reversed(new):
            memory.commit(key)
        found[request, 0] = here
        stored += len(new)
        if lower_capacity:
            written += lower.write(new)

    numbers = {key: number for number, key in enumerate(keys)}
    victims = np.array([numbers[key] for key in memory.victims[:num_victims]], np.int32)
    return Replayed(
        found, stored, promoted, written, len(memory.victims), len(lower.victims), victims
    )


def _key(number: int) -> bytes:
    return _NAMESPACE + number.to_bytes(KEY_BYTES - NAMESPACE_BYTES, "little")


class Arrivals:
    def __init__(self, times_s: Times | None) -> None:
        self.are_known = times_s is not None
        self._times_s = None if times_s is None else times_s.tolist()
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def reach(self, request: int) -> None:
        if self._times_s is not None:
            self._now_s = self._times_s[request]


def learned_policy(arrivals: Arrivals) -> LearnedPolicy:
    """Raises ConfigError without times."""
    if not arrivals.are_known:
        raise ConfigError(
            "policy learned needs the requests' times; give each line of the trace a timestamp, "
            "and sort the lines by it"
        )
    return LearnedPolicy(arrivals)


class _Lower(Protocol):
    victims: list[bytes]

    def num_found(self, keys: Sequence[bytes]) -> int: ...

    def used(self, prompt: Sequence[bytes], lookup: PolicyLookup) -> None: ...

    def read(self, keys: Sequence[bytes]) -> None: ...

    def write(self, keys: Sequence[bytes]) -> int: ...


class _Tier:
    """parents: `{key: parent}`; None: unknown"""

    def __init__(self, policy: Policy, capacity: int, parents: dict[bytes, bytes | None]) -> None:
        self.policy = policy
        self.victims: list[bytes] = []
        self._capacity = capacity
        self._parents = parents
        self._here: set[bytes] = set()
        self._num_reserved = 0
        self._continued: set[bytes] = set()  # parents of reserved chunks

    def num_found(self, keys: Sequence[bytes]) -> int:
        here = self._here
        for i, key in enumerate(keys):
            if key not in here:
                return i
        return len(keys)

    def used(self, prompt: Sequence[bytes], lookup: PolicyLookup) -> None: ...

    def read(self, keys: Sequence[bytes]) -> None:
        self.policy.touch_all(keys)

    def reserve(self, keys: Sequence[bytes], *, if_worth: bool) -> Sequence[bytes]:
        """Return the leading chunks that got memory.

        if_worth: the policy may decline a chunk
        """
        for i, key in enumerate(keys):
            if not self._reserve(key, key if if_worth else None):
                return keys[:i]
        return keys

    def commit(self, key: bytes) -> None:
        parent = self._parents[key]
        if parent is not None:
            self._continued.discard(parent)
        self._num_reserved -= 1
        self._here.add(key)
        self.policy.insert(key, 1, parent)

    def write(self, keys: Sequence[bytes]) -> int:
        """Return the stored keys' number."""
        missing = [key for key in keys if key not in self._here]
        reserved = [key for key in missing if self._reserve(key, None)]
        for key in reserved:
            self.commit(key)
        return len(reserved)

    def _reserve(self, key: bytes, wanted: bytes | None) -> bool:
        parent = self._parents[key]
        if parent is not None:
            self._continued.add(parent)
        if len(self._here) + self._num_reserved >= self._capacity:
            victims = self.policy.victims(1, self._continued.__contains__, wanted=wanted)
            if not victims:
                if parent is not None:
                    self._continued.discard(parent)
                return False
            for victim in victims:
                self.policy.remove(victim, evicted=True)
                self._here.remove(victim)
            self.victims += victims
        self._num_reserved += 1
        return True
