"""The records of a bus of peers: their order, their clears, and forgeries."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="needs kvhold[nats]")

from kvhold.core.metrics import Metrics
from kvhold.net import peers as p
from kvhold.net.wire import encode
from kvhold.testing.tier import make_key
from kvhold.tiers.peers import bus
from kvhold.tiers.peers.bus import BusConfig, Inbox, Inboxes, seal
from kvhold.tiers.peers.index import digest_of, pack
from kvhold.tiers.peers.nats_bus import NatsBus
from kvhold_lab.servers.nats import NatsServer
from tests.tiers.buses import by_bus, ignored, over, publish, published, server, stream
from tests.tiers.conftest import start_or_skip
from tests.tiers.peer_places import SPACE, eventually, eventually_found, following

__all__ = ["server", "stream"]

SECRET = "s3cret-of-the-bus"


def a_record(after: int, *, key: bytes = b"", clear: int = 0) -> bytes:
    chunks = pack([(digest_of(key), 9)]) if key else None
    runs = [p.Run(chunks.digests, chunks.sizes)] if chunks else []
    clears = [p.ClearNumber(SPACE, clear)] if clear else []
    return bytes(encode(p.PeerChanges(after, runs, clears)))


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
        for guarded in start_or_skip(lambda: NatsServer(user="kvhold", password=SECRET)):
            login: dict[str, Any] = {"bus_user": "kvhold", "bus_password_file": str(password)}
            async with (
                published(guarded, stream, **login) as place,
                following(place.port, **over(guarded, stream, **login)) as tier,
                following(
                    place.port,
                    **over(guarded, stream, **login | {"bus_password_file": str(wrong)}),
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
