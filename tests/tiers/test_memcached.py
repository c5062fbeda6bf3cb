"""The memcached tier against a real server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from kvhold.core.errors import ConfigError, TierError, TierFull, TierUnavailable
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.memcached import MemcachedTier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.memcached import MemcachedServer
from tests.tiers.conftest import opened, start_or_skip

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

KEY = make_key(1)
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_server() -> Iterator[MemcachedServer]:
    yield from start_or_skip(lambda: MemcachedServer(item_bytes=4 * MIB))


@pytest.fixture
def server(shared_server: MemcachedServer) -> Iterator[MemcachedServer]:
    if not shared_server.running:
        shared_server.start()
    yield shared_server
    if shared_server.running:
        shared_server.resume()


@pytest.fixture
async def tier(server: MemcachedServer) -> AsyncIterator[MemcachedTier]:
    forget_all(server)
    tier = at(server.url)
    yield tier
    await tier.close()


def forget_all(server: MemcachedServer) -> None:
    """By the server's own command: its list, which a scan reads, may leave an item out that is
    being moved.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"flush_all\r\n")
        assert sock.recv(100) == b"OK\r\n"


def at(url: str) -> MemcachedTier:
    return opened(MemcachedTier.from_url(parse_url(url)))


class TestMemcachedTier(TierContract):
    too_large_bytes = 5 * MIB

    @pytest.fixture
    async def tier(self, server: MemcachedServer) -> AsyncIterator[MemcachedTier]:
        forget_all(server)
        tier = at(server.url)
        yield tier
        await tier.close()


async def test_a_restart_needs_no_new_tier(server: MemcachedServer, tier: MemcachedTier) -> None:
    values = {make_key(i): make_value(i, 3 * MIB) for i in range(6)}
    await store(tier, values)
    server.kill()
    for call in (
        tier.check(),
        tier.probe([KEY]),
        fetch(tier, [KEY], [1]),
        store(tier, {KEY: b"x"}),
        tier.delete([KEY]),
        scanned(tier),
    ):
        with pytest.raises(TierUnavailable, match=str(server.port)):
            await call
    server.start()
    assert await fetch(tier, list(values), [3 * MIB] * 6) == [None] * 6
    assert await store(tier, values) == [True] * 6
    assert await fetch(tier, list(values), [3 * MIB] * 6) == list(values.values())


async def test_a_cancelled_call_lets_go_and_its_reply_answers_nobody(
    server: MemcachedServer, tier: MemcachedTier
) -> None:
    await store(tier, {make_key(i): make_value(i, MIB) for i in range(4)})
    server.pause()
    room = bytearray(MIB)
    calls = [
        asyncio.ensure_future(tier.get([KEY], [[memoryview(room)]])),
        asyncio.ensure_future(tier.probe([KEY])),
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    server.resume()
    before = bytes(room)
    keys = [make_key(i) for i in range(4)]
    assert await fetch(tier, keys, [MIB] * 4) == [make_value(i, MIB) for i in range(4)]
    assert await tier.probe([make_key(9), *keys]) == [None, *[MIB] * 4]
    assert bytes(room) == before


async def test_a_full_server_that_evicts_nothing_refuses() -> None:
    with MemcachedServer(item_bytes=MIB, memory_bytes=16 * MIB, evict=False) as small:
        tier = at(f"{small.url}?connections=1")
        values = dict.fromkeys(map(make_key, range(40)), make_value(1, 700_000))
        faults = await tier.put([(key, [memoryview(value)]) for key, value in values.items()])
        assert any(isinstance(fault, TierFull) for fault in faults)
        assert None in faults
        expected = [
            value if fault is None else None
            for value, fault in zip(values.values(), faults, strict=True)
        ]
        assert await fetch(tier, list(values), [700_000] * 40) == expected
        await tier.close()


async def test_others_items_are_not_keys(server: MemcachedServer, tier: MemcachedTier) -> None:
    other = at(f"{server.url}?prefix=kvholder:")
    await store(other, {KEY: b"another"})
    await store(tier, {KEY: b"one"})
    assert await fetch(tier, [KEY], [10]) == [b"one"]
    assert await scanned(tier) == [KEY]
    assert await other.delete([KEY]) == [True]
    await other.close()


GARBAGE = [
    b"VALUE x 0 5\r\nhello\r\nEND\r\n",
    b"VA -1\r\n",
    b"VA 1e3\r\n",
    b"HD\r\n",
    b"VA 100\r\n" + b"x" * 102,
    b"\x00" * 20_000,
]


@pytest.mark.parametrize("reply", GARBAGE, ids=lambda reply: repr(reply[:10]))
async def test_garbage_is_an_error_and_the_end_of_the_connection(reply: bytes) -> None:
    ended = asyncio.Event()

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(reply)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        ended.set()

    async with await asyncio.start_server(lie, "127.0.0.1", 0) as server:
        tier = at(f"memcached://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        memory = bytearray(b"\xa5" * 300)
        with pytest.raises(TierError, match="protocol"):
            await tier.get([KEY], [[memoryview(memory)[100:200]]])
        assert memory[:100] == memory[200:] == b"\xa5" * 100
        await ended.wait()
        await tier.close()


@pytest.mark.parametrize(
    "line",
    [
        "memcached://",
        "memcached://a,b",
        "memcached://a/1",
        "memcached://u:p@a",
        "memcached://a?prefix=%20",
        "memcached://a?conections=1",
    ],
)
def test_what_cannot_be_is_said_before_any_io(line: str) -> None:
    with pytest.raises(ConfigError):
        at(line)
