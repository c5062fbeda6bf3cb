"""The server of peers, its logins and limits, and peers that misbehave."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ConfigError, TierDenied, TierError, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.net import login
from kvhold.net import peers as p
from kvhold.net.stream import Stream, accept_stream
from kvhold.net.wire import Decoder, encode
from kvhold.node.byte_budget import ByteBudget
from kvhold.node.peer_server import PeerServer
from kvhold.testing.tier import fetch, make_key, make_value
from kvhold.tiers.exchanges import read_body
from kvhold.tiers.peers import PeersTier
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.certificates import make_certificates
from tests.tiers.peer_places import (
    PATIENT_S,
    SPACE,
    Place,
    eventually,
    eventually_found,
    following,
    served,
)

pytestmark = pytest.mark.asyncio


class TestServer:
    async def test_a_peer_of_another_version_is_refused_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with served() as place:
            monkeypatch.setattr(p, "PEERS_VERSION", 99)
            async with following(place.port) as tier:
                with pytest.raises(
                    TierUnavailable, match=r"kvhold node for peers, protocol 1; .*another version"
                ):
                    await tier.check()

    async def test_a_token_is_checked(self) -> None:
        async with served(token="hush") as place:
            async with following(place.port) as tier:
                with pytest.raises(TierDenied, match="a token is needed"):
                    await tier.check()
            async with following(place.port, token="wrong") as tier:
                with pytest.raises(TierDenied, match="the token is wrong"):
                    await tier.check()
            async with following(place.port, token="hush") as tier:
                await tier.check()

    async def test_tls_with_client_certificates(self, tmp_path: Path) -> None:
        try:
            made = make_certificates(tmp_path)
        except NotInstalled as error:
            pytest.skip(str(error))
        tls = {
            "tls_cert": str(made.server),
            "tls_key": str(made.server_key),
            "tls_client_ca": str(made.ca),
        }
        async with served(**tls) as place:
            value = make_value(1, 3_000_001)
            place.put(make_key(1), value)
            own = {"cert_file": made.client, "key_file": made.client_key}
            async with following(place.port, tls="true", ca_file=made.ca, **own) as tier:
                await tier.check()
                await eventually_found(tier, make_key(1), len(value))
                assert await fetch(tier, [make_key(1)], [len(value)]) == [value]
            for options in ({}, {"tls": "true", "ca_file": made.ca}, {"tls": "true"} | own):
                async with following(place.port, **options) as tier:
                    with pytest.raises(TierError, match=r"127\.0\.0\.1"):
                        await tier.check()

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"listen": "0.0.0.0:0"}, r"peers\.listen = '0\.0\.0\.0:0': only the loopback"),
            ({"listen": "0.0.0.0:0", "token": "hush"}, r"clear text; set peers\.tls_cert"),
            ({"listen": "7711"}, r"peers\.listen = '7711': write HOST:PORT"),
            ({"listen": "127.0.0.1:0", "token_file": "/nowhere"}, r"peers\.token_file"),
            ({"listen": "127.0.0.1:0", "tls_key": "/x"}, r"need peers\.tls_cert"),
            (
                {"listen": "127.0.0.1:0", "bytes_per_s": 1000},
                r"peers\.bytes_per_s = 1000: .*at least 1MiB, or 0 for no limit",
            ),
        ],
    )
    async def test_a_server_that_may_not_be_exposed_is_refused(
        self, settings: dict[str, Any], told: str
    ) -> None:
        place = Place()
        with pytest.raises(ConfigError, match=told) as caught:
            PeerServer(ServePeersConfig(**settings), place, place.feed, Metrics())
        assert "hush" not in str(caught.value)

    async def test_a_connection_that_comes_as_the_server_ends_is_no_fault(self) -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with served() as place:
            await asyncio.sleep(0.01)
            with socket.create_connection(("127.0.0.1", place.port)):
                await asyncio.sleep(0)  # the loop knows of it, and calls nothing yet
                await place.server.stop()
        assert not faults

    async def test_connections_have_a_limit(self) -> None:
        async with served(max_connections=1) as place, following(place.port) as tier:
            await tier.check()
            async with following(place.port) as second:
                with pytest.raises(TierUnavailable, match=r"peers\.max_connections = 1 are in use"):
                    await second.check()

    async def test_slow_peers_pin_no_more_than_the_budget(self) -> None:
        async with (
            served(in_flight_bytes=40_000) as place,
            following(place.port, connections=8) as tier,
        ):
            values = {make_key(number): make_value(number, 9_000) for number in range(12)}
            for key, value in values.items():
                place.put(key, value)
            await eventually_found(tier, make_key(11), 9_000)
            place.may_lend.clear()
            reads = [asyncio.ensure_future(fetch(tier, [key], [9_000])) for key in values]
            await eventually(lambda: place.lent_now == 18_000)
            await asyncio.sleep(0.05)
            assert place.most_lent == 18_000
            place.may_lend.set()
            assert [read for [read] in await asyncio.gather(*reads)] == list(values.values())
            assert place.most_lent <= 20_000
            await eventually(lambda: place.server.budget.used == 0)

    async def test_ranges_pin_no_more_than_the_budget(self) -> None:
        async with served(in_flight_bytes=20_000) as place, following(place.port) as tier:
            keys = [make_key(number) for number in range(12)]
            for key in keys:
                place.put(key, bytes(9_000))
            await eventually_found(tier, keys[-1], 9_000)
            into = [bytearray(b"x") for _ in keys]
            buffers = [[memoryview(one)] for one in into]
            assert await tier.get(keys, buffers, starts=[8_999] * 12) == [1] * 12
            assert into == [bytearray(1)] * 12
            assert 0 < place.most_lent <= 20_000

    async def test_a_budget_outlives_callers_that_give_up(self) -> None:
        budget = ByteBudget(10)
        gate = asyncio.Event()

        async def use(nbytes: int) -> None:
            async with budget.taken(nbytes, "one"):
                await gate.wait()

        first = asyncio.ensure_future(use(8))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(use(nbytes)) for nbytes in (6, 3, 1)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        waiting[1].cancel()
        gate.set()
        await asyncio.wait([first, *waiting])
        assert budget.used == 0
        async with asyncio.timeout(PATIENT_S), budget.taken(10, "one"):
            pass

    async def test_an_owner_that_gives_nothing_back_leaves_half_to_others(self) -> None:
        budget = ByteBudget(100)
        gate = asyncio.Event()

        async def use(owner: str, nbytes: int) -> None:
            async with budget.taken(nbytes, owner):
                await gate.wait()

        stalled = [asyncio.ensure_future(use("stalled", 20)) for _ in range(5)]
        await asyncio.sleep(0)
        assert budget.used_by("stalled") == 40
        async with asyncio.timeout(PATIENT_S), budget.taken(50, "other"):
            second = [asyncio.ensure_future(use("second", 5)) for _ in range(5)]
            await asyncio.sleep(0)
            assert budget.used_by("second") == 5, "what is left is shared, too"
        await asyncio.sleep(0)
        assert budget.used_by("second") == 25
        gate.set()
        await asyncio.wait([*stalled, *second])
        assert budget.used == budget.used_by("stalled") == 0

    async def test_a_large_part_of_the_budget_is_not_overtaken_by_small_ones(self) -> None:
        budget = ByteBudget(100)
        got: list[str] = []

        async def use(owner: str, nbytes: int) -> None:
            async with budget.taken(nbytes, owner):
                got.append(owner)

        async with budget.taken(30, "first"):
            waiting = [asyncio.ensure_future(use(*one)) for one in (("large", 90), ("small", 1))]
            await asyncio.sleep(0)
            assert got == []
        await asyncio.wait(waiting)
        assert got == ["large", "small"]

    @pytest.mark.parametrize("is_range", [False, True], ids=["frames", "ranges"])
    async def test_a_limited_server_sends_all_chunks_right_and_later(self, is_range: bool) -> None:
        limit = 2 << 20
        async with served(bytes_per_s=limit) as place, following(place.port) as tier:
            values = {make_key(number): make_value(number, 120_000) for number in range(16)}
            for key, value in values.items():
                place.put(key, value)
            await eventually_found(tier, make_key(15), 120_000)
            begin = 1 if is_range else 0
            into = [bytearray(120_000 - begin) for _ in values]
            began_s = asyncio.get_running_loop().time()
            sizes = await tier.get(
                list(values),
                [[memoryview(one)] for one in into],
                starts=[begin] * 16 if is_range else None,
            )
            took_s = asyncio.get_running_loop().time() - began_s
            assert sizes == [120_000 - begin] * 16
            assert into == [value[begin:] for value in values.values()]
            assert took_s >= (15 * 119_000) / limit - limit * 0.1 / limit
            waits = place.server.metrics.as_dict()
            [waited_s] = [
                seconds for name, seconds in waits.items() if "served_wait_seconds" in name
            ]
            assert waited_s > 0
            assert not place.server.rate.num_waiting

    async def test_chunks_that_are_not_there_take_nothing_of_the_limit(self) -> None:
        async with served(bytes_per_s=1 << 20) as place, following(place.port) as tier:
            place.put(make_key(0), bytes(100))
            await eventually_found(tier, make_key(0), 100)
            stream, _ = await tier.peers[0].open_to_follow()
            keys = b"".join(make_key(number) for number in range(1, 201))
            await stream.send([encode(p.PeerGet(keys, [1 << 40] * 200))])
            async with asyncio.timeout(PATIENT_S):
                while keys:
                    sizes = Decoder[Any](p.PeerValues).decode(await read_body(stream)).sizes
                    assert not any(sizes)
                    keys = keys[len(sizes) * len(make_key(0)) :]
                assert await fetch(tier, [make_key(0)], [100]) == [bytes(100)]
            stream.close()

    async def test_a_peer_that_does_not_read_delays_no_other(self) -> None:
        async with served(in_flight_bytes=64 << 20) as place, following(place.port) as tier:
            keys = [make_key(number) for number in range(8)]
            for key in keys:
                place.put(key, bytes(8 << 20))
            await eventually_found(tier, keys[-1], 8 << 20)
            await eventually_found(tier, keys[0], 8 << 20)
            streams: list[Stream] = []
            for key in keys:  # together as much as the budget
                stream, _ = await tier.peers[0].open_to_follow()
                get = encode(p.PeerGet(key, [8 << 20]))
                await stream.send([encode(p.Introduce("stalled", 0)), get])
                streams.append(stream)
            await eventually(lambda: place.lent_now >= 32 << 20)
            async with asyncio.timeout(PATIENT_S / 2):  # such a connection ends after 60 s
                for key in keys:
                    assert await fetch(tier, [key], [8 << 20]) == [bytes(8 << 20)]
            stalled = place.server.peers.status(place.server.budget.used_by)
            assert {one["name"]: one["in_flight_bytes"] for one in stalled}["stalled"] == 32 << 20
            for stream in streams:
                stream.close()

    @pytest.mark.parametrize(
        "request_of",
        [
            lambda: p.PeerGet(b"", []),
            lambda: p.PeerGet(make_key(1), [1, 2]),
            lambda: p.PeerGet(make_key(1), [1], [-1]),
            lambda: p.PeerGet(make_key(1)[:-1], [1]),
            lambda: p.PeerGet(make_key(1) * 5000, [1] * 5000),
            lambda: p.Introduce("x", 70_000),
        ],
        ids=["nothing", "two sizes", "negative start", "half a key", "too many", "a port"],
    )
    async def test_a_bad_get_ends_its_connection_only(
        self, request_of: Callable[[], p.PeerGet | p.Introduce]
    ) -> None:
        async with served() as place, following(place.port) as tier:
            await tier.check()
            stream, _ = await tier.peers[0].open_to_follow()
            await stream.send([encode(request_of())])
            answer = Decoder[Any](login.LoginRefused).decode(await read_body(stream))
            assert isinstance(answer, login.LoginRefused)
            stream.close()
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)


class TestHostilePeers:
    """A peer that breaks the protocol costs misses."""

    @asynccontextmanager
    async def hostile(self, *news: bytes, version: str = "x") -> AsyncIterator[PeersTier]:
        """A tier of one peer that says this to each follower."""

        async def converse(sock: Any) -> None:
            stream: Stream = await accept_stream(sock, None)
            try:
                await read_body(stream)
                welcome = p.PeerWelcome(p.PEERS_VERSION, version, 7)
                await stream.send([encode(welcome), *news])
                await asyncio.sleep(PATIENT_S)
            finally:
                stream.close()

        loop, talks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)

            async def accept() -> None:
                while True:
                    sock, _ = await loop.sock_accept(listener)
                    talks.append(loop.create_task(converse(sock)))

            accepting = loop.create_task(accept())
            async with following(listener.getsockname()[1]) as tier:
                yield tier
            for task in (accepting, *talks):
                task.cancel()
            await asyncio.wait([accepting, *talks])

    @pytest.mark.parametrize(
        "news",
        [
            b"\xff\xff\xff\xff",
            b"\x04\x00\x00\x00junk",
            bytes(encode(p.Page(1, True, True, [], b"1234567", b""))),
            bytes(encode(p.Page(1, True, True, [], bytes(16), bytes(8)))),
            bytes(encode(p.Page(1, True, True, [p.ClearNumber(b"x", 1)], b"", b""))),
            bytes(encode(p.Page(1, True, True, [p.ClearNumber(SPACE, 1 << 62)], b"", b""))),
            bytes(encode(p.PeerChanges(9, [], []))),
            bytes(encode(p.PeerWelcome(1, "x", 7))),
        ],
        ids=["length", "junk", "digests", "sizes", "prefix", "number", "gap", "welcome"],
    )
    async def test_bad_news_are_a_fault_of_the_peer(self, news: bytes) -> None:
        async with self.hostile(news) as tier:
            with pytest.raises(TierError, match=r"127\.0\.0\.1"):
                await tier.check()
            assert await tier.probe([make_key(1)]) == [None]

    async def test_the_version_text_of_a_peer_is_printable_and_short(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        page = bytes(encode(p.Page(1, True, True, [], b"", b"")))
        text = "1.0\n\x1b[2Jroot: " + "y" * 3000
        with caplog.at_level("INFO"):
            async with self.hostile(page, version=text) as tier:
                await tier.check()
                assert tier.peers[0].kvhold == "1.0??[2Jroot: " + "y" * 26
        [told] = [one.getMessage() for one in caplog.records if "following" in one.getMessage()]
        assert told.isprintable() and len(told) < 100

    async def test_the_index_has_a_limit(self) -> None:
        async with served() as place, following(place.port, most_chunks=100) as tier:
            for number in range(3_000):
                place.put(make_key(number), b"x")
            place.put(make_key(9_999), b"last")
            await tier.check()
            await eventually(lambda: tier.peers[0].after == place.feed.number)
            assert tier.num_chunks <= 100 + 2_000
