"""Large values over a connection: whole, or a fault, and nobody else waits for them."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from kvhold.core.errors import ProtocolError
from kvhold.net.bulk import Incoming
from kvhold.net.stream import Stream, accept_stream

SIZE = 3 << 20
SIZE_OF_A_SOCKET = 50_000


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


async def test_a_value_larger_than_the_connection_holds_arrives_whole(
    pair: tuple[Stream, Stream],
) -> None:
    value, into = os.urandom(SIZE), bytearray(SIZE + 10)
    sending = asyncio.create_task(pair[0].send([b"head", value, b"end"]))
    assert await pair[1].read(4) == b"head"
    parts = [memoryview(into)[:5], memoryview(into)[5:200_000], memoryview(into)[200_000:]]
    await pair[1].read_into(parts, SIZE)
    await sending
    assert into[:SIZE] == value
    assert into[SIZE:] == bytes(10)
    assert await pair[1].read(3) == b"end"


async def test_the_watch_of_a_value_sees_its_bytes_in_order(pair: tuple[Stream, Stream]) -> None:
    value, into, seen = os.urandom(SIZE), bytearray(SIZE), bytearray()
    sending = asyncio.create_task(pair[0].send([b"head", value, b"end"]))
    assert await pair[1].read(4) == b"head"
    parts = [memoryview(into)[:5], memoryview(into)[5:200_000], memoryview(into)[200_000:]]
    await pair[1].read_values([Incoming(parts, SIZE, seen.extend)])
    await sending
    assert into == seen == value
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


async def test_a_reading_that_was_cancelled_has_let_go_of_its_memory(
    pair: tuple[Stream, Stream],
) -> None:
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


async def test_questions_and_answers_of_any_size_follow_one_another(
    pair: tuple[Stream, Stream],
) -> None:
    async def answer(sizes: list[int]) -> None:
        for size in sizes:
            assert await pair[1].read(3) == b"ask"
            await pair[1].send([size.to_bytes(4, "little"), b"x" * size])

    sizes = [1, 20_000, 0, 16_380, 16_384, 5, 300_000, 2] * 3
    answering = asyncio.create_task(answer(sizes))
    for size in sizes:
        await pair[0].send([b"ask"])
        assert await pair[0].read(4) == size.to_bytes(4, "little")
        assert await pair[0].read(size) == b"x" * size
    await answering


async def read_once(pair: tuple[Stream, Stream], content: bytes) -> int:
    """Something is waited for, and comes. Returns the reader's descriptor."""
    reading = asyncio.create_task(pair[1].read(len(content)))
    await turns(3)
    await pair[0].send([content])
    assert await reading == content
    return pair[1]._sock.fileno()


async def test_what_comes_while_nobody_reads_does_not_keep_the_loop_busy_and_is_read_later(
    pair: tuple[Stream, Stream],
) -> None:
    descriptor = await read_once(pair, b"first")
    await pair[0].send([b"later"])
    await turns(5)
    assert not asyncio.get_running_loop().remove_reader(descriptor), "nobody is to be told"
    assert not pair[1].quiet
    assert await pair[1].read(5) == b"later"
    assert await read_once(pair, b"again") == descriptor


async def test_an_end_that_comes_while_nobody_reads_is_met_by_the_next_who_does(
    pair: tuple[Stream, Stream],
) -> None:
    await read_once(pair, b"first")
    pair[0].close()
    await turns(5)
    assert not pair[1].quiet
    with pytest.raises(EOFError):
        await pair[1].read(1)


async def test_nothing_is_left_with_the_loop_after_a_close(pair: tuple[Stream, Stream]) -> None:
    descriptor = await read_once(pair, b"first")
    pair[1].close()
    assert not asyncio.get_running_loop().remove_reader(descriptor)


def test_a_connection_may_outlive_its_loop() -> None:
    async def begin() -> tuple[Stream, Stream]:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        streams = Stream(ends[0]), Stream(ends[1])
        await read_once(streams, b"first")
        return streams

    for stream in asyncio.run(begin()):
        stream.close()
        assert stream._sock.fileno() == -1


@pytest.mark.parametrize("pieces", [(3, 97), (4, 90, 6), (50, 49, 1), (1,) * 100])
async def test_of_somebody_who_may_say_little_no_byte_more_is_received(
    pair: tuple[Stream, Stream], pieces: tuple[int, ...]
) -> None:
    pair[1].allowed_bytes = 100
    reading = asyncio.create_task(pair[1].read(101))
    for nbytes in (*pieces, 1):
        await pair[0].send([bytes(nbytes)])
        await turns(5)
    with pytest.raises(ProtocolError, match="more bytes than are allowed"):
        await reading
    assert pair[1]._sock.recv(10) == bytes(1), "that one byte is still in the socket"


async def test_who_has_said_what_it_may_goes_on_when_it_may_say_more(
    pair: tuple[Stream, Stream],
) -> None:
    pair[1].allowed_bytes = 100
    await pair[0].send([b"x" * 100, b"y" * SIZE_OF_A_SOCKET])
    assert await pair[1].read(100) == b"x" * 100
    pair[1].allowed_bytes = None
    assert await pair[1].read(SIZE_OF_A_SOCKET) == b"y" * SIZE_OF_A_SOCKET


def a_tcp_connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


async def test_little_after_much_is_read_at_once() -> None:
    """A small answer is not held back until as many bytes have come as a large value needs."""
    client, served = a_tcp_connection()
    client.setblocking(False)
    near, far = Stream(client), await accept_stream(served, None)
    async with asyncio.timeout(20):
        for number in range(3):
            sending = asyncio.create_task(far.send([bytes(SIZE)]))
            await near.read_into([memoryview(bytearray(SIZE))], SIZE)
            await sending
            reading = asyncio.create_task(near.read(5))
            await turns(5)
            await far.send([b"small"])
            assert await reading == b"small", number
    for stream in (near, far):
        stream.close()


async def test_a_few_bytes_and_the_end_of_a_tcp_connection_are_a_fault() -> None:
    client, served = a_tcp_connection()
    client.setblocking(False)
    near, far = Stream(client), await accept_stream(served, None)
    reading = asyncio.create_task(near.read_into([memoryview(bytearray(SIZE))], SIZE))
    await turns(5)
    await far.send([bytes(100)])
    far.close()
    with pytest.raises(EOFError):
        await asyncio.wait_for(reading, 20)
    near.close()


async def test_a_send_to_a_lost_connection_is_a_fault(pair: tuple[Stream, Stream]) -> None:
    sending = asyncio.create_task(pair[0].send([bytes(SIZE)] * 3))
    await turns(5)
    pair[1].close()
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds
        await asyncio.wait_for(sending, 20)


async def test_more_pieces_than_one_call_takes_arrive_in_order(
    pair: tuple[Stream, Stream],
) -> None:
    pieces = [os.urandom(5000) for _ in range(1500)]
    sending = asyncio.create_task(pair[0].send(pieces))
    assert await pair[1].read(1500 * 5000) == b"".join(pieces)
    await sending


async def test_a_descriptor_whose_tls_handshake_failed_may_be_used_again() -> None:
    client, served = a_tcp_connection()
    number = served.fileno()
    accepting = asyncio.create_task(accept_stream(served, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)))
    await turns(5)
    client.close()
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds
        await accepting

    taken = os.open(os.devnull, os.O_RDONLY)  # so that the client does not get the number
    if taken != number:
        os.dup2(taken, number)
        os.close(taken)
    client, served = a_tcp_connection()
    fresh = os.dup(served.fileno())
    served.close()
    os.dup2(fresh, number)
    os.close(fresh)
    stream = await accept_stream(socket.socket(fileno=number), None)
    reading = asyncio.create_task(stream.read(5))
    await turns(5)
    client.sendall(b"hello")
    assert await asyncio.wait_for(reading, 10) == b"hello"
    stream.close()
    client.close()
