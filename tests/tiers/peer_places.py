"""Served places, tiers that follow them, and waits for what a follower does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.node.peer_feed import PeerFeed
from kvhold.node.peer_server import PeerServer
from kvhold.testing.tier import make_key
from kvhold.tiers.base import Parts
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.channel import ChannelPlan
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.registry import make_tier

PATIENT_S = 60.0
SPACE = make_key(0)[:16]


class Place:
    """Values that a server lends, in the place of a node's chunks."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        plan: ChannelPlan | None = None,
        **settings: Any,
    ) -> None:
        self.values: dict[bytes, bytes] = {}
        self.numbers = ClearNumbers()
        self.feed = PeerFeed(lambda key, nbytes, num_tokens: nbytes)
        self.feed.follow_clears(self.numbers)
        self.settings = ServePeersConfig(listen=f"{host}:{port}", **settings)
        self.server = PeerServer(self.settings, self, self.feed, Metrics(), plan)
        self.lent_now = self.most_lent = 0
        self.may_lend = asyncio.Event()
        self.may_lend.set()

    @asynccontextmanager
    async def lent(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> AsyncIterator[list[Parts | None]]:
        found: list[Parts | None] = []
        for key, most in zip(keys, room, strict=True):
            value = self.values.get(key)
            fits = value is not None and len(value) <= most
            found.append([memoryview(value)] if value is not None and fits else None)
        nbytes = sum(len(parts[0]) for parts in found if parts)
        self.lent_now += nbytes
        self.most_lent = max(self.most_lent, self.lent_now)
        try:
            await self.may_lend.wait()
            yield found
        finally:
            self.lent_now -= nbytes

    def put(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            self.values[key] = value
            self.feed.note_on_disk(key, len(value))

    def remove(self, key: bytes) -> bool:
        self.feed.note_on_disk(key, 0)
        return self.values.pop(key, None) is not None

    def start(self) -> None:
        self.server.listen()
        self.feed.start()
        self.server.start()

    @property
    def port(self) -> int:
        return self.server.port


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Place]:
    place = Place(**settings)
    place.start()
    try:
        yield place
    finally:
        await place.server.stop()


def a_tier(*ports: int, **options: object) -> PeersTier:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    pairs = "&".join(f"{name}={value}" for name, value in options.items())
    tier, _ = make_tier(f"peers://{hosts}{'?' if pairs else ''}{pairs}")
    assert isinstance(tier, PeersTier)
    return tier


@asynccontextmanager
async def following(*ports: int, **options: object) -> AsyncIterator[PeersTier]:
    tier = a_tier(*ports, **{"answer_timeout_s": PATIENT_S} | options)
    try:
        yield tier
    finally:
        await tier.close()


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not condition():  # noqa: ASYNC110 - followers report to nobody
            await asyncio.sleep(0.005)


async def eventually_found(tier: PeersTier, key: bytes, nbytes: int | None) -> None:
    async with asyncio.timeout(PATIENT_S):
        while await tier.probe([key]) != [nbytes]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def checked(tier: PeersTier) -> None:
    """Wait until the tier is in use, which may take several tries on a busy machine."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            try:
                return await tier.check()
            except TierUnavailable:
                await asyncio.sleep(0.05)
