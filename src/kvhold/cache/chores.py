"""Work that would hold a loop for too long, done in steps between other work.

    chores.add(ram.sweep())  # an iterator; each item says how much work was done since the last one
    while chores.step(): ...        # its driver does other things between two steps

Work is counted in units of about one microsecond, not measured, so that equal calls make equal
steps. Single writer: the state.
"""

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

TURN = 400  # units of one step: under a millisecond on a slow machine
_MOST_DROPPED = 4000  # items of a list, in one step
_MOST_POPPED = 200  # items of a dictionary, in one step

Result = TypeVar("Result")

Turns: TypeAlias = Generator[int, None, Result]
"""A call that may take several steps.

It yields how much was done since it yielded last; its return value is the answer.
"""


class Chores:
    """Background work, in the order in which it began."""

    def __init__(self) -> None:
        self._work: deque[Iterator[int]] = deque()

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Iterator[int]) -> None:
        """Add work for the next steps."""
        self._work.append(work)

    def step(self, units: int = TURN) -> bool:
        """Do about `units` of work. Return whether there is more."""
        while self._work and units > 0:
            done = next(self._work[0], None)
            if done is None:
                self._work.popleft()
            else:
                units -= done
        return bool(self._work)


def emptied(*lists: list[Any]) -> Iterator[int]:
    """Empty long lists in steps: freeing a million objects at once takes many milliseconds."""
    for one in lists:
        while one:
            del one[-_MOST_DROPPED:]
            yield _MOST_DROPPED // 16


def emptied_dicts(*mappings: dict[Any, Any]) -> Iterator[int]:
    """Empty large dictionaries in steps."""
    for one in mappings:
        while one:
            for _ in range(min(_MOST_POPPED, len(one))):
                one.popitem()
            yield _MOST_POPPED


def finish(turns: Turns[Result]) -> Result:
    """Run all steps of a call at once, and return its answer."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: Result = end.value
            return result


class Running(Generic[Result]):
    """A call that is done step by step.

    running = Running(turns)
    while not running.step(): ...
    running.result                    # from then on
    """

    result: Result

    def __init__(self, turns: Turns[Result]) -> None:
        self._turns = turns
        self.is_done = False

    def step(self, units: int = TURN) -> bool:
        """Do about `units` of the call. Return whether it is done; raise its errors."""
        while units > 0:
            try:
                units -= next(self._turns)
            except StopIteration as end:
                self.result = end.value
                self.is_done = True
                return True
        return False

    def close(self) -> None:
        """Give the call up: it releases its holdings."""
        self._turns.close()
