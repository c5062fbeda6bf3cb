"""The parts of the simulation that stand for a host: interrupts, descriptors, sockets that are
full.
"""

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvhold.net import messages as m
from kvhold.node import listener
from kvhold.node.listener import Listener
from kvhold.tiers.policies import POLICIES
from kvhold_lab.simulation.descriptors import Descriptors
from kvhold_lab.simulation.draw import draw
from kvhold_lab.simulation.interruption import Interruption
from kvhold_lab.simulation.link import SimLink
from kvhold_lab.simulation.listening import ListeningLoop, ListeningSocket, SimOs
from kvhold_lab.simulation.wire import End, connect
from kvhold_lab.simulation.world import World


class ComputeCost:
    """Three awaits, and two of its cleaning up. Notes what it has done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def run(self) -> None:
        try:
            for number in range(1, 4):
                await asyncio.sleep(1.0)
                self.done.append(f"step {number}")
        finally:
            await asyncio.sleep(1.0)
            self.done.append("cleaned up")


def run(work: ComputeCost, at: int, *, early: bool) -> tuple[bool, float]:
    """Whether it was interrupted, and how long it took."""
    world = World(1)
    world.may_stall = False
    loop = world.new_loop("test")

    async def interrupted() -> None:
        await Interruption(work.run(), at=at, early=early)

    task, ended_s = loop.create_task(interrupted()), list[float]()
    task.add_done_callback(lambda _: ended_s.append(world.now))
    world.run(lambda: bool(ended_s), most_s=100.0)
    return task.cancelled(), round(ended_s[0], 6)


@pytest.mark.parametrize(("early", "waits_s"), [(True, 0.0), (False, 1.0)])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_work_is_interrupted_at_the_chosen_await_and_cleans_up(
    at: int, early: bool, waits_s: float
) -> None:
    work = ComputeCost()
    assert run(work, at, early=early) == (True, at - 1 + waits_s + 1.0)
    assert work.done == [*(f"step {number}" for number in range(1, at)), "cleaned up"]


def test_an_interrupt_may_come_while_work_cleans_up() -> None:
    work = ComputeCost()
    assert run(work, 4, early=True) == (True, 3.0)
    assert work.done == ["step 1", "step 2", "step 3"]


def test_work_with_fewer_awaits_is_not_interrupted() -> None:
    work = ComputeCost()
    assert run(work, 5, early=False) == (False, 4.0)
    assert work.done[-1] == "cleaned up"


def test_a_full_socket_takes_no_more_until_the_other_end_has_read() -> None:
    world = World(1)
    near, far = connect(world)
    near.most_bytes = 10
    changes: list[str] = []
    near.on_change = lambda: changes.append("room")
    assert near.push(memoryview(bytes(16))) == 10
    with pytest.raises(BlockingIOError):
        near.push(memoryview(bytes(6)))
    got = bytearray()
    far.on_data = got.extend
    world.run(lambda: len(got) == 10, most_s=10.0)
    with pytest.raises(BlockingIOError):
        near.push(memoryview(bytes(6)))
    assert not changes
    far.was_read(4)
    assert changes
    assert near.push(memoryview(bytes(6))) == 4


class Accepted(asyncio.Protocol):
    """Notes that a client was accepted."""

    number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Accepted.number += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(1)
    monkeypatch.setattr(listener, "os", SimOs(world.descriptors))
    monkeypatch.setattr(Accepted, "number", 0)
    return world


def listening(world: World) -> ListeningSocket:
    sock = ListeningSocket(world)
    loop: Any = ListeningLoop(world.new_loop("node"))
    as_socket: Any = sock
    Listener(as_socket, Accepted, lambda: None).start(loop)
    return sock


def arrive(sock: ListeningSocket, world: World) -> End:
    near, far = connect(world)
    sock.arrive(far)
    return near


def test_the_listener_refuses_with_its_spare_descriptor_where_no_other_is_left(
    world: World,
) -> None:
    sock = listening(world)
    world.descriptors.run_out(0)
    near = arrive(sock, world)
    world.run(lambda: near._eof_seen, most_s=10.0)
    assert b"no descriptor left" in near.pull()
    assert not Accepted.number
    world.descriptors.abound()
    arrive(sock, world)
    assert world.run(lambda: Accepted.number == 1, most_s=10.0)


def test_clients_wait_while_there_is_not_even_a_spare_descriptor(world: World) -> None:
    sock = listening(world)
    world.descriptors.run_out(-1)  # another process takes the spare one
    near = arrive(sock, world)
    assert not world.run(lambda: near._eof_seen or bool(near._in), most_s=3.0)
    world.descriptors.abound()
    assert world.run(lambda: Accepted.number == 1, most_s=10.0)


def test_descriptors_are_counted() -> None:
    descriptors = Descriptors()
    descriptors.run_out(1)
    descriptors.take()
    with pytest.raises(OSError, match="Too many open files"):
        descriptors.take()
    descriptors.put_back()
    assert not descriptors.are_short


@pytest.mark.parametrize(("fits", "garbled"), [(8, {7}), (1000, set[int]())])
def test_garbage_inside_a_message_may_be_taken_for_checksums(fits: int, garbled: set[int]) -> None:
    """Of a commit that fits only in part, garbage completes the rest."""
    world = World(1)
    checker = SimpleNamespace(garbled=set[int]())
    node: Any = SimpleNamespace(number=7, checker=checker, listening=Mock())
    process: Any = SimpleNamespace(world=world, name="client", loop=world.new_loop("client"))
    link = SimLink(process, node)
    link.end.most_bytes = fits
    asked: Any = link.call(m.Commit(1, [0], bytes(64)), 5.0)
    task = process.loop.create_task(asked)
    world.run(lambda: world.now > 0.5, most_s=1.0)
    link.send_garbage()
    assert checker.garbled == garbled
    task.cancel()
    world.run(task.done, most_s=1.0)


def test_each_policy_of_memory_is_drawn_and_a_seed_always_draws_the_same() -> None:
    drawn = [draw(Random(seed), seed=seed).node.policy for seed in range(200)]
    assert drawn == [draw(Random(seed), seed=seed).node.policy for seed in range(200)]
    assert set(drawn) == set(POLICIES)
    assert 20 < drawn.count("learned") < 60
