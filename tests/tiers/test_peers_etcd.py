"""Peers that register in a real etcd: they come, go, restart and move, and hits are exact."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ConfigError, TierUnavailable
from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.directory import Own
from kvhold.tiers.peers.etcd import MOST_LISTED, EtcdPeersTier
from kvhold.tiers.registry import make_tier
from kvhold_lab.servers.base import free_port
from kvhold_lab.servers.etcd import EtcdServer
from tests.tiers.conftest import start_or_skip
from tests.tiers.peer_places import PATIENT_S, Place, checked, eventually, eventually_found, served

pytestmark = pytest.mark.asyncio

LEASE_S = 3  # etcd's least is 2


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    yield from start_or_skip(EtcdServer)


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """One that a test may stop."""
    yield from start_or_skip(EtcdServer)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"kvhold/{request.node.name}"


def a_tier(server: EtcdServer, prefix: str, *, login: str = "", **options: object) -> PeersTier:
    own: dict[str, object] = {
        "answer_timeout_s": PATIENT_S,
        "refresh_s": 0.1,
        "lease_s": LEASE_S,
    }
    pairs = "&".join(f"{name}={value}" for name, value in (own | options).items())
    tier, _ = make_tier(f"peers-etcd://{login}127.0.0.1:{server.port}/{prefix}?{pairs}")
    assert isinstance(tier, EtcdPeersTier)
    return tier


@asynccontextmanager
async def node(
    server: EtcdServer, prefix: str, *, port: int = 0, **options: Any
) -> AsyncIterator[tuple[Place, PeersTier]]:
    """A place that is registered, and the tier of its node."""
    async with served(port=port) as place:
        tier = a_tier(server, prefix, **options)
        tier.serve_as(Own(f"127.0.0.1:{place.port}", place.feed.incarnation))
        try:
            await checked(tier)
            yield place, tier
        finally:
            await tier.close()


@asynccontextmanager
async def following(server: EtcdServer, prefix: str, **options: Any) -> AsyncIterator[PeersTier]:
    tier = a_tier(server, prefix, **options)
    try:
        tier._start()
        yield tier
    finally:
        await tier.close()


def keys_of(server: EtcdServer, prefix: str) -> list[dict[str, str]]:
    begin, end = f"/{prefix}/".encode(), f"/{prefix}0".encode()
    answer = server.call("kv/range", key=_text(begin), range_end=_text(end))
    found: list[dict[str, str]] = answer.get("kvs", [])
    return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def put(server: EtcdServer, key: str, value: bytes) -> None:
    server.call("kv/put", key=_text(key.encode()), value=_text(value))


async def fault_of(tier: PeersTier) -> str:
    """Wait until the list of peers has a fault."""
    await eventually(lambda: tier.peers_status()["list_fault"])
    return tier.peers_status()["list_fault"]


async def mended(tier: PeersTier) -> None:
    await eventually(lambda: not tier.peers_status()["list_fault"])


def ports(tier: PeersTier) -> set[int]:
    return {peer.address.port for peer in tier.peers}


class TestComingAndGoing:
    async def test_registered_nodes_read_each_other(self, etcd: EtcdServer, prefix: str) -> None:
        async with node(etcd, prefix) as (one, first), node(etcd, prefix) as (other, second):
            one.put(make_key(1), b"one")
            other.put(make_key(2), b"other")
            await eventually_found(first, make_key(2), 5)
            await eventually_found(second, make_key(1), 3)
            assert await fetch(first, [make_key(2)], [5]) == [b"other"]
            assert await fetch(second, [make_key(1)], [3]) == [b"one"]
            assert (ports(first), ports(second)) == ({other.port}, {one.port})
            assert first.peers_status()["registered"] == f"127.0.0.1:{one.port}"
            assert len(keys_of(etcd, prefix)) == 2

    async def test_a_node_that_ends_leaves_the_list_at_once(
        self, etcd: EtcdServer, prefix: str
    ) -> None:
        async with following(etcd, prefix, lease_s=600, forget_s=0.1) as tier:
            async with node(etcd, prefix, lease_s=600) as (place, _):
                place.put(make_key(1), b"x")
                await eventually_found(tier, make_key(1), 1)
            assert keys_of(etcd, prefix) == []
            await eventually_found(tier, make_key(1), None)

    async def test_a_killed_node_leaves_with_its_lease(self, etcd: EtcdServer, prefix: str) -> None:
        async with node(etcd, prefix) as (place, tier), node(etcd, prefix) as (_, other):
            await eventually(lambda: ports(other) == {place.port})
            assert tier._roster._reading is not None
            tier._roster._reading.cancel()  # as if it were killed: nothing is revoked
            await eventually(lambda: ports(other) == set())
            assert other.peers_status()["list_fault"] == ""  # it is alone, and knows it

    async def test_a_node_is_registered_as_long_as_it_runs(
        self, etcd: EtcdServer, prefix: str
    ) -> None:
        async with node(etcd, prefix) as (_, tier):
            [before] = keys_of(etcd, prefix)
            await asyncio.sleep(1.5 * LEASE_S)
            assert keys_of(etcd, prefix) == [before]  # not written again, either
            assert tier.peers_status()["list_fault"] == ""

    @pytest.mark.parametrize("lost", ["lease", "key"])
    async def test_a_lost_registration_is_renewed(
        self, etcd: EtcdServer, prefix: str, lost: str
    ) -> None:
        async with node(etcd, prefix) as (place, _):
            [before] = keys_of(etcd, prefix)
            if lost == "lease":
                etcd.call("lease/revoke", ID=before["lease"])
            else:
                etcd.call("kv/deleterange", key=before["key"])

            def is_back() -> bool:
                keys = keys_of(etcd, prefix)
                return len(keys) == 1 and keys[0]["create_revision"] != before["create_revision"]

            await eventually(is_back)
            [after] = keys_of(etcd, prefix)
            assert (after["lease"] == before["lease"]) == (lost == "key")
            assert json.loads(base64.b64decode(after["value"])) == {
                "address": f"127.0.0.1:{place.port}",
                "incarnation": place.feed.incarnation,
            }

    @pytest.mark.parametrize("where", ["same port", "another port"])
    async def test_a_restarted_node_is_followed_and_its_old_chunks_are_not_found(
        self, etcd: EtcdServer, prefix: str, where: str
    ) -> None:
        port = free_port()
        async with following(etcd, prefix) as tier:
            async with node(etcd, prefix, port=port) as (first, _):
                first.put(make_key(1), b"before")
                first.put(make_key(3), b"both")
                await eventually_found(tier, make_key(1), 6)
                await eventually_found(tier, make_key(3), 4)
            port = port if where == "same port" else free_port()
            async with node(etcd, prefix, port=port) as (again, _):
                again.put(make_key(2), b"after!!")
                again.put(make_key(3), b"BOTH")
                await eventually_found(tier, make_key(2), 7)
                await eventually_found(tier, make_key(3), 4)
                assert await tier.probe([make_key(1)]) == [None]
                found = await fetch(tier, [make_key(2), make_key(3)], [7, 4])
                assert found == [b"after!!", b"BOTH"]

    async def test_a_node_may_change_its_address(self, etcd: EtcdServer, prefix: str) -> None:
        async with (
            following(etcd, prefix) as tier,
            node(etcd, prefix) as (place, own),
            served(host="127.0.0.2") as elsewhere,
        ):
            await eventually(lambda: ports(tier) == {place.port})
            elsewhere.put(make_key(1), b"x")
            own.serve_as(Own(f"127.0.0.2:{elsewhere.port}", place.feed.incarnation))
            await eventually_found(tier, make_key(1), 1)
            await eventually(lambda: ports(tier) == {elsewhere.port})
            assert len(keys_of(etcd, prefix)) == 1


class TestTrouble:
    async def test_the_last_list_goes_on_while_etcd_is_away(
        self, own_etcd: EtcdServer, prefix: str
    ) -> None:
        async with node(own_etcd, prefix) as (place, _), following(own_etcd, prefix) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            own_etcd.kill()
            told = await fault_of(tier)
            assert f"etcd at http://127.0.0.1:{own_etcd.port}" in told
            assert told.endswith("the last list stays in use")
            place.put(make_key(2), b"yy")
            await eventually_found(tier, make_key(2), 2)
            assert await fetch(tier, [make_key(1)], [1]) == [b"x"]
            own_etcd.start()
            await mended(tier)
            await eventually(lambda: len(keys_of(own_etcd, prefix)) == 1)
            assert await tier.probe([make_key(1)]) == [1]

    async def test_an_etcd_that_hangs_costs_nothing_but_news(
        self, own_etcd: EtcdServer, prefix: str
    ) -> None:
        async with node(own_etcd, prefix) as (place, _), following(own_etcd, prefix) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            own_etcd.pause()
            assert "no answer" in await fault_of(tier)
            assert await fetch(tier, [make_key(1)], [1]) == [b"x"]
            own_etcd.resume()
            await mended(tier)

    async def test_an_etcd_that_lost_its_data_is_filled_again(
        self, own_etcd: EtcdServer, prefix: str
    ) -> None:
        async with node(own_etcd, prefix) as (one, _), node(own_etcd, prefix) as (_, other):
            one.put(make_key(1), b"x")
            await eventually_found(other, make_key(1), 1)
            for key in keys_of(own_etcd, prefix):
                own_etcd.call("lease/revoke", ID=key["lease"])
            await eventually(lambda: len(keys_of(own_etcd, prefix)) == 2)
            await eventually_found(other, make_key(1), 1)

    async def test_another_member_is_asked_when_one_is_away(
        self, etcd: EtcdServer, prefix: str
    ) -> None:
        put(etcd, f"/{prefix}/1", b'{"address": "127.0.0.1:7", "incarnation": 1}')
        tier, _ = make_tier(f"peers-etcd://127.0.0.1:{free_port()},127.0.0.1:{etcd.port}/{prefix}")
        assert isinstance(tier, PeersTier)
        tier._start()
        await eventually(lambda: ports(tier) == {7})
        await tier.close()

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"junk",
            b"[]",
            b'{"address": "a b:1", "incarnation": 1}',
            b'{"address": "host:0", "incarnation": 1}',
            b'{"address": "host", "incarnation": "1"}',
            b'{"address": "%s:1", "incarnation": 1}' % (b"a" * 300),
            b'{"address": "a:1", "incarnation": 1}' + b" " * 600,
            b"[" * 400,
            b'{"address": "\xff:1", "incarnation": 1}',
        ],
    )
    async def test_keys_that_are_no_registrations_are_ignored_and_told(
        self, etcd: EtcdServer, value: bytes
    ) -> None:
        prefix = f"kvhold/{hash(value)}"
        put(etcd, f"/{prefix}/1", value)
        put(etcd, f"/{prefix}/2", b'{"address": "127.0.0.1:9", "incarnation": 2}')
        async with following(etcd, prefix) as tier:
            await eventually(lambda: ports(tier) == {9})
            await eventually(lambda: "1 keys below" in tier.peers_status()["list_fault"])

    async def test_more_registrations_than_are_read_are_told(
        self, etcd: EtcdServer, prefix: str
    ) -> None:
        for number in range(MOST_LISTED + 10):
            value = b'{"address": "127.0.1.1:%d", "incarnation": %d}' % (number + 1, number + 1)
            put(etcd, f"/{prefix}/{number:04}", value)
        async with following(etcd, prefix) as tier:
            await eventually(lambda: len(tier.peers) == 32)
            assert "at most 32 peers are followed" in await fault_of(tier)

    async def test_an_answer_that_is_too_large_is_a_fault(
        self, etcd: EtcdServer, prefix: str
    ) -> None:
        for number in range(2):
            put(etcd, f"/{prefix}/{number}", b"x" * 1_000_000)
        async with following(etcd, prefix) as tier:
            assert "more than 1048576 bytes" in await fault_of(tier)

    async def test_what_is_not_etcd_is_a_fault(self, prefix: str) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\njunk")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        tier, _ = make_tier(f"peers-etcd://127.0.0.1:{port}/{prefix}")
        with pytest.raises(TierUnavailable, match=r"the answer to kv/range cannot be read"):
            await tier.check()
        await tier.close()
        server.close()
        await server.wait_closed()


class TestRights:
    async def test_a_user_logs_in_again_after_a_restart_and_no_secret_is_told(
        self,
        own_etcd: EtcdServer,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        own_etcd.add_user("ann", "hush-hush")
        secret = tmp_path / "password"
        secret.write_text("hush-hush\n")
        secret.chmod(0o600)
        login = f"ann:${{file:{secret}}}@"
        told = list[str]()
        async with (
            node(own_etcd, "kvhold/peers", login=login) as (place, own),
            following(own_etcd, "kvhold/peers", login=login) as tier,
        ):
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            assert own.peers_status()["registered"]
            with pytest.raises(HTTPError):  # nobody reads it without a login
                keys_of(own_etcd, "kvhold/peers")
            own_etcd.kill()
            await fault_of(tier)
            told += [tier.peers_status()["list_fault"], own.peers_status()["list_fault"]]
            own_etcd.start()
            for one in (tier, own):
                await mended(one)
        for bad, why in (
            ("", "user name is empty"),
            ("ann:wrong-secret@", "authentication failed"),
        ):
            async with following(own_etcd, "kvhold/peers", login=bad) as tier:
                told.append(await fault_of(tier))
                assert why in told[-1]
        async with following(own_etcd, "elsewhere", login="ann:hush-hush@") as tier:
            told.append(await fault_of(tier))
            assert "permission denied" in told[-1]
        for text in (*told, caplog.text):
            assert "hush" not in text and "wrong-secret" not in text

    async def test_a_node_that_may_only_read_says_that_it_is_not_registered(
        self, own_etcd: EtcdServer
    ) -> None:
        put(own_etcd, "/reading/1", b'{"address": "127.0.0.1:9", "incarnation": 9}')
        own_etcd.add_user("ann", "hush")
        # and may read elsewhere
        token = own_etcd.call("auth/authenticate", name="root", password="hush")["token"]
        own_etcd.call(
            "auth/role/grant",
            token=token,
            name="kvhold",
            perm={"permType": "READ", "key": _text(b"/reading/"), "range_end": _text(b"/reading0")},
        )
        tier = a_tier(own_etcd, "reading", login="ann:hush@")
        tier.serve_as(Own("127.0.0.1:1", 1))
        tier._start()
        await eventually(lambda: ports(tier) == {9})
        assert "this node is not registered" in await fault_of(tier)
        assert "permission denied" in tier.peers_status()["list_fault"]
        assert tier.peers_status()["registered"] == ""
        await tier.close()

    async def test_tls_with_client_certificates(self, prefix: str) -> None:
        for server in start_or_skip(lambda: EtcdServer(tls=True)):
            made = server.certificates
            own: dict[str, Any] = {"etcd_cert_file": made.client, "etcd_key_file": made.client_key}
            trust: dict[str, Any] = {"etcd_tls": "true", "etcd_ca_file": made.ca}
            async with (
                node(server, prefix, **trust, **own) as (place, _),
                following(server, prefix, **trust, **own) as tier,
            ):
                place.put(make_key(1), b"x")
                await eventually_found(tier, make_key(1), 1)
            for options in ({}, {"etcd_tls": "true"} | own, trust):
                async with following(server, prefix, **options) as tier:
                    await fault_of(tier)
                    assert tier.peers == []


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("peers-etcd://", "name 1 to 16 members"),
            ("peers-etcd://" + ",".join(f"h{n}" for n in range(17)), "name 1 to 16 members"),
            ("peers-etcd://a/" + "x" * 200, "at most 200 bytes"),
            ("peers-etcd://a?refresh_s=10", "at least 3 times refresh_s = 10"),
            ("peers-etcd://ann@a", "a user and a password"),
            ("peers-etcd://:hush@a", "a user and a password"),
            ("peers-etcd://ann:hush@a", "add etcd_tls=true"),
            ("peers-etcd://a?token=hush", "add tls=true"),
            ("peers-etcd://127.0.0.1?token=hush", "add tls=true"),
            ("peers-etcd://a?etcd_ca_file=/x", "are for TLS"),
            ("peers-etcd://a?etcd_tls=true&etcd_ca_file=/nowhere", "etcd_ca_file: cannot use"),
            ("peers-etcd://a?etcd_tsl=true", "etcd_tls"),
        ],
    )
    async def test_settings_that_cannot_be_are_named(self, url: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told) as caught:
            make_tier(url)
        assert "hush" not in str(caught.value)

    @pytest.mark.parametrize("listen", ["0.0.0.0:7711", "[::]:7711"])
    async def test_an_address_that_nobody_can_use_is_not_registered(self, listen: str) -> None:
        tier, _ = make_tier("peers-etcd://a")
        assert isinstance(tier, PeersTier)
        with pytest.raises(ConfigError, match=r"set peers\.advertise"):
            tier.check_serving(ServePeersConfig(listen=listen))
        tier.check_serving(ServePeersConfig(listen=listen, advertise="10.0.0.5:7711"))
        tier.check_serving(ServePeersConfig(listen="10.0.0.5:7711"))
