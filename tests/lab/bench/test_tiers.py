"""The commands that measure tiers, break them and wear them down: short runs, whose verdicts count
and whose numbers do not.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhold_lab.bench import faults, tiers
from kvhold_lab.bench.command import command
from kvhold_lab.bench.faults import FAULTS
from kvhold_lab.bench.soak import kills
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer

YES = {"right", "alive", "in_deadline", "baseline", "counted"}


def run(tmp_path: Path, *arguments: str) -> Any:
    """What the command writes as JSON. It must succeed."""
    result = CliRunner().invoke(
        command, [*arguments, "--json", str(tmp_path / "out.json")], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out.json").read_text())


@pytest.fixture
def redis_here() -> None:
    try:
        RedisServer().command()
    except NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may be late by some seconds, but answers."""
    monkeypatch.setattr(faults, "SLACK_S", 30.0)
    monkeypatch.setattr(faults, "CALL_S", 20.0)


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
def test_a_disk_may_fail_in_every_way(tmp_path: Path) -> None:
    rows = run(tmp_path, "faults", "--tier", "disk")
    assert [row["fault"] for row in rows] == list(FAULTS)
    assert all(row[name] is not False for row in rows for name in YES), rows
    assert {row["fault"] for row in rows if row["counted"] is None} == {"slow", "full"}


@pytest.mark.slow
@pytest.mark.usefixtures("redis_here", "busy_machine")
def test_a_server_may_die_hang_refuse_and_come_back(tmp_path: Path) -> None:
    asked = ["dies mid-get", "hangs", "full", "auth fails", "comes back"]
    rows = run(
        tmp_path,
        "faults",
        "--tier",
        "redis",
        *(word for fault in asked for word in ("--fault", fault)),
    )
    assert [row["fault"] for row in rows] == asked
    assert all(row[name] for row in rows for name in YES), rows


def test_what_does_not_exist_is_told() -> None:
    result = CliRunner().invoke(command, ["faults", "--tier", "floppy"])
    assert (result.exit_code, "floppy: known are disk" in result.output) == (2, True)


@pytest.mark.server
@pytest.mark.parametrize("tier", ["disk", "kvhold"])
def test_rows_have_what_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    monkeypatch.setattr(tiers, "ROUNDS", 1)
    monkeypatch.setattr(tiers, "VALUE_BYTES", 1 << 20)
    monkeypatch.setattr(tiers, "NUM_VALUES", 2)
    rows = run(tmp_path, "tiers", "--tier", tier)
    assert {"put", "get", "lookup of 125 chunks"} <= {row["op"] for row in rows}
    for row in rows:
        assert row["tier"] == tier
        assert row["mb_s"] > 0
        assert row["ratio"] == pytest.approx(row["mb_s"] / row["limit_mb_s"])


def test_no_damage_goes_unnoticed(tmp_path: Path) -> None:
    result = run(tmp_path, "soak", "damage", "--count", "3000")
    assert sum(result["injected"].values()) == 3000
    assert len(result["injected"]) == 5
    assert result["undetected"] == 0


@pytest.mark.slow
def test_what_was_acknowledged_outlives_kills_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "_ROUNDS_A_SPACE", 3)
    result = run(tmp_path, "soak", "kills", "--rounds", "6")
    assert result["acknowledged"] > 0
    assert result["looked_up"] > 0
    assert (result["lost"], result["wrong"], result["misaccounted"]) == (0, 0, 0)


@pytest.mark.vllm
@pytest.mark.alone
@pytest.mark.usefixtures("redis_here")
def test_an_engine_outlives_a_redis_that_keeps_dying(tmp_path: Path) -> None:
    result = run(tmp_path, "soak", "redis", "--minutes", "0.4", "--every-s", "6")
    assert result["kills"] >= 2
    assert (result["wrong"], result["errors"]) == (0, 0)
    assert result["chunks_from_redis"] > 0
