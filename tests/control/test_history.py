"""The past of the metrics: what is kept, for how long, and what survives."""

import sqlite3
import time
from pathlib import Path
from typing import Any, cast

import pytest

from kvhold.control.history import History
from kvhold.control.recorder import Recorder
from kvhold.core.errors import ConfigError
from kvhold.net.messages import MetricSample

HITS = "kvhold_hit_tokens"
START = 1_800_000_000


class Clock:
    now = float(START)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def add(history: History, clock: Clock, value: float, *, run: str = "a", used: float = 0) -> None:
    samples = [
        MetricSample(HITS, ("ram",), value),
        MetricSample("kvhold_arena_used_bytes", (), used),
        MetricSample("kvhold_tier_seconds", ("d", "get", "1MiB"), 1.0, (1,)),
        MetricSample("of_another_version", (), 1.0),
    ]
    history.add(clock.now, run, samples)


def total(history: History, since_s: float) -> float:
    values = history.read([HITS], since_s)["series"].get(f"{HITS}{{source=ram}}", [])
    return sum(value or 0 for value in values)


def test_counters_are_increments_and_gauges_values(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    for value, used in ((100, 5), (130, 6), (170, 7)):
        add(history, clock, value, used=used)
        clock.now += 10
    found = history.read([HITS, "kvhold_arena_used_bytes"], 60)
    assert found["step_s"] == 1
    of = {name: [v for v in values if v is not None] for name, values in found["series"].items()}
    assert of == {f"{HITS}{{source=ram}}": [30, 40], "kvhold_arena_used_bytes": [5, 6, 7]}
    assert len(found["at_s"]) == len(found["series"]["kvhold_arena_used_bytes"]) == 61
    history.close()


def test_a_new_node_counts_from_zero(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    for value, run in ((100, "a"), (110, "a"), (7, "b"), (9, "b")):
        add(history, clock, value, run=run)
        clock.now += 10
    assert total(history, 3600) == 10 + 7 + 2
    history.close()


def test_it_survives_a_restart_without_a_jump(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    for value in (100, 110):
        add(history, clock, value)
        clock.now += 10
    history.close()
    again = History(tmp_path / "h", clock=clock)
    for value in (500, 503):  # what was counted meanwhile is not known
        add(again, clock, value)
        clock.now += 10
    assert total(again, 3600) == 10 + 3
    assert (tmp_path / "h").stat().st_mode & 0o777 == 0o600
    again.close()


def test_what_is_old_is_kept_in_sums_and_then_goes(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    hours = 40
    for value in range(hours * 60 + 1):
        add(history, clock, value)
        clock.now += 60
    assert total(history, 86400 * 2) == hours * 60
    assert abs(total(history, 3600) - 60) <= 1
    with sqlite3.connect(tmp_path / "h") as database:
        counted = dict(database.execute("SELECT level, COUNT(*) FROM points GROUP BY level"))
    database.close()
    assert counted[0] <= 2 * (6 * 60 + 61)
    assert counted[1] <= 2 * (hours * 12 + 1)
    clock.now += 31 * 86400
    for value in range(61):
        add(history, clock, 5000 + value)
        clock.now += 1
    with sqlite3.connect(tmp_path / "h") as database:
        oldest = database.execute("SELECT MIN(at) FROM points").fetchone()[0]
    database.close()
    assert oldest >= clock.now - 30 * 86400 - 300
    history.close()


@pytest.mark.parametrize("since_s", [60, 3600, 21600, 86400, 30 * 86400])
def test_an_answer_has_few_columns(tmp_path: Path, clock: Clock, since_s: float) -> None:
    history = History(tmp_path / "h", clock=clock)
    add(history, clock, 1)
    found = history.read([HITS], since_s)
    assert 50 < len(found["at_s"]) <= 302
    assert found["at_s"][-1] <= clock.now < found["at_s"][-1] + found["step_s"]
    history.close()


def test_a_damaged_file_is_begun_anew_and_kept(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "h.history"
    path.write_bytes(b"no database" * 1000)
    history = History(path, clock=clock)
    add(history, clock, 1)
    assert "damaged" in caplog.text
    assert (tmp_path / "h.damaged").read_bytes().startswith(b"no database")
    history.close()


def test_a_link_or_a_missing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "none" / "h"):
        with pytest.raises(ConfigError, match=r"control\.history_file: cannot use"):
            History(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_node_that_answers_late_is_the_same_one() -> None:
    recorder = Recorder(cast(Any, None), Path("none"), 1.0)
    began_s = time.monotonic() - 100

    def run(pid: int, late_s: float = 0.0, restarted_s: float = 0.0) -> str:
        uptime_s = time.monotonic() - began_s - restarted_s + late_s
        return recorder._run_of(cast(Any, {"pid": pid, "uptime_s": uptime_s}))

    assert [run(1), run(1, 0.6), run(1, -0.6), run(1)] == ["1"] * 4
    assert [run(1, restarted_s=60), run(1, restarted_s=60), run(2, restarted_s=60)] == [*"223"]


def test_a_file_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "h"
    History(path).close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match=r"control\.history_file: cannot use .*locked"):
            History(path)
        other.rollback()
    other.close()
    assert path.exists() and not path.with_suffix(".damaged").exists()
