"""The tier of peers over real connections to a served place, and peers that misbehave."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhold import __version__
from kvhold.cache import open_cache
from kvhold.cli.doctor import _look_at_tiers
from kvhold.core.config import ServePeersConfig, load_config
from kvhold.core.errors import (
    ConfigError,
    TierCannotList,
    TierDenied,
    TierError,
    TierUnavailable,
)
from kvhold.core.keys import HASH_BYTES, Namespace, place_suffix
from kvhold.core.layout import Group, Layout
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import (
    NEVER_STORED,
    PEER_DENIED,
    PEER_EVICTED,
    PEER_GONE,
    PEER_SLOW,
    Reason,
)
from kvhold.core.status import FollowedPeerStatus
from kvhold.net import login
from kvhold.net import peers as p
from kvhold.net.stream import Stream, accept_stream
from kvhold.net.wire import Decoder, encode
from kvhold.node.byte_budget import ByteBudget
from kvhold.node.peer_feed import PeerFeed
from kvhold.node.peer_server import PeerServer
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, store
from kvhold.tiers.base import Parts, TierTraits
from kvhold.tiers.exchanges import Getting, read_body
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.outcomes import Unknown
from kvhold.tiers.peers import PeersTier, clear_numbers, follower
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.peers.directory import Own
from kvhold.tiers.peers.faults import PeerGone, PeerSlow
from kvhold.tiers.peers.index import digest_of, pack, unpack
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.relay import RelayedNetwork
from kvhold_lab.servers.base import NotInstalled, free_port
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

LAYOUT = Layout(
    groups=(Group(layers=2, planes=2, heads=1, head_dim=64, dtype="float16"),),
    tokens_per_chunk=16,
)


class _PutThere:
    """Puts and deletes at the served place, and waits until the tier has been told."""

    def __init__(self, tier: PeersTier, place: Place) -> None:
        self._tier = tier
        self._place = place
        self._turn = asyncio.Lock()

    @property
    def traits(self) -> TierTraits:
        return self._tier.traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        values = {
            key: b"".join(bytes(part.cast("B")) for part in parts) for key, parts in items[::-1]
        }
        async with self._turn:
            for key, value in values.items():
                self._place.put(key, value)
            for key in values:
                await eventually_found(self._tier, key, len(self._place.values[key]))
        return [None] * len(items)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        async with self._turn:
            removed = [self._place.remove(key) for key in keys]
            for key in keys:
                await eventually_found(self._tier, key, None)
        return removed

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        for key in list(self._place.values):
            if key.startswith(prefix):
                yield key


class TestPeersTier(TierContract):
    """Reads through the tier; puts, deletes and scans at the place that it reads from."""

    @pytest.fixture
    async def tier(self) -> AsyncIterator[Any]:
        async with served() as place, following(place.port) as tier:
            await tier.check()
            yield _PutThere(tier, place)


async def test_a_probe_asks_nobody() -> None:
    async with served() as place, following(place.port) as tier:
        place.put(make_key(1), b"x" * 100)
        await eventually_found(tier, make_key(1), 100)
        place.may_lend.clear()
        sent = place.server.metrics.as_dict()
        for _ in range(100):
            assert await tier.probe([make_key(1), make_key(2)]) == [100, None]
        assert place.server.metrics.as_dict() == sent


async def test_a_probe_of_many_keys_lets_other_tasks_run() -> None:
    async with served() as place, following(place.port) as tier:
        await tier.check()
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        await tier.probe([make_key(1)] * 10_000)
        counting.cancel()
        assert turns >= 30


async def test_nothing_is_written_to_peers() -> None:
    async with served() as place, following(place.port) as tier:
        assert tier.traits.read_only
        assert await store(tier, {make_key(1): b"x"}) == [False]
        with pytest.raises(TierCannotList):
            [key async for key in tier.scan(b"")]
        assert place.values == {}


async def test_a_deleted_chunk_is_forgotten_and_stays_at_its_peer() -> None:
    async with served() as place, following(place.port) as tier:
        place.put(make_key(1), b"damaged")
        await eventually_found(tier, make_key(1), 7)
        assert await tier.delete([make_key(1)]) == [False]
        assert await tier.probe([make_key(1)]) == [None]
        assert place.values


async def test_a_chunk_that_its_peer_has_lost_is_a_miss_and_leaves_the_index() -> None:
    async with served() as place, following(place.port) as tier:
        place.put(make_key(1), b"x" * 100)
        place.put(make_key(2), b"y" * 100)
        await eventually_found(tier, make_key(2), 100)
        del place.values[make_key(1)]  # and no event says so
        assert await fetch(tier, [make_key(1), make_key(2)], [100, 100]) == [None, b"y" * 100]
        assert await tier.probe([make_key(1), make_key(2)]) == [None, 100]


async def test_a_snapshot_of_many_pages_is_complete() -> None:
    async with served() as place:
        values = {make_key(number): b"x" * (number % 50 + 1) for number in range(10_000)}
        for key, value in values.items():
            place.put(key, value)
        await eventually(lambda: len(place.feed) == len(values))
        async with following(place.port) as tier:
            await tier.check()
            assert await tier.probe(list(values)) == [len(value) for value in values.values()]
            assert tier.num_chunks == len(values)


async def test_chunks_that_change_during_a_snapshot_are_right_in_the_end() -> None:
    async with served() as place:
        for number in range(9_000):
            place.put(make_key(number), b"x")
        await eventually(lambda: len(place.feed) == 9_000)
        async with following(place.port) as tier:
            checking = asyncio.ensure_future(tier.check())
            for number in range(0, 9_000, 2):
                place.remove(make_key(number))
                place.put(make_key(20_000 + number), b"yy")
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await checking
            await eventually_found(tier, make_key(20_000 + 8_998), 2)
            await eventually(lambda: tier.num_chunks == 9_000)
            keys = [make_key(number) for number in range(9_000)]
            assert await tier.probe(keys) == [None, 1] * 4_500


async def test_a_chunk_that_comes_to_memory_during_a_snapshot_is_in_it() -> None:
    feed = PeerFeed(lambda key, nbytes, num_tokens: nbytes)
    feed.start()
    for number in range(9_000):
        feed.note(make_key(number), 10, 0)
    on_disk = [make_key(number) for number in range(20_000, 20_100)]
    for key in on_disk:
        feed.note_on_disk(key, 10)
    await eventually(lambda: len(feed) == 9_100)
    told = set[int]()
    pages, number = feed.pages(), feed.number
    for page in pages:
        told.update(unpack(page.digests, page.sizes)[0])
        if not page.is_last:  # all parts of memory but the last ones are read
            for key in on_disk:
                feed.note(key, 10, 0)
            for _ in range(10):
                await asyncio.sleep(0)
    assert feed.number == number  # nothing has changed for a follower
    assert {digest_of(key) for key in on_disk} <= told


async def test_the_least_loaded_peer_is_asked() -> None:
    async with served() as one, served() as other, following(one.port, other.port) as tier:
        await tier.check()
        keys = [make_key(number) for number in range(8)]
        for key in keys:
            one.put(key, b"x" * 1000)
            other.put(key, b"x" * 1000)
        await eventually(lambda: all(_peers_of(tier, key) == 3 for key in keys))
        assert await fetch(tier, keys, [1000] * 8) == [b"x" * 1000] * 8
        sent = [
            sum(peer["chunks"] for peer in place.server.peers.status(lambda peer: 0))
            for place in (one, other)
        ]
        assert sent == [4, 4]


def _peers_of(tier: PeersTier, key: bytes) -> int:
    found = tier._index.find(digest_of(key))
    return 0 if found is None else found.peers


@pytest.mark.parametrize("noticed", [False, True], ids=["asked before", "asked after"])
async def test_connections_that_the_network_has_forgotten_cost_one_deadline_at_most(
    noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """noticed: the follower has a new connection when the next get comes"""
    monkeypatch.setattr(follower, "SILENT_S", 2.0 if noticed else PATIENT_S)
    keys = [make_key(number) for number in range(4)]
    async with served() as place:
        with RelayedNetwork() as network:
            link = network.link(("127.0.0.1", place.port))
            async with following(link.port, answer_timeout_s=3.0, pause_s=0.001) as tier:
                for key in keys:
                    place.put(key, b"x" * 100)
                await eventually_found(tier, keys[-1], 100)
                place.may_lend.clear()
                gets = [asyncio.ensure_future(fetch(tier, [key], [100])) for key in keys]
                await eventually(lambda: place.lent_now == 400)  # over as many connections
                place.may_lend.set()
                assert await asyncio.gather(*gets) == [[b"x" * 100]] * 4
                link.forget()
                if noticed:
                    await eventually(lambda: not tier.peers[0].is_followed)
                else:
                    [answer] = await tier.get(keys[:1], [[memoryview(bytearray(100))]])
                    assert isinstance(answer, TierUnavailable)
                await eventually_found(tier, keys[0], 100)
                assert await fetch(tier, keys, [100] * 4) == [b"x" * 100] * 4


async def test_a_peer_that_does_not_answer_costs_one_deadline_and_is_left_alone() -> None:
    async with (
        served() as place,
        following(place.port, answer_timeout_s=0.2, pause_s=PATIENT_S) as tier,
    ):
        place.put(make_key(1), b"x" * 100)
        await eventually_found(tier, make_key(1), 100)
        place.may_lend.clear()
        buffer = bytearray(100)
        [answer] = await tier.get([make_key(1)], [[memoryview(buffer)]])
        assert isinstance(answer, TierUnavailable)
        assert "no answer within 0.2 s" in str(answer)
        # left alone: its chunks are not found, and nobody waits for it again
        [why] = await tier.probe([make_key(1)])
        assert isinstance(why, PeerSlow) and why.miss == PEER_SLOW
        assert await tier.get([make_key(1)], [[memoryview(buffer)]]) == [None]
        place.may_lend.set()


async def test_a_silent_peer_does_not_delay_the_chunks_of_others() -> None:
    async with (
        served() as silent,
        served() as place,
        following(silent.port, place.port, answer_timeout_s=0.3) as tier,
    ):
        await tier.check()
        silent.put(make_key(1), b"x" * 100)
        place.put(make_key(2), b"y" * 100)
        await eventually_found(tier, make_key(1), 100)
        await eventually_found(tier, make_key(2), 100)
        silent.may_lend.clear()
        assert await fetch(tier, [make_key(1), make_key(2)], [100, 100]) == [None, b"y" * 100]
        silent.may_lend.set()


async def test_a_peer_that_never_answers_does_not_fail_the_check_of_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with (
            served() as place,
            following(silent.getsockname()[1], place.port) as tier,
            asyncio.timeout(4.0),  # less than a connection may take
        ):
            await tier.check()
            assert [peer.is_followed for peer in tier.peers] == [False, True]


async def test_a_value_of_a_lost_connection_does_not_count() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    here.setblocking(False)
    stream = await accept_stream(here, None)
    item = Getting(make_key(1), [memoryview(bytearray(4))], None)
    await loop.run_in_executor(None, there.sendall, b"good")
    await item.take(stream, 4)
    sizes = [item.size]
    there.sendall(b"ne")
    there.close()
    with pytest.raises(EOFError):
        await item.take(stream, 4)
    assert [*sizes, item.size] == [4, None]
    stream.close()


async def test_a_restarted_peer_is_followed_again_from_a_snapshot() -> None:
    async with served() as place, following(place.port) as tier:
        place.put(make_key(1), b"before")
        await eventually_found(tier, make_key(1), 6)
        await place.server.stop()
        await eventually(lambda: not tier.peers[0].is_followed)
        again = Place(port=place.port)
        again.put(make_key(2), b"after!!")
        again.start()
        await eventually_found(tier, make_key(2), 7)
        assert await tier.probe([make_key(1)]) == [None]
        assert tier.num_chunks == 1
        assert await fetch(tier, [make_key(2)], [7]) == [b"after!!"]
        await again.server.stop()


async def test_the_chunks_of_a_lost_peer_leave_the_index_after_a_while() -> None:
    async with served() as place, following(place.port, forget_s=0.2) as tier:
        place.put(make_key(1), b"x")
        await eventually_found(tier, make_key(1), 1)
        await place.server.stop()
        await eventually(lambda: tier.num_chunks == 0)


async def test_the_chunks_of_a_snapshot_that_was_cut_leave_the_index_after_a_while() -> None:
    async with served() as place, following(place.port, forget_s=0.2) as tier:
        chunks = pack([(digest_of(make_key(1)), 1)])

        def cut_off() -> Iterator[p.Page]:
            yield p.Page(place.feed.number, True, False, [], chunks.digests, chunks.sizes)
            raise ConnectionResetError

        place.feed.pages = cut_off  # type: ignore[method-assign]
        tier._start()
        await eventually(lambda: tier.num_chunks == 1)
        await place.server.stop()
        await eventually(lambda: tier.num_chunks == 0)
        assert not tier.peers[0].is_followed


async def test_a_short_loss_costs_no_snapshot() -> None:
    async with served() as place, following(place.port) as tier:
        place.put(make_key(1), b"x")
        await eventually_found(tier, make_key(1), 1)
        num_pages, pages = 0, place.feed.pages

        def counted() -> Any:
            nonlocal num_pages
            num_pages += 1
            return pages()

        place.feed.pages = counted  # type: ignore[method-assign]
        for task in list(place.server._conversations):
            task.cancel()
        place.put(make_key(2), b"yy")
        await eventually_found(tier, make_key(2), 2)
        assert await tier.probe([make_key(1)]) == [1]
        assert num_pages == 0


async def test_a_follower_that_missed_changes_gets_a_snapshot() -> None:
    async with served() as place, following(place.port) as tier:
        place.put(make_key(1), b"x")
        await eventually_found(tier, make_key(1), 1)
        tier.peers[0].after -= 1  # as if one had been lost
        place.remove(make_key(1))
        place.put(make_key(2), b"yy")
        await eventually_found(tier, make_key(2), 2)
        assert await tier.probe([make_key(1)]) == [None]


def rows(tier: PeersTier) -> list[FollowedPeerStatus]:
    return tier.peers_status()["peers"]


class TestSeen:
    """What is told of a peer, and why its chunks are missed."""

    async def test_loads_events_and_chunks_are_counted_by_peer(self) -> None:
        async with served() as place, following(place.port) as tier:
            await tier.check()
            for number in range(5):
                place.put(make_key(number), b"x" * 100)
            await eventually(lambda: tier.num_chunks == 5)
            del place.values[make_key(4)]
            keys = [make_key(number) for number in range(3, 5)]
            assert await fetch(tier, keys, [100, 100]) == [b"x" * 100, None]
            [peer] = rows(tier)
            name = f"127.0.0.1:{place.port}"
            assert (peer["address"], peer["name"]) == (name, socket.gethostname())
            assert (peer["state"], peer["cause"]) == ("following", "")
            assert (peer["incarnation"], peer["version"]) == (place.feed.incarnation, __version__)
            assert (peer["chunks"], peer["events"], peer["absent_chunks"]) == (4, 5, 1)
            assert (peer["loads"], peer["loaded_chunks"], peer["loaded_bytes"]) == (1, 1, 100)
            assert peer["events_per_s"] > 0 < peer["loaded_bytes_per_s"]
            assert peer["last_load_s"] == peer["median_load_s"] is not None
            assert (peer["last_fault"], peer["last_fault_ago_s"]) == ("", None)
            counted = tier.metrics.as_dict()
            assert counted.pop(f"kvhold_peer_load_seconds_sum{{peer={name}}}") > 0
            assert counted == {
                f"kvhold_peer_{counter}": value
                for counter, value in {
                    f"loads{{peer={name},result=done}}": 1,
                    f"load_seconds_count{{peer={name}}}": 1,
                    f"loaded_chunks{{peer={name}}}": 1,
                    f"loaded_bytes{{peer={name}}}": 100,
                    f"missed_chunks{{peer={name},reason=peer_evicted}}": 1,
                    f"events{{peer={name}}}": 5,
                    f"index_chunks{{peer={name}}}": 4,
                }.items()
            }

    async def test_the_chunks_of_a_lost_peer_are_missed_because_it_is_gone(self) -> None:
        async with following(free_port()) as tier:
            async with served(port=tier.peers[0].address.port) as place:
                place.put(make_key(1), b"x")
                await eventually_found(tier, make_key(1), 1)
            await eventually(lambda: rows(tier)[0]["state"] == "away")
            gone, absent = await tier.probe([make_key(1), make_key(2)])
            assert isinstance(gone, PeerGone) and gone.miss == PEER_GONE
            assert absent is None
            [peer] = rows(tier)
            assert peer["cause"] in ("closed", "port")
            assert str(peer["address"]) in peer["last_fault"]
            tier.advance(SPACE)
            assert await tier.probe([make_key(1)]) == [None], "it is cleared"

    async def test_a_refusal_is_a_state_with_its_cause(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with served(token="hush") as place, following(place.port) as tier:
            with pytest.raises(TierDenied) as caught:
                await tier.check()
            assert caught.value.miss == PEER_DENIED
            [peer] = rows(tier)
            assert (peer["state"], peer["cause"]) == ("refused", "token")
            [refused] = place.server.peers.status_of_refused()
            assert (refused["address"], refused["reason"]) == ("127.0.0.1", "a token is needed")
            monkeypatch.setattr(p, "PEERS_VERSION", 99)
            async with following(place.port, token="hush") as other:
                with pytest.raises(TierUnavailable):
                    await other.check()
                [peer] = rows(other)
                assert (peer["state"], peer["cause"]) == ("refused", "version")
        async with following(free_port()) as tier:
            assert rows(tier)[0]["state"] == "connecting"
            with pytest.raises(TierUnavailable) as unavailable:
                await tier.check()
            assert unavailable.value.miss == PEER_GONE
            assert (rows(tier)[0]["state"], rows(tier)[0]["cause"]) == ("away", "port")

    async def test_this_node_itself_is_neither_followed_nor_away(self) -> None:
        async with served() as place, following(place.port) as tier:
            tier.serve_as(Own(incarnation=place.feed.incarnation))
            await tier.check()
            assert rows(tier)[0]["state"] == "itself"

    async def test_a_hit_that_ends_at_an_evicted_chunk_of_a_peer_says_so(self) -> None:
        space = Namespace(model="m", layout=LAYOUT)
        prompt = space.prompt(list(range(16)))
        query = prompt.query()
        key = query.namespace + query.hashes[:HASH_BYTES] + place_suffix(0, 0)
        async with served() as place:
            place.feed.note_on_disk(key, 9_000)  # and it has no such chunk
            tiers = [f"peers://127.0.0.1:{place.port}?answer_timeout_s={PATIENT_S}"]

            def look_up() -> tuple[Reason | None, Reason | None]:
                with open_cache(ram_bytes="16MiB", huge_pages="never", tiers=tiers) as cache:
                    cache.register(space)
                    reasons: list[Reason | None] = [NEVER_STORED]
                    while reasons[-1] == NEVER_STORED:  # until the tier follows
                        reasons.append(cache.lookup(query, wait_s=PATIENT_S).reason)
                    return reasons[-1], cache.lookup(query, wait_s=PATIENT_S).reason

            loop = asyncio.get_running_loop()
            async with asyncio.timeout(PATIENT_S):
                found = await loop.run_in_executor(None, look_up)
            assert found == (PEER_EVICTED, PEER_EVICTED), "the second time it is remembered"

    async def test_a_tier_that_is_left_alone_is_missed_for_the_peers_reason(self) -> None:
        async with served(token="hush") as place, following(place.port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics())
            await guard.check()
            assert not guard.available
            unknown = Unknown()
            assert await guard.probe([make_key(1)], unknown=unknown) == [None]
            assert unknown.why == PEER_DENIED
            await guard.close()


class TestDoctor:
    """`kvhold doctor` of a tier of peers: one finding for the tier, and one for each peer."""

    async def test_each_peer_is_tried_and_each_fault_has_its_advice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with served() as place, served(token="hush") as closed:
                ports = (place.port, closed.port, free_port(), silent.getsockname()[1])
                hosts = ",".join(f"127.0.0.1:{one}" for one in ports)
                url = f"peers://{hosts}?get_timeout_s=3"
                config = load_config({"tiers": [url]}, environ={})
                tier, good, *bad = await _look_at_tiers(config)
                assert (tier.ok, good.ok) == (True, True)
                assert good.name == f"peer 127.0.0.1:{place.port}"
                assert good.says == [f"{socket.gethostname()}, kvhold {__version__}"]
                assert [finding.ok for finding in bad] == [False] * 3
                causes = [finding.says[1].partition(":")[0] for finding in bad]
                assert causes == ["token", "port", "silent"]
                assert "peers.token_file at the peer" in bad[0].says[1]
                assert "no answer within 3 s" in bad[2].says[0]
                monkeypatch.setattr(p, "PEERS_VERSION", 99)
                tier, other = await _look_at_tiers(
                    load_config({"tiers": [f"peers://127.0.0.1:{place.port}"]}, environ={})
                )
                assert tier.says[-1] == "no peer can be followed"
                assert other.says[1].startswith("version: install the same version")

    async def test_a_certificate_of_another_authority_is_named(self, tmp_path: Path) -> None:
        try:
            made = make_certificates(tmp_path)
        except NotInstalled as error:
            pytest.skip(str(error))
        tls = {"tls_cert": str(made.server), "tls_key": str(made.server_key)}
        async with served(**tls) as place, served() as clear:
            url = f"peers://127.0.0.1:{place.port},127.0.0.1:{clear.port}?tls=true"
            _, own, plain = await _look_at_tiers(load_config({"tiers": [url]}, environ={}))
            assert "its certificate is not accepted" in own.says[0]
            assert own.says[1].startswith("certificate: compare ca_file here")
            assert plain.says[1].startswith(("tls: no TLS is spoken there", "closed"))


class TestClears:
    """A clear of this host holds for what its peers still have."""

    async def test_a_cleared_chunk_of_a_peer_is_not_found(self) -> None:
        async with served() as place, following(place.port) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            tier.advance(SPACE)
            assert await tier.probe([make_key(1)]) == [None]
            assert await tier.get([make_key(1)], [[memoryview(bytearray(1))]]) == [None]

    @pytest.mark.parametrize("prefix", [SPACE, b""], ids=["namespace", "everything"])
    async def test_it_is_found_again_when_the_peer_has_cleared_too(self, prefix: bytes) -> None:
        async with served() as place, following(place.port) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            tier.advance(prefix)
            place.remove(make_key(1))
            place.numbers.learn(prefix, tier.numbers[prefix])
            place.put(make_key(2), b"after")
            await asyncio.sleep(0.05)
            assert await tier.probe([make_key(2)]) == [None]  # it was not announced
            place.numbers.announce(prefix)
            await eventually_found(tier, make_key(2), 5)

    async def test_another_namespace_is_not_touched(self) -> None:
        other = b"o" * 16
        async with served() as place, following(place.port) as tier:
            place.put(make_key(1, other), b"x")
            await eventually_found(tier, make_key(1, other), 1)
            tier.advance(SPACE)
            assert await tier.probe([make_key(1, other)]) == [1]

    @pytest.mark.parametrize("when", ["before it follows", "later"])
    async def test_a_peers_clear_is_learned_once(self, when: str) -> None:
        learned: list[bytes] = []
        async with served() as place, following(place.port) as tier:
            tier.keep_clears(learned.append, None)
            if when == "later":
                await tier.check()
            place.numbers.advance(SPACE)
            place.numbers.announce(SPACE)
            await tier.check()
            await eventually(lambda: learned == [SPACE])
            assert tier.numbers == place.numbers.numbers
            place.numbers.announce(SPACE)
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            assert learned == [SPACE]

    async def test_clears_of_the_last_run_hold(self) -> None:
        async with served() as place, following(place.port) as tier:
            tier.keep_clears(lambda prefix: None, {SPACE: 5})
            place.put(make_key(1), b"x")
            await tier.check()
            await eventually(lambda: tier.num_chunks == 1)
            assert await tier.probe([make_key(1)]) == [None]

    async def test_a_clear_that_the_last_run_did_not_end_is_announced(self, tmp_path: Path) -> None:
        journal = ClearsJournal(tmp_path / "clears")
        journal.begin(["peers"])
        await journal.add("peers", SPACE)
        async with served() as place, following(place.port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics(), place="peers")
            guard.share(lambda prefix: None, journal)
            guard.resume_clears(journal)
            await eventually(lambda: not journal.pending("peers"))
            assert tier.clear_numbers.announced.keys() == {SPACE}
            assert tier.clear_numbers.announced == tier.numbers
            await guard.close()
        await journal.close(PATIENT_S)

    async def test_a_number_is_larger_than_any_known(self) -> None:
        numbers = ClearNumbers(clock=lambda: 1.0)
        assert numbers.advance(SPACE) == 1000
        assert numbers.advance(SPACE) == 1001
        assert numbers.learn(SPACE, 5000)
        assert not numbers.learn(SPACE, 5000)
        assert numbers.advance(SPACE) == 5001

    async def test_a_clear_is_as_old_as_its_request_and_not_as_the_end_of_its_transfers(
        self,
    ) -> None:
        now_s = 9.0
        async with served() as place, following(place.port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics())
            tier.clear_numbers = ClearNumbers(clock=lambda: now_s)
            pending = [await guard.begin_clear(SPACE, asked_s) for asked_s in (1.0, 3.0)]
            await guard.end_clear(pending[0])
            assert tier.numbers == {SPACE: 1000}
            # a chunk that was stored here at 2.0 is older than this clear
            assert tier.clear_numbers.learn(SPACE, 2500)
            await guard.end_clear(pending[1])
            assert tier.numbers == {SPACE: 3000}
            await guard.end_clear(await guard.begin_clear(SPACE))
            assert tier.numbers == {SPACE: 9000}
            await guard.close()

    async def test_the_clears_of_a_peer_have_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clear_numbers, "MOST_NUMBERS", 10)
        async with served() as place, following(place.port) as tier:
            await tier.check()
            for number in range(30):
                place.numbers.advance(prefix := b"%016d" % number)
                place.numbers.announce(prefix)
            last = [b"%016d" % number for number in range(20, 30)]
            await eventually(lambda: list(tier.peers[0].clears) == last)
            place.numbers.advance(b"")
            place.numbers.announce(b"")
            await eventually(lambda: b"" in tier.peers[0].clears)

    async def test_many_clears_let_other_tasks_run(self) -> None:
        learned: list[bytes] = []
        async with served() as place, following(place.port) as tier:
            tier.keep_clears(learned.append, None)
            for number in range(3_000):
                place.numbers.advance(prefix := b"%016d" % number)
                place.numbers.announce(prefix)
            seen = set[int]()

            async def watch() -> None:
                while True:
                    seen.add(len(learned))
                    await asyncio.sleep(0)

            watching = asyncio.ensure_future(watch())
            await tier.check()
            await eventually(lambda: len(learned) == 3_000)
            watching.cancel()
            assert {500, 1_000, 2_500} <= seen

    @pytest.mark.parametrize(("prefix", "number"), [(b"short", 1), (SPACE, 0), (SPACE, 1 << 62)])
    async def test_an_impossible_clear_is_refused(self, prefix: bytes, number: int) -> None:
        with pytest.raises(ValueError, match="a clear of"):
            ClearNumbers().learn(prefix, number)


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
        ],
    )
    async def test_a_server_that_may_not_be_exposed_is_refused(
        self, settings: dict[str, Any], told: str
    ) -> None:
        place = Place()
        with pytest.raises(ConfigError, match=told) as caught:
            PeerServer(ServePeersConfig(**settings), place, place.feed, Metrics())
        assert "hush" not in str(caught.value)

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
            bytes(encode(p.Happened(9, [], []))),
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


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("peers://", "write peers://host-a"),
        ("peers://a/x", "write peers://host-a"),
        ("peers://a,a", "different ones"),
        ("peers://" + ",".join(f"h{n}" for n in range(33)), "1 to 32 different"),
        ("peers://user:hush@a", "no users"),
        ("peers://:hush@a", "add tls=true"),
        ("peers://a?token_file=/nowhere", "token_file"),
        ("peers://a?ca_file=/x", "are for TLS"),
        ("peers://a?conections=2", "connections"),
    ],
)
async def test_settings_that_cannot_be_are_named(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        make_tier(url)
    assert "hush" not in str(caught.value)
