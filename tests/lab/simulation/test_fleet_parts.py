"""The parts of simulated fleets: the bus, the directories, clocks that differ, and what a clear
promises then.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvhold.core.errors import TierUnavailable
from kvhold.tiers.peers.directory import Listing, Own
from kvhold_lab.simulation.bus import SimBus, SimStream
from kvhold_lab.simulation.clears import SimOrigin
from kvhold_lab.simulation.clocks import HostClock
from kvhold_lab.simulation.fleet_draw import draw_fleet
from kvhold_lab.simulation.membership import SimDns, SimEtcd, SimMembership
from kvhold_lab.simulation.peer_clears import FleetClears, PeerClears
from kvhold_lab.simulation.world import World

SPACE = b"a namespace of 16"[:16]
PORT = 7711


@pytest.fixture
def world() -> World:
    world = World(1)
    world.may_stall = False
    return world


def run(world: World, work: Any, *, most_s: float = 60.0) -> Any:
    """Return the work's result. Raises its error."""
    task = world.new_loop("test").create_task(work)
    assert world.run(task.done, most_s=most_s)
    return task.result()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - of virtual time
            await asyncio.sleep(0.01)


class TestBus:
    async def reader(self, world: World, stream: SimStream, host: str) -> list[tuple[int, bytes]]:
        """Return what comes to a reader, which has subscribed."""
        came: list[tuple[int, bytes]] = []
        inboxes: Any = SimpleNamespace(put=lambda number, data: came.append((number, data)))
        before = len(stream.subscriptions)
        world.new_loop(host).create_task(SimBus(stream, host).read(inboxes))
        await until(lambda: len(stream.subscriptions) > before)
        return came

    def stream(self, world: World) -> SimStream:
        stream = SimStream(world, usual_s=0.001)
        stream.end_trouble()
        return stream

    async def publish(self, stream: SimStream, *texts: bytes) -> None:
        async with SimBus(stream, "writer").connected() as session:
            for text in texts:
                await session.publish(7, text)

    def test_each_reader_gets_each_message_once_in_the_order_of_the_stream(
        self, world: World
    ) -> None:
        stream = self.stream(world)
        texts = [b"%d" % number for number in range(5)]

        async def read() -> list[list[tuple[int, bytes]]]:
            readers = [await self.reader(world, stream, f"host-{number}") for number in range(3)]
            await self.publish(stream, *texts)
            await until(lambda: all(len(came) >= 5 for came in readers))
            return readers

        assert run(world, read()) == [[(7, text) for text in texts]] * 3

    def test_a_reader_that_was_away_goes_on_where_it_was(self, world: World) -> None:
        stream = self.stream(world)

        async def read() -> list[tuple[int, bytes]]:
            came = await self.reader(world, stream, "host")
            await self.publish(stream, b"1")
            await until(lambda: len(came) == 1)
            stream._go_down(keeps_messages=True)
            with pytest.raises(TierUnavailable):
                await self.publish(stream, b"refused")
            stream._come_back()
            await self.publish(stream, b"2")
            await until(lambda: len(came) == 2)
            return came

        assert run(world, read()) == [(7, b"1"), (7, b"2")]

    def test_old_messages_are_dropped(self, world: World) -> None:
        stream = self.stream(world)
        run(world, self.publish(stream, *[b"x"] * (stream._keeps + 3)), most_s=3600.0)
        assert (stream.first, stream.last) == (4, stream._keeps + 3)
        assert len(stream.after(0)) == stream._keeps


class TestDirectories:
    async def listed(self, directory: Any, own: Own) -> set[str]:
        listing: Listing = await directory.read(own)
        return {str(address) for address in listing.addresses}

    def read(self, world: World, members: SimMembership, directory: Any, own: Own) -> set[str]:
        members.end_trouble()
        found: set[str] = run(world, self.listed(directory, own))
        return found

    def test_a_node_that_was_killed_leaves_etcd_with_its_lease(self, world: World) -> None:
        members = SimEtcd(world)
        one, other = members.directory([1, 2]), members.directory([2, 1])
        first, second = Own("10.0.0.1:7711", 1, PORT), Own("10.0.0.2:7711", 2, PORT)
        assert self.read(world, members, one, first) == set()
        assert self.read(world, members, other, second) == {first.address}
        assert self.read(world, members, one, first) == {second.address}
        world.later(members.lease_s + 1.5, lambda: None)  # time passes only to an event
        world.run(lambda: world.now > members.lease_s + 1, most_s=60.0)
        assert self.read(world, members, other, second) == set()

    def test_a_node_in_dns_is_listed_late_and_leaves_late(self, world: World) -> None:
        members = SimDns(world, PORT)
        directory = members.directory([1, 2])
        members.has_changed(1, ["10.0.0.1"])
        with pytest.raises(TierUnavailable, match="not known"):
            run(world, self.listed(directory, Own()))
        world.run(lambda: False, most_s=20.0)
        assert self.read(world, members, directory, Own()) == {"10.0.0.1:7711"}
        members.has_changed(1, ["10.0.0.9"])
        world.run(lambda: False, most_s=20.0)
        assert self.read(world, members, directory, Own()) == {"10.0.0.9:7711"}


def test_a_loop_has_the_clock_of_its_host(world: World) -> None:
    loop = world.new_loop("host")
    loop.clock = HostClock(ahead_s=-3.0, drift=0.5, up_s=100.0)
    seen: list[tuple[float, int]] = []
    loop.call_later(10.0, lambda: seen.append((world.wall(), world.clock_ms())))
    world.later(20.0, lambda: seen.append((world.wall(), world.clock_ms())))
    world.run(lambda: len(seen) == 2, most_s=60.0)
    started_s = world.wall_offset_s
    assert seen == [(started_s + 10.0 - 3.0 + 5.0, 115_000), (started_s + 20.0, 20_000)]


def test_all_kinds_of_fleets_are_drawn() -> None:
    drawn = [draw_fleet(seed, 3) for seed in range(200)]
    assert {one.directory for one in drawn} == {"static", "dns", "etcd"}
    for name in ("has_bus", "has_two_addresses", "is_skewed"):
        assert {getattr(one, name) for one in drawn} == {False, True}
    assert not any(one.has_two_addresses for one in drawn if one.directory == "etcd")
    assert "etcd" not in {draw_fleet(seed, 100).directory for seed in range(200)}


class TestClearsByOtherClocks:
    """Host 0 clears after host 1, and does not know of that clear."""

    def promise(self, world: World, *, number: int) -> tuple[PeerClears, int, int]:
        """number: of host 0's clear; host 1's has 5,000. Returns when the two began, too."""
        shared = FleetClears(world)
        here, there = PeerClears(shared, 0), PeerClears(shared, 1)
        began: list[int] = []
        for promise, its_number in ((there, 5_000), (here, number)):
            began.append(world.number())
            promise.asked_to_clear(SPACE, began[-1])
            promise.begins(SPACE)
            promise.numbered(SPACE, its_number)
            promise.cleared(SPACE, began[-1], world.number())
        return here, began[0], began[1]

    def bound(self, promise: PeerClears, world: World) -> list[int]:
        """Return since when chunks from a peer must have been stored."""
        asked = world.number()
        found = promise.binding(SPACE + b"key", SimOrigin(0, True), asked, 0.0)
        return [since for since, _ in found]

    def test_a_clear_by_an_equal_clock_binds_from_its_beginning(self, world: World) -> None:
        promise, _, began = self.promise(world, number=6_000)
        assert self.bound(promise, world) == [began]

    def test_a_clear_that_was_overtaken_binds_from_the_beginning_of_the_other(
        self, world: World
    ) -> None:
        promise, other_began, _ = self.promise(world, number=10)
        assert self.bound(promise, world) == [other_began]
