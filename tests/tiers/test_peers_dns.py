"""Peers that a DNS name lists: they come, go, restart and change addresses, and hits are exact."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhold.cli.doctor import Finding, _look_at_peers
from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ConfigError, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.node.peer_server import PeerServer
from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.directory import Own, is_host_name, parse_address
from kvhold.tiers.peers.dns import DnsPeersTier
from kvhold.tiers.peers.index import digest_of
from kvhold.tiers.peers.peer import Peer
from kvhold.tiers.registry import make_tier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.base import NotInstalled, free_port
from kvhold_lab.servers.certificates import make_certificates
from tests.programs import needed_program
from tests.tiers.peer_places import PATIENT_S, checked, eventually, eventually_found, served

pytestmark = pytest.mark.asyncio

UNUSED = "peers.test"  # no resolver is asked for it


class Names:
    """The answers of a resolver: addresses, or a fault."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] = list(addresses)
        self.fault: Exception | None = None
        self.num_asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, name: str) -> list[str]:
        assert name == UNUSED
        self.num_asked += 1
        assert self.may_answer.wait(PATIENT_S)
        if self.fault is not None:
            raise self.fault
        return list(self.addresses)


@asynccontextmanager
async def following(names: Names, port: int, **options: object) -> AsyncIterator[PeersTier]:
    pairs = {"answer_timeout_s": PATIENT_S, "refresh_s": 0.05} | options
    url = "&".join(f"{name}={value}" for name, value in pairs.items())
    tier = DnsPeersTier.from_url(parse_url(f"peers-dns://{UNUSED}:{port}?{url}"), resolver=names)
    try:
        yield tier
    finally:
        names.may_answer.set()
        await tier.close()


def listed(tier: PeersTier) -> list[str]:
    return [peer.address.host for peer in tier.peers]


def has(tier: PeersTier, peer: Peer, key: bytes) -> bool:
    found = tier._index.find(digest_of(key))
    return found is not None and bool(found.peers & peer.mask)


def followed(tier: PeersTier) -> set[str]:
    return {peer.address.host for peer in tier.peers if peer.is_followed}


@pytest.fixture
def port() -> int:
    return free_port()


class TestComingAndGoing:
    async def test_each_address_is_a_peer(self, port: int) -> None:
        async with (
            served(host="127.0.0.2", port=port) as one,
            served(host="127.0.0.3", port=port) as other,
            following(Names("127.0.0.3", "127.0.0.2"), port) as tier,
        ):
            one.put(make_key(1), b"one")
            other.put(make_key(2), b"other")
            await tier.check()
            assert listed(tier) == ["127.0.0.2", "127.0.0.3"]
            await eventually_found(tier, make_key(1), 3)
            await eventually_found(tier, make_key(2), 5)
            assert await fetch(tier, [make_key(1), make_key(2)], [3, 5]) == [b"one", b"other"]

    async def test_a_peer_that_is_listed_later_is_followed(self, port: int) -> None:
        names = Names("127.0.0.2")
        async with (
            served(host="127.0.0.2", port=port),
            served(host="127.0.0.3", port=port) as late,
            following(names, port) as tier,
        ):
            late.put(make_key(1), b"late")
            await tier.check()
            assert await tier.probe([make_key(1)]) == [None]
            names.addresses.append("127.0.0.3")
            await eventually_found(tier, make_key(1), 4)
            assert await fetch(tier, [make_key(1)], [4]) == [b"late"]

    async def test_a_peer_that_leaves_the_list_is_not_asked_and_is_forgotten(
        self, port: int
    ) -> None:
        names = Names("127.0.0.2", "127.0.0.3")
        async with (
            served(host="127.0.0.2", port=port) as left,
            served(host="127.0.0.3", port=port) as stays,
            following(names, port, forget_s=0.3) as tier,
        ):
            left.put(make_key(1), b"left")
            stays.put(make_key(2), b"stays")
            await eventually_found(tier, make_key(1), 4)
            await eventually_found(tier, make_key(2), 5)
            names.addresses.remove("127.0.0.2")
            await eventually_found(tier, make_key(1), None)
            assert await tier.get([make_key(1)], [[memoryview(bytearray(4))]]) == [None]
            assert "kvhold_peer_served_chunks" not in str(left.server.metrics.as_dict())
            await eventually(lambda: tier.num_chunks == 1)
            await eventually(lambda: left.server.num_served == 0)
            assert await tier.probe([make_key(2)]) == [5]

    async def test_a_peer_that_is_soon_listed_again_costs_no_snapshot(self, port: int) -> None:
        names = Names("127.0.0.2", "127.0.0.3")
        async with (
            served(host="127.0.0.2", port=port) as back,
            served(host="127.0.0.3", port=port),
            following(names, port) as tier,
        ):
            back.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            num_pages, pages = 0, back.feed.pages

            def counted() -> Any:
                nonlocal num_pages
                num_pages += 1
                return pages()

            back.feed.pages = counted  # type: ignore[method-assign]
            names.addresses.remove("127.0.0.2")
            await eventually_found(tier, make_key(1), None)
            back.put(make_key(2), b"yy")
            back.remove(make_key(1))
            names.addresses.append("127.0.0.2")
            await eventually_found(tier, make_key(2), 2)
            assert await tier.probe([make_key(1)]) == [None]
            assert num_pages == 0

    async def test_a_lost_peer_that_is_listed_again_is_forgotten(self, port: int) -> None:
        names = Names("127.0.0.2", "127.0.0.3")
        async with (
            served(host="127.0.0.2", port=port) as lost,
            served(host="127.0.0.3", port=port),
            following(names, port, forget_s=1.0) as tier,
        ):
            lost.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            names.addresses.remove("127.0.0.2")
            await eventually(lambda: listed(tier) == ["127.0.0.3"])
            await lost.server.stop()
            names.addresses.append("127.0.0.2")
            await eventually(lambda: len(listed(tier)) == 2)
            await eventually(lambda: tier.num_chunks == 0)
            assert len(listed(tier)) == 2

    async def test_a_node_that_restarts_at_another_address_is_another_peer(self, port: int) -> None:
        names = Names("127.0.0.2")
        async with following(names, port) as tier:
            async with served(host="127.0.0.2", port=port) as first:
                first.put(make_key(1), b"first")
                first.put(make_key(3), b"both")
                await eventually_found(tier, make_key(1), 5)
                await eventually_found(tier, make_key(3), 4)
            async with served(host="127.0.0.9", port=port) as again:
                again.put(make_key(2), b"again!")
                again.put(make_key(3), b"BOTH")
                names.addresses[:] = ["127.0.0.9"]
                await eventually_found(tier, make_key(2), 6)
                keys = [make_key(number) for number in (1, 2, 3)]
                assert await tier.probe(keys) == [None, 6, 4]
                assert await fetch(tier, keys[1:], [6, 4]) == [b"again!", b"BOTH"]

    async def test_a_number_in_the_index_has_no_chunks_of_its_earlier_peer(self, port: int) -> None:
        names = Names("127.0.0.2")
        async with (
            served(host="127.0.0.2", port=port) as before,
            served(host="127.0.0.3", port=port) as after,
            following(names, port, forget_s=0.05) as tier,
        ):
            before.put(make_key(1), b"before")
            await eventually_found(tier, make_key(1), 6)
            names.addresses[:] = ["127.0.0.3"]
            await eventually(lambda: followed(tier) == {"127.0.0.3"} and tier.num_chunks == 0)
            names.addresses[:] = ["127.0.0.3", "127.0.0.2"]
            await eventually(lambda: len(followed(tier)) == 2)
            assert {peer.number for peer in tier.peers} == {0, 1}
            after.put(make_key(2), b"after")
            await eventually_found(tier, make_key(2), 5)
            held = {
                peer.address.host: [
                    key for key in (make_key(1), make_key(2)) if has(tier, peer, key)
                ]
                for peer in tier.peers
            }
            assert held == {"127.0.0.2": [make_key(1)], "127.0.0.3": [make_key(2)]}

    async def test_a_peer_that_left_leaves_the_metrics_with_its_chunks(self, port: int) -> None:
        names = Names("127.0.0.2")
        async with (
            served(host="127.0.0.2", port=port) as before,
            served(host="127.0.0.3", port=port) as after,
            following(names, port, forget_s=0.05) as tier,
        ):
            before.put(make_key(1), b"before")
            await eventually_found(tier, make_key(1), 6)
            left = tier.peers[0]
            names.addresses[:] = ["127.0.0.3"]
            after.put(make_key(2), b"after")
            await eventually_found(tier, make_key(2), 5)
            await eventually(lambda: "127.0.0.2" not in str(tier.metrics.as_dict()))
            left.record.loaded(1.0, num_chunks=1, nbytes=1, num_absent=1)  # a get that ends late
            left.record.indexed(0)
            counted = tier.metrics.as_dict()
            assert "127.0.0.2" not in str(counted)
            assert counted[f"kvhold_peer_index_chunks{{peer=127.0.0.3:{port}}}"] == 1

    async def test_this_node_is_not_followed(self, port: int) -> None:
        names = Names("127.0.0.2", "127.0.0.3")
        async with (
            served(host="127.0.0.2", port=port) as itself,
            served(host="127.0.0.3", port=port) as other,
            following(names, port) as tier,
        ):
            tier.serve_as(Own(f"127.0.0.2:{port}", itself.feed.incarnation))
            itself.put(make_key(1), b"x")
            other.put(make_key(2), b"x")
            await tier.check()
            await eventually_found(tier, make_key(2), 1)
            await eventually(lambda: tier.peers[0].is_self)
            assert followed(tier) == {"127.0.0.3"}
            assert await tier.probe([make_key(1)]) == [None]
            assert [peer["state"] for peer in tier.peers_status()["peers"]] == [
                "itself",
                "following",
            ]

    async def test_a_node_with_two_addresses_is_followed_once(self, port: int) -> None:
        async with (
            served(host="127.0.0.2", port=port) as node,
            following(Names("127.0.0.2", "127.0.0.3"), port) as tier,
        ):
            settings = ServePeersConfig(listen=f"127.0.0.3:{port}")
            second = PeerServer(settings, node, node.feed, Metrics())
            second.listen()
            second.start()
            node.put(make_key(1), b"once")
            await tier.check()
            await eventually_found(tier, make_key(1), 4)
            await eventually(lambda: all(peer.tried.is_set() for peer in tier.peers))
            assert len(followed(tier)) == 1
            states = [peer["state"] for peer in tier.peers_status()["peers"]]
            assert sorted(states) == ["elsewhere", "following"]
            [first] = [peer for peer in tier.peers if peer.is_followed]
            await (node.server if first.address.host == "127.0.0.2" else second).stop()
            await eventually(
                lambda: followed(tier) == {"127.0.0.2", "127.0.0.3"} - {first.address.host}
            )
            await eventually_found(tier, make_key(1), 4)
            await second.stop()


class TestDoctor:
    """`kvhold doctor` tries the peers that are listed now."""

    async def test_each_listed_peer_is_tried(self, port: int) -> None:
        names = Names("127.0.0.2", "127.0.0.3")
        async with served(host="127.0.0.2", port=port), following(names, port) as tier:
            whole, good, bad = await _look_at_peers(tier, Finding("peers"), PATIENT_S)
            assert (whole.ok, good.ok, bad.ok) == (True, True, False)
            assert bad.name == f"peer 127.0.0.3:{port}"
            assert bad.says[1].startswith("port: nothing listens there")

    async def test_a_list_that_cannot_be_read_is_wrong(self, port: int) -> None:
        names = Names()
        names.fault = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        async with following(names, port) as tier:
            [whole] = await _look_at_peers(tier, Finding("peers"), PATIENT_S)
            assert not whole.ok
            assert any("Name or service not known" in said for said in whole.says)


class TestTheList:
    @pytest.mark.parametrize("answer", ["fault", "empty"])
    async def test_no_answer_keeps_the_last_list_and_is_in_the_status(
        self, port: int, answer: str
    ) -> None:
        names = Names("127.0.0.2")
        async with served(host="127.0.0.2", port=port) as place, following(names, port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics())
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            status = guard.status()["followed_peers"]
            assert (status["directory"], status["list_fault"]) == (f"the DNS name {UNUSED}", "")
            assert status["list_age_s"] is not None
            assert [peer["address"] for peer in status["peers"]] == [f"127.0.0.2:{port}"]
            if answer == "fault":
                names.fault = socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
            names.addresses.clear()
            told = "Temporary failure" if answer == "fault" else "lists no peer"
            await eventually(lambda: told in tier.peers_status()["list_fault"])
            assert "the last list stays in use" in tier.peers_status()["list_fault"]
            num_asked = names.num_asked
            await eventually(lambda: names.num_asked > num_asked + 3)
            place.put(make_key(2), b"yy")
            await eventually_found(tier, make_key(2), 2)
            assert await tier.probe([make_key(1)]) == [1]
            names.fault, names.addresses = None, ["127.0.0.2"]
            await eventually(lambda: not tier.peers_status()["list_fault"])

    async def test_lost_peers_leave_an_old_list_and_others_stay(self, port: int) -> None:
        names = Names("127.0.0.2", "127.0.0.3")
        async with (
            served(host="127.0.0.2", port=port) as stays,
            following(names, port, keep_list_s=0.5) as tier,
        ):
            async with served(host="127.0.0.3", port=port):
                await tier.check()
                await eventually(lambda: len(followed(tier)) == 2)
                names.addresses.clear()
                await eventually(lambda: tier.peers_status()["list_fault"])
            await eventually(lambda: listed(tier) == ["127.0.0.2"])
            stays.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)

    async def test_a_check_without_any_list_says_why(self, port: int) -> None:
        names = Names()
        names.fault = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        async with following(names, port) as tier:
            with pytest.raises(TierUnavailable, match=rf"{UNUSED}: Name or service not known"):
                await tier.check()
            assert await tier.probe([make_key(1)]) == [None]
            async with served(host="127.0.0.2", port=port) as place:
                place.put(make_key(1), b"x")
                names.fault, names.addresses = None, ["127.0.0.2"]
                await eventually_found(tier, make_key(1), 1)
                await tier.check()

    async def test_an_error_of_ours_does_not_end_reading(self, port: int) -> None:
        names = Names("127.0.0.2")
        names.fault = RuntimeError("unforeseen")
        async with following(names, port) as tier:
            tier._start()
            await eventually(lambda: "RuntimeError" in tier.peers_status()["list_fault"])
            names.fault = None
            await eventually(lambda: listed(tier) == ["127.0.0.2"])
            await eventually(lambda: not tier.peers_status()["list_fault"])

    async def test_a_resolver_that_hangs_is_asked_once(
        self, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.peers.roster._READ_TIMEOUT_S", 0.05)
        names = Names("127.0.0.2")
        async with served(host="127.0.0.2", port=port) as place, following(names, port) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            names.may_answer.clear()
            await eventually(lambda: "no answer" in tier.peers_status()["list_fault"])
            num_asked = names.num_asked
            await asyncio.sleep(0.5)
            assert names.num_asked <= num_asked + 1
            assert await tier.probe([make_key(1)]) == [1]
            names.may_answer.set()
            await eventually(lambda: not tier.peers_status()["list_fault"])

    async def test_too_many_addresses_are_named_and_the_first_are_followed(self, port: int) -> None:
        names = Names("127.0.0.200")
        async with following(names, port) as tier:
            tier._start()
            await eventually(lambda: listed(tier))
            names.addresses += [f"127.0.1.{number}" for number in range(1, 41)]
            await eventually(lambda: len(listed(tier)) == 32)
            await eventually(lambda: tier.peers_status()["list_fault"])
            told = tier.peers_status()["list_fault"]
            assert "lists 41 peers, and 9 are left out: at most 32 peers are followed" in told
            assert "central cache (kvhold://)" in told
            assert "127.0.0.200" in listed(tier)  # it was there before
            del names.addresses[10:]
            await eventually(lambda: sorted(listed(tier)) == sorted(names.addresses))
            await eventually(lambda: not tier.peers_status()["list_fault"])

    async def test_new_peers_do_not_wait_for_those_that_left(self, port: int) -> None:
        names = Names(*(f"127.0.1.{number}" for number in range(1, 33)))
        async with following(names, port) as tier:
            tier._start()
            await eventually(lambda: len(listed(tier)) == 32)
            names.addresses = [f"127.0.2.{number}" for number in range(1, 33)]
            await eventually(lambda: set(listed(tier)) == set(names.addresses))
            assert {peer.number for peer in tier.peers} == set(range(32))

    async def test_addresses_that_no_host_has_are_ignored(self, port: int) -> None:
        names = Names("0.0.0.0", "::", "224.0.0.1", "ff02::1", "name", "127.0.0.2", "127.0.0.2")
        async with following(names, port) as tier:
            tier._start()
            await eventually(lambda: listed(tier) == ["127.0.0.2"])


class TestCertificates:
    async def test_a_certificate_must_have_the_name(
        self, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        try:
            made = make_certificates(tmp_path)  # for 127.0.0.1 and localhost
        except NotInstalled as error:
            pytest.skip(str(error))
        tls = {"tls_cert": str(made.server), "tls_key": str(made.server_key)}
        async with served(port=port, **tls):
            async with following(Names("127.0.0.1"), port, tls="true", ca_file=made.ca) as tier:
                tier._start()
                told = "Hostname mismatch, certificate is not valid for 'peers.test'"
                await eventually(lambda: told in str([peer.last_fault for peer in tier.peers]))
            monkeypatch.setattr(f"{__name__}.UNUSED", "localhost")
            async with following(Names("127.0.0.1"), port, tls="true", ca_file=made.ca) as tier:
                await checked(tier)
                assert followed(tier) == {"127.0.0.1"}


async def test_the_hosts_resolver_is_asked() -> None:
    async with served() as place:
        tier, settings = make_tier(f"peers-dns://localhost:{place.port}?answer_timeout_s=60")
        assert isinstance(tier, DnsPeersTier)
        assert settings.name == "peers-dns"
        place.put(make_key(1), b"x")
        await tier.check()
        await eventually_found(tier, make_key(1), 1)
        assert await fetch(tier, [make_key(1)], [1]) == [b"x"]
        await tier.close()


@pytest.fixture
def own_network() -> list[str]:
    """The start of a command that runs in a network and with a /etc/resolv.conf of its own."""
    command = [needed_program("unshare"), "--user", "--map-root-user", "--mount", "--net"]
    done = subprocess.run([*command, "true"], capture_output=True)
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.decode(errors='replace').strip()}")
    return command


async def test_a_real_dns_server_lists_peers(own_network: list[str], tmp_path: Path) -> None:
    """A DNS server on port 53 whose answers change, asked by the C library."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    script = Path(__file__).with_name("dns_peers.py")
    inner = (
        f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && ip link set lo up && "
        f"exec {sys.executable} {script}"
    )
    process = await asyncio.create_subprocess_exec(
        *(*own_network, "sh", "-c", inner),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENT_S)
    assert process.returncode == 0, err.decode()[-2000:]
    told = json.loads(out.splitlines()[-1])
    assert told["both families"] == ["127.0.0.2", "::1"]
    assert told["bytes"] == ["over v4", "over v6"]
    assert told["fewer"] == ["::1"]
    assert "not known" in told["unknown"] and told["kept"] == ["::1"]
    assert "no answer" in told["silent"] or "Temporary failure" in told["silent"]
    assert told["back"] == ["127.0.0.2", "::1"]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("peers-dns://", "write one name"),
        ("peers-dns://a,b", "write one name"),
        ("peers-dns://10.0.0.1", "belong to peers://"),
        ("peers-dns://[::1]:7711", "belong to peers://"),
        ("peers-dns://a/x", "write one name"),
        ("peers-dns://a b", "write one name"),
        ("peers-dns://" + "a" * 64, "write one name"),
        ("peers-dns://" + "a." * 130 + "a", "write one name"),
        ("peers-dns://user:hush@a", "no users"),
        ("peers-dns://:hush@a", "add tls=true"),
        ("peers-dns://a?refresh_s=0", "refresh_s"),
        ("peers-dns://a?refesh_s=1", "refresh_s"),
    ],
)
async def test_settings_that_cannot_be_are_named(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        make_tier(url)
    assert "hush" not in str(caught.value)


async def test_addresses_are_parsed() -> None:
    assert str(parse_address("host-a", where="x")) == "host-a:7711"
    assert str(parse_address("[fe80::1]:80", where="x")) == "[fe80::1]:80"
    for bad in ("", "a:0", "a:70000", "a b", "::1", "a\n", "[::1", "-a", "a..b", "é"):
        with pytest.raises(ConfigError, match=r"x: .* is not HOST:PORT"):
            parse_address(bad, where="x")
    assert is_host_name("_a.b-c.svc.") and not is_host_name("a" * 254)
