"""The Redis tier when things go wrong at real servers: killed, paused, restarted, full, forbidden,
and other clients at our keys.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress

import pytest

from kvhold.core.errors import TierDenied, TierError, TierFull, TierUnavailable
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.redis.names import RedisNames
from kvhold.tiers.redis.resp import ErrorReply, RedisCall
from kvhold.tiers.redis.split import Head
from kvhold.tiers.redis.transaction import Transaction
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.redis import RedisServer, ReplyError
from tests.tiers.conftest import opened, start_or_skip

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

KEY = make_key(1)
MIB = 1 << 20
LOST = TierUnavailable("redis", "run", "the connection was lost")


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
        with RedisServer(password="secret") as server:
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
        with RedisServer(tls=True) as server:
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
        with RedisServer(
            settings={"maxmemory": "24mb", "maxmemory-policy": "noeviction"}
        ) as server:
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


class TestValuesInParts:
    @pytest.fixture
    async def tier(self, server: RedisServer) -> AsyncIterator[RedisTier]:
        tier = at(f"{server.url}?max_value_bytes=1000")
        yield tier
        await tier.close()

    async def test_without_a_time_to_live_nothing_of_it_has_one(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {KEY: make_value(1, 5000)})
        assert [server.call("PTTL", key) for key in server.call("KEYS", "*")] == [-1] * 6

    async def test_a_lost_race_leaves_no_parts(self, server: RedisServer, tier: RedisTier) -> None:
        await asyncio.gather(*(store(tier, {KEY: make_value(i, 5000 + i)}) for i in range(6)))
        assert server.call("DBSIZE") == 1 + 6 or server.call("DBSIZE") == 1 + 5
        assert await tier.delete([KEY]) == [True]
        assert server.call("DBSIZE") == 0

    @pytest.mark.parametrize("is_answer_lost", [False, True])
    async def test_an_interrupted_delete_leaves_no_part_for_ever(
        self,
        server: RedisServer,
        tier: RedisTier,
        monkeypatch: pytest.MonkeyPatch,
        is_answer_lost: bool,
    ) -> None:
        run, values = tier._router.run, {make_key(i): make_value(i, 5000) for i in range(3)}
        left = 0

        async def interrupted(operation: str, calls: Sequence[RedisCall], *, bulk: bool) -> None:
            nonlocal left
            left -= 1
            if left >= 0 or is_answer_lost:
                await run(operation, calls, bulk=bulk)
            if left < 0:
                raise asyncio.CancelledError

        for num_steps in range(100):
            assert await store(tier, values) == [True] * 3
            left = num_steps
            with monkeypatch.context() as patch:
                patch.setattr(tier._router, "run", interrupted)
                with suppress(asyncio.CancelledError):
                    assert await tier.delete(list(values)) == [True] * 3
            if left >= 0:
                break
            for key in values:
                parts = server.call("KEYS", name(key) + b":*")
                if not server.call("EXISTS", name(key)):
                    assert all(server.call("PTTL", part) > 0 for part in parts), num_steps
            server.call("FLUSHALL")
        assert server.call("KEYS", "*") == []

    @pytest.mark.parametrize("error", [asyncio.CancelledError(), LOST], ids=["cancelled", "lost"])
    @pytest.mark.parametrize("is_for_good", [False, True])
    @pytest.mark.parametrize("is_answer_lost", [False, True])
    async def test_an_interrupted_put_leaves_a_whole_value_or_what_expires(
        self,
        server: RedisServer,
        tier: RedisTier,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        is_for_good: bool,
        is_answer_lost: bool,
    ) -> None:
        run, left = tier._router.run, 0

        async def interrupted(operation: str, calls: Sequence[RedisCall], *, bulk: bool) -> None:
            nonlocal left
            left -= bool(calls)
            is_hit = bool(calls) and (left < 0 if is_for_good else left == -1)
            if not is_hit or is_answer_lost:
                await run(operation, calls, bulk=bulk)
            if is_hit:
                raise error

        for num_steps in range(100):
            left, stored = num_steps, [False]
            with monkeypatch.context() as patch:
                patch.setattr(tier._router, "run", interrupted)
                with suppress(asyncio.CancelledError):
                    stored = await store(tier, {KEY: make_value(1, 5000)})
            lives = {each: server.call("PTTL", each) for each in server.call("KEYS", "*")}
            lasting = {each for each, left_ms in lives.items() if left_ms == -1}
            if stored == [True] or lasting:
                assert name(KEY) in lasting, num_steps
                assert len(lasting) == len(lives) == 6, num_steps
            server.call("FLUSHALL")
            if left >= 0:
                break
        assert stored == [True]

    @pytest.mark.parametrize("is_lost", [False, True])
    async def test_a_delete_that_does_not_know_a_length_removes_the_others_and_fails(
        self,
        server: RedisServer,
        tier: RedisTier,
        monkeypatch: pytest.MonkeyPatch,
        is_lost: bool,
    ) -> None:
        values = {make_key(i): make_value(i, 5000) for i in range(2)}
        await store(tier, values)
        run = tier._router.run

        async def unknown(operation: str, calls: Sequence[RedisCall], *, bulk: bool) -> None:
            await run(operation, calls, bulk=bulk)
            if b"STRLEN" in bytes(calls[0].request[0]):
                calls[0].reply = None if is_lost else ErrorReply("LOADING for a moment")
                calls[0].fault = LOST if is_lost else None

        with monkeypatch.context() as patch:
            patch.setattr(tier._router, "run", unknown)
            with pytest.raises(TierUnavailable):
                await tier.delete(list(values))
        assert await tier.probe(list(values)) == [5000, None]
        assert server.call("DBSIZE") == 6
        assert await tier.delete(list(values)) == [True, False]
        assert server.call("DBSIZE") == 0

    @pytest.mark.parametrize("before", [b"small", make_value(2, 2000)], ids=["small", "in parts"])
    async def test_a_delete_removes_the_parts_of_a_value_that_is_put_during_it(
        self,
        server: RedisServer,
        tier: RedisTier,
        monkeypatch: pytest.MonkeyPatch,
        before: bytes,
    ) -> None:
        await store(tier, {KEY: before})
        lengths = tier._lengths

        async def replaced(keys: Sequence[bytes], operation: str) -> Sequence[object]:
            found = await lengths(keys, operation)
            assert await tier.replace([(KEY, [memoryview(make_value(1, 5000))])]) == [True]
            return found

        with monkeypatch.context() as patch:
            patch.setattr(tier, "_lengths", replaced)
            assert await tier.delete([KEY]) == [True]
        assert server.call("EXISTS", name(KEY)) == 0
        assert [server.call("PTTL", each) == -1 for each in server.call("KEYS", "*:*:*")] == (
            [] if before == b"small" else [False] * 2
        ), "only parts for readers of the old head, which expire"

    async def test_a_put_does_not_keep_parts_whose_head_was_removed_before_its_end(
        self, server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = tier._router.run

        async def removed(operation: str, calls: Sequence[RedisCall], *, bulk: bool) -> None:
            if calls and isinstance(calls[0], Transaction):
                server.call("DEL", name(KEY))
            await run(operation, calls, bulk=bulk)

        monkeypatch.setattr(tier._router, "run", removed)
        assert await store(tier, {KEY: make_value(1, 5000)}) == [True]
        assert all(server.call("PTTL", each) > 0 for each in server.call("KEYS", "*"))

    async def test_a_part_that_was_evicted_makes_a_miss_that_can_be_put_again(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        value = make_value(1, 5000)
        for by_get in (True, False):
            await store(tier, {KEY: value})
            part = sorted(server.call("KEYS", "*:3"))[0]
            server.call("DEL", part)
            assert await tier.probe([KEY]) == [None]
            if by_get:
                assert await fetch(tier, [KEY], [5000]) == [None]
                assert server.call("DBSIZE") == 0, "whoever meets it removes what is left"
            assert await store(tier, {KEY: value}) == [True]
            assert await fetch(tier, [KEY], [5000]) == [value]
            assert server.call("DBSIZE") == 6
            await tier.delete([KEY])

    async def test_an_ordinary_value_replaces_what_is_left_of_one_in_parts(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {KEY: make_value(1, 5000)})
        server.call("DEL", *server.call("KEYS", "*:0"))
        assert await store(tier, {KEY: b"small"}) == [True]
        assert await fetch(tier, [KEY], [10]) == [b"small"]

    async def test_a_part_of_another_length_makes_a_miss(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        for change in (b"short", bytes(1001)):
            await store(tier, {KEY: make_value(1, 5000)})
            server.call("SET", *server.call("KEYS", "*:2"), change)
            assert await tier.probe([KEY]) == [None]
            assert await fetch(tier, [KEY], [5000]) in (
                [None],
                [make_value(1, 2000) + bytes(1000) + make_value(1, 5000)[3000:]],
            )
            server.call("FLUSHALL")

    async def test_a_value_that_looks_like_a_head_comes_back(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {KEY: make_value(1, 5000)})
        head = server.call("GET", name(KEY))
        other = at(server.url)
        values = {
            make_key(2): head,
            make_key(3): head[:-1],
            make_key(4): head + b"x",
            make_key(5): bytes(len(head)),
        }
        for writer in (tier, other):
            await store(writer, values)
            for reader in (tier, other):
                assert await reader.probe(list(values)) == [len(value) for value in values.values()]
                assert await fetch(reader, list(values), [50] * 4) == list(values.values())
                for start, length in [(0, 5), (0, 39), (1, 38), (30, 9)]:
                    reservations = [bytearray(length) for _ in values]
                    assert (
                        await reader.get(
                            list(values),
                            [[memoryview(b)] for b in reservations],
                            starts=[start] * 4,
                        )
                        == [length] * 4
                    )
                    assert reservations == [
                        value[start : start + length] for value in values.values()
                    ]
            assert await writer.delete(list(values)) == [True] * 4
        await other.close()
        assert await tier.delete([KEY]) == [True]
        assert server.call("DBSIZE") == 0

    async def test_a_head_that_lies_is_a_miss(self, server: RedisServer, tier: RedisTier) -> None:
        await store(tier, {KEY: make_value(1, 5000)})
        head = server.call("GET", name(KEY))
        for size, part in [(0, 1000), (5000, 0), (2**64 - 1, 1), (2**63, 2**48), (5000, 999)]:
            server.call(
                "SET",
                name(KEY),
                head[:8] + size.to_bytes(8, "little") + part.to_bytes(8, "little") + head[24:],
            )
            assert await tier.probe([KEY]) == [None]
            assert await fetch(tier, [KEY], [6000]) == [None]
            assert await tier.get([KEY], [[memoryview(bytearray(10))]], starts=[4995]) == [None]

    async def test_a_full_server_keeps_nothing_of_a_value_in_parts(self) -> None:
        with RedisServer(
            settings={"maxmemory": "10mb", "maxmemory-policy": "noeviction"}
        ) as server:
            tier = at(f"{server.url}?max_value_bytes=1MiB")
            faults = await tier.put(
                [(KEY, [memoryview(make_value(1, 20 * MIB))]), (make_key(2), [memoryview(b"x")])]
            )
            assert isinstance(faults[0], TierFull)
            assert faults[1] is None
            assert server.call("DBSIZE") == 1
            await tier.close()

    async def test_a_head_is_not_removed_when_another_value_has_come(
        self, server: RedisServer, tier: RedisTier
    ) -> None:
        await store(tier, {KEY: make_value(1, 5000)})
        head = Head.parse(server.call("GET", name(KEY)))
        assert head is not None
        server.call("SET", name(KEY), "new")
        await tier._large.mend(name(KEY), head)
        assert await fetch(tier, [KEY], [10]) == [b"new"]


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
