"""A Redis server that a test may hurt, and tiers on it."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from kvhold.testing.tier import make_key
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.redis.names import RedisNames
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.redis import RedisServer
from tests.tiers.conftest import opened, start_or_skip

KEY = make_key(1)
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    yield from start_or_skip(
        lambda: RedisServer(users=["bob on >pw ~kvhold:* +@all", "eve on >pw ~other:* +@all"])
    )


@pytest.fixture
def server(shared_server: RedisServer) -> Iterator[RedisServer]:
    """An empty one, that the test may hurt."""
    if not shared_server.running:
        shared_server.start()
    shared_server.call("FLUSHALL")
    yield shared_server
    if shared_server.running:
        shared_server.resume()


@pytest.fixture
async def tier(server: RedisServer) -> AsyncIterator[RedisTier]:
    tier = at(server.url)
    yield tier
    await tier.close()


def at(url: str) -> RedisTier:
    return opened(RedisTier.from_url(parse_url(url)))


def name(key: bytes) -> bytes:
    return RedisNames("kvhold:").of(key)


async def turns(number: int) -> None:
    """Let the loop's other tasks run so often."""
    for _ in range(number):
        await asyncio.sleep(0)
