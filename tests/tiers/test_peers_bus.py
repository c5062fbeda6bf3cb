"""Peers whose changes come over a real NATS JetStream: gaps, forgeries, clears, and a bus away."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="needs kvhold[nats]")

import nats
from nats.js.api import StorageType

from kvhold.core.errors import ConfigError
from kvhold.core.metrics import Metrics
from kvhold.net import peers as p
from kvhold.net.wire import encode
from kvhold.node.peer_publisher import PeerPublisher
from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.peers import PeersConfig, PeersTier, bus, nats_bus
from kvhold.tiers.peers.bus import BusConfig, Inbox, Inboxes, seal
from kvhold.tiers.peers.directory import Listing, Own
from kvhold.tiers.peers.index import digest_of, pack
from kvhold.tiers.peers.nats_bus import NatsBus, NatsSession
from kvhold.tiers.registry import make_tier
from kvhold_lab.servers.base import free_port
from kvhold_lab.servers.nats import NatsServer
from tests.node.nodes import run_kvhold
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

SECRET = "s3cret-of-the-bus"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    yield from start_or_skip(NatsServer)


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """One that a test may stop."""
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


def num_following(place: Place) -> int:
    return sum(peer["follows"] for peer in place.server.peers.status(lambda _: 0))


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


def a_record(after: int, *, key: bytes = b"", clear: int = 0) -> bytes:
    chunks = pack([(digest_of(key), 9)]) if key else None
    runs = [p.Run(chunks.digests, chunks.sizes)] if chunks else []
    clears = [p.ClearNumber(SPACE, clear)] if clear else []
    return bytes(encode(p.Happened(after, runs, clears)))


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


@pytest.mark.asyncio
class TestForgeries:
    async def test_records_without_the_key_are_ignored_and_counted(
        self, server: NatsServer, stream: str
    ) -> None:
        async with (
            published(server, stream) as place,
            following(place.port, **over(server, stream)) as tier,
        ):
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            await by_bus(tier)
            feed, before = place.feed, ignored(tier, "unknown")  # until it was followed
            record = a_record(feed.number, key=make_key(7), clear=5)
            now_ms = bus.clock_ms()
            wrong_key = seal(record, key=b"k" * 32, incarnation=feed.incarnation, at_ms=now_ms)
            wrong_node = seal(record, key=feed.bus_key, incarnation=9, at_ms=now_ms)
            await publish(server, stream, feed.incarnation, wrong_key)
            await publish(server, stream, feed.incarnation, wrong_node)
            await publish(server, stream, 9, wrong_node)
            await publish(server, stream, feed.incarnation, b"x")
            broken = seal(
                b"\1\0\0\0\xc1", key=feed.bus_key, incarnation=feed.incarnation, at_ms=now_ms
            )
            await publish(server, stream, feed.incarnation, broken)
            await eventually(lambda: ignored(tier, "forged") == 2)
            await eventually(lambda: ignored(tier, "unknown") == before + 1)
            await eventually(lambda: ignored(tier, "size") == 1)
            await eventually(lambda: ignored(tier, "protocol") == 1)
            place.put(make_key(2), b"yy")
            await eventually_found(tier, make_key(2), 2)
            assert await tier.probe([make_key(7)]) == [None]
            assert tier.numbers == {}
            assert tier.peers[0].is_by_bus
            assert tier.peers_status()["bus_ignored"] == before + 5

    async def test_a_login_by_files_works_and_appears_nowhere(
        self, stream: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        password = tmp_path / "password"
        password.write_text(SECRET + "\n")
        password.chmod(0o600)
        wrong = tmp_path / "wrong"
        wrong.write_text("wr0ng-one")
        wrong.chmod(0o600)
        for server in start_or_skip(lambda: NatsServer(user="kvhold", password=SECRET)):
            login: dict[str, Any] = {"bus_user": "kvhold", "bus_password_file": str(password)}
            async with (
                published(server, stream, **login) as place,
                following(place.port, **over(server, stream, **login)) as tier,
                following(
                    place.port,
                    **over(server, stream, **login | {"bus_password_file": str(wrong)}),
                ) as refused,
            ):
                place.put(make_key(1), b"x")
                await eventually_found(tier, make_key(1), 1)
                await by_bus(tier)
                await eventually_found(refused, make_key(1), 1)
                await eventually(lambda: "Authorization" in refused.peers_status()["bus_fault"])
                told = f"{tier.peers_status()} {refused.peers_status()} {caplog.text}"
        assert SECRET not in told
        assert "wr0ng-one" not in told
        assert place.feed.bus_key.hex() not in told

    async def test_tls_is_used_and_a_server_without_it_gets_no_login(
        self, server: NatsServer, stream: str
    ) -> None:
        for secure in start_or_skip(lambda: NatsServer(tls=True, token=SECRET)):
            tls: dict[str, Any] = {
                "bus_tls": True,
                "bus_ca_file": str(secure.certificates.ca),
                "bus_token": SECRET,
            }
            async with (
                published(secure, stream, **tls) as place,
                following(place.port, **over(secure, stream, **tls)) as tier,
            ):
                await by_bus(tier)
                clear_text = NatsBus(
                    BusConfig(bus=f"nats://127.0.0.1:{server.port}", bus_stream=stream, **tls)
                )
                with pytest.raises(Exception, match="does not use TLS"):
                    async with clear_text.connected():
                        pass


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


class TestInbox:
    KEY = b"k" * 32

    def inbox(self, clock: Callable[[], int] = lambda: 0) -> Inbox:
        inbox = Inbox(7, self.KEY, clock)
        inbox.welcomed(0, clock())
        return inbox

    def put(self, inbox: Inbox, record: bytes, at_ms: int) -> str:
        return inbox.put(seal(record, key=self.KEY, incarnation=7, at_ms=at_ms))

    def test_a_record_that_was_held_back_does_not_make_the_bus_current(self) -> None:
        now_ms = [100_000]
        inbox = self.inbox(lambda: now_ms[0])  # the peer's clock: 100 s less
        assert not inbox.continues(10)
        assert self.put(inbox, a_record(10), at_ms=0) == ""
        assert inbox.continues(10)
        now_ms[0] += 6_000
        assert not inbox.continues(10)
        self.put(inbox, a_record(10), at_ms=0)  # the same beat again
        assert not inbox.continues(10)
        self.put(inbox, a_record(10), at_ms=6_000)
        assert inbox.continues(10)

    def test_a_welcome_that_came_late_makes_no_old_record_current(self) -> None:
        now_ms = [100_000]
        inboxes = Inboxes(Metrics(), clock=lambda: now_ms[0])
        asked_ms = now_ms[0]
        told = p.PeerBus(self.KEY, 0)  # the peer answers at once
        now_ms[0] += 4_000  # the answer is on its way
        inbox = inboxes.open(7, told, asked_ms=asked_ms, own=None)
        now_ms[0] += 4_000
        self.put(inbox, a_record(10), at_ms=0)  # it was sealed 8 s ago
        assert not inbox.continues(10)
        self.put(inbox, a_record(10), at_ms=8_000)
        assert inbox.continues(10)

    def test_a_peer_whose_clock_runs_faster_makes_no_old_record_current(self) -> None:
        now_ms = [100_000]
        inbox = self.inbox(lambda: now_ms[0])
        now_ms[0] += 1_000_000  # in which the peer's clock gains 20 s
        self.put(inbox, a_record(10), at_ms=1_020_000)
        assert inbox.continues(10)
        now_ms[0] += 6_000
        self.put(inbox, a_record(10), at_ms=1_020_000)
        assert not inbox.continues(10)

    def test_a_taken_record_is_missing_for_those_who_have_not_taken_it(self) -> None:
        inbox = self.inbox()
        self.put(inbox, a_record(10, key=make_key(1)) + a_record(11, key=make_key(2)), at_ms=0)
        assert inbox.continues(10)
        inbox.drop(11)
        assert not inbox.continues(10)
        assert inbox.continues(11)
        inbox.drop(12)
        assert not inbox.continues(11)
        assert inbox.continues(12)

    def test_a_node_at_two_addresses_has_an_inbox_for_each_follower(self) -> None:
        inboxes = Inboxes(Metrics(), clock=lambda: 0)
        told = p.PeerBus(self.KEY, 0)

        def arrive(after: int) -> None:
            record = a_record(after, key=make_key(after))
            inboxes.put(7, seal(record, key=self.KEY, incarnation=7, at_ms=0))

        first = inboxes.open(7, told, asked_ms=0, own=None)
        arrive(10)
        assert inboxes.open(7, told, asked_ms=0, own=first) is first
        second = inboxes.open(7, told, asked_ms=0, own=None)
        assert not second.continues(10)  # that record is in the other follower's
        inboxes.close(first)  # which leaves the second one open
        arrive(11)
        assert second.continues(11)

    def test_a_message_may_have_several_records(self) -> None:
        inbox = self.inbox()
        first, second = a_record(10, key=make_key(1)), a_record(11, key=make_key(2))
        assert self.put(inbox, (first + second)[:-1], at_ms=0) == "protocol"
        assert not inbox.continues(10)  # nothing of it was taken
        assert self.put(inbox, first + second, at_ms=0) == ""
        assert [record.after for record, _ in inbox._records] == [10, 11]

    def test_a_peer_with_an_impossible_key_is_refused(self) -> None:
        with pytest.raises(ValueError, match="a key of 65 bytes"):
            Inboxes(Metrics()).open(7, p.PeerBus(b"k" * 65, 0), asked_ms=0, own=None)

    def test_missing_changes_show(self) -> None:
        inbox = self.inbox()
        self.put(inbox, a_record(10, key=make_key(1)), at_ms=0)
        assert inbox.continues(10)
        self.put(inbox, a_record(12, key=make_key(2)), at_ms=0)
        assert not inbox.continues(10)
        assert not inbox.continues(11)
        assert inbox.continues(12)
        self.put(inbox, a_record(12, key=make_key(3)), at_ms=0)  # another one with its number
        inbox.drop(13)
        assert inbox.continues(13)

    def test_waiting_bytes_are_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bus, "_MOST_WAITING_BYTES", 100)
        inbox = self.inbox()
        for number in range(10):
            self.put(inbox, a_record(10 + number, key=make_key(number)), at_ms=0)
        assert inbox._waiting_bytes <= 100
        assert not inbox.continues(10)


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
