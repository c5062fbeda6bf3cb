"""Which of several peers with a chunk is asked."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from kvhold.testing.tier import fetch, make_key, make_value
from kvhold.tiers.peers import PeersTier, speed
from kvhold.tiers.peers.speed import PeerQueues, PeerSpeed
from kvhold_lab.bench.relay import RelayedLink, RelayedNetwork
from tests.tiers.peer_places import Place, eventually, eventually_found, following, served

NBYTES = 100_000
MB = 1 << 20


def chosen(queues: PeerQueues, sizes: list[int], peers: list[int]) -> Counter[int]:
    return Counter(queues.put(nbytes, peers) for nbytes in sizes)


def test_the_speed_is_the_median_of_the_latest_loads() -> None:
    measured = PeerSpeed()
    assert measured.seconds_per_byte(0.0) is None
    for at_s, seconds in enumerate([1.0, 1.0, 1.0, 9.0, 9.0]):
        measured.add(seconds * MB, MB, at_s)
    assert measured.seconds_per_byte(5.0) == 1.0
    measured.add(1e6, 1000, 5.0)  # a small load is mostly latency
    assert measured.seconds_per_byte(5.0) == 1.0
    for at_s in range(20):
        measured.add(2.0 * MB, MB, 5.0 + at_s / 10)
    assert measured.seconds_per_byte(7.0) == 2.0


def test_an_old_speed_and_that_of_a_failed_peer_are_unknown() -> None:
    measured = PeerSpeed()
    measured.add(1.0 * MB, MB, 0.0)
    measured.add(3.0 * MB, MB, 20.0)
    assert measured.seconds_per_byte(speed._RECENT_S) == 2.0
    assert measured.seconds_per_byte(speed._RECENT_S + 1) == 3.0
    assert measured.seconds_per_byte(speed._RECENT_S + 21) is None
    measured.add(1.0 * MB, MB, 60.0)
    measured.forget()
    assert measured.seconds_per_byte(60.0) is None


def test_the_faster_peer_is_asked_and_a_slower_one_while_that_is_busy() -> None:
    speeds = {0: 5e-9, 1: 1e-9}
    assert chosen(PeerQueues(speeds, {0: 0, 1: 0}), [MB], [0, 1]) == {1: 1}
    assert chosen(PeerQueues(speeds, {0: 0, 1: 0}), [MB] * 60, [0, 1]) == {0: 10, 1: 50}
    assert chosen(PeerQueues(speeds, {0: 0, 1: 9 * MB}), [MB], [0, 1]) == {0: 1}
    assert chosen(PeerQueues(speeds, {0: 0, 1: 0}), [MB], [0]) == {0: 1}, "only it has the chunk"


def test_equal_peers_share_by_what_they_are_asked() -> None:
    for each in (None, 2e-9):
        queues = PeerQueues(dict.fromkeys(range(3), each), {0: 2 * MB, 1: 0, 2: 0})
        assert chosen(queues, [MB] * 10, [0, 1, 2]) == {0: 2, 1: 4, 2: 4}


def test_an_unknown_peer_is_tried_with_one_chunk_at_a_time() -> None:
    queues = PeerQueues({0: 1e-9, 1: None}, {0: 0, 1: 0})
    assert queues.put(MB, [0, 1]) == 1
    assert queues.put(MB, [0, 1]) == 0
    assert PeerQueues({0: 1e-9, 1: None}, {0: 0, 1: MB}).put(MB, [0, 1]) == 0


class Two(NamedTuple):
    near: Place
    far: Place
    link: RelayedLink
    tier: PeersTier

    async def load(self, number: int) -> None:
        value = make_value(number, NBYTES)
        assert await fetch(self.tier, [make_key(number)], [NBYTES]) == [value]

    def sent(self) -> tuple[int, int]:
        near, far = (
            sum(one["chunks"] for one in place.server.peers.status(lambda peer: 0))
            for place in (self.near, self.far)
        )
        return near, far


@asynccontextmanager
async def near_and_far(num_chunks: int) -> AsyncIterator[Two]:
    """The far one has the lower number, and an equal one would be asked first."""
    with RelayedNetwork() as network:
        async with served() as near, served() as far:
            link = network.link(("127.0.0.1", far.port))
            async with following(link.port, near.port) as tier:
                for number in range(num_chunks):
                    for place in (near, far):
                        place.put(make_key(number), make_value(number, NBYTES))
                for _ in (near, far):
                    await eventually_found(tier, make_key(num_chunks - 1), NBYTES)
                await eventually(lambda: all(peer.is_followed for peer in tier.peers))
                await eventually(lambda: all(tier._index.count(n) == num_chunks for n in (0, 1)))
                yield Two(near, far, link, tier)


@pytest.mark.asyncio
async def test_the_nearest_peer_is_asked_and_a_recovered_one_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with near_and_far(30) as two:
        two.link.delay_s = 0.3
        for number in range(2):
            await two.load(number)
        assert two.sent() == (1, 1), "each is measured once"
        for number in range(2, 12):
            await two.load(number)
        near, far = two.sent()
        assert near >= 10, f"{far} of 12 chunks came from the far one"
        two.link.delay_s = 0.0
        monkeypatch.setattr(speed, "_RECENT_S", 0.0)
        await asyncio.sleep(0.01)
        for number in range(12, 16):
            await two.load(number)
        assert two.sent()[1] > far, "nobody measured the far one again"
