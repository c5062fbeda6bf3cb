"""The queue before the engines: in order, with bounds."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvhold.core.errors import KVHoldError
from kvhold.core.proxy_config import ProxyConfig


class ProxyOverloaded(KVHoldError):
    """reason: a label in metrics"""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class HeldBytes:
    def __init__(self, admission: "Admission", most: int) -> None:
        self._admission = admission
        self._most = most
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises ProxyOverloaded."""
        if self._admission.held_bytes + num_bytes > self._most:
            raise ProxyOverloaded(
                "memory", "the requests in progress are too large (proxy.max_held_bytes)"
            )
        self._admission.held_bytes += num_bytes
        self.num_bytes += num_bytes


class Admission:
    def __init__(self, config: ProxyConfig, num_usable: Callable[[], int]) -> None:
        self._config = config
        self._num_usable = num_usable
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        self.held_bytes = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def check_queue(self) -> None:
        if not self._has_room() and self.queued >= self._config.max_queued:
            raise ProxyOverloaded(
                "queue_full", f"{self.queued} requests wait for a decode engine (proxy.max_queued)"
            )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        self.check_queue()
        if self._waiting or not self._has_room():
            await self._wait()
        else:
            self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.wake()

    @contextmanager
    def hold(self) -> Iterator["HeldBytes"]:
        held = HeldBytes(self, self._config.max_held_bytes)
        try:
            yield held
        finally:
            self.held_bytes -= held.num_bytes

    def wake(self) -> None:
        """A request has ended, or an engine became usable."""
        while self._waiting and self._has_room():
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.running += 1
                waiter.set_result(None)

    def _has_room(self) -> bool:
        return self.running < self._config.max_running * self._num_usable()

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self.running -= 1
                self.wake()
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise ProxyOverloaded(
                    "queue_timeout",
                    f"no decode engine was free within {self._config.queue_timeout_s:g} s "
                    "(proxy.queue_timeout_s)",
                ) from None
            raise
