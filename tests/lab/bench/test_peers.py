"""`kvhold bench peers` and `kvhold bench soak peers` in small: what they measure and find."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvhold.cli import cli
from kvhold.core.config import ClientConfig
from kvhold.net.nixl_agent import is_installed
from kvhold_lab.bench.peers import rows
from kvhold_lab.bench.peers_rows import PeersRow, PeersSizes
from kvhold_lab.bench.second_host import NoSecondHost
from kvhold_lab.bench.servers import running_node
from kvhold_lab.bench.soak import peers as soak
from kvhold_lab.bench.soak.hash_engine import SPACE, HashEngine, answer, compute_kv
from kvhold_lab.bench.soak.peers_fleet import FleetNetwork, namespaces_network, relays_network

pytestmark = pytest.mark.server

SMALL = PeersSizes(rounds=1, layers=1, peers=2, chunks=1000, lookups=5, events_s=1000, event_s=0.1)
NAMES = (
    "get of 64 chunks of 128 KiB from a peer; limit: bare TCP",
    "get of 64 chunks of 128 KiB from a peer over a link of 1 Gbit/s; limit: bare TCP",
    "lookup of 32,000 tokens, a hit, with 2 peers of 1,000 chunks; limit: without tiers",
    "lookup of 32,000 tokens, a miss, with 2 peers of 1,000 chunks; limit: without tiers",
    "lookup of 32,000 tokens, a miss, with 2 peers of 1,000 chunks; limit: with memory:// as",
    "index of the peers' chunks",
    "median way of an event into a peer's index, at ",
    "p99 of an engine's lookup of 32,000 tokens while a peer reads ",
    "p99 of an engine's lookup of 32,000 tokens while a peer of lowest priority reads ",
)
NIXL = "get of 64 chunks of 128 KiB from a peer by NIXL; limit: NIXL alone, in one read"


def test_each_number_of_the_peers_has_a_row_with_its_limit() -> None:
    names = [*NAMES[:2], *([NIXL] if is_installed() else []), *NAMES[2:]]
    measured = list(rows(SMALL))
    assert len(measured) == len(names)
    for row, name in zip(measured, names, strict=True):
        assert row.name.startswith(name)
        assert all(isfinite(number) and number > 0 for number in (row.value, row.limit, row.ratio))
        assert row.goal


@pytest.mark.usefixtures("home")
def test_other_systems_have_a_row_each_with_the_limit_or_their_error() -> None:
    mooncake, lmcache = rows(SMALL, ["mooncake", "lmcache"])
    assert mooncake.name.startswith("get of 64 chunks of 128 KiB from Mooncake Store")
    assert mooncake.name.endswith("; limit: bare TCP") == (mooncake.value > 0)
    assert lmcache.name.startswith("get of 64 chunks by LMCache's P2P: no ")
    assert lmcache.value == 0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_rows_are_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PeersRow("a name", 1.0, "ms", 2.0, 0.5, "at most 1")
    monkeypatch.setattr(
        "kvhold_lab.bench.peers.rows", lambda sizes, only: iter([row][: only != ()])
    )
    command = ["bench", "peers", "--only", "get", "--json", str(tmp_path / "rows.json")]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "a name\n    1.000 ms, limit 2.000, ratio 0.500 (goal: at most 1)" in result.output
    assert json.loads((tmp_path / "rows.json").read_text()) == [asdict(row)]


@pytest.mark.parametrize("network_of", [namespaces_network, relays_network])
def test_peers_that_are_killed_and_cut_off_give_no_wrong_byte_and_keep_nothing(
    network_of: Callable[[int], AbstractContextManager[FleetNetwork]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small: dict[str, Any] = {
        "_DOCUMENTS": 15,
        "_PAUSES_S": (0.1, 0.4),
        "_WARM_UP_REQUESTS": 40,
        "_QUIET_S": (2, 2),
        "_CUTS_S": (3,),
        "_AFTER_S": 4,
        "_OLD_S": 0,
        "_BACK_S": 60,
        "_ALLOWED_S": 30,
        "_BACK_SHARE": 0.5,
    }
    for name, value in small.items():
        monkeypatch.setattr(soak, name, value)
    try:
        found = soak.run(100, 1, nodes=4, network_of=network_of)
    except NoSecondHost as error:
        pytest.skip(str(error))
    assert found.passed, (found.findings, found.missing)
    assert found.requests >= 100
    assert min(found.kills, found.restarts, found.cuts, found.peer_tokens) > 0


def test_wrong_kv_in_the_cache_is_seen_in_bytes_and_tokens() -> None:
    tokens, others = (np.random.default_rng(seed).integers(0, 99, 40, np.int32) for seed in (1, 2))
    with running_node() as client:
        client.register(SPACE)
        engine = HashEngine(client, ClientConfig(), 60)
        cold = engine.serve(tokens, compute_kv(tokens))
        warm = engine.serve(tokens, compute_kv(tokens))
        wrong = engine.serve(tokens, compute_kv(others))
    assert (cold.hit_tokens, warm.hit_tokens, cold.stored_tokens) == (0, 40, 40)
    assert cold.tokens == warm.tokens == answer(compute_kv(tokens))
    assert answer(compute_kv(others)) != cold.tokens
    assert (cold.wrong_bytes, warm.wrong_bytes, cold.late, cold.refused) == (0, 0, [], [])
    assert wrong.wrong_bytes
