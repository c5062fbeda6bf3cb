"""`kvhold bench peers` and `kvhold bench soak peers` in small: what they measure and find."""

import json
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold.cli import cli
from kvhold.net.nixl_agent import is_installed
from kvhold_lab.bench.peers import rows
from kvhold_lab.bench.peers_rows import PeersRow, PeersSizes
from kvhold_lab.bench.soak import peers as soak

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


def test_peers_that_are_killed_and_cut_off_give_no_wrong_byte_and_keep_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soak, "_CHAOS_S", (0.1, 0.5))
    found = soak.run(15, 1, nodes=3)
    assert (found.wrong, found.late, found.left) == (0, 0, 0), found.findings
    assert found.requests > 0
    assert {field.name for field in fields(found)} >= {"kills", "cuts", "forgotten"}
