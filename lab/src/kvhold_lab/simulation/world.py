"""Virtual time and the order of events: one scheduler for all threads.

All randomness comes from `world.random`.
"""

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from kvhold_lab.simulation.clocks import HostClock
from kvhold_lab.simulation.descriptors import Descriptors
from kvhold_lab.simulation.sockets import SimSocket, SocketLoop

_STALL = 0.0008  # chance of a stall before each step of a loop
_MOST_NOTES = 200_000
_STEPS_A_LOOK = 20
_MANY_SCHEDULED = 50_000


class Handle:
    __slots__ = ("_when", "args", "callback", "context", "is_cancelled", "loop")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: "SimLoop",
        context: contextvars.Context,
        when: float = 0.0,
    ) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args
        self.loop = loop
        self.context = context
        self.is_cancelled = False
        self._when = when

    def run(self) -> None:
        try:
            self.context.run(self.callback, *self.args)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - as asyncio does
            self.loop.call_exception_handler(
                {"message": f"exception in {self.callback}", "exception": error}
            )

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when


class World:
    def __init__(self, seed: int, *, keep_notes: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.wall_offset_s = 1_800_000_000.0
        self.steps = 0
        self.operations = 0
        self.findings: list[str] = []
        self.notes: list[tuple[float, str, tuple[Any, ...]]] = []
        self._keep_notes = keep_notes
        self._loops: list[SimLoop] = []
        self._ready: list[SimLoop] = []
        # stalled loops with handles, by time
        self._stalled: list[tuple[float, int, SimLoop]] = []
        self._num_stalls = 0
        self._dead: list[SimLoop] = []
        self._heap: list[tuple[float, int, SimLoop | None, Handle]] = []
        self._most_scheduled = _MANY_SCHEDULED
        self._last = 0
        self.descriptors = Descriptors()
        self.sockets: dict[int, SimSocket] = {}
        self.may_stall = True
        self._running: SimLoop | None = None
        self._outside = SimLoop(self, "outside", 0)  # type: ignore[abstract]

    def wall(self) -> float:
        """The running host's Unix time, which may jump."""
        running = self._running
        if running is None or running.clock is None:
            return self.wall_offset_s + self.now
        return self.wall_offset_s + self.now + running.clock.wall_ahead_s(self.now)

    def clock_ms(self) -> int:
        """The running host's clock that never jumps."""
        running = self._running
        if running is None or running.clock is None:
            return int(1000 * self.now)
        return int(1000 * running.clock.monotonic_s(self.now))

    def note(self, text: str, *values: Any) -> None:
        if self._keep_notes and len(self.notes) < _MOST_NOTES:
            self.notes.append((self.now, text, values))

    def find(self, text: str) -> None:
        self.findings.append(f"{self.now:.6f} {text}")
        self.note("FINDING %s", text)

    def number(self) -> int:
        self._last += 1
        return self._last

    def new_loop(self, name: str) -> "SimLoop":
        number = len(self._loops) + len(self._dead) + 1
        loop = SimLoop(self, name, number)  # type: ignore[abstract]  # what the real code uses
        self._loops.append(loop)
        return loop

    def kill(self, loop: "SimLoop") -> None:
        loop.dead = True
        if loop.is_runnable:
            self.is_idle(loop)
        loop.ready.clear()
        self._loops.remove(loop)
        self._dead.append(loop)

    def is_ready(self, loop: "SimLoop") -> None:
        """Idle or stalled, with handles."""
        if loop.stalled_until > self.now:
            self._num_stalls += 1
            heappush(self._stalled, (loop.stalled_until, self._num_stalls, loop))
        else:
            loop.is_runnable, loop.place = True, len(self._ready)
            self._ready.append(loop)

    def is_idle(self, loop: "SimLoop") -> None:
        loop.is_runnable = False
        last = self._ready.pop()
        if last is not loop:
            self._ready[loop.place] = last
            last.place = loop.place

    def has_stalled(self, loop: "SimLoop") -> None:
        if loop.is_runnable:
            self.is_idle(loop)
        if loop.ready:
            self.is_ready(loop)

    def stall_one(self, seconds: float) -> None:
        if self._loops:
            self.random.choice(self._loops).stall(seconds)

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> Handle:
        handle = Handle(callback, args, self._outside, contextvars.Context())
        self.schedule(self.now + delay_s, None, handle)
        return handle

    def schedule(self, at: float, loop: "SimLoop | None", handle: Handle) -> None:
        heappush(self._heap, (at, self.number(), loop, handle))
        if len(self._heap) > self._most_scheduled:
            self._heap[:] = [one for one in self._heap if not one[3].is_cancelled]
            heapify(self._heap)
            self._most_scheduled = max(_MANY_SCHEDULED, 2 * len(self._heap))

    def delay(self, usual_s: float = 0.001, *, slow: float = 0.02, slow_s: float = 1.0) -> float:
        """About `usual_s`; with probability `slow`, up to `slow_s`."""
        if self.random.random() < slow:
            return self.random.random() * slow_s
        return self.random.expovariate(1 / usual_s)

    def run(self, until: Callable[[], bool], *, most_s: float, most_steps: int = 400_000) -> bool:
        end = self.now + most_s
        last_step = self.steps + most_steps
        step, findings = self._step, self.findings
        try:
            while not until():
                for _ in range(_STEPS_A_LOOK):
                    if findings or self.now > end or self.steps > last_step or not step():
                        self.enter(None)
                        return until()
                self.enter(None)
            return True
        finally:
            self.enter(None)

    def enter(self, loop: "SimLoop | None") -> None:
        if self._running is not loop:
            self._running = loop
            events._set_running_loop(loop)

    def _step(self) -> bool:
        heap, now = self._heap, self.now
        while heap and heap[0][0] <= now:
            _, _, loop, handle = heappop(heap)
            if handle.is_cancelled:
                continue
            if loop is None:
                self.steps += 1
                self.enter(None)
                handle.run()
            elif not loop.dead:
                loop.add(handle)
        stalled = self._stalled
        while stalled and (stalled[0][0] <= now or not stalled[0][2].waits_until(stalled[0][0])):
            until, _, loop = heappop(stalled)
            if loop.waits_until(until):
                self.is_ready(loop)
        runnable = self._ready
        if runnable:
            random = self.random
            loop = (
                runnable[0]
                if len(runnable) == 1
                else runnable[int(random.random() * len(runnable))]
            )
            if self.may_stall and random.random() < _STALL:
                loop.stall(random.random() ** 4 * 2.0)
                return True
            self.steps += 1
            handle = loop.ready.popleft()
            if not loop.ready:
                self.is_idle(loop)
            if not handle.is_cancelled:
                if self._running is not loop:
                    self.enter(loop)
                handle.run()
            return True
        if heap and (not stalled or heap[0][0] <= stalled[0][0]):
            self.now = heap[0][0]
        elif stalled:
            self.now = stalled[0][0]
        else:
            return False
        return True

    def end(self) -> None:
        for loop in list(self._loops):
            self.kill(loop)
        self._heap.clear()


class SimThread:
    """usual_s: of a call; may be changed"""

    def __init__(self, world: World) -> None:
        self._world = world
        self.usual_s = 0.0005

    def delay(self) -> float:
        return self._world.delay(self.usual_s, slow=0.01)

    def shutdown(self, **_: Any) -> None:
        """Do nothing."""


class SimTask(asyncio.Task[Any]):
    """Its hash is its number, so a set's order is part of the history."""

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: "SimLoop", **kwargs: Any) -> None:
        self._number = loop.world.number()
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimLoop(SocketLoop, asyncio.AbstractEventLoop):  # type: ignore[misc]
    world: World

    def __init__(self, world: World, name: str, number: int) -> None:
        """number: larger than earlier loops'; 0: it never runs"""
        super().__init__()
        self.world = world
        self.name = name
        self.number = number
        self.place = 0
        self.ready: deque[Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.stalled_until = 0.0
        self.dead = self.is_runnable = False
        self.clock: HostClock | None = None

    def add(self, handle: Handle) -> None:
        if not self.ready and self.number:
            self.world.is_ready(self)
        self.ready.append(handle)

    def waits_until(self, until: float) -> bool:
        return bool(self.ready) and not self.is_runnable and self.stalled_until == until

    def stall(self, seconds: float) -> None:
        self.stalled_until = max(self.stalled_until, self.world.now + seconds)
        self.world.has_stalled(self)
        self.world.note("%s stands still for %.3f s", self.name, seconds)

    def time(self) -> float:
        return self.world.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Handle:
        handle = Handle(callback, args, self, context or contextvars.copy_context())
        if not self.dead:
            self.add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Handle:
        return self.call_at(self.world.now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Handle:
        handle = Handle(callback, args, self, context or contextvars.copy_context(), when)
        if not self.dead:
            self.world.schedule(when, self, handle)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> "asyncio.Task[Any]":  # type: ignore[override]
        task = SimTask(coro, self, **kwargs)
        self.tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()

        def work() -> None:
            if self.dead or future.cancelled():
                return
            try:
                result, error = func(*args), None
            except Exception as raised:  # noqa: BLE001 - the future passes it on
                result, error = None, raised
            self.world.later(
                self.world.delay(0.0005, slow=0.01), self.call_soon, deliver, result, error
            )

        def deliver(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        if isinstance(executor, SimThread):
            self.world.later(executor.delay(), work)
        else:
            self.world.later(self.world.delay(0.0005, slow=0.01), work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A finding, unless the thread was killed."""
        if not self.dead:
            error = context.get("exception")
            self.world.find(
                f"{self.name}: {context.get('message')}: {type(error).__name__}: {error}"
            )

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return self.dead
