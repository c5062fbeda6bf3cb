"""Interrupt work at one of its awaits: `await Interruption(work(), at=7, early=True)`.

early: at the start of the wait
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Interruption:
    def __init__(self, work: Coroutine[Any, Any, None], at: int, *, early: bool) -> None:
        self._work = work
        self._at = at
        self._early = early

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        awaits = 0
        error: BaseException | None = None
        while True:
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration:
                return
            awaits, error = awaits + 1, None
            if awaits == self._at and self._early:
                error = asyncio.CancelledError()
                continue
            try:
                yield waits_for
            except BaseException as raised:  # noqa: BLE001 - the work gets it
                error = raised
            if awaits == self._at:
                error = error or asyncio.CancelledError()
