"""Sends a workload's requests: at their times (open loop), or at most `max_in_flight` at once.

Cancelling drops requests in flight.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from kvhold_lab.bench.load.work import Phase, Reply, Request, Result, Session

Send = Callable[[Request], Awaitable[Reply]]


@dataclass
class LoadRun:
    send: Send
    keep: Callable[[Result], None]
    began: float = field(default_factory=time.perf_counter)
    in_flight: int = 0

    async def phase(self, phase: Phase) -> None:
        await asyncio.sleep(phase.pause_s)
        began = time.perf_counter()
        room = asyncio.Semaphore(phase.max_in_flight or sys.maxsize)
        try:
            async with asyncio.TaskGroup() as tasks:
                for session in phase.sessions:
                    if (request := next(session, None)) is None:
                        continue
                    await _until(request, began)
                    await room.acquire()
                    task = tasks.create_task(self._session(session, request, began))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _session(self, session: Session, request: Request, began: float) -> None:
        try:
            while True:
                await _until(request, began)
                reply = await self._request(request, began)
                request = session.send(reply)
        except StopIteration:
            pass

    async def _request(self, request: Request, began: float) -> Reply:
        now = time.perf_counter()
        self.in_flight += 1
        try:
            reply = await self.send(request)
        finally:
            self.in_flight -= 1
        self.keep(
            Result(
                group=request.group,
                labels=request.labels,
                started_s=now - self.began,
                late_s=max(0.0, now - began - request.at_s) if request.at_s is not None else None,
                reply=replace(reply, content="", text=""),
                score=request.score(reply.text)
                if request.score is not None and reply.error is None
                else None,
            )
        )
        return reply


async def _until(request: Request, began: float) -> None:
    at_s = request.at_s if request.at_s is not None else 0.0
    await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - began)))
