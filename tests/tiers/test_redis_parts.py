"""Large values lie in parts in Redis: whole, or not there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import pytest

from kvhold.core.errors import TierFull, TierUnavailable
from kvhold.testing.tier import fetch, make_key, make_value, store
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.redis.resp import ErrorReply, RedisCall
from kvhold.tiers.redis.split import Head
from kvhold.tiers.redis.transaction import Transaction
from kvhold_lab.servers.redis import RedisServer
from tests.tiers.conftest import server_or_skip
from tests.tiers.redis_tiers import KEY, MIB, at, name, server, shared_server

__all__ = ["server", "shared_server"]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")
LOST = TierUnavailable("redis", "run", "the connection was lost")


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
        settings = {"maxmemory": "10mb", "maxmemory-policy": "noeviction"}
        with server_or_skip(lambda: RedisServer(settings=settings)) as server:
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
