"""Divides long work into short steps. A unit is about one microsecond."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from math import inf
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

TURN = 250  # units per step
TURN_S = 0.0004  # per step of a node; its last unit may take 0.3 ms more
_ONE_TURN_KEYS = 250  # a call with at most this many keys is one step
_MOST_DROPPED = 1000  # list items per step
_MOST_POPPED = 60  # dictionary items per step

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Turns: TypeAlias = Generator[int, None, Result]
"""A call in several steps. It yields the units done since the last step, and returns the answer."""


class Chores:
    def __init__(self) -> None:
        self._work: deque[Iterator[int]] = deque()

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Iterator[int]) -> None:
        self._work.append(work)

    def run(self, turns: Turns[None], num_keys: int) -> None:
        if is_short(num_keys):
            finish(turns)
        else:
            self.add(turns)

    def step(self, units: int = TURN, most_s: float = inf) -> bool:
        end_s = time.perf_counter() + most_s
        while self._work and units > 0:
            done = next(self._work[0], None)
            if done is None:
                self._work.popleft()
            else:
                units -= done
            if time.perf_counter() > end_s:
                break
        return bool(self._work)


def emptied(*lists: list[Any]) -> Iterator[int]:
    """Freeing a million objects takes many milliseconds."""
    for one in lists:
        while one:
            del one[-_MOST_DROPPED:]
            yield _MOST_DROPPED // 16


def emptied_dicts(*mappings: dict[Any, Any]) -> Iterator[int]:
    for one in mappings:
        while one:
            for _ in range(min(_MOST_POPPED, len(one))):
                one.popitem()
            yield _MOST_POPPED


def finish(turns: Turns[Result]) -> Result:
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: Result = end.value
            return result


def in_one_turn(call: Callable[Arguments, Turns[Result]]) -> Callable[Arguments, Result]:

    @wraps(call)
    def finished(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return finish(call(*args, **kwargs))

    return finished


def is_short(num_keys: int) -> bool:
    return num_keys <= _ONE_TURN_KEYS


def unless_short(num_keys: int, turns: Turns[Result]) -> Turns[Result]:
    return finish(turns) if is_short(num_keys) else (yield from turns)


class Running(Generic[Result]):
    result: Result

    def __init__(self, turns: Turns[Result], most_s: float = inf) -> None:
        self._turns = turns
        self._most_s = most_s
        self.is_done = False

    def step(self, units: int = TURN) -> bool:
        end_s = time.perf_counter() + self._most_s
        while units > 0 and time.perf_counter() < end_s:
            try:
                units -= next(self._turns)
            except StopIteration as end:
                self.result = end.value
                self.is_done = True
                return True
        return False

    def close(self) -> None:
        self._turns.close()
