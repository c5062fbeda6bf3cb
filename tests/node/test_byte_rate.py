"""The bytes per second of a node's peers, in virtual time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvhold.node.byte_rate import ByteRate
from kvhold_lab.simulation.world import World

RATE = 1000
_RIGHT = 1e-6


class Reads:
    def __init__(self, bytes_per_s: int = RATE) -> None:
        self.world = World(1)
        self.world.may_stall = False
        self.loop = self.world.new_loop("peers")
        self.rate = ByteRate(bytes_per_s)
        self.got: list[tuple[float, str, int]] = []

    def run(self, *reads: Coroutine[Any, Any, None], most_s: float = 3600.0) -> None:
        tasks = [self.loop.create_task(read) for read in reads]
        assert self.world.run(lambda: all(task.done() for task in tasks), most_s=most_s)
        for task in tasks:
            task.result()

    async def read(self, owner: str, *sizes: int, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        for nbytes in sizes:
            await self.rate.take(nbytes, owner)
            self.got.append((self.loop.time(), owner, nbytes))

    def nbytes(self, owner: str, until_s: float) -> int:
        return sum(size for at_s, who, size in self.got if who == owner and at_s <= until_s)


@pytest.mark.parametrize("num_owners", [1, 3])
def test_no_span_of_time_has_more_bytes_than_the_limit_allows(num_owners: int) -> None:
    reads = Reads()
    sizes = [1 + 37 * number % 300 for number in range(40)]
    reads.run(
        *(
            reads.read(f"peer {number}", *sizes, after_s=number * 3.3)
            for number in range(num_owners)
        )
    )
    assert len(reads.got) == 40 * num_owners
    for begin, (begin_s, _, _) in enumerate(reads.got):
        nbytes = 0
        for at_s, _, size in reads.got[begin:]:
            assert nbytes <= RATE * (at_s - begin_s) + _RIGHT
            nbytes += size
    assert reads.world.now <= sum(sizes) * num_owners / RATE + 3.3 * num_owners


def test_a_pause_is_not_saved_for_later() -> None:
    reads = Reads()
    reads.run(reads.read("one", 500))
    reads.run(reads.read("one", 500, 500, 500, after_s=100.0))
    assert [at_s for at_s, _, _ in reads.got] == pytest.approx([0.0, 100.0, 100.5, 101.0])


def test_peers_that_wait_get_equal_parts_whatever_the_number_and_size_of_their_gets() -> None:
    reads = Reads()
    reads.run(
        *(reads.read("greedy", *[50] * 400) for _ in range(8)),
        reads.read("modest", *[200] * 50),
    )
    for until_s in (4.0, 8.0, 16.0):
        half = RATE * until_s / 2
        assert reads.nbytes("greedy", until_s) == pytest.approx(half, abs=600)
        assert reads.nbytes("modest", until_s) == pytest.approx(half, abs=600)


def test_a_late_peer_is_not_behind_those_that_wait_already() -> None:
    reads = Reads()
    reads.run(*(reads.read("first", 100) for _ in range(50)), reads.read("late", 100, after_s=1.05))
    [late_s] = [at_s for at_s, owner, _ in reads.got if owner == "late"]
    assert late_s == pytest.approx(1.1)


def test_bytes_that_were_not_sent_are_given_back_and_others_taken_later() -> None:
    reads = Reads()

    async def read() -> None:
        await reads.rate.take(5000, "one")
        reads.rate.add(-4000)

    reads.run(read(), reads.read("two", 100))
    assert reads.got[0][0] == pytest.approx(1.0)

    async def send_unexpected() -> None:
        await asyncio.sleep(100.0)
        reads.rate.add(3000)
        await reads.read("three", 1)

    began_s = reads.world.now
    reads.run(send_unexpected())
    assert reads.got[1][0] == pytest.approx(began_s + 103.0)


def test_who_gives_up_takes_nothing() -> None:
    reads = Reads()

    async def give_up() -> None:
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await reads.rate.take(100_000, "gone")

    reads.run(reads.read("first", 1000), give_up(), reads.read("second", 10, after_s=0.2))
    assert reads.got[1][0] == pytest.approx(1.0)
    assert not reads.rate.num_waiting


def test_without_a_limit_nobody_waits() -> None:
    reads = Reads(0)
    reads.run(reads.read("one", *[1 << 40] * 10))
    assert {at_s for at_s, _, _ in reads.got} == {0.0}
