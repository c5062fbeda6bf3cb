"""The metrics over time, on disk."""

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from kvhold.control.latency_history import LatenciesAnswer, LatencyHistory
from kvhold.control.share_history import ShareHistory, SharesAnswer
from kvhold.control.time_grid import COARSE, COARSE_STEP_S, FINE, LEVELS, TimeGrid
from kvhold.core.errors import ConfigError
from kvhold.core.metrics import TABLE
from kvhold.core.usage import LookupShare
from kvhold.net.messages import MetricSample

log = logging.getLogger(__name__)

_PRUNE_EVERY = 60  # samples
_MOST_SERIES = 1000
_MOST_JOBS = 256
_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS jobs (number INTEGER PRIMARY KEY, row TEXT);
CREATE TABLE IF NOT EXISTS points (
    level INTEGER, series INTEGER, at INTEGER, value REAL, PRIMARY KEY (level, series, at)
) WITHOUT ROWID;
"""


class HistoryAnswer(TypedDict):
    """step_s: seconds between two columns
    at_s:   Unix time at which each column begins
    series: by metric with its labels: increments of a counter, means of a gauge; null: unknown
    """

    step_s: int
    at_s: list[int]
    series: dict[str, list[float | None]]


class History:
    """One thread at a time."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError: the file cannot be used."""
        self._path = path
        self._clock = clock
        self._run = ""
        self._last: dict[str, float] = {}
        self._adds = 0
        try:
            self._database = self._open()
        except sqlite3.OperationalError as error:
            raise ConfigError(f"control.history_file: cannot use {path}: {error}") from None
        except sqlite3.DatabaseError as error:
            log.warning("%s is damaged (%s): begun anew; the old one ends in .damaged", path, error)
            path.replace(path.with_suffix(".damaged"))
            self._database = self._open()
        self._shares = ShareHistory(self._database)
        self._latencies = LatencyHistory(self._database)
        self._ids = {
            name: number for number, name in self._database.execute("SELECT id, name FROM series")
        }

    def add(
        self,
        at_s: float,
        run: str,
        samples: Sequence[MetricSample],
        shares: Sequence[LookupShare] = (),
    ) -> None:
        """run: of the node; another one's counters begin at 0"""
        self._shares.add(at_s, run, shares)
        self._latencies.add(at_s, run, samples)
        counters, gauges = self._changes(run, samples)
        at = int(at_s)
        coarse = at - at % COARSE_STEP_S
        with self._database:
            for values, fold in ((counters, "value + excluded.value"), (gauges, "excluded.value")):
                rows = [(self._id(name), value) for name, value in values.items()]
                known = [(number, value) for number, value in rows if number is not None]
                for level, when in ((FINE, at), (COARSE, coarse)):
                    self._database.executemany(
                        "INSERT INTO points VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                        f"value = {fold}",
                        [(level, number, when, value) for number, value in known],
                    )
            self._adds += 1
            if self._adds % _PRUNE_EVERY == 1:
                self._prune()

    def read(self, metrics: Sequence[str], since_s: float) -> HistoryAnswer:
        grid = TimeGrid(int(since_s), int(self._clock()))
        step = grid.step_s
        series: dict[str, list[float | None]] = {}
        for name, number in sorted(self._ids.items()):
            metric = name.partition("{")[0]
            if metric not in metrics:
                continue
            fold = "SUM" if TABLE[metric].kind == "counter" else "AVG"
            found = dict(
                self._database.execute(
                    f"SELECT at / ? * ?, {fold}(value) FROM points "
                    "WHERE level = ? AND series = ? AND at >= ? GROUP BY 1",
                    (step, step, grid.level, number, grid.first_s),
                ).fetchall()
            )
            if found:
                series[name] = [found.get(at) for at in grid.columns]
        return {"step_s": step, "at_s": grid.columns, "series": series}

    def read_shares(self, kind: str, since_s: float, tenant: str | None) -> SharesAnswer:
        grid = TimeGrid(int(since_s), int(self._clock()))
        return self._shares.read(kind, grid, tenant=tenant)

    def read_latencies(self, since_s: float) -> LatenciesAnswer:
        return self._latencies.read(TimeGrid(int(since_s), int(self._clock())))

    def save_job(self, number: int, row: str) -> None:
        with self._database:
            self._database.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?)", (number, row))
            self._database.execute("DELETE FROM jobs WHERE number <= ?", (number - _MOST_JOBS,))

    def jobs(self) -> list[str]:
        rows = self._database.execute("SELECT row FROM jobs ORDER BY number").fetchall()
        return [row for (row,) in rows]

    def close(self) -> None:
        self._database.close()

    def _open(self) -> sqlite3.Connection:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(self._path, flags, 0o600))
        except OSError as error:
            raise ConfigError(
                f"control.history_file: cannot use {self._path}: {error.strerror}"
            ) from None
        database = sqlite3.connect(self._path, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        return database

    def _changes(
        self, run: str, samples: Iterable[MetricSample]
    ) -> tuple[Mapping[str, float], Mapping[str, float]]:
        is_first, is_same = not self._run, run == self._run
        last, self._last, self._run = self._last if is_same else {}, {}, run
        counters, gauges = {}, {}
        for sample in samples:
            metric = TABLE.get(sample.name)
            if metric is None or metric.kind == "histogram":
                continue
            name = _flat(sample.name, metric.labels, sample.labels)
            if metric.kind == "gauge":
                gauges[name] = sample.value
                continue
            self._last[name] = sample.value
            if not is_first:  # else it counts since the node's start
                counters[name] = max(0.0, sample.value - last.get(name, 0.0))
        return counters, gauges

    def _id(self, name: str) -> int | None:
        if name not in self._ids:
            if len(self._ids) >= _MOST_SERIES:
                return None
            added = self._database.execute("INSERT INTO series (name) VALUES (?)", (name,))
            assert added.lastrowid is not None
            self._ids[name] = added.lastrowid
        number: int = self._ids[name]
        return number

    def _prune(self) -> None:
        now = int(self._clock())
        for level, kept_s in LEVELS.items():
            self._database.execute(
                "DELETE FROM points WHERE level = ? AND at < ?", (level, now - kept_s)
            )
        self._shares.prune(now)
        self._latencies.prune(now)


def _flat(name: str, labels: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f"{label}={value}" for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}}" if pairs else name
