"""Pauses of a thread that works on many files.

A short system call drops the GIL and takes it again. A thread that makes thousands of such calls
starves the node's loop. Python asks a thread for the GIL only after 0.5 ms without a wake-up, but
each drop wakes the loop's thread, which then finds the GIL taken.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_BETWEEN_PAUSES = 100  # one to four milliseconds of calls
_PAUSE_S = 0.0001


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    """Yield the items. Sleep for a moment after each 100 of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _BETWEEN_PAUSES == 0:
            time.sleep(_PAUSE_S)
