"""Peers whose changes come over a real NATS JetStream: gaps, ends, and a bus away."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("nats", reason="needs kvhold[nats]")

import nats
from nats.js.api import StorageType

from kvhold.core.errors import ConfigError
from kvhold.core.metrics import Metrics
from kvhold.net import peers as p
from kvhold.node.peer_publisher import PeerPublisher
from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.peers import PeersConfig, PeersTier, bus, nats_bus
from kvhold.tiers.peers.bus import BusConfig, Inbox, Inboxes
from kvhold.tiers.peers.directory import Listing, Own
from kvhold.tiers.peers.nats_bus import NatsBus, NatsSession
from kvhold.tiers.registry import make_tier
from kvhold_lab.servers.base import free_port
from kvhold_lab.servers.nats import NatsServer
from tests.node.nodes import run_kvhold
from tests.tiers.buses import by_bus, ignored, over, published, server, stream
from tests.tiers.conftest import start_or_skip
from tests.tiers.peer_places import (
    PATIENT_S,
    SPACE,
    Place,
    a_tier,
    eventually,
    eventually_found,
    following,
    served,
)

__all__ = ["server", "stream"]


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """One that a test may stop."""
    yield from start_or_skip(NatsServer)


def num_following(place: Place) -> int:
    return sum(peer["follows"] for peer in place.server.peers.status(lambda _: 0))


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


async def replay(server: NatsServer, stream: str, incarnation: int, data: bytes) -> None:
    client = await nats.connect(f"nats://127.0.0.1:{server.port}")
    try:
        while True:
            await client.publish(f"{stream}.{incarnation:016x}", data)
            await client.flush()
            await asyncio.sleep(0.1)
    finally:
        await client.close()


async def make_durable(server: NatsServer, stream: str) -> None:
    """Make the stream as an operator does."""
    client = await nats.connect(f"nats://127.0.0.1:{server.port}")
    await client.jetstream().add_stream(
        name=stream, subjects=[f"{stream}.*"], storage=StorageType.FILE
    )
    await client.close()


@pytest.mark.asyncio
class TestFollowing:
    async def test_changes_of_two_nodes_come_over_one_subscription(
        self, server: NatsServer, stream: str
    ) -> None:
        async with (
            published(server, stream) as one,
            published(server, stream) as other,
            following(one.port, other.port, **over(server, stream)) as tier,
        ):
            one.put(make_key(1), b"before")
            await eventually_found(tier, make_key(1), 6)
            await by_bus(tier)
            await eventually(lambda: num_following(one) == num_following(other) == 0)
            one.put(make_key(2), b"one")
            other.put(make_key(3), b"other")
            await eventually_found(tier, make_key(2), 3)
            await eventually_found(tier, make_key(3), 5)
            assert await fetch(tier, [make_key(2), make_key(3)], [3, 5]) == [b"one", b"other"]
            one.remove(make_key(2))
            await eventually_found(tier, make_key(2), None)
            status = tier.peers_status()
            assert status["bus_fault"] == ""
            assert [peer["by_bus"] for peer in status["peers"]] == [True, True]

    async def test_a_clear_comes_over_the_bus(self, server: NatsServer, stream: str) -> None:
        async with published(server, stream) as place:
            tier = a_tier(place.port, **over(server, stream))
            cleared: list[bytes] = []
            tier.keep_clears(cleared.append, None)
            try:
                place.put(make_key(1), b"x")
                await eventually_found(tier, make_key(1), 1)
                await by_bus(tier)
                number = place.numbers.advance(SPACE)
                place.numbers.announce(SPACE)
                await eventually(lambda: cleared == [SPACE])
                assert tier.numbers == {SPACE: number}
                assert tier.peers[0].is_by_bus
            finally:
                await tier.close()

    async def test_a_peer_without_a_bus_is_followed_over_its_connection(
        self, server: NatsServer, stream: str
    ) -> None:
        async with served() as place, following(place.port, **over(server, stream)) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            assert not tier.peers[0].is_by_bus
            assert num_following(place) == 1

    async def test_a_restarted_node_is_followed_and_its_old_chunks_are_not_found(
        self, server: NatsServer, stream: str
    ) -> None:
        port = free_port()
        async with published(server, stream, port=port) as first:
            tier = a_tier(port, **over(server, stream, answer_timeout_s=PATIENT_S))
            first.put(make_key(1), b"before")
            await eventually_found(tier, make_key(1), 6)
            await by_bus(tier)
        try:
            async with published(server, stream, port=port) as again:
                again.put(make_key(2), b"after!!")
                await eventually_found(tier, make_key(2), 7)
                assert await tier.probe([make_key(1)]) == [None]
                await by_bus(tier)
                assert tier.peers[0].incarnation == again.feed.incarnation
        finally:
            await tier.close()


@pytest.mark.asyncio
class TestTrouble:
    async def test_a_gap_is_filled_by_the_peer_itself(
        self, server: NatsServer, stream: str
    ) -> None:
        async with (
            published(server, stream) as place,
            following(place.port, **over(server, stream)) as tier,
        ):
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            await by_bus(tier)
            feed = place.feed
            # a change that never reaches the bus: the publisher goes on after it
            place.put(make_key(2), b"yy")
            before = feed.number
            publishers_view = feed.changes_after

            def forgetful(number: int) -> tuple[bytes, int] | None:
                is_lost = number == before and feed.number != before
                return None if is_lost else publishers_view(number)

            feed.changes_after = forgetful  # type: ignore[method-assign]
            await eventually_found(tier, make_key(2), 2)
            feed.changes_after = publishers_view  # type: ignore[method-assign]
            place.put(make_key(3), b"zzz")
            await eventually_found(tier, make_key(3), 3)
            assert await tier.probe([make_key(n) for n in (1, 2, 3)]) == [1, 2, 3]
            await by_bus(tier)

    async def test_a_clear_that_is_lost_on_the_bus_is_learnt_of_the_peer(
        self, server: NatsServer, stream: str
    ) -> None:
        async with (
            published(server, stream) as place,
            following(place.port, **over(server, stream)) as tier,
        ):
            await by_bus(tier)
            feed, before = place.feed, place.feed.number
            publishers_view = feed.changes_after

            def forgetful(number: int) -> tuple[bytes, int] | None:
                is_lost = number == before and feed.number != before
                return None if is_lost else publishers_view(number)

            feed.changes_after = forgetful  # type: ignore[method-assign]
            number = place.numbers.advance(SPACE)
            place.numbers.announce(SPACE)
            await eventually(lambda: tier.numbers == {SPACE: number})
            assert tier.peers[0].clears == {SPACE: number}

    async def test_old_records_sent_again_do_not_hide_a_clear(
        self, server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bus, "SILENT_S", 2.0)
        async with (
            published(server, stream) as place,
            following(place.port, **over(server, stream)) as tier,
        ):
            beats: list[bytes] = []
            take = Inbox.put

            def overhear(inbox: Inbox, data: bytes) -> str:
                beats.append(data)
                return take(inbox, data)

            monkeypatch.setattr(Inbox, "put", overhear)
            await by_bus(tier)
            monkeypatch.setattr(NatsSession, "publish", hang)  # the bus takes nothing more
            await eventually(lambda: beats)
            number = place.numbers.advance(SPACE)
            place.numbers.announce(SPACE)
            again = asyncio.create_task(replay(server, stream, place.feed.incarnation, beats[-1]))
            try:
                await eventually(lambda: tier.numbers == {SPACE: number})
                assert not tier.peers[0].is_by_bus
                assert ignored(tier, "forged") == 0
            finally:
                await bus.end_task(again)

    async def test_peers_are_followed_without_the_bus_while_it_is_away(
        self, own_server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bus, "SILENT_S", 2.0)
        async with (
            published(own_server, stream) as place,
            following(place.port, **over(own_server, stream)) as tier,
        ):
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            await by_bus(tier)
            own_server.kill()
            place.put(make_key(2), b"yy")
            await eventually(lambda: tier.peers_status()["bus_fault"])
            assert await tier.probe([make_key(1)]) == [1]
            assert await fetch(tier, [make_key(1)], [1]) == [b"x"]
            await eventually_found(tier, make_key(2), 2)
            assert tier.peers[0].is_followed
            assert not tier.peers[0].is_by_bus
            own_server.start()  # with an empty stream, whose numbers begin again
            await by_bus(tier)
            place.put(make_key(3), b"zzz")
            await eventually_found(tier, make_key(3), 3)
            assert tier.peers_status()["bus_fault"] == ""
            assert await tier.probe([make_key(1), make_key(2)]) == [1, 2]

    async def test_a_reader_that_was_away_goes_on_where_it_was(
        self, own_server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await make_durable(own_server, stream)
        monkeypatch.setattr(nats_bus, "_FIRST_PAUSE_S", 1.0)  # the publisher is back before it
        async with (
            published(own_server, stream) as place,
            following(place.port, **over(own_server, stream)) as tier,
        ):
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            await by_bus(tier)
            left: list[float] = []
            monkeypatch.setattr(Inbox, "drop", lambda *_: left.append(1))  # over a connection
            own_server.kill()
            own_server.start()
            place.put(make_key(2), b"yy")
            await eventually_found(tier, make_key(2), 2)
            assert tier.peers[0].is_by_bus
            assert not left


class _LosesACancel:
    """A bus whose client loses a cancellation, as `asyncio.wait_for` of Python 3.11 may."""

    source, fault = "", ""

    def __init__(self) -> None:
        self.has_lost = False
        self.is_waiting = asyncio.Event()

    async def read(self, inboxes: Inboxes) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["_LosesACancel"]:
        yield self

    async def check(self) -> list[str]:
        return []

    async def publish(self, incarnation: int, data: bytes) -> None:
        self.is_waiting.set()
        try:
            await asyncio.sleep(PATIENT_S)
        except asyncio.CancelledError:
            if self.has_lost:
                raise
            self.has_lost = True


@pytest.mark.asyncio
async def test_a_publisher_ends_though_a_cancellation_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus, "_CANCEL_AGAIN_S", 0.05)
    loses = _LosesACancel()
    async with served() as place:
        publisher = PeerPublisher(place.feed, loses)
        publisher.start()
        await loses.is_waiting.wait()
        await publisher.stop()
    assert loses.has_lost


class _HangsAtTheEnd:
    """A directory that does not answer when a registration ends."""

    source = "a directory"

    async def read(self, own: Own) -> Listing:
        return Listing([], is_alone=True)

    def registered_as(self) -> str:
        return ""

    async def close(self) -> None:
        await hang()


class _ReadsForEver(_LosesACancel):
    async def read(self, inboxes: Inboxes) -> None:
        await hang()


class _TierWithABus(PeersTier):
    def make_bus(self) -> bus.Bus:
        return _ReadsForEver()


@pytest.mark.asyncio
async def test_a_close_that_is_cut_off_ends_the_reading_of_the_bus() -> None:
    tier = _TierWithABus((), PeersConfig(), directory=_HangsAtTheEnd())
    await tier.listed()
    closing = asyncio.create_task(tier.close())
    await asyncio.wait((closing,), timeout=0.05)
    closing.cancel()
    reading = tier._reading
    assert reading is not None
    await eventually(reading.done)


@pytest.mark.asyncio
async def test_many_small_changes_are_few_messages(server: NatsServer, stream: str) -> None:
    async with served() as place:
        nats_of_place = NatsBus(BusConfig(bus=f"nats://127.0.0.1:{server.port}", bus_stream=stream))
        publisher = PeerPublisher(place.feed, nats_of_place)
        before = place.feed.number
        for number in range(100):
            place.put(make_key(number), b"x")
            # so that each change is a record
            await eventually(lambda: not place.feed.num_waiting)
        assert len(place.feed._kept) == 100
        inboxes = Inboxes(Metrics())
        told = p.PeerBus(place.feed.bus_key, bus.clock_ms())
        inbox = inboxes.open(place.feed.incarnation, told, asked_ms=told.clock_ms, own=None)
        reader = NatsBus(BusConfig(bus=f"nats://127.0.0.1:{server.port}", bus_stream=stream))
        async with reader.connected() as session:
            subscription = await session.subscribe(inboxes, after=0)
            publisher.start()
            await eventually(lambda: len(inbox._records) == 100)
            await publisher.stop()
        assert inbox.continues(before)
        assert subscription.number <= 2


async def test_a_server_that_is_away_is_left_for_the_next_one(
    server: NatsServer, stream: str
) -> None:
    servers = f"nats://127.0.0.1:{free_port()},127.0.0.1:{server.port}"
    async with (
        published(server, stream, bus=servers) as place,
        following(place.port, **over(server, stream, bus=servers)) as tier,
    ):
        place.put(make_key(1), b"x")
        await eventually_found(tier, make_key(1), 1)
        await by_bus(tier)


async def test_doctor_tries_each_server_of_the_bus(server: NatsServer, stream: str) -> None:
    gone = free_port()
    async with served() as place:
        servers = f"nats://127.0.0.1:{server.port},127.0.0.1:{gone}"
        for bus_servers, is_right in ((servers.partition(",")[0], True), (servers, False)):
            tier = f"peers://127.0.0.1:{place.port}?bus={bus_servers}&bus_stream={stream}"
            told = await asyncio.to_thread(run_kvhold, "doctor", "--tier", tier)
            line = next(line for line in told.stdout.splitlines() if "bus NATS at" in line)
            assert line.lstrip().startswith("ok" if is_right else "WRONG"), told.stdout
            assert ("changes come over a connection to each peer" in told.stdout) != is_right
            assert (f"127.0.0.1:{gone}: " in told.stdout) != is_right


class TestSettings:
    def test_a_missing_client_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "kvhold.tiers.peers.nats_bus")
        monkeypatch.setitem(sys.modules, "nats", None)
        assert make_tier("peers://127.0.0.1:7711")  # which needs none
        with pytest.raises(ConfigError, match=r"pip install 'kvhold\[nats\]'"):
            make_tier("peers://127.0.0.1:7711?bus=nats://127.0.0.1")

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ("bus=bus-a:4222", "write nats://HOST:PORT"),
            ("bus=nats://u:secret%40bus-a", "write nats://HOST:PORT"),
            ("bus=nats://bus-a:4222", "add bus_tls=true"),
            ("bus=nats://127.0.0.1&bus_ca_file=/x", "add bus_tls=true"),
            ("bus=nats://127.0.0.1&bus_user=u", "a login is bus_user with"),
            ("bus=nats://127.0.0.1&bus_stream=a.b", "bus_stream"),
            ("bus=nats://127.0.0.1&bus_tls=true&bus_ca_file=/none", "bus_ca_file"),
            ("bus=nats://127.0.0.1:99999", "is not HOST:PORT"),
        ],
    )
    def test_a_wrong_setting_is_named(self, options: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told) as raised:
            make_tier(f"peers://127.0.0.1:7711?{options}")
        assert "secret" not in str(raised.value)
