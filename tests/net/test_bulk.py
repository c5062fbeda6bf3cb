"""Large values that threads move: as whole, and as easy to stop, as in the loop."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvhold.net import bulk
from kvhold.net.bulk import Incoming
from kvhold.net.stream import Stream, accept_stream

SIZE = 3 << 20
HEADER = 600


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def connected(threads: ThreadPoolExecutor) -> tuple[Stream, Stream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
    streams = await accept_stream(client, None), await accept_stream(served, None)
    for stream in streams:
        stream.threads = threads
    return streams


@pytest.fixture
async def pair(thread: ThreadPoolExecutor) -> AsyncIterator[tuple[Stream, Stream]]:
    streams = await connected(thread)
    yield streams
    for stream in streams:
        stream.close()


def incoming(watch: bytearray | None = None) -> Incoming:
    parts = (memoryview(bytearray(HEADER)), memoryview(bytearray(SIZE)))
    return Incoming(parts, HEADER + SIZE, None if watch is None else watch.extend)


async def test_values_of_several_parts_arrive_whole_in_both_directions(
    pair: tuple[Stream, Stream],
) -> None:
    for near, far in (pair, reversed(pair)):
        values = [os.urandom(HEADER + SIZE) for _ in range(3)]
        seen = [bytearray() for _ in values]
        sending = asyncio.create_task(near.send([b"head", *values, b"end"]))
        assert await far.read(4) == b"head"
        into = [incoming(watch) for watch in seen]
        await far.read_values(into)
        assert await far.read(3) == b"end"
        await sending
        assert [b"".join(one.parts) for one in into] == values == seen
        assert all(one.has_arrived for one in into)


async def test_what_came_before_a_lost_connection_has_arrived(
    pair: tuple[Stream, Stream],
) -> None:
    into = [incoming(), incoming()]
    reading = asyncio.create_task(pair[1].read_values(into))
    value = os.urandom(HEADER + SIZE)
    await pair[0].send([value, value[:-1]])
    pair[0].close()
    with pytest.raises(EOFError):
        await reading
    assert [one.has_arrived for one in into] == [True, False]
    assert b"".join(into[0].parts) == value


async def test_a_cancelled_read_has_let_go_of_its_memory(pair: tuple[Stream, Stream]) -> None:
    into = incoming()
    reading = asyncio.create_task(pair[1].read_values([into]))
    await pair[0].send([b"1" * 700_000])
    while not into.parts[1][0]:  # noqa: ASYNC110 - a thread writes it
        await asyncio.sleep(0.001)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    into.parts[1][:] = bytes(SIZE)
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds
        await pair[0].send([b"2" * 8_000_000] * 4)
    assert not any(into.parts[1])


@pytest.mark.parametrize("come", [0, 700_000])
async def test_whoever_closes_ends_the_reading(pair: tuple[Stream, Stream], come: int) -> None:
    descriptor = pair[1]._sock.fileno()
    reading = asyncio.create_task(pair[1].read_values([incoming()]))
    await pair[0].send([bytes(come)])
    await asyncio.sleep(0)
    assert pair[1]._apart is not None
    pair[1].close()
    with pytest.raises(ConnectionAbortedError):
        await reading
    assert pair[1]._sock.fileno() == -1
    assert not asyncio.get_running_loop().remove_reader(descriptor)


async def test_a_slow_connection_does_not_keep_the_thread(
    pair: tuple[Stream, Stream], thread: ThreadPoolExecutor
) -> None:
    slow = incoming()
    waiting = asyncio.create_task(pair[1].read_values([slow]))
    await pair[0].send([bytes(100_000)])
    others = await connected(thread)
    value, into = os.urandom(HEADER + SIZE), incoming()
    sending = asyncio.create_task(others[0].send([value]))
    async with asyncio.timeout(20):
        await others[1].read_values([into])
        await sending
        assert b"".join(into.parts) == value
        assert not waiting.done()
        await pair[0].send([bytes(HEADER + SIZE - 100_000)])
        await waiting
    for stream in others:
        stream.close()


async def test_a_fast_connection_gives_the_thread_back_now_and_then(
    pair: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_TURN_S", -1.0)
    value, into = os.urandom(HEADER + SIZE), incoming()
    sending = asyncio.create_task(pair[0].send([value]))
    async with asyncio.timeout(20):
        await pair[1].read_values([into])
        await sending
    assert b"".join(into.parts) == value
