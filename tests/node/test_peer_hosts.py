"""Nodes of two hosts that share nothing but a network, in network namespaces, and a network that
fails between them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhold.core.reasons import PEER_SLOW
from kvhold.testing.cache import a_prompt, store
from kvhold_lab.bench.relay import RelayedNetwork
from tests.namespaces import two_hosts
from tests.node.fleets import Fleet, eventually_read, fleet, found_tokens, joined, peers, port_of
from tests.node.hosts import Hosts
from tests.node.nodes import PATIENT_S, SPACE, eventually

__all__ = ["fleet"]

BACK_S = 10.0
FAILED = "kvhold_tier_errors{tier=peers,operation=get,reason=unavailable}"
LONG = 1000  # tokens: 63 chunks, 1.5 MB


@pytest.fixture
def hosts(nothing_is_left: None, tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts() as pair, Hosts(tmp_path, pair) as hosts:
        yield hosts


def test_what_one_host_stores_is_an_exact_hit_on_the_other(hosts: Hosts) -> None:
    clients = [joined(node) for node in hosts.nodes]
    for seed, (writer, reader) in enumerate((clients, clients[::-1])):
        prompt = a_prompt(SPACE, 300, seed)
        store(writer, prompt)
        eventually_read(reader, prompt)  # compares every byte


def test_a_partition_in_the_middle_of_a_read_costs_one_deadline_and_heals(hosts: Hosts) -> None:
    first, _ = hosts.hosts
    writer, reader = (joined(node) for node in hosts.nodes)
    watcher = hosts.nodes[1].client(name="watcher")
    prompts = [a_prompt(SPACE, LONG, seed) for seed in range(4)]
    for prompt in prompts[:3]:
        store(writer, prompt)
    eventually_read(reader, prompts[0])
    first.limit("8mbit")  # a read takes 1.5 s
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.lookup, prompts[1].query(), wait_s=PATIENT_S)
        eventually(lambda: watcher.status()["arriving_chunks"] > 0)
        first.link_down()
        with found.result(PATIENT_S) as hit:
            assert hit.num_tokens < LONG
            assert hit.reason == PEER_SLOW
    failed = reader.status()["tier_counters"][FAILED]
    assert failed <= 63  # the chunks of one get
    assert found_tokens(reader, prompts[2]) == 0
    assert reader.status()["tier_counters"][FAILED] == failed  # it was not asked again
    eventually(lambda: watcher.status()["arriving_chunks"] == 0)
    assert watcher.status()["pinned_chunks"] == 0
    eventually(lambda: "silent for 5 s" in hosts.nodes[1].log.read_text())
    store(writer, prompts[3])  # without followers
    first.limit("1gbit")
    first.link_up()
    eventually(lambda: found_tokens(reader, prompts[3]) == LONG, BACK_S)
    for prompt in prompts:
        eventually_read(reader, prompt)


def test_connections_that_a_relay_has_forgotten_cost_misses_and_are_replaced(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    with RelayedNetwork() as network:
        link = network.link(("127.0.0.1", port_of(first)))
        tier = peers(link.port, answer_timeout_s=3.0, pause_s=0.001)
        writer, reader = joined(first), joined(fleet.start("b", tier))
        prompts = [a_prompt(SPACE, 4000, seed) for seed in range(2)]
        later = [a_prompt(SPACE, 100, seed) for seed in range(10, 14)]
        store(writer, prompts[0])
        eventually_read(reader, prompts[0])  # over several connections, which are kept
        for prompt in later:
            store(writer, prompt)
        eventually_read(reader, later[0])
        link.forget()
        with reader.lookup(later[1].query(), wait_s=PATIENT_S) as hit:
            assert (hit.num_tokens, hit.reason) == (0, PEER_SLOW)
        for prompt in later[1:]:
            eventually_read(reader, prompt)
