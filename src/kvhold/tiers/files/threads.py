"""A few threads that do the blocking file work of many calls in turn.

    threads = IoThreads("kvhold-disk-read", 4)
    await threads.run([job.run for job in jobs])  # job.run(stop): the result stays with the job

This is `in_thread` for a batch: a cancelled call ends only when no thread works on its jobs. Each
job runs exactly once. The remaining jobs of a cancelled call run with `stop` set, and then only
clean up.

A call's jobs run side by side. After 5 ms for one call, a thread goes to the end of the queue, so
that a large batch does not delay a small one. Used from one event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeAlias

_TURN_S = 0.005  # a job is never interrupted; after this time the next one waits

Job: TypeAlias = Callable[[Event], None]


class IoThreads:
    """A pool of threads, which start on demand."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads

    async def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs.

        A job that raises does not stop the others; the first exception is raised at the end.
        """
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
        """End the threads, which must be idle. Idempotent."""
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
        # the edge of a thread: the others still run, and `run` raises it
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        if time.monotonic() > until:
            return
