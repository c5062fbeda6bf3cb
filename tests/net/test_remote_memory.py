"""Memory that is read through an agent: faults, reads that are given up, and the end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvhold.net.remote_memory import (
    MOST_METADATA_BYTES,
    ChannelFault,
    MemoryRange,
    ReadPiece,
    RemoteMemory,
    address_of,
)
from tests.tiers.agents import Agents, FakeAgent
from tests.tiers.peer_places import eventually

pytestmark = pytest.mark.asyncio
NBYTES = 1 << 16


@contextmanager
def memory_of(agents: Agents, buffer: bytearray, make: Any = None) -> Iterator[RemoteMemory]:
    memory = RemoteMemory(make or agents.make, memoryview(buffer), linger_s=0.01)
    memory.start()
    try:
        yield memory
    finally:
        agents.may_end.set()
        assert memory.close()


class Two:
    def __init__(self, agents: Agents, here: RemoteMemory, there: RemoteMemory, name: str) -> None:
        self.agents, self.here, self.there, self.name = agents, here, there, name

    def pieces(self, count: int = 1, nbytes: int = NBYTES) -> list[ReadPiece]:
        size = nbytes // count
        return [
            ReadPiece(self.here.region.address + at, self.there.region.address + at, size)
            for at in range(0, nbytes, size)
        ]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    agents = Agents()
    with (
        memory_of(agents, bytearray(NBYTES)) as here,
        memory_of(agents, bytearray(range(256)) * (NBYTES // 256)) as there,
    ):
        await eventually(lambda: not here.fault and not there.fault)
        yield Two(agents, here, there, await here.connect(there.metadata))


def agent_of(two: Two) -> FakeAgent:
    return next(one for one in two.agents.by_name.values() if one.reads)


async def test_a_read_brings_all_pieces_and_is_released(two: Two) -> None:
    await two.here.read(two.name, two.pieces(count=16))
    assert two.here._buffer == two.there._buffer
    [read] = agent_of(two).reads
    assert read.is_released


async def test_a_read_that_is_given_up_ends_when_the_agent_has_ended_it(two: Two) -> None:
    two.agents.may_end.clear()
    reading = asyncio.ensure_future(two.here.read(two.name, two.pieces()))
    await eventually(lambda: two.agents.num_begun == 1)
    for _ in range(3):
        reading.cancel()
        await asyncio.wait((reading,), timeout=0.05)
        assert not reading.done(), "its memory may still be written"
    two.agents.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert agent_of(two).reads[0].is_released


async def test_a_read_whose_deadline_has_passed_raises_timeout_when_it_has_ended(two: Two) -> None:
    two.agents.may_end.clear()

    async def read() -> None:
        async with asyncio.timeout(0.05):
            await two.here.read(two.name, two.pieces())

    reading = asyncio.ensure_future(read())
    await asyncio.wait((reading,), timeout=0.2)
    assert not reading.done()
    two.agents.may_end.set()
    with pytest.raises(TimeoutError):
        await reading


async def test_a_fault_of_a_read_is_a_channel_fault_and_others_go_on(two: Two) -> None:
    two.agents.fault = "link down\x07"
    with pytest.raises(ChannelFault, match=r"RuntimeError: link down\?"):
        await two.here.read(two.name, two.pieces())
    assert agent_of(two).num_progress, "other parts of the read may still write"
    two.agents.fault = ""
    await two.here.read(two.name, two.pieces())
    assert all(read.is_released for read in agent_of(two).reads)


async def test_a_read_that_cannot_begin_is_a_channel_fault(two: Two) -> None:
    outside = [ReadPiece(two.here.region.address, two.there.region.address + NBYTES, 8)]
    with pytest.raises(ChannelFault, match="AssertionError"):
        await two.here.read(two.name, outside)
    with pytest.raises(ChannelFault, match="not connected"):
        await two.here.read("nobody", two.pieces())
    with pytest.raises(AssertionError, match="not registered"):
        await two.here.read(two.name, [ReadPiece(two.here.region.address - 1, 1, 8)])


async def test_another_agent_is_removed_once_no_read_from_there_is_left(two: Two) -> None:
    two.agents.may_end.clear()
    reading = asyncio.ensure_future(two.here.read(two.name, two.pieces()))
    await eventually(lambda: two.agents.num_begun == 1)
    two.here.disconnect(two.name)
    with pytest.raises(ChannelFault, match="not connected"):
        await two.here.read(two.name, two.pieces())
    assert agent_of(two).remotes
    two.agents.may_end.set()
    await reading
    await eventually(lambda: not agent_of(two).remotes)


async def test_an_agent_with_the_name_of_another_is_refused(two: Two) -> None:
    with pytest.raises(ChannelFault, match="the same name"):
        await two.here.connect(two.there.metadata)
    with pytest.raises(ChannelFault, match="is no agent"):
        await two.here.connect(b"forged")
    await two.here.read(two.name, two.pieces())


async def test_a_connection_that_is_given_up_is_removed(two: Two) -> None:
    two.here.disconnect(two.name)
    connecting = asyncio.ensure_future(two.here.connect(two.there.metadata))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await eventually(lambda: not two.here._names)


@pytest.mark.parametrize("nbytes", [0, MOST_METADATA_BYTES + 1])
async def test_an_agent_without_usable_metadata_is_not_used(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents()
    monkeypatch.setattr(FakeAgent, "metadata", lambda self: b"x" * nbytes)
    with memory_of(agents, bytearray(NBYTES)) as memory:
        await eventually(lambda: not memory.is_starting)
        assert memory.fault == f"the agent's metadata has {nbytes} bytes"
        with pytest.raises(ChannelFault, match="metadata"):
            await memory.connect(b"x")
        await eventually(lambda: agents.num_closed == 1)


async def test_an_agent_that_cannot_be_made_is_a_fault_with_its_reason() -> None:
    def make() -> FakeAgent:
        raise OSError("no such library")

    with memory_of(Agents(), bytearray(NBYTES), make) as memory:
        await eventually(lambda: not memory.is_starting)
        assert memory.fault == "OSError: no such library"
        with pytest.raises(ChannelFault, match="no such library"):
            await memory.read("x", [])


async def test_no_call_waits_for_an_agent_that_has_ended(two: Two) -> None:
    assert two.here.close()
    with pytest.raises(ChannelFault, match="it has ended"):
        await two.here.read(two.name, two.pieces())
    with pytest.raises(ChannelFault, match="it has ended"):
        await two.here.connect(b"x")


async def test_memory_that_a_read_may_still_write_stays_mapped(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhold.net.remote_memory._CLOSE_S", 0.05)
    two.agents.may_end.clear()
    reading = asyncio.ensure_future(two.here.read(two.name, two.pieces()))
    await eventually(lambda: two.agents.num_begun == 1)
    loop = asyncio.get_running_loop()
    assert not await loop.run_in_executor(None, two.here.close)
    assert two.here._buffer is not None and not two.agents.num_closed
    two.agents.may_end.set()
    await reading
    await eventually(lambda: two.here._buffer is None and two.agents.num_closed == 1)


@pytest.mark.parametrize(
    ("at", "nbytes", "inside"),
    [
        (0, 100, True),
        (99, 1, True),
        (100, 1, False),
        (0, 101, False),
        (-1, 1, False),
        (0, 0, False),
    ],
)
async def test_a_range_has_only_what_lies_wholly_inside(at: int, nbytes: int, inside: bool) -> None:
    assert MemoryRange(1000, 100).has(1000 + at, nbytes) is inside


async def test_the_address_of_a_view_is_that_of_its_first_byte() -> None:
    view = memoryview(bytearray(100))
    assert address_of(view[7:]) == address_of(view) + 7
