"""The Redis tier while servers change their roles: slots that move, nodes of a cluster that die,
failovers that Sentinel makes.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from kvhold.core.errors import TierError, TierUnavailable
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.redis.names import RedisNames
from kvhold.tiers.redis.topology import slot_of
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.redis import RedisCluster, RedisSentinels, RedisServer, wait_for
from tests.tiers.conftest import opened, server_or_skip, start_or_skip

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

VALUES = {make_key(i): make_value(i, 1000 + i) for i in range(30)}
SIZES = [len(value) for value in VALUES.values()]


def at(url: str) -> RedisTier:
    return opened(RedisTier.from_url(parse_url(url)))


def slot(key: bytes) -> int:
    return slot_of(RedisNames("kvhold:").of(key))


def test_slots_are_those_of_the_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert (
        slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    )
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar")
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")
    assert slot_of(b"foo{bar}{zap}") == slot_of(b"bar")


@pytest.fixture(scope="module")
def running() -> Iterator[RedisCluster]:
    yield from start_or_skip(RedisCluster)


class TestSlotsThatMove:
    @pytest.fixture
    def cluster(self, running: RedisCluster) -> RedisCluster:
        for node in running.nodes:
            node.call("FLUSHALL")
        return running

    @pytest.fixture
    async def tier(self, cluster: RedisCluster) -> AsyncIterator[RedisTier]:
        tier = at(cluster.url)
        yield tier
        await tier.close()

    async def test_keys_are_on_all_nodes_and_each_answers_for_its_own(
        self, cluster: RedisCluster, tier: RedisTier
    ) -> None:
        assert await store(tier, VALUES) == [True] * 30
        assert all(node.call("DBSIZE") for node in cluster.nodes)
        assert await tier.probe(list(VALUES)) == SIZES
        assert await fetch(tier, list(VALUES), SIZES) == list(VALUES.values())

    async def test_a_slot_that_has_moved_is_followed(
        self, cluster: RedisCluster, tier: RedisTier
    ) -> None:
        await tier.check()  # now it knows who serves what
        key = next(iter(VALUES))
        for _ in range(2):
            old = cluster.owner(slot(key))
            new = next(node for node in cluster.nodes if node is not old)
            cluster.assign(slot(key), new)
            assert await tier.probe(list(VALUES)) == [None] * 30
            cluster.assign(slot(key), old)
            assert await store(tier, VALUES) == [True] * 30
            assert await tier.delete(list(VALUES)) == [True] * 30
            cluster.assign(slot(key), new)
            assert await fetch(tier, [key], [2000]) == [None]
            assert await store(tier, {key: VALUES[key]}) == [True]
            assert new.call("DBSIZE") == 1
            assert await fetch(tier, [key], [2000]) == [VALUES[key]]
            assert await tier.delete([key]) == [True]

    async def test_a_slot_that_is_moving_is_answered_from_both_sides(
        self, cluster: RedisCluster, tier: RedisTier
    ) -> None:
        keys = list(VALUES)[:2]
        await store(tier, {keys[0]: VALUES[keys[0]]})
        source = cluster.owner(slot(keys[0]))
        target = next(node for node in cluster.nodes if node is not source)
        target.call(
            "CLUSTER", "SETSLOT", slot(keys[0]), "IMPORTING", source.call("CLUSTER", "MYID")
        )
        source.call(
            "CLUSTER", "SETSLOT", slot(keys[0]), "MIGRATING", target.call("CLUSTER", "MYID")
        )
        try:
            assert await tier.probe(keys) == [SIZES[0], None]
            source.call(
                "MIGRATE", "127.0.0.1", target.port, RedisNames("kvhold:").of(keys[0]), 0, 5000
            )
            assert await tier.probe(keys) == [SIZES[0], None], "ASK leads to the other side"
            assert await fetch(tier, keys, SIZES[:2]) == [VALUES[keys[0]], None]
            assert await tier.delete([keys[0]]) == [True]
            assert await store(tier, VALUES) == [True] * 30
            assert await fetch(tier, list(VALUES), SIZES) == list(VALUES.values())
            assert target.call("CLUSTER", "COUNTKEYSINSLOT", slot(keys[0])) == 1
            large = at(f"{cluster.url}?max_value_bytes=500")
            await tier.delete([keys[0]])
            assert await store(large, {keys[0]: VALUES[keys[0]]}) == [True]
            assert await large.probe([keys[0]]) == [SIZES[0]]
            assert await fetch(large, [keys[0]], SIZES[:1]) == [VALUES[keys[0]]]
            new = make_value(77, SIZES[0])
            assert await large.replace([(keys[0], [memoryview(new)])]) == [True]
            assert await fetch(large, [keys[0]], SIZES[:1]) == [new]
            assert await large.delete([keys[0]]) == [True]
            assert await large.probe([keys[0]]) == [None]
            await large.close()
        finally:
            for node in cluster.nodes:
                node.call(
                    "CLUSTER", "SETSLOT", slot(keys[0]), "NODE", source.call("CLUSTER", "MYID")
                )

    async def test_a_node_that_dies_loses_its_own_keys_alone(self) -> None:
        with server_or_skip(RedisCluster) as cluster:
            tier = at(cluster.url)
            await store(tier, VALUES)
            dead = cluster.owner(0)
            lost = [cluster.owner(slot(key)) is dead for key in VALUES]
            assert any(lost)
            dead.kill()
            sizes = await tier.probe(list(VALUES))
            assert [isinstance(size, TierUnavailable) for size in sizes] == lost
            assert all(
                gone or size == nbytes
                for gone, size, nbytes in zip(lost, sizes, SIZES, strict=True)
            )
            buffers = [bytearray(nbytes) for nbytes in SIZES]
            got = await tier.get(list(VALUES), [[memoryview(buffer)] for buffer in buffers])
            faults = await tier.put([(key, [memoryview(value)]) for key, value in VALUES.items()])
            for i, value in enumerate(VALUES.values()):
                assert (
                    isinstance(got[i], TierUnavailable)
                    if lost[i]
                    else (got[i], bytes(buffers[i])) == (len(value), value)
                )
                assert isinstance(faults[i], TierUnavailable) if lost[i] else faults[i] is None
            with pytest.raises(TierUnavailable):
                await tier.delete(list(VALUES))
            with pytest.raises(TierUnavailable):
                await scanned(tier)
            with pytest.raises(TierUnavailable):
                await tier.check()
            await tier.close()

    async def test_a_server_that_is_no_cluster_says_so(self) -> None:
        with server_or_skip(RedisServer) as server:
            tier = at(f"redis-cluster://127.0.0.1:{server.port}")
            with pytest.raises(TierError, match="cluster support disabled"):
                await tier.check()
            await tier.close()


class TestFailover:
    @pytest.fixture
    def sentinels(self) -> Iterator[RedisSentinels]:
        yield from start_or_skip(RedisSentinels)

    @pytest.mark.parametrize("how", ["kill", "pause", pytest.param("ask", marks=pytest.mark.slow)])
    async def test_the_same_tier_goes_on_at_the_new_primary(
        self, sentinels: RedisSentinels, how: str
    ) -> None:
        tier = at(sentinels.url)
        await store(tier, VALUES)
        wait_for(lambda: sentinels.replica.call("DBSIZE") == len(VALUES))
        old, new = sentinels.primary, sentinels.replica
        if how == "ask":
            sentinels.sentinels[0].call("SENTINEL", "FAILOVER", sentinels.service)
        elif how == "kill":
            sentinels.be_quick()
            old.kill()
            with pytest.raises(TierUnavailable):
                await tier.probe(list(VALUES))
        else:
            sentinels.be_quick()
            old.pause()
            call = asyncio.ensure_future(tier.probe(list(VALUES)))
            for _ in range(50):
                await asyncio.sleep(0)
            call.cancel()  # as a deadline would
            await asyncio.wait((call,))
        sentinels.wait_until_primary(new)
        if how == "ask":  # until then the old one takes writes, which go when it becomes a replica
            wait_for(lambda: old.call("ROLE")[0] == b"slave")
        assert await tier.probe(list(VALUES)) == SIZES
        assert await fetch(tier, list(VALUES), SIZES) == list(VALUES.values())
        assert await store(tier, {make_key(99): b"new"}) == [True]
        assert new.call("DBSIZE") == len(VALUES) + 1
        await tier.check()
        await tier.close()

    async def test_a_replica_is_never_asked(self, sentinels: RedisSentinels) -> None:
        tier = at(sentinels.url)
        await store(tier, VALUES)
        await tier.probe(list(VALUES))
        clients = sentinels.replica.call("CLIENT", "LIST").decode()
        assert "name=kvhold" not in clients
        for sentinel in sentinels.sentinels[:2]:  # the third still knows
            sentinel.kill()
        fresh = at(sentinels.url)
        assert await fresh.probe(list(VALUES)) == SIZES
        await fresh.close()
        unknown = at(sentinels.url.replace("service=held", "service=other"))
        with pytest.raises(TierError, match="watches no 'other'"):
            await unknown.check()
        await unknown.close()
        await tier.close()
