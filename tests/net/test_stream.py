"""Large values over a connection: whole, or a fault, and nobody else waits for them."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from kvhold.net.stream import Stream

SIZE = 3 << 20


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Stream, Stream]]:
    """The two ends of one connection, which holds far less than SIZE."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    streams = Stream(ends[0]), Stream(ends[1])
    yield streams
    for stream in streams:
        stream.close()


async def turns(count: int) -> None:
    """Of the loop, for all others."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_value_larger_than_the_connection_holds_arrives_whole(pair: tuple[Stream, Stream]) -> None:
    value, into = os.urandom(SIZE), bytearray(SIZE + 10)
    sending = asyncio.create_task(pair[0].send([b"head", value, b"end"]))
    assert await pair[1].read(4) == b"head"
    parts = [memoryview(into)[:5], memoryview(into)[5:200_000], memoryview(into)[200_000:]]
    await pair[1].read_into(parts, SIZE)
    await sending
    assert into[:SIZE] == value
    assert into[SIZE:] == bytes(10)
    assert await pair[1].read(3) == b"end"


async def test_a_value_that_ends_early_is_a_fault(pair: tuple[Stream, Stream]) -> None:
    reading = asyncio.create_task(pair[1].read_into([memoryview(bytearray(SIZE))], SIZE))
    await pair[0].send([bytes(SIZE - 1)])
    pair[0].close()
    with pytest.raises(EOFError):
        await reading


async def test_whoever_closes_ends_the_reading(pair: tuple[Stream, Stream]) -> None:
    reading = asyncio.create_task(pair[1].read_into([memoryview(bytearray(SIZE))], SIZE))
    await pair[0].send([bytes(100_000)])
    pair[1].close()
    with pytest.raises(ConnectionAbortedError):
        await reading


async def test_a_reading_that_was_cancelled_has_let_go_of_its_memory(pair: tuple[Stream, Stream]) -> None:
    into = bytearray(SIZE)
    reading = asyncio.create_task(pair[1].read_into([memoryview(into)], SIZE))
    await pair[0].send([b"1" * 100_000])
    await turns(10)
    assert into[0], "it is being read"
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    into[:] = bytes(SIZE)
    await pair[0].send([b"2" * 100_000])
    await turns(10)
    assert not any(into)


async def test_others_have_their_turns_while_a_value_arrives(pair: tuple[Stream, Stream]) -> None:
    had = 0

    async def count() -> None:
        nonlocal had
        while True:
            had += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    sending = asyncio.create_task(pair[0].send([bytes(SIZE)]))
    await pair[1].read_into([memoryview(bytearray(SIZE))], SIZE)
    counting.cancel()
    await sending
    assert had > 3
