"""Places that publish their changes over a real NATS JetStream, and tiers that hear them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvhold.node.peer_publisher import PeerPublisher
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.bus import BusConfig
from kvhold.tiers.peers.nats_bus import NatsBus
from kvhold_lab.servers.nats import NatsServer
from tests.tiers.conftest import start_or_skip
from tests.tiers.peer_places import Place, eventually, served


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    yield from start_or_skip(NatsServer)


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)[:60]


@asynccontextmanager
async def published(
    server: NatsServer, stream: str, *, port: int = 0, **options: Any
) -> AsyncIterator[Place]:
    """A place that publishes its changes, and serves them."""
    async with served(port=port) as place:
        config = BusConfig(**over(server, stream, **options))
        publisher = PeerPublisher(place.feed, NatsBus(config))
        publisher.start()
        try:
            yield place
        finally:
            await publisher.stop()


def over(server: NatsServer, stream: str, **options: Any) -> dict[str, Any]:
    return {"bus": f"nats://127.0.0.1:{server.port}", "bus_stream": stream} | options


async def by_bus(tier: PeersTier) -> None:
    """Wait until all peers are followed over the bus."""
    tier._start()
    await eventually(lambda: all(peer.is_by_bus for peer in tier.peers))


def ignored(tier: PeersTier, reason: str) -> float:
    found = [
        value
        for name, value in tier.metrics.as_dict().items()
        if name.startswith("kvhold_peer_bus_ignored") and reason in name
    ]
    return sum(found)


async def publish(server: NatsServer, stream: str, incarnation: int, data: bytes) -> None:
    """Write to the stream as somebody else."""
    other = NatsBus(BusConfig(bus=f"nats://127.0.0.1:{server.port}", bus_stream=stream))
    async with other.connected() as session:
        await session.publish(incarnation, data)
