"""A cancelled call ends only when no thread works on its jobs. Each job runs exactly once, after a
cancellation with `stop` set. After 5 ms a call goes to the end of the queue.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeAlias

_TURN_S = 0.005

Job: TypeAlias = Callable[[Event], None]


class IoThreads:
    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads

    async def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, then raise the first exception."""
        todo, stop, errors = deque(jobs), Event(), list[BaseException]()
        loop, cancelled = asyncio.get_running_loop(), False
        width = min(self._num_threads, len(todo))
        working = {
            loop.run_in_executor(self._executor, _take_a_turn, todo, stop, errors)
            for _ in range(width)
        }
        while working:
            try:
                done, working = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                cancelled = True
                stop.set()
                continue
            for _ in range(min(len(done), len(todo))):
                working.add(loop.run_in_executor(self._executor, _take_a_turn, todo, stop, errors))
        if cancelled:
            raise asyncio.CancelledError
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._executor.shutdown(wait=True)


def _take_a_turn(todo: deque[Job], stop: Event, errors: list[BaseException]) -> None:
    until = time.monotonic() + _TURN_S
    while True:
        try:
            job = todo.popleft()
        except IndexError:
            return
        try:
            job(stop)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        if time.monotonic() > until:
            return
