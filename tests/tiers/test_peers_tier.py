"""The tier of peers over real connections to a served place."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from kvhold.core.errors import ConfigError, TierCannotList, TierError, TierUnavailable
from kvhold.core.reasons import PEER_SLOW
from kvhold.net import peers as p
from kvhold.net.stream import accept_stream
from kvhold.node.peer_feed import PeerFeed
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, store
from kvhold.tiers.base import Parts, TierTraits
from kvhold.tiers.exchanges import Getting
from kvhold.tiers.peers import PeersTier, follower
from kvhold.tiers.peers.faults import PeerSlow
from kvhold.tiers.peers.index import digest_of, pack, unpack
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.relay import RelayedNetwork
from tests.tiers.peer_places import (
    PATIENT_S,
    Place,
    eventually,
    eventually_found,
    following,
    served,
)

pytestmark = pytest.mark.asyncio


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
