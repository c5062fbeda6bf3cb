"""A node's changes, to the bus of its tier of peers, in the peers' loop.

While the bus is away, changes wait in the feed.
"""

import asyncio
import random
from secrets import token_bytes

from kvhold.core.errors import TierUnavailable
from kvhold.node.peer_feed import PeerFeed
from kvhold.tiers.peers.bus import BATCH_BYTES, KEY_BYTES, Bus, BusSession, clock_ms, end_task, seal

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class PeerPublisher:
    def __init__(self, feed: PeerFeed, bus: Bus) -> None:
        self._feed, self._bus = feed, bus
        feed.bus_key = token_bytes(KEY_BYTES)
        self._number = feed.number
        self._publishing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._publishing = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._publishing is not None:
            await end_task(self._publishing)

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            before = self._number
            try:
                async with self._bus.connected() as session:
                    await self._publish(session)
            except TierUnavailable:
                pass
            if self._number != before:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _publish(self, session: BusSession) -> None:
        feed = self._feed
        while True:
            records, number = self._next_records()
            data = seal(records, key=feed.bus_key, incarnation=feed.incarnation, at_ms=clock_ms())
            await session.publish(feed.incarnation, data)
            self._number = number
            await feed.wait(number)

    def _next_records(self) -> tuple[bytes, int]:
        records, number = bytearray(), self._number
        while not records or (len(records) < BATCH_BYTES and number != self._feed.number):
            found = self._feed.changes_after(number)
            if found is None:
                number = self._feed.number
                continue
            record, number = found
            records += record
        return bytes(records), number
