"""The Redis tier before a server that lies: garbage, lengths that cannot be, halves of replies,
answers that nobody asked for.

The server is our own: no real one does these things on request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from kvhold.core.errors import TierDenied, TierError, TierUnavailable
from kvhold.testing.tier import make_key, scanned
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.redis.split import HEAD_BYTES
from kvhold.tiers.url import parse_url
from tests.tiers.conftest import opened

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

KEY = make_key(1)
GUARD = b"\xa5"

Say = Callable[[list[bytes]], bytes | None]


def at(url: str) -> RedisTier:
    return opened(RedisTier.from_url(parse_url(url)))


class Liar:
    """Greets like Redis, and then answers each command with what `say` gives; None closes the
    connection.
    """

    def __init__(self) -> None:
        self.port = 0
        self.say: Say = lambda _: b"+PONG\r\n"
        self.connections = 0
        self.commands: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (words := await self._read(reader)) is not None:
                if words[0] == b"CLIENT":
                    writer.write(b"+OK\r\n")
                    continue
                self.commands.append(words[0])
                if (answer := self.say(words)) is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> list[bytes] | None:
        if not (line := await reader.readline()):
            return None
        words = []
        for _ in range(int(line[1:])):
            nbytes = int((await reader.readline())[1:])
            words.append((await reader.readexactly(nbytes + 2))[:-2])
        return words


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    liar = Liar()
    async with await asyncio.start_server(liar.serve, "127.0.0.1", 0) as server:
        liar.port = server.sockets[0].getsockname()[1]
        yield liar


@pytest.fixture
async def tier(liar: Liar) -> AsyncIterator[RedisTier]:
    tier = at(f"redis://127.0.0.1:{liar.port}?connections=1")
    yield tier
    await tier.close()


NOT_A_STRING = [
    b"+OK\r\n",
    b":5\r\n",
    b"*1\r\n$1\r\na\r\n",
    b"$-2\r\n",
    b"$abc\r\n",
    b"$ 5\r\nhello\r\n",
    b"$+5\r\nhello\r\n",
    b"$5_0\r\n",
    b"$\r\n",
    b"$5\r\nhelloXX",
    b"$5\r\nhello\n\r",
    b"$1" + b"0" * 30 + b"\r\n",
    b"\r\n",
    b"_\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00" * 20_000,
]


@pytest.mark.parametrize("reply", NOT_A_STRING, ids=lambda reply: repr(reply[:20]))
@pytest.mark.parametrize("starts", [None, [0]])
async def test_garbage_for_a_value_is_an_error_and_the_end_of_the_connection(
    liar: Liar, tier: RedisTier, reply: bytes, starts: list[int] | None
) -> None:
    liar.say = lambda _: reply
    memory = bytearray(GUARD * 300)
    with pytest.raises(TierError):
        await tier.get([KEY], [[memoryview(memory)[100:200]]], starts=starts)
    assert memory[:100] == memory[200:] == GUARD * 100
    before = liar.connections
    liar.say = lambda words: b"$100\r\n" + b"v" * 100 + b"\r\n"
    assert await tier.get([KEY], [[memoryview(memory)[100:200]]], starts=starts) == [100]
    assert memory == GUARD * 100 + b"v" * 100 + GUARD * 100
    assert liar.connections == before + 1, "the stream that could be out of step is used no more"


@pytest.mark.parametrize("length", [101, 5_000_000, 1 << 40, 9_223_372_036_854_775_807])
async def test_a_huge_length_is_a_miss_without_memory_for_it(
    liar: Liar, tier: RedisTier, length: int
) -> None:
    liar.say = lambda _: b"$%d\r\n" % length + b"x" * 101 + b"\r\n"
    memory = bytearray(GUARD * 300)
    assert await tier.get([KEY], [[memoryview(memory)[100:200]]]) == [None]
    assert memory == GUARD * 300
    liar.say = lambda _: b"$2\r\nok\r\n"
    assert await tier.get([KEY], [[memoryview(memory)[100:200]]]) == [2]


async def test_more_than_the_range_that_was_asked_for_is_an_error(
    liar: Liar, tier: RedisTier
) -> None:
    liar.say = lambda _: b"$101\r\n" + b"x" * 101 + b"\r\n"
    memory = bytearray(GUARD * 300)
    with pytest.raises(TierError):
        await tier.get([KEY], [[memoryview(memory)[100:200]]], starts=[7])
    assert memory == GUARD * 300


@pytest.mark.parametrize(
    "reply",
    [
        b"$2\r\n12\r\n",
        b"+12\r\n",
        b"$99999999\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 50,
        b":1.5\r\n",
        b":0x10\r\n",
        b": 5\r\n",
        b":-3\r\n",
        b"$-1\r\n",
    ],
)
async def test_what_is_no_size_is_never_a_size(liar: Liar, tier: RedisTier, reply: bytes) -> None:
    liar.say = lambda _: reply
    with suppress(TierError):
        assert await tier.probe([KEY]) == [None]
    liar.say = lambda _: b":12\r\n"
    assert await tier.probe([KEY]) == [12]


@pytest.mark.parametrize("length", [12, HEAD_BYTES])
@pytest.mark.parametrize(
    "reply", [b"+PONG\r\n", b":1\r\n", b"*0\r\n", b"*1\r\n:1\r\n", b"-ERR no\r\n"]
)
async def test_what_is_no_removal_is_never_one(
    liar: Liar, tier: RedisTier, reply: bytes, length: int
) -> None:
    liar.say = lambda words: b":%d\r\n" % length if words[0] == b"STRLEN" else reply
    with pytest.raises(TierError):
        await tier.delete([KEY])


@pytest.mark.parametrize("reply", [b"+PONG\r\n", b":1\r\n", b"*0\r\n", b"-ERR no\r\n"])
async def test_a_put_in_parts_fails_if_its_last_answer_is_garbage(liar: Liar, reply: bytes) -> None:
    def say(words: list[bytes]) -> bytes:
        is_end = words[0] in (b"WATCH", b"GETRANGE", b"MULTI", b"PERSIST", b"EXEC")
        return reply if is_end else b":1\r\n" if words[0] != b"SET" else b"+OK\r\n"

    liar.say = say
    tier = at(f"redis://127.0.0.1:{liar.port}?max_value_bytes=100")
    [fault] = await tier.put([(KEY, [memoryview(bytes(250))])])
    assert isinstance(fault, TierError)
    await tier.close()


async def test_half_a_value_and_an_end_is_unavailable(liar: Liar, tier: RedisTier) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await liar._read(reader)
        writer.write(b"+OK\r\n")
        await liar._read(reader)
        writer.write(b"$100\r\n" + b"v" * 50)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
        broken = at(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        memory = bytearray(GUARD * 300)
        with pytest.raises(TierUnavailable):
            await broken.get([KEY], [[memoryview(memory)[100:200]]])
        assert memory[:100] == memory[150:200] + GUARD * 50 == memory[200:] == GUARD * 100
        await broken.close()


async def test_a_connection_that_was_closed_while_idle_is_made_again_once(
    liar: Liar, tier: RedisTier
) -> None:
    liar.say = lambda _: b":1\r\n"
    assert await tier.probe([KEY]) == [1]
    answers = iter([None, b":2\r\n"])  # it closes instead of answering, as if it had been about to
    liar.say = lambda _: next(answers)
    assert await tier.probe([KEY]) == [2]
    assert liar.connections == 2
    liar.say = lambda _: None
    with pytest.raises(TierUnavailable):
        await tier.probe([KEY])
    assert liar.connections == 3, "once, and no more"


async def test_d30_a_reply_that_nobody_asked_for_answers_nobody(
    liar: Liar, tier: RedisTier
) -> None:
    liar.say = lambda _: b":5\r\n:666\r\n"
    assert await tier.probe([KEY]) == [5]
    liar.say = lambda _: b":7\r\n"
    assert await tier.probe([KEY]) == [7]
    assert liar.connections == 2


async def test_d30_a_cancelled_calls_reply_answers_nobody(liar: Liar, tier: RedisTier) -> None:
    liar.say = lambda _: b":1\r\n"
    assert await tier.probe([KEY]) == [1]
    for turns in range(40):
        liar.say = lambda _: b":666\r\n"
        call = asyncio.ensure_future(tier.probe([KEY]))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait((call,))
        liar.say = lambda _, turns=turns: b":%d\r\n" % (turns + 100)  # type: ignore[misc]
        assert await tier.probe([KEY]) == [turns + 100]


@pytest.mark.parametrize(
    "reply",
    [
        b"*0\r\n",
        b"*1\r\n:5\r\n",
        b"*2\r\n:0\r\n*0\r\n",
        b"$1\r\n0\r\n",
        b"-ERR no\r\n",
        b"*2\r\n$1\r\n0\r\n$-1\r\n",
    ],
)
async def test_a_scan_that_is_answered_with_nonsense_is_an_error(
    liar: Liar, tier: RedisTier, reply: bytes
) -> None:
    answers = iter([reply])
    liar.say = lambda _: next(answers, None)
    with pytest.raises(TierError):
        await scanned(tier)


@pytest.mark.parametrize(
    "slots",
    [
        b"*0\r\n",
        b":1\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*1\r\n*3\r\n:5\r\n:1\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:0\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n*0\r\n:7\r\n",
        b"-ERR This instance has cluster support disabled\r\n",
    ],
)
async def test_a_cluster_that_says_nonsense_is_an_error(liar: Liar, slots: bytes) -> None:
    liar.say = lambda _: slots
    tier = at(f"redis-cluster://127.0.0.1:{liar.port}")
    with pytest.raises(TierError):
        await tier.probe([KEY])
    await tier.close()


@pytest.mark.parametrize("code", [b"MOVED", b"ASK"])
async def test_a_key_that_is_sent_round_in_circles_is_given_up(liar: Liar, code: bytes) -> None:
    port = liar.port
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port
    liar.say = lambda words: (
        slots if words[0] == b"CLUSTER" else b"-%b 1 127.0.0.1:%d\r\n" % (code, port)
    )
    tier = at(f"redis-cluster://127.0.0.1:{port}")
    with pytest.raises(TierUnavailable):
        await tier.probe([KEY])
    assert len(liar.commands) < 40
    await tier.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"-MOVED\r\n",
        b"-MOVED 1 nowhere\r\n",
        b"-MOVED 1 h:99999\r\n",
        b"-ASK 1 :\r\n",
        b"-MOVED 1 127.0.0.1:-1\r\n",
    ],
)
async def test_a_redirect_to_nowhere_is_an_error(liar: Liar, tier: RedisTier, reply: bytes) -> None:
    liar.say = lambda _: reply
    with pytest.raises(TierError):
        await tier.probe([KEY])


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"-LOADING Redis is loading\r\n", TierUnavailable),
        (b"-READONLY You can't write\r\n", TierUnavailable),
        (b"-CLUSTERDOWN The cluster is down\r\n", TierUnavailable),
        (b"-MASTERDOWN Link with MASTER is down\r\n", TierUnavailable),
        (b"-ERR max number of clients reached\r\n", TierUnavailable),
        (b"-NOAUTH Authentication required.\r\n", TierDenied),
        (b"-NOPERM this user has no permissions\r\n", TierDenied),
    ],
)
async def test_what_a_server_says_of_itself_is_a_fault_of_the_place(
    liar: Liar, tier: RedisTier, reply: bytes, expected: type[TierError]
) -> None:
    liar.say = lambda _: reply
    with pytest.raises(expected):
        await tier.probe([KEY])
    with pytest.raises(expected):
        await tier.get([KEY], [[memoryview(bytearray(10))]])
    with pytest.raises(expected):
        await tier.put([(KEY, [memoryview(b"x")])])


async def test_a_password_that_the_server_repeats_is_not_told(liar: Liar) -> None:
    liar.say = lambda words: (
        b"-ERR unknown command 'AUTH', with args beginning with: '%b'\r\n" % words[-1]
    )
    tier = at(f"redis://:hunter2@127.0.0.1:{liar.port}")
    with pytest.raises(TierDenied) as caught:
        await tier.check()
    assert "hunter2" not in str(caught.value)
    await tier.close()
