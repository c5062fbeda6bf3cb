"""Nodes of other versions, in raw msgpack."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvhold.core.errors import TierUnavailable
from kvhold.net.peers import PEERS_VERSION
from kvhold.testing.tier import fetch, make_key, make_value
from kvhold.tiers.peers.faults import PeerRefuses
from kvhold.tiers.peers.index import digest_of, pack
from tests.tiers.peer_places import PATIENT_S, eventually_found, following, served

pytestmark = pytest.mark.asyncio

VALUE = make_value(1, 50_000)


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, *fields: Any, then: bytes = b"") -> None:
        body = msgspec.msgpack.encode(fields)
        self._writer.write(len(body).to_bytes(4, "little") + body + then)
        await self._writer.drain()

    async def read(self) -> list[Any]:
        async with asyncio.timeout(PATIENT_S):
            length = int.from_bytes(await self._reader.readexactly(4), "little")
            record = msgspec.msgpack.decode(await self._reader.readexactly(length))
        assert isinstance(record, list)
        return record

    async def read_bytes(self, nbytes: int) -> bytes:
        async with asyncio.timeout(PATIENT_S):
            return await self._reader.readexactly(nbytes)

    def close(self) -> None:
        self._writer.close()


async def connected(port: int, version: int) -> Wire:
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    await wire.send("CentralHello", "kvhold-peer", version, "")
    return wire


class OtherNode:
    """spoken: by the hello's version; None: it refuses"""

    def __init__(self, spoken: dict[int, int | None], *more: Any) -> None:
        self._spoken, self._more = spoken, more
        self.hellos: list[int] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            _, _, version, _ = await wire.read()
            self.hellos.append(version)
            spoken = self._spoken.get(version)
            if spoken is None:
                await wire.send("CentralRefused", "the client is older: upgrade it", False, True)
                return
            await wire.send("PeerWelcome", spoken, "9.9", 7, "other-host", None, "", *self._more)
            while True:
                await self._answer(wire, await wire.read())
        except (EOFError, OSError):
            pass
        finally:
            wire.close()

    async def _answer(self, wire: Wire, request: list[Any]) -> None:
        if request[0] == "Follow":
            digests, sizes = pack([(digest_of(make_key(1)), len(VALUE))])
            await wire.send("Page", 1, True, True, [], digests, sizes, *self._more)
        elif request[0] == "PeerGet":
            await wire.send("PeerValues", [len(VALUE)], then=VALUE)
        else:
            assert request[0] == "Introduce"


@asynccontextmanager
async def other_node(node: OtherNode) -> AsyncIterator[int]:
    server = await asyncio.start_server(node.converse, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("apart", [-1, 0, 1])
async def test_a_reader_one_version_apart_is_served_in_the_lower_version(apart: int) -> None:
    async with served() as place:
        place.put(make_key(1), VALUE)
        theirs = PEERS_VERSION + apart
        wire = await connected(place.port, theirs)
        tag, spoken, *_ = await wire.read()
        assert (tag, spoken) == ("PeerWelcome", min(theirs, PEERS_VERSION))
        await wire.send("Introduce", "other-host", 0)
        await wire.send("PeerGet", make_key(1), [len(VALUE)])
        assert await wire.read() == ["PeerValues", [len(VALUE)]]
        assert await wire.read_bytes(len(VALUE)) == VALUE
        await wire.send("Follow", 0, 0)
        pages = [await wire.read()]
        while pages[-1][0] != "Page":
            pages.append(await wire.read())
        assert pack([(digest_of(make_key(1)), len(VALUE))]).digests == pages[-1][5]
        wire.close()


@pytest.mark.parametrize(
    ("apart", "told"),
    [
        (-2, "older one: upgrade it"),
        (2, "newer one: upgrade this side"),
        (98, "newer one: upgrade this side"),
    ],
)
async def test_a_reader_more_than_one_version_apart_is_told_who_must_upgrade(
    apart: int, told: str
) -> None:
    async with served() as place:
        wire = await connected(place.port, PEERS_VERSION + apart)
        tag, reason, denied, is_other_version = await wire.read()
        assert (tag, denied, is_other_version) == ("CentralRefused", False, True)
        assert f"kvhold node for peers, protocol {PEERS_VERSION}; " in reason
        assert reason.endswith(told)
        wire.close()


@pytest.mark.parametrize(
    ("spoken", "more"),
    [(PEERS_VERSION - 1, ()), (PEERS_VERSION, ("a later field", {"of": 2}))],
    ids=["an older node", "a newer node"],
)
async def test_a_node_one_version_apart_is_followed_and_read(
    spoken: int, more: tuple[Any, ...]
) -> None:
    node = OtherNode({PEERS_VERSION: spoken}, *more)
    async with other_node(node) as port, following(port) as tier:
        await tier.check()
        await eventually_found(tier, make_key(1), len(VALUE))
        assert await fetch(tier, [make_key(1)], [len(VALUE)]) == [VALUE]
        assert tier.peers[0].kvhold == "9.9"
    assert set(node.hellos) == {PEERS_VERSION}


@pytest.mark.parametrize(
    ("spoken", "told"),
    [
        (PEERS_VERSION - 2, "and this node speaks"),
        (PEERS_VERSION + 1, "and this node speaks"),
        (None, "the client is older: upgrade it"),
    ],
)
async def test_a_node_that_cannot_be_understood_is_refused_with_the_way_out(
    spoken: int | None, told: str
) -> None:
    node = OtherNode({PEERS_VERSION: spoken})
    async with other_node(node) as port, following(port) as tier:
        with pytest.raises(TierUnavailable, match=told):
            await tier.check()
        [peer] = tier.peers
        assert isinstance(peer.last_fault, PeerRefuses)
        assert peer.last_fault.cause == "version"
        assert "upgrade" in str(peer.last_fault)
