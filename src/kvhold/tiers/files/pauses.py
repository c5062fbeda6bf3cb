"""Pauses of a thread that works on many files: system calls drop and retake the GIL."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_WORK_S = 0.0005
_PAUSE_S = 0.0001


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    until_s = time.perf_counter() + _WORK_S
    for item in items:
        yield item
        if time.perf_counter() >= until_s:
            time.sleep(_PAUSE_S)
            until_s = time.perf_counter() + _WORK_S
