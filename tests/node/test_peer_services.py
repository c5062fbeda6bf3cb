"""Nodes that find each other by etcd, or hear of each other's chunks by NATS."""

import re
from collections.abc import Iterator

import pytest

from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, store
from kvhold_lab.servers.etcd import EtcdServer
from kvhold_lab.servers.nats import NatsServer
from tests.node.fleets import (
    PATIENT_PAIRS,
    Fleet,
    eventually_read,
    fleet,
    found_tokens,
    free_port,
    joined,
    peers,
    port_of,
    served,
    tier_of,
)
from tests.node.nodes import SPACE, eventually, run_kvhold
from tests.tiers.conftest import start_or_skip

__all__ = ["fleet"]


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    yield from start_or_skip(EtcdServer)


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    pytest.importorskip("nats", reason="needs kvhold[nats]")
    yield from start_or_skip(NatsServer)


class TestBus:
    def test_three_nodes_tell_their_changes_and_clears_over_it(
        self, fleet: Fleet, nats: NatsServer
    ) -> None:
        ports = [free_port() for _ in "abc"]
        tier = peers(*ports, bus=f"nats://127.0.0.1:{nats.port}")
        clients = [
            joined(fleet.start(name, tier, port=port))
            for name, port in zip("abc", ports, strict=True)
        ]

        def by_bus(client: NodeClient) -> int:
            return sum(peer["by_bus"] for peer in tier_of(client)["followed_peers"]["peers"])

        eventually(lambda: [by_bus(client) for client in clients] == [2, 2, 2])
        eventually(
            lambda: not any(peer["follows"] for one in clients for peer in served(one)["peers"])
        )
        prompt = a_prompt(SPACE, 100)
        store(clients[0], prompt)
        eventually_read(clients[1], prompt)
        eventually_read(clients[2], prompt)
        told = run_kvhold("peers", "--socket", str(clients[1].path)).stdout
        assert f"bus       NATS at 127.0.0.1:{nats.port}: 2 peers followed by it" in told
        clients[1].clear(SPACE.digest)
        eventually(lambda: all(client.status()["used_bytes"] == 0 for client in clients))
        assert [found_tokens(client, prompt) for client in clients] == [0, 0, 0]
        assert [by_bus(client) for client in clients] == [2, 2, 2]


class TestMembership:
    """Nodes that come, go and move, as DNS or etcd lists them."""

    def test_the_addresses_of_a_name_are_peers(self, fleet: Fleet) -> None:
        first = fleet.start("a", port=0)
        writer = joined(first)
        reader = joined(fleet.start("b", f"peers-dns://localhost:{port_of(first)}?{PATIENT_PAIRS}"))
        store(writer, a_prompt(SPACE, 100))
        eventually_read(reader, a_prompt(SPACE, 100))
        peers = tier_of(reader)["followed_peers"]
        assert peers["directory"] == "the DNS name localhost"
        assert f"127.0.0.1:{port_of(first)}" in [peer["address"] for peer in peers["peers"]]
        told = run_kvhold("peers", "--socket", str(reader.path)).stdout
        assert re.search(r"^list      the DNS name localhost, read \d+ s ago$", told, re.MULTILINE)

    def test_nodes_find_each_other_in_etcd_wherever_they_are(
        self, fleet: Fleet, etcd: EtcdServer
    ) -> None:
        tier = f"peers-etcd://127.0.0.1:{etcd.port}?{PATIENT_PAIRS}&refresh_s=0.2&lease_s=3"
        nodes = {name: fleet.start(name, tier, port=0) for name in "ab"}
        clients = {name: joined(node) for name, node in nodes.items()}
        prompts = [a_prompt(SPACE, 100, seed) for seed in range(4)]
        store(clients["a"], prompts[0])
        store(clients["b"], prompts[1])
        eventually_read(clients["a"], prompts[1])
        eventually_read(clients["b"], prompts[0])
        # a third one comes, one is killed, and comes back at another port
        clients["c"] = joined(fleet.start("c", tier, port=0))
        eventually_read(clients["c"], prompts[0])
        nodes["a"].kill()
        store(clients["c"], prompts[2])
        eventually_read(clients["b"], prompts[2])
        etcd.kill()
        again = fleet.start("a", tier, port=0)  # without etcd: alone for now
        assert port_of(again) != port_of(nodes["a"])
        clients["a"] = joined(again)
        store(clients["a"], prompts[3])
        assert found_tokens(clients["b"], prompts[3]) == 0
        eventually(lambda: tier_of(clients["a"])["followed_peers"]["list_fault"])
        etcd.start()
        eventually_read(clients["b"], prompts[3])
        eventually_read(clients["a"], prompts[1])
        followed = tier_of(clients["a"])["followed_peers"]
        assert followed["registered"] == again.ready.rpartition("peers on ")[2].strip()
        # one that ends leaves at once
        again.process.terminate()
        again.process.wait()
        gone = f"127.0.0.1:{port_of(again)}"
        eventually(lambda: gone not in addresses_of(clients["b"]))
        # and a clear holds for all
        clients["b"].clear(SPACE.digest)
        eventually(lambda: clients["c"].status()["used_bytes"] == 0)
        assert found_tokens(clients["c"], prompts[0]) == 0

    def test_an_address_for_all_hosts_needs_one_to_register(self, fleet: Fleet) -> None:
        settings = fleet.folder / "a.toml"
        settings.write_text('[peers]\nlisten = "0.0.0.0:0"\ntoken = "hush"\ninsecure = true\n')
        ended = run_kvhold(
            *("serve", "--socket", str(fleet.folder / "a.sock"), "--ram-bytes", "16MiB"),
            *("--config", str(settings), "--tier", "peers-etcd://127.0.0.1:1"),
        )
        assert ended.returncode == 1
        assert "set peers.advertise" in ended.stderr
        assert "Traceback" not in ended.stderr


def addresses_of(client: NodeClient) -> list[str]:
    return [peer["address"] for peer in tier_of(client)["followed_peers"]["peers"]]
