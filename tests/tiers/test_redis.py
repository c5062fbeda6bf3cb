"""The Redis tier's contract against real servers, in every shape in which they are deployed."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvhold.testing import TierContract
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.redis import RedisCluster, RedisSentinels, RedisServer
from tests.tiers.conftest import start_or_skip

ACL_USER = (
    "ann on >s:e/c@r%t ~kvhold:* resetchannels -@all +get +getrange +strlen +set "
    "+unlink +pexpire +pttl +persist"
    " +watch +unwatch +multi +exec +scan +ping +select +auth"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    yield from start_or_skip(lambda: RedisServer(unix=True, password="other", users=[ACL_USER]))


@pytest.fixture(scope="module")
def tls_server() -> Iterator[RedisServer]:
    yield from start_or_skip(lambda: RedisServer(tls=True, password="secret"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    yield from start_or_skip(RedisCluster)


@pytest.fixture(scope="module")
def sentinels() -> Iterator[RedisSentinels]:
    yield from start_or_skip(RedisSentinels)


@asynccontextmanager
async def tier_at(url: str, *servers: RedisServer) -> AsyncIterator[RedisTier]:
    """A tier over servers that hold nothing."""
    for server in servers:
        server.call("FLUSHALL")
    tier = RedisTier.from_url(parse_url(url))
    try:
        yield tier
    finally:
        await tier.close()


class TestOneServer(TierContract):
    @pytest.fixture
    async def tier(self, server: RedisServer) -> AsyncIterator[RedisTier]:
        async with tier_at(server.url, server) as tier:
            yield tier


class TestUnixSocketAndAnotherDatabase(TierContract):
    @pytest.fixture
    async def tier(self, server: RedisServer) -> AsyncIterator[RedisTier]:
        async with tier_at(
            f"unix://:other@{server.unix_path}?db=3&prefix=a*[b]?^\\:&connections=1", server
        ) as tier:
            yield tier


class TestUserWithTheRightsThatAreListedAlone(TierContract):
    @pytest.fixture
    async def tier(self, server: RedisServer) -> AsyncIterator[RedisTier]:
        async with tier_at(
            f"valkey://ann:s%3Ae%2Fc%40r%25t@127.0.0.1:{server.port}", server
        ) as tier:
            yield tier


class TestTls(TierContract):
    @pytest.fixture
    async def tier(self, tls_server: RedisServer) -> AsyncIterator[RedisTier]:
        async with tier_at(tls_server.url, tls_server) as tier:
            yield tier


class TestValuesInParts(TierContract):
    """Every value of more than 5,000 bytes is stored in parts."""

    @pytest.fixture
    async def tier(self, server: RedisServer) -> AsyncIterator[RedisTier]:
        async with tier_at(f"{server.url}?max_value_bytes=5000", server) as tier:
            yield tier
        async with tier_at(server.url) as tier:
            await tier.delete([key async for key in tier.scan(b"")])
        left = server.call("KEYS", "*")
        assert all(server.call("PTTL", name) > 0 for name in left), (
            "what is left of cancelled puts goes by itself"
        )


class TestCluster(TierContract):
    @pytest.fixture
    async def tier(self, cluster: RedisCluster) -> AsyncIterator[RedisTier]:
        async with tier_at(cluster.url, *cluster.nodes) as tier:
            yield tier


class TestClusterWithValuesInParts(TierContract):
    @pytest.fixture
    async def tier(self, cluster: RedisCluster) -> AsyncIterator[RedisTier]:
        async with tier_at(
            f"redis://127.0.0.1:{cluster.nodes[1].port}?cluster=true&max_value_bytes=5000",
            *cluster.nodes,
        ) as tier:
            yield tier


class TestSentinels(TierContract):
    @pytest.fixture
    async def tier(self, sentinels: RedisSentinels) -> AsyncIterator[RedisTier]:
        async with tier_at(sentinels.url, sentinels.primary) as tier:
            yield tier
