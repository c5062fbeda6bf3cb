"""The Redis tier when things go wrong at real servers: killed, paused, restarted, full, forbidden,
and other clients at our keys.
"""

import asyncio
import random
from contextlib import suppress

import pytest

from kvhold.core.errors import TierDenied, TierError, TierFull, TierUnavailable
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.redis import RedisTier
from kvhold_lab.servers.redis import RedisServer, ReplyError
from tests.tiers.conftest import server_or_skip
from tests.tiers.redis_tiers import KEY, MIB, at, name, server, shared_server, tier, turns

__all__ = ["server", "shared_server", "tier"]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


class TestServerThatDies:
    async def test_nobody_there_is_unavailable(self, server: RedisServer, tier: RedisTier) -> None:
        server.kill()
        with pytest.raises(TierUnavailable, match=str(server.port)):
            await tier.check()
        with pytest.raises(TierUnavailable):
            await tier.probe([KEY])
        with pytest.raises(TierUnavailable):
            await fetch(tier, [KEY], [10])
        with pytest.raises(TierUnavailable):
            await store(tier, {KEY: b"x"})
        with pytest.raises(TierUnavailable):
            await tier.delete([KEY])
        with pytest.raises(TierUnavailable):
            await scanned(tier)

    async def test_a_restart_needs_no_new_tier(self, server: RedisServer, tier: RedisTier) -> None:
        # every connection has been used
        await store(tier, {make_key(i): make_value(i, 3 * MIB) for i in range(8)})
        server.kill()
        server.start()
        assert await tier.probe([KEY]) == [None]
        assert await fetch(tier, [make_key(i) for i in range(8)], [3 * MIB] * 8) == [None] * 8
        values = {make_key(i): make_value(i, 3 * MIB) for i in range(8)}
        server.kill()
        server.start()
        assert await store(tier, values) == [True] * 8
        assert await fetch(tier, list(values), [3 * MIB] * 8) == list(values.values())

    async def test_killed_in_the_middle_of_a_put_the_value_is_not_there(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await tier.check()
        server.pause()
        value = bytearray(64 * MIB)  # more than the sockets hold
        put = asyncio.ensure_future(tier.put([(KEY, [memoryview(value)])]))
        await turns(20)
        assert not put.done()
        server.kill()
        with pytest.raises(TierUnavailable):
            await put
        server.start()
        assert await tier.probe([KEY]) == [None]
        assert await store(tier, {KEY: b"another"}) == [True]

    async def test_killed_in_the_middle_of_a_get_it_fails_and_recovers(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        values = {make_key(i): make_value(i, 8 * MIB) for i in range(4)}
        await store(tier, values)
        server.pause()
        get = asyncio.ensure_future(fetch(tier, list(values), [8 * MIB] * 4))
        await turns(20)
        assert not get.done()
        server.kill()
        with pytest.raises(TierUnavailable):
            await get
        server.start()
        assert await fetch(tier, list(values), [8 * MIB] * 4) == [None] * 4
        await store(tier, values)
        assert await fetch(tier, list(values), [8 * MIB] * 4) == list(values.values())

    async def test_idle_connections_that_the_server_closed_are_opened_again(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        for _ in range(3):
            assert await store(tier, {KEY: b"x"}) == [True]
            assert await tier.probe([KEY]) == [1]
            server.call("CLIENT", "KILL", "TYPE", "normal")
            assert await fetch(tier, [KEY], [1]) == [b"x"]


class TestServerThatStandsStill:
    async def test_d33_the_loop_goes_on_while_the_server_does_not(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await tier.check()
        server.pause()
        calls = [
            asyncio.ensure_future(call)
            for call in (tier.probe([KEY]), fetch(tier, [KEY], [10]), store(tier, {KEY: b"x"}))
        ]
        await turns(50)
        assert not any(call.done() for call in calls)
        server.resume()
        assert (await asyncio.gather(*calls))[2] == [True]

    async def test_cancelled_calls_let_go_of_their_buffers_at_once(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {KEY: make_value(1, MIB)})
        server.pause()
        room, value = bytearray(MIB), bytearray(64 * MIB)
        calls = [
            asyncio.ensure_future(tier.get([KEY], [[memoryview(room)]])),
            asyncio.ensure_future(tier.put([(make_key(2), [memoryview(value)])])),
        ]
        await turns(20)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        before = bytes(room)
        value[:] = b"\xff" * len(value)
        server.resume()
        assert await tier.probe([KEY, make_key(2)]) == [MIB, None]
        assert await fetch(tier, [KEY], [MIB]) == [make_value(1, MIB)]
        assert bytes(room) == before

    async def test_cancelled_calls_leave_no_connection_behind(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {make_key(i): make_value(i, 2 * MIB) for i in range(8)})
        for round in range(20):
            call = asyncio.ensure_future(
                fetch(tier, [make_key(i) for i in range(8)], [2 * MIB] * 8)
            )
            await turns(3 * round)
            call.cancel()
            await asyncio.wait((call,))
        await tier.check()
        while len(clients(server)) > 4 + 2:  # noqa: ASYNC110 - until the server has seen the ends
            await asyncio.sleep(0)
        await tier.close()
        while clients(server):  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def test_closing_ends_the_calls_that_are_under_way(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await tier.check()
        server.pause()
        calls = [
            asyncio.ensure_future(tier.probe([KEY])),
            asyncio.ensure_future(fetch(tier, [KEY], [10])),
        ]
        await turns(20)
        await tier.close()
        for call in calls:
            with pytest.raises(TierUnavailable):
                await call


class TestForbidden:
    @pytest.mark.parametrize("credentials", ["bob:wr0ng", "nobody:wr0ng", ":wr0ng"])
    async def test_wrong_credentials_are_denied_and_not_told(
        self, server: RedisServer, credentials: str
    ) -> None:
        tier = at(f"redis://{credentials}@127.0.0.1:{server.port}")
        for call in (
            tier.check(),
            tier.probe([KEY]),
            fetch(tier, [KEY], [1]),
            store(tier, {KEY: b"x"}),
        ):
            with pytest.raises(TierDenied) as caught:
                await call
            assert "wr0ng" not in str(caught.value)
        await tier.close()

    async def test_a_password_is_asked_for(self) -> None:
        with server_or_skip(lambda: RedisServer(password="secret")) as server:
            tier = at(f"redis://127.0.0.1:{server.port}")
            with pytest.raises(TierDenied, match="password"):
                await tier.check()
            await tier.close()

    async def test_a_database_that_is_not_there_is_denied(self, server: RedisServer) -> None:
        tier = at(f"redis://127.0.0.1:{server.port}/99")
        with pytest.raises(TierDenied, match="99"):
            await tier.check()
        await tier.close()

    async def test_keys_without_rights_are_denied(self, server: RedisServer) -> None:
        tier = at(f"redis://eve:pw@127.0.0.1:{server.port}")
        for call in (
            tier.check(),
            tier.probe([KEY]),
            fetch(tier, [KEY], [1]),
            store(tier, {KEY: b"x"}),
            tier.delete([KEY]),
        ):
            with pytest.raises(TierDenied):
                await call
        await tier.close()

    async def test_a_certificate_that_is_not_known_is_denied(self) -> None:
        with server_or_skip(lambda: RedisServer(tls=True)) as server:
            tier = at(f"rediss://127.0.0.1:{server.port}?cert_file={server.client_file}")
            with pytest.raises(TierDenied, match="certificate"):
                await tier.check()
            await tier.close()
            tier = at(
                f"rediss://localhost:{server.port}?cert_file={server.client_file}&ca_file={server.ca_file}&verify=chain"
            )
            await tier.check()
            await tier.close()
            tier = at(
                f"rediss://localhost:{server.port}?cert_file={server.client_file}&ca_file={server.ca_file}"
            )
            with pytest.raises(TierDenied, match="localhost"):
                await tier.check()
            await tier.close()
            tier = at(f"rediss://127.0.0.1:{server.port}?ca_file={server.folder / 'none.pem'}")
            with pytest.raises(TierDenied, match="ca_file"):
                await tier.check()
            await tier.close()
            tier = at(f"redis://127.0.0.1:{server.port}")
            with pytest.raises(TierUnavailable):
                await tier.check()
            await tier.close()


class TestOneBadItem:
    async def test_a_list_at_a_key_loses_its_own_item_alone(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        server.call("RPUSH", name(KEY), "a", "b")
        good = {make_key(i): make_value(i, 5000) for i in (0, 2)}
        faults = await tier.put(
            [
                (key, [memoryview(b"x" * 5000)]) if key == KEY else (key, [memoryview(good[key])])
                for key in (make_key(0), KEY, make_key(2))
            ]
        )
        assert [faults[0], faults[2]] == [None, None]
        assert isinstance(faults[1], TierError)
        keys = [make_key(0), KEY, make_key(2)]
        assert await tier.probe(keys) == [5000, None, 5000]
        for starts in (None, [0] * 3, [1000] * 3):
            buffers = [bytearray(4000 if starts else 5000) for _ in keys]
            got = await tier.get(keys, [[memoryview(b)] for b in buffers], starts=starts)
            assert isinstance(got[1], TierError)
            assert "WRONGTYPE" in str(got[1])
            assert [got[0], got[2]] == [len(buffers[0])] * 2
            first = starts[0] if starts else 0
            assert [bytes(buffers[0]), bytes(buffers[2])] == [
                value[first : first + len(buffers[0])] for value in good.values()
            ]
        assert await scanned(tier) == sorted(good)
        assert await tier.delete(keys) == [True, True, True]

    async def test_a_full_server_refuses_values_without_room_and_keeps_the_others(self) -> None:
        settings = {"maxmemory": "24mb", "maxmemory-policy": "noeviction"}
        with server_or_skip(lambda: RedisServer(settings=settings)) as server:
            tier = at(server.url + "?connections=1")
            values = {make_key(i): make_value(i, 4 * MIB) for i in range(12)}
            faults = await tier.put([(key, [memoryview(value)]) for key, value in values.items()])
            assert any(isinstance(fault, TierFull) for fault in faults)
            assert None in faults
            assert all(fault is None or isinstance(fault, TierFull) for fault in faults)
            expected = [
                value if fault is None else None
                for value, fault in zip(values.values(), faults, strict=True)
            ]
            assert await fetch(tier, list(values), [4 * MIB] * 12) == expected
            await tier.delete(list(values))
            assert await store(tier, {KEY: b"x"}) == [True]
            await tier.close()

    async def test_a_value_of_no_bytes_is_refused_alone(self, tier: RedisTier) -> None:
        faults = await tier.put([(KEY, [memoryview(b"")]), (make_key(2), [memoryview(b"x")])])
        assert isinstance(faults[0], TierError)
        assert faults[1] is None
        assert await tier.probe([KEY, make_key(2)]) == [None, 1]

    async def test_a_server_with_a_smaller_value_limit_than_configured_is_survived(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        server.call("CONFIG", "SET", "proto-max-bulk-len", MIB)
        try:
            # the server may cut the connection before it has said why
            with suppress(TierUnavailable):
                faults = await tier.put([(KEY, [memoryview(bytes(2 * MIB))])])
                assert isinstance(faults[0], TierError)
            assert await store(tier, {make_key(2): bytes(MIB)}) == [True]
            assert await tier.probe([KEY, make_key(2)]) == [None, MIB]
            careful = at(f"{server.url}?max_value_bytes=1MiB")
            assert await store(careful, {KEY: make_value(1, 5 * MIB)}) == [True]
            assert await fetch(tier, [KEY], [5 * MIB]) == [make_value(1, 5 * MIB)]
            await careful.close()
        finally:
            server.call("CONFIG", "SET", "proto-max-bulk-len", 512 * MIB)

    async def test_r0_unequal_lists_are_an_error_before_any_connection(self) -> None:
        tier = at("redis://127.0.0.1:1")  # nobody listens there
        with pytest.raises(ValueError, match=r"1 keys, 2 buffers"):
            await tier.get([KEY], [[memoryview(bytearray(1))]] * 2)
        with pytest.raises(ValueError, match=r"1 keys, 2 starts"):
            await tier.get([KEY], [[memoryview(bytearray(1))]], starts=[0, 0])
        with pytest.raises(ValueError, match="before its value"):
            await tier.get([KEY], [[memoryview(bytearray(1))]], starts=[-1])
        await tier.close()


class TestOtherClients:
    @pytest.mark.parametrize("nbytes", [1001, 100_000, 9 * MIB])
    async def test_a_value_that_has_grown_since_the_probe_is_a_miss(
        self, server: RedisServer, tier: RedisTier, nbytes: int
    ) -> None:
        values = {make_key(i): make_value(i, 1000) for i in range(4)}
        await store(tier, values)
        assert await tier.probe(list(values)) == [1000] * 4
        server.call("SET", name(KEY), make_value(9, nbytes))
        memory = bytearray(b"\xa5") * 3000
        into = [
            memoryview(bytearray(1000)),
            memoryview(memory)[1000:2000],
            memoryview(bytearray(1000)),
            memoryview(bytearray(1000)),
        ]
        assert await tier.get(list(values), [[view] for view in into]) == [1000, None, 1000, 1000]
        assert memory == bytearray(b"\xa5") * 3000
        assert [bytes(into[i]) for i in (0, 2, 3)] == [values[make_key(i)] for i in (0, 2, 3)]

    async def test_a_value_that_has_shrunk_since_the_probe_has_its_new_size(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {KEY: make_value(1, 1000)})
        server.call("SETRANGE", name(KEY), 0, "new")
        server.call("SET", name(KEY), "short")
        assert await fetch(tier, [KEY], [1000]) == [b"short"]
        server.call("SET", name(KEY), "")
        assert await tier.probe([KEY]) == [None]
        assert await fetch(tier, [KEY], [1000]) == [None]

    async def test_names_of_others_are_not_keys(self, server: RedisServer, tier: RedisTier) -> None:
        await store(tier, {KEY: b"x"})
        good = name(KEY)
        for other in (
            b"kvhold:",
            b"kvhold:{}",
            good[:-1],
            good + b"x",
            good.upper(),
            good[:9] + b"g" + good[10:],
            b"K" + good[1:],
            b"x" * 89,
        ):
            server.call("SET", other, "x")
        assert await scanned(tier) == [KEY]

    async def test_prefixes_keep_tiers_apart(self, server: RedisServer, tier: RedisTier) -> None:
        other = at(f"{server.url}?prefix=kv*")
        await store(tier, {KEY: b"one"})
        await store(other, {KEY: b"another", make_key(2): b"x"})
        assert await fetch(tier, [KEY], [10]) == [b"one"]
        assert await scanned(tier) == [KEY]
        assert await scanned(other) == sorted([KEY, make_key(2)])
        await other.close()


class TestTimeToLive:
    async def test_the_tiers_own_counts_where_a_put_has_none(self, server: RedisServer) -> None:
        tier = at(f"{server.url}?ttl_s=500")
        await tier.put([(KEY, [memoryview(b"x")])])
        await tier.put([(make_key(2), [memoryview(b"x")])], ttl_s=50)
        assert 400_000 < server.call("PTTL", name(KEY)) <= 500_000
        assert 40_000 < server.call("PTTL", name(make_key(2))) <= 50_000
        await tier.close()

    @pytest.mark.parametrize("ttl_s", [0.0, 1e-9, 1e300])
    async def test_extreme_times_are_no_error(self, tier: RedisTier, ttl_s: float) -> None:
        assert await tier.put([(KEY, [memoryview(b"x")])], ttl_s=ttl_s) == [None]

    async def test_a_value_in_parts_goes_before_its_parts(self, server: RedisServer) -> None:
        tier = at(f"{server.url}?max_value_bytes=1000")
        await tier.put([(KEY, [memoryview(make_value(1, 5000))])], ttl_s=50)
        lives = {key: server.call("PTTL", key) for key in server.call("KEYS", "*")}
        assert len(lives) == 6
        head = lives.pop(name(KEY))
        assert 0 < head <= 50_000 < min(lives.values())
        await tier.close()


class TestNothingIsEverMixed:
    """D30, D33: one reply is one command's, whatever was cancelled, killed or closed beside it."""

    @pytest.mark.parametrize("options", ["connections=2", "connections=3&max_value_bytes=60000"])
    async def test_thousands_of_calls_with_random_cancellations(
        self, server: RedisServer, options: str
    ) -> None:
        tier = at(f"{server.url}?{options}")
        chance = random.Random(7)
        sizes = {
            make_key(i): chance.choice([1, 40, 700, 20_000, 150_000, 400_000]) + i
            for i in range(60)
        }
        values = {key: make_value(i, size) for i, (key, size) in enumerate(sizes.items())}
        counts = {"right": 0, "miss": 0, "cancelled": 0}

        async def one_call(keys: list[bytes], kind: str) -> None:
            if kind == "put":
                for fault in await tier.put([(key, [memoryview(values[key])]) for key in keys]):
                    assert fault is None or isinstance(fault, TierUnavailable)
            elif kind == "delete":
                await tier.delete(keys)
            elif kind == "probe":
                for key, nbytes in zip(keys, await tier.probe(keys), strict=True):
                    assert nbytes in (None, len(values[key]))
            elif kind == "range":
                await ranges(keys)
            else:
                for key, found in zip(
                    keys, await fetch(tier, keys, [len(values[key]) for key in keys]), strict=True
                ):
                    assert found in (None, values[key]), (
                        "a value that is another key's, or half of one"
                    )
                    counts["miss" if found is None else "right"] += 1

        async def ranges(keys: list[bytes]) -> None:
            starts = [random.Random(key).randrange(len(values[key])) for key in keys]
            reservations = [
                bytearray(len(values[key]) - start) for key, start in zip(keys, starts, strict=True)
            ]
            got = await tier.get(keys, [[memoryview(room)] for room in reservations], starts=starts)
            for key, start, room, nbytes in zip(keys, starts, reservations, got, strict=True):
                assert not isinstance(nbytes, int) or room == values[key][start:]

        async def caller(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(120):
                keys = chance.choices(list(values), k=chance.randint(1, 6))
                kind = chance.choice(["put", "put", "get", "get", "range", "probe", "delete"])
                call = asyncio.ensure_future(one_call(keys, kind))
                if chance.random() < 0.4:
                    await turns(chance.randint(0, 60))
                    call.cancel()
                try:
                    await call
                except asyncio.CancelledError:
                    counts["cancelled"] += 1
                if chance.random() < 0.01:
                    server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def tolerant(seed: int) -> None:
            while True:
                try:
                    return await caller(seed)
                except (
                    TierUnavailable
                ):  # the server has closed a connection in the middle of a call
                    seed += 1000

        await asyncio.gather(*(tolerant(seed) for seed in range(20)))
        assert min(counts.values()) > 100, counts
        await tier.close()


def clients(server: RedisServer) -> list[str]:
    """The connections of ours that the server knows of."""
    try:
        listed = server.call("CLIENT", "LIST").decode().splitlines()
    except ReplyError:
        return []
    return [line for line in listed if "name=kvhold" in line]
