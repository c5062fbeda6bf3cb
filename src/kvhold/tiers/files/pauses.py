"""Pauses of a thread that works on many files.

A short system call drops the GIL and takes it again. A thread that makes thousands of such calls
starves the node's loop. Python asks a thread for the GIL only after 0.5 ms without a wake-up, but
each drop wakes the loop's thread, which then finds the GIL taken.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_WORK_S = 0.0005
_PAUSE_S = 0.0001


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    """Yield the items. Sleep for a moment after every half millisecond."""
    until_s = time.perf_counter() + _WORK_S
    for item in items:
        yield item
        if time.perf_counter() >= until_s:
            # no event to wait for: the sleep gives the GIL to the loop's thread
            time.sleep(_PAUSE_S)
            until_s = time.perf_counter() + _WORK_S
