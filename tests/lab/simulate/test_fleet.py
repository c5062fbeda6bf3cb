"""`kvhold bench fleet`: a trace on hosts that are each other's peers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold.cli import cli
from kvhold.core.errors import ConfigError
from kvhold.tiers.policies import LruPolicy
from kvhold_lab.simulate.fleet import FleetRow, FleetSetup, replay_fleet
from kvhold_lab.simulate.policy_replay import replay_class
from kvhold_lab.simulate.trace import Cut, parse_trace
from tests.lab.simulate.traces import BLOCK, make_trace

TOKEN_BYTES = 100
ALL = 1 << 30  # chunks: nothing is evicted


@pytest.fixture(scope="module")
def cut() -> Cut:
    return parse_trace(make_trace(sessions=40, turns=5)).cut(BLOCK)


def replay(cut: Cut, setup: FleetSetup) -> FleetRow:
    return replay_fleet(cut, setup, TOKEN_BYTES)


def seen_before(cut: Cut) -> float:
    """The share of the chunks that some earlier request had."""
    return 1 - cut.num_ids / cut.chunks.size


@pytest.mark.parametrize("capacity", [0, 3, 40, 200, ALL])
def test_one_host_finds_what_one_cache_finds(cut: Cut, capacity: int) -> None:
    row = replay(cut, FleetSetup(hosts=1, memory_chunks=capacity))
    alone = replay_class(cut.chunks, cut.starts, cut.parents, make=LruPolicy, capacity=capacity)
    assert row.found_here * cut.chunks.size == pytest.approx(int(alone.found[:, 0].sum()))
    assert row.found_at_peers == row.changes_read_per_s == row.index_chunks == 0 or capacity


@pytest.mark.parametrize("routing", ["random", "affinity"])
def test_what_any_host_had_is_found_somewhere(cut: Cut, routing: str) -> None:
    row = replay(cut, FleetSetup(hosts=5, memory_chunks=ALL, routing=routing))  # type: ignore[arg-type]
    assert row.found_here + row.found_at_peers == pytest.approx(seen_before(cut))
    assert row.index_chunks == 5 * cut.num_ids


def test_affinity_leaves_less_to_the_peers(cut: Cut) -> None:
    setup = FleetSetup(hosts=5, memory_chunks=ALL)
    random, near = replay(cut, setup), replay(cut, replace(setup, routing="affinity"))
    assert near.found_at_peers < random.found_at_peers / 2
    assert near.peer_bytes_per_s < random.peer_bytes_per_s / 2


def test_without_peers_the_shared_tier_has_what_other_hosts_stored(cut: Cut) -> None:
    row = replay(cut, FleetSetup(hosts=5, memory_chunks=60, shared_chunks=ALL, peers=0))
    assert row.found_here + row.found_shared == pytest.approx(seen_before(cut))
    assert row.found_at_peers == row.peer_bytes_per_s == row.changes_read_per_s == 0


def test_hosts_follow_only_those_of_their_group(cut: Cut) -> None:
    setup = FleetSetup(hosts=6, memory_chunks=ALL)
    all_six, pairs = replay(cut, setup), replay(cut, replace(setup, peers=1))
    assert pairs.changes_read_per_s == pytest.approx(pairs.changes_per_s)
    assert all_six.changes_read_per_s == pytest.approx(5 * all_six.changes_per_s)
    assert pairs.index_chunks < all_six.index_chunks
    assert pairs.found_at_peers < all_six.found_at_peers


def test_hosts_that_share_users_find_at_peers_what_one_large_memory_finds(cut: Cut) -> None:
    pooled = replay(cut, FleetSetup(hosts=4, memory_chunks=ALL, copies=1))
    assert pooled.copies == 1
    assert pooled.found_here + pooled.found_at_peers == pytest.approx(seen_before(cut))
    assert pooled.index_chunks == cut.num_ids
    small = replay(cut, FleetSetup(hosts=4, memory_chunks=60, copies=1))
    alone = replay(cut, FleetSetup(hosts=4, memory_chunks=60, copies=1, peers=0))
    assert small.found_here == alone.found_here
    assert small.found_at_peers > alone.found_at_peers == 0


def test_a_full_memory_evicts_as_much_as_it_stores(cut: Cut) -> None:
    row = replay(cut, FleetSetup(hosts=3, memory_chunks=50))
    assert row.index_chunks <= 3 * 50
    seconds = cut.times_s[-1] - cut.times_s[0]  # type: ignore[index]
    computed = (1 - row.found_here) * cut.chunks.size  # per copy, and so per host
    stored_and_evicted = 2 * computed - 50
    assert row.changes_per_s * seconds == pytest.approx(stored_and_evicted, abs=1)


def test_equal_seeds_give_equal_rows(cut: Cut) -> None:
    setup = FleetSetup(hosts=4, memory_chunks=100)
    assert replay(cut, setup) == replay(cut, setup)
    assert replay(cut, setup) != replay(cut, replace(setup, seed=2))


def test_a_trace_without_times_is_refused(cut: Cut) -> None:
    with pytest.raises(ConfigError, match="timestamp"):
        replay(replace(cut, times_s=None), FleetSetup(hosts=2, memory_chunks=10))


def test_a_trace_of_short_prompts_is_refused() -> None:
    line = b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    with pytest.raises(ConfigError, match="fills a chunk of 512 tokens"):
        replay(parse_trace([line]).cut(BLOCK), FleetSetup(hosts=2, memory_chunks=10))


def test_the_command_writes_a_row_for_each_combination(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    trace.write_bytes(b"".join(make_trace(sessions=10, turns=3)))
    arguments = ["--hosts", "1", "--hosts", "3", "--memory", "1GiB", "--shared", "2GiB"]
    done = CliRunner().invoke(cli, ["bench", "fleet", str(trace), *arguments, "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert [(row["hosts"], row["routing"]) for row in rows] == [
        (1, "random"),
        (1, "affinity"),
        (3, "random"),
        (3, "affinity"),
    ]
    assert all(row["memory_bytes"] == 1 << 30 and row["shared_bytes"] == 2 << 30 for row in rows)
