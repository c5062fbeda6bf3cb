"""Pauses of a thread that works on many files.

A short system call drops and takes the GIL. A thread that makes thousands of them starves the
node's loop: the loop's thread is woken at each drop and finds the GIL taken again, so its request
for the GIL, which it makes after 0.5 ms without being woken, never comes.
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
