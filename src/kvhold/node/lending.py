"""The leases of one follower's connection: frames that stay in place while it reads them.

Until returned, `timeout_s`, or the connection's end. One event loop.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

from kvhold.core.errors import ProtocolError
from kvhold.node.byte_budget import ByteBudget
from kvhold.node.served_peers import ServedPeer
from kvhold.tiers.base import Parts

_MOST_LEASES = 64  # of one connection


class ChunkSource(Protocol):
    def lent(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> AbstractAsyncContextManager[list[Parts | None]]:
        """Frames stay in place until the block ends. None: not here, or larger than its room."""


class PeerLeases:
    def __init__(
        self, source: ChunkSource, budget: ByteBudget, peer: ServedPeer, *, timeout_s: float
    ) -> None:
        self._source, self._budget, self._peer = source, budget, peer
        self._timeout_s = timeout_s
        self._last = 0
        self._held: dict[int, tuple[asyncio.Task[None], asyncio.Event]] = {}

    async def lend(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> tuple[int, list[Parts | None]]:
        """Once the budget allows. Raises ProtocolError: too many leases."""
        if len(self._held) >= _MOST_LEASES:
            raise ProtocolError(f"a connection has {_MOST_LEASES} leases; return one first")
        self._last = lease = self._last + 1
        frames: asyncio.Future[list[Parts | None]] = asyncio.get_running_loop().create_future()
        returned = asyncio.Event()
        holding = asyncio.create_task(self._hold(lease, keys, room, frames, returned))
        self._held[lease] = holding, returned
        await asyncio.wait((holding, frames), return_when=asyncio.FIRST_COMPLETED)
        if not frames.done():
            holding.result()
        return lease, frames.result()

    def returned(self, lease: int) -> None:
        """An unknown lease has ended already."""
        if lease in self._held:
            self._held[lease][1].set()

    async def end(self) -> None:
        holding = [task for task, _ in self._held.values()]
        for task in holding:
            task.cancel()
        if holding:
            await asyncio.wait(holding)

    async def _hold(
        self,
        lease: int,
        keys: Sequence[bytes],
        room: Sequence[int],
        frames: "asyncio.Future[list[Parts | None]]",
        returned: asyncio.Event,
    ) -> None:
        nbytes = min(self._budget.limit, sum(max(0, most) for most in room))
        try:
            async with (
                self._budget.taken(nbytes, self._peer),
                self._source.lent(keys, room) as found,
            ):
                if not frames.done():
                    frames.set_result(found)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._timeout_s):
                            await returned.wait()
        finally:
            del self._held[lease]
