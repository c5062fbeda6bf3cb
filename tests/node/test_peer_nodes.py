"""Nodes that serve each other: what one stores, another has, and what becomes of it in trouble."""

import asyncio
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhold.cache import open_cache
from kvhold.codecs import frame_chunk, make_codec
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace
from kvhold.core.planning import ComputeCost, ComputeIntent
from kvhold.core.reasons import NEVER_STORED, PEER_GONE, PEER_SLOW
from kvhold.node import NodeClient
from kvhold.testing.cache import HYBRID, PLAIN, a_prompt, read, store
from kvhold.testing.damage import OpenArena
from tests.node.fleets import (
    Fleet,
    eventually_read,
    fleet,
    found_tokens,
    free_port,
    joined,
    peer_of,
    peers,
    port_of,
    reason_of,
    served,
    tier_of,
)
from tests.node.nodes import PATIENT_S, SPACE, eventually, run_kvhold

__all__ = ["fleet"]

TIMED_OUT = "kvhold_tier_errors{tier=peers,operation=get,reason=unavailable}"
SENT = "kvhold_peer_served_chunks{peer=127.0.0.1,result=sent}"
EVICTED = "kvhold_evicted_chunks{tier=ram}"
BAD = "kvhold_tier_bad_frames{tier=peers,reason=checksum}"
WIDE = Namespace(model="wide", layout=HYBRID)


@pytest.mark.parametrize("namespace", [SPACE, WIDE], ids=["one group", "three groups"])
def test_what_one_node_stores_is_a_hit_of_another(fleet: Fleet, namespace: Namespace) -> None:
    first = fleet.start("a", port=0)
    second = fleet.start("b", peers(port_of(first)))
    writer, reader = joined(first, namespace), joined(second, namespace)
    prompt = a_prompt(namespace, 100)
    store(writer, prompt)
    eventually_read(reader, prompt)
    assert served(writer)["counters"][SENT] >= 7
    eventually(lambda: writer.status()["pinned_chunks"] == 0)
    assert served(writer)["in_flight_bytes"] == 0
    assert found_tokens(joined(first, namespace), prompt) == 100


@pytest.mark.parametrize("namespace", [SPACE, WIDE], ids=["one group", "three groups"])
def test_what_is_handed_over_stays_until_the_other_node_has_it(
    fleet: Fleet, namespace: Namespace
) -> None:
    first = fleet.start("a", port=0)
    second = fleet.start("b", peers(port_of(first)))
    writer, reader = joined(first, namespace), joined(second, namespace)
    prompt = a_prompt(namespace, 100)
    intent = ComputeIntent(ComputeCost("request", 100), waits=False, keep_s=PATIENT_S)
    with writer.lookup(prompt.query(), intent=intent):
        store(writer, prompt)
    assert writer.status()["handover_chunks"] == 7 * len(namespace.layout.groups)
    eventually_read(reader, prompt)
    assert writer.status()["handover_chunks"] == 0
    assert writer.status()["counters"]["kvhold_handovers{result=read}"] == 1


def test_what_was_stored_before_is_in_the_snapshot_of_a_later_follower(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    prompt = a_prompt(SPACE, 300)
    store(joined(first), prompt)
    reader = joined(fleet.start("b", peers(port_of(first))))
    eventually_read(reader, prompt)
    assert tier_of(reader)["kind"] == "peers"
    assert tier_of(reader)["read_only"]


def test_two_nodes_with_one_list_serve_each_other_and_not_themselves(fleet: Fleet) -> None:
    ports = [free_port(), free_port()]
    nodes = [
        fleet.start(name, peers(*ports), port=port) for name, port in zip("ab", ports, strict=True)
    ]
    clients = [joined(node) for node in nodes]
    prompts = [a_prompt(SPACE, 100, seed) for seed in (1, 2)]
    for client, prompt in zip(clients, prompts, strict=True):
        store(client, prompt)
    for client, prompt in zip(clients, prompts[::-1], strict=True):
        eventually_read(client, prompt)
        assert served(client)["connections"] <= 2  # the other's follow, and its reads


def test_an_engine_is_not_limited_while_its_node_serves_peers_slowly(fleet: Fleet) -> None:
    first = fleet.start("a", port=0, serving={"bytes_per_s": "1MiB"})
    writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
    prompts = [a_prompt(SPACE, 1000, seed) for seed in range(4)]  # 6 MB
    for prompt in prompts:
        store(writer, prompt)
    eventually(lambda: peer_of(reader)["chunks"] == writer.status()["chunks"])
    with ThreadPoolExecutor(len(prompts)) as pool:
        loading = [pool.submit(read, joined(fleet.nodes[1]), prompt) for prompt in prompts]
        eventually(lambda: served(writer)["counters"].get(SENT, 0) > 0)
        for prompt in prompts:
            assert read(writer, prompt) == prompt.num_tokens
        assert served(writer)["counters"][SENT] < writer.status()["chunks"], "all was sent"
        assert [one.result() for one in loading] == [prompt.num_tokens for prompt in prompts]


@pytest.mark.parametrize("is_set", [True, False], ids=["last copies stay", "as the policy says"])
def test_the_last_copy_in_the_fleet_is_evicted_last(fleet: Fleet, is_set: bool) -> None:
    ports = [free_port(), free_port()]
    nodes = [
        fleet.start(name, peers(*ports), port=port, serving={"last_copies": is_set})
        for name, port in zip("ab", ports, strict=True)
    ]
    first, second = (joined(node) for node in nodes)
    alone = a_prompt(SPACE, 2000, 0)
    store(first, alone)  # the oldest
    both = [a_prompt(SPACE, 500, seed) for seed in range(1, 9)]
    for prompt in both:
        store(first, prompt)
        eventually_read(second, prompt)
    eventually(lambda: num_followed(first) == second.status()["chunks"])
    eventually(lambda: num_followed(second) == first.status()["chunks"])
    number = 100
    while not first.status()["counters"].get(EVICTED, 0):
        store(first, a_prompt(SPACE, 250, number))
        number += 1
    assert (found_tokens(second, alone) == alone.num_tokens) == is_set
    for prompt in both:
        assert found_tokens(second, prompt) == found_tokens(first, prompt) == prompt.num_tokens


def num_followed(client: NodeClient) -> int:
    rows = tier_of(client)["followed_peers"]["peers"]
    return sum(peer["chunks"] for peer in rows if peer["state"] == "following")


def test_last_copies_need_a_tier_of_peers(tmp_path: Path) -> None:
    settings = tmp_path / "node.toml"
    settings.write_text("[peers]\nlast_copies = true\n")
    told = run_kvhold("serve", "--config", str(settings), "--socket", str(tmp_path / "a.sock"))
    assert told.returncode
    assert "peers.last_copies: " in told.stderr and "add peers://host-a:7711" in told.stderr


def test_an_evicted_chunk_is_not_found_at_its_peer(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
    prompts = [a_prompt(SPACE, 4000, seed) for seed in range(6)]  # 37 MB for 16 MiB of memory
    for prompt in prompts:
        store(writer, prompt)
    eventually_read(reader, prompts[-1])
    assert found_tokens(reader, prompts[0]) == 0
    eventually(lambda: served(writer)["chunks"] == writer.status()["chunks"])


def test_peers_are_listed_on_both_sides(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    second = fleet.start("b", peers(port_of(first)))
    writer, reader = joined(first), joined(second)
    prompt = a_prompt(SPACE, 100)
    store(writer, prompt)
    eventually_read(reader, prompt)
    host = f"127.0.0.1:{port_of(first)}"
    told = run_kvhold("peers", "--socket", str(second.path)).stdout
    assert re.search(rf"{host} +\S+ +following +\d+ s +7 .* ms", told), told
    assert "7 chunks in an index of" in told and "serves no peers" in told
    both = json.loads(run_kvhold("peers", "--json", "--socket", str(second.path)).stdout)
    assert both["served_peers"] is None
    [peer] = both["followed_peers"]["peers"]
    assert (peer["address"], peer["state"], peer["loaded_chunks"]) == (host, "following", 7)
    assert peer["last_load_s"] > 0
    told = run_kvhold("peers", "--socket", str(first.path)).stdout
    assert "follows no peers" in told
    assert re.search(r"^127\.0\.0\.1 +\S+ +follows +\d+ s +7 +0 ", told, re.MULTILINE), told
    told = run_kvhold("status", "--socket", str(second.path)).stdout
    assert re.search(r"^peers     1 following; 7 chunks in an index", told, re.MULTILINE), told
    told = run_kvhold("status", "--socket", str(first.path)).stdout
    assert f"serving   1 peers on {host}, 7 chunks" in told


def test_explain_says_which_peer_the_chunks_came_from(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
    prompt = a_prompt(SPACE, 100)
    store(writer, prompt)
    eventually(lambda: peer_of(reader)["chunks"] == 7)
    cost = ComputeCost("cmpl-1", 100, token_s=1.0)
    with reader.lookup(prompt.query(), cost=cost, wait_s=PATIENT_S) as hit:
        assert hit.num_tokens == 100
    [decision] = reader.explain("cmpl-1")
    [loaded] = decision.loaded
    assert (loaded.place, loaded.chunks) == (f"127.0.0.1:{port_of(first)}", [[0, 6]])
    assert 0 < loaded.seconds < PATIENT_S


def test_a_port_that_is_taken_is_named(fleet: Fleet) -> None:
    port = port_of(fleet.start("a", port=0))
    settings = fleet.folder / "second.toml"
    settings.write_text(f'[peers]\nlisten = "127.0.0.1:{port}"\n')
    ended = run_kvhold(
        "serve",
        "--socket",
        str(fleet.folder / "b.sock"),
        "--ram-bytes",
        "16MiB",
        "--config",
        str(settings),
    )
    assert ended.returncode == 1
    assert f"peers.listen: cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_all_peers_are_named_in_one_tier(fleet: Fleet) -> None:
    ended = run_kvhold(
        *("serve", "--socket", str(fleet.folder / "b.sock"), "--ram-bytes", "16MiB"),
        *("--tier", "peers://127.0.0.1:1", "--tier", "peers://127.0.0.1:2"),
    )
    assert ended.returncode == 1
    assert "name all peers in one tier" in ended.stderr


def test_doctor_puts_nothing_to_peers(fleet: Fleet) -> None:
    port = port_of(fleet.start("a", port=0))
    found = run_kvhold("doctor", "--tier", f"peers://127.0.0.1:{port}").stdout
    assert "read_only: nothing was put" in found


class TestClears:
    def test_a_clear_holds_for_what_a_peer_still_has(self, fleet: Fleet) -> None:
        first = fleet.start("a", port=0)  # follows nobody, so it does not learn of the clear
        second = fleet.start("b", peers(port_of(first)))
        writer, reader = joined(first), joined(second)
        prompt = a_prompt(SPACE, 100)
        store(writer, prompt)
        eventually_read(reader, prompt)
        reader.clear(SPACE.digest)
        reader.flush()
        assert found_tokens(reader, prompt) == 0
        # and after a restart
        second.process.terminate()
        second.process.wait()
        reader = joined(fleet.start("b", peers(port_of(first))))
        other = Namespace(model="other", layout=SPACE.layout)
        writer.register(other)
        reader.register(other)
        store(writer, a_prompt(other, 100))
        eventually_read(reader, a_prompt(other, 100))  # so it follows
        assert found_tokens(reader, prompt) == 0
        # until the peer clears, too
        writer.clear(SPACE.digest)
        store(writer, prompt)
        eventually_read(reader, prompt)

    @pytest.mark.parametrize("everything", [False, True], ids=["namespace", "everything"])
    def test_a_clear_of_one_node_clears_the_others_that_follow_it(
        self, fleet: Fleet, everything: bool
    ) -> None:
        ports = [free_port(), free_port()]
        writer, reader = (
            joined(fleet.start(name, peers(*ports), port=port))
            for name, port in zip("ab", ports, strict=True)
        )
        prompt = a_prompt(SPACE, 100)
        store(writer, prompt)
        eventually_read(reader, prompt)
        reader.clear(None if everything else SPACE.digest)
        eventually(lambda: writer.status()["used_bytes"] == 0)
        assert found_tokens(reader, prompt) == found_tokens(writer, prompt) == 0
        store(writer, prompt)
        eventually_read(reader, prompt)


class TestTrouble:
    def test_a_killed_peer_costs_misses_and_its_next_run_is_followed(self, fleet: Fleet) -> None:
        port = free_port()
        first = fleet.start("a", port=port)
        reader = joined(fleet.start("b", peers(port, forget_s=0.1)))
        writer = joined(first)
        prompts = [a_prompt(SPACE, 1000, seed) for seed in range(3)]
        for prompt in prompts:
            store(writer, prompt)
        eventually_read(reader, prompts[0])
        first.kill()
        for prompt in prompts[1:]:
            assert found_tokens(reader, prompt) in (0, 1000)
        eventually(lambda: found_tokens(reader, prompts[2]) == 0)
        assert peer_of(reader)["state"] == "away"
        assert found_tokens(reader, prompts[0]) == 1000  # this host's own by now
        writer = joined(fleet.start("a", port=port))
        store(writer, prompts[2])
        eventually_read(reader, prompts[2])
        assert found_tokens(reader, a_prompt(SPACE, 1000, seed=9)) == 0
        eventually(lambda: reader.status()["pinned_chunks"] == 0)

    def test_a_peer_killed_in_the_middle_of_a_read_is_a_miss_at_once(self, fleet: Fleet) -> None:
        first = fleet.start("a", port=0)
        reader = joined(fleet.start("b", peers(port_of(first))))  # deadlines of a minute
        prompts = [a_prompt(SPACE, 1000, seed) for seed in range(2)]
        writer = joined(first)
        for prompt in prompts:
            store(writer, prompt)
        eventually_read(reader, prompts[0])
        watcher = fleet.nodes[1].client(name="watcher")
        first.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            began_s = time.monotonic()
            found = pool.submit(found_tokens, reader, prompts[1])
            eventually(lambda: watcher.status()["arriving_chunks"] > 0)
            first.kill()
            assert found.result(PATIENT_S) == 0
            assert time.monotonic() - began_s < PATIENT_S / 2
        eventually(lambda: watcher.status()["arriving_chunks"] == 0)
        assert watcher.status()["pinned_chunks"] == 0

    def test_the_chunks_of_a_lost_peer_are_missed_because_it_is_gone(self, fleet: Fleet) -> None:
        first = fleet.start("a", port=0)
        writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
        prompts = [a_prompt(SPACE, 100, seed) for seed in range(2)]
        for prompt in prompts:
            store(writer, prompt)
        eventually_read(reader, prompts[0])
        first.kill()
        eventually(lambda: reason_of(reader, prompts[1]) == PEER_GONE)
        assert reason_of(reader, a_prompt(SPACE, 100, seed=9)) == NEVER_STORED
        assert reader.status()["counters"]["kvhold_missed_tokens{reason=peer_gone}"] >= 100
        peer = peer_of(reader)
        assert (peer["state"], peer["chunks"], peer["loads"]) == ("away", 14, 1)
        assert peer["last_fault_ago_s"] < PATIENT_S

    def test_a_peer_that_stops_costs_one_deadline(self, fleet: Fleet) -> None:
        first = fleet.start("a", port=0)
        tier = peers(port_of(first), answer_timeout_s=0.3, pause_s=PATIENT_S)
        writer, reader = joined(first), joined(fleet.start("b", tier))
        prompts = [a_prompt(SPACE, 100, seed) for seed in range(3)]
        for prompt in prompts:
            store(writer, prompt)
        eventually_read(reader, prompts[0])
        with first.stopped():
            with reader.lookup(prompts[1].query(), wait_s=PATIENT_S) as hit:
                assert (hit.num_tokens, hit.reason) == (0, PEER_SLOW)
            # asked again, the peer would have cost another deadline
            with reader.lookup(prompts[2].query(), wait_s=PATIENT_S) as hit:
                assert (hit.num_tokens, hit.reason) == (0, PEER_SLOW)
            assert peer_of(reader)["state"] == "paused"
            assert peer_of(reader)["cause"] == "slow"
            assert reader.status()["tier_counters"][TIMED_OUT] == 7  # the chunks of one get
        assert "no answer within 0.3 s" in tier_of(reader)["last_fault"]

    def test_bytes_damaged_at_the_peer_are_a_miss(self, fleet: Fleet) -> None:
        first = fleet.start("a", port=0, scrub_interval_s=0)
        writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
        prompt = a_prompt(SPACE, 16)
        store(writer, prompt)
        eventually(lambda: served(writer)["chunks"] == 1)
        [at] = places_of(writer, prompt)
        with OpenArena(first.pid) as arena:
            arena.flip(at + 5)
        eventually(lambda: found_tokens(reader, prompt) or bad_frames(reader))
        assert found_tokens(reader, prompt) == 0
        assert bad_frames(reader) == 1  # it is not asked for again


def bad_frames(client: NodeClient) -> float:
    return client.status()["tier_counters"].get(BAD, 0)


def places_of(client: NodeClient, prompt: Any) -> list[int]:
    with client.lookup(prompt.query()) as hit:
        lease = client.claim(hit.ticket)
        assert lease is not None
        with lease:
            return [int(offset) for offset in lease.chunks().offsets if offset != ABSENT]


class TestDisks:
    """Chunks that are only on a peer's disks."""

    @pytest.mark.parametrize("codec", ["raw", "lossless"])
    def test_chunks_that_memory_has_evicted_come_from_the_disk(
        self, fleet: Fleet, codec: str
    ) -> None:
        first = fleet.start("a", disk(fleet.folder, codec=codec), port=0)
        writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
        prompts = [a_prompt(SPACE, 2000, seed) for seed in range(8)]  # 25 MB for 16 MiB of memory
        for prompt in prompts:
            store(writer, prompt)
            writer.flush()
        eventually(lambda: served(writer)["chunks"] == 8 * 125)
        assert writer.status()["chunks"] < 8 * 125
        for prompt in prompts:
            eventually_read(reader, prompt)

    def test_a_lossy_disk_serves_exact_chunks_to_those_that_allow_no_loss(
        self, fleet: Fleet
    ) -> None:
        pytest.importorskip("numba", reason="no numba in this environment")
        lossy, prompt = SPACE.allowing_loss(max_error=1), a_prompt(SPACE, 100)
        first = fleet.start("a", disk(fleet.folder, codec="int8"), port=0)
        writer = joined(first, lossy)
        store(writer, a_prompt(lossy, 100))
        writer.flush()
        reader = joined(fleet.start("b", peers(port_of(first))))
        reader.register(lossy)
        eventually(lambda: found_tokens(reader, a_prompt(lossy, 100)) == 100)
        assert found_tokens(reader, prompt) == 0
        writer.register(SPACE)
        store(writer, prompt)
        writer.flush()
        first.process.terminate()
        first.process.wait()
        again = fleet.start("a", disk(fleet.folder, codec="int8"), port=0)
        reader = joined(fleet.start("c", peers(port_of(again))))
        eventually_read(reader, prompt)

    def test_a_lossy_frame_under_an_exact_name_is_not_taken_from_a_peer(self, fleet: Fleet) -> None:
        pytest.importorskip("numba", reason="no numba in this environment")
        prompt = a_prompt(SPACE, 16)
        key = prompt.chunk_key(0)
        frame = frame_chunk(
            memoryview(bytes(PLAIN.chunk_bytes(0, 16))),
            make_codec("int8"),
            key=key,
            layout=PLAIN,
            num_tokens=16,
            first_token=0,
        )
        cached = open_cache(ram_bytes="1MiB", tiers=[disk(fleet.folder)], plugins=[])
        with cached as cache:
            assert cache.tier_worker is not None
            guard = cache.tier_worker._stack.guards[0]
            asyncio.run_coroutine_threadsafe(
                guard.put([(key, frame.parts)], ttl_s=None), cache.tier_worker._loop
            ).result(PATIENT_S)
        first = fleet.start("a", disk(fleet.folder), port=0)
        reader = joined(fleet.start("b", peers(port_of(first))))
        refused = "kvhold_tier_bad_frames{tier=peers,reason=lossy}"
        eventually(
            lambda: found_tokens(reader, prompt) or reader.status()["tier_counters"].get(refused)
        )
        assert found_tokens(reader, prompt) == 0

    def test_what_is_on_the_disk_at_the_start_is_served(self, fleet: Fleet) -> None:
        first = fleet.start("a", disk(fleet.folder), port=0)
        prompt = a_prompt(SPACE, 100)
        writer = joined(first)
        store(writer, prompt)
        writer.flush()
        first.process.terminate()
        first.process.wait()
        first = fleet.start("a", disk(fleet.folder), port=0)
        reader = joined(fleet.start("b", peers(port_of(first))))
        eventually_read(reader, prompt)
        assert joined(first).status()["chunks"] == 0

    def test_chunks_of_an_encrypted_disk_are_not(self, fleet: Fleet) -> None:
        key = fleet.folder / "key"
        key.write_text("ab" * 32)
        key.chmod(0o600)
        keys: dict[str, Any] = {"encryption.keys": [f"=file:{key}"]}
        first = fleet.start("a", disk(fleet.folder, encrypt="true"), port=0, **keys)
        writer = joined(first)
        store(writer, a_prompt(SPACE, 100))
        writer.flush()
        eventually(lambda: served(writer)["chunks"] == 7)
        first.process.terminate()
        first.process.wait()
        again = joined(fleet.start("a", disk(fleet.folder, encrypt="true"), port=0, **keys))
        assert found_tokens(again, a_prompt(SPACE, 100)) == 100
        eventually(lambda: served(again)["chunks"] == 7)  # those that have come to memory

    def test_a_clear_removes_the_chunks_of_the_disk(self, fleet: Fleet) -> None:
        first = fleet.start("a", disk(fleet.folder), port=0)
        writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
        prompt = a_prompt(SPACE, 100)
        store(writer, prompt)
        writer.flush()
        writer.clear(SPACE.digest)
        eventually(lambda: served(writer)["chunks"] == 0)
        assert found_tokens(reader, prompt) == 0


def disk(folder: Path, **options: object) -> str:
    patient = dict.fromkeys(("probe_timeout_s", "get_timeout_s", "put_timeout_s"), PATIENT_S)
    pairs = "&".join(f"{name}={value}" for name, value in (patient | options).items())
    return f"disk://{folder}/kv?max_bytes=1GiB&{pairs}"
