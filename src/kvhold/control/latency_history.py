"""Of the first `MOST_TIERS` tiers: at most 260,000 rows."""

import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import add
from typing import TypedDict

import numpy as np

from kvhold.control.time_grid import COARSE, COARSE_STEP_S, FINE, LEVELS, TimeGrid
from kvhold.core.metrics import TABLE
from kvhold.net.messages import MetricSample

MOST_TIERS = 8
OPERATIONS = ("probe", "get", "put")
_METRIC = TABLE["kvhold_tier_seconds"]
_NONE = (0,) * (len(_METRIC.buckets) + 1)
_COUNT = np.dtype("<u4")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS latencies (
    level INTEGER, at INTEGER, tier TEXT, operation TEXT, counts BLOB,
    PRIMARY KEY (level, at, tier, operation)
) WITHOUT ROWID;
"""

_Key = tuple[str, str]  # tier, operation


class LatencyRow(TypedDict):
    """medians_s, p99s_s: by column; null: no calls"""

    tier: str
    operation: str
    calls: int
    median_s: float
    p99_s: float
    medians_s: list[float | None]
    p99s_s: list[float | None]


class LatenciesAnswer(TypedDict):
    step_s: int
    at_s: list[int]
    latencies: list[LatencyRow]


class LatencyHistory:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.executescript(_SCHEMA)
        database.create_function("merged", 2, _merged, deterministic=True)
        self._run = ""
        self._last: dict[_Key, Sequence[int]] = {}

    def add(self, at_s: float, run: str, samples: Iterable[MetricSample]) -> None:
        is_first, last = not self._run, self._last if run == self._run else {}
        self._run, self._last = run, _counts(samples)
        if is_first:
            return
        rows: list[tuple[str, str, bytes]] = []
        for key, counts in self._last.items():
            pairs = zip(counts, last.get(key, _NONE), strict=True)
            grown = [max(0, count - before) for count, before in pairs]
            if any(grown):
                rows.append((*key, np.array(grown, _COUNT).tobytes()))
        at = int(at_s)
        with self._database:
            for level, when in ((FINE, at), (COARSE, at - at % COARSE_STEP_S)):
                self._database.executemany(
                    "INSERT INTO latencies VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "counts = merged(counts, excluded.counts)",
                    [(level, when, *row) for row in rows],
                )

    def read(self, grid: TimeGrid) -> LatenciesAnswer:
        rows = self._database.execute(
            "SELECT tier, operation, at / ? * ?, counts FROM latencies "
            "WHERE level = ? AND at >= ? AND length(counts) = ?",
            (grid.step_s, grid.step_s, grid.level, grid.first_s, len(_NONE) * _COUNT.itemsize),
        ).fetchall()
        places: dict[tuple[str, str, int], int] = {}
        of_row = [places.setdefault(row[:3], len(places)) for row in rows]
        counts = np.frombuffer(b"".join(row[3] for row in rows), _COUNT)
        sums = np.zeros((len(places), len(_NONE)), np.int64)
        np.add.at(sums, of_row, counts.reshape(-1, len(_NONE)))
        found: dict[_Key, dict[int, list[int]]] = {}
        for (tier, operation, at), total in zip(places, sums.tolist(), strict=True):
            found.setdefault((tier, operation), {})[at] = total
        return {
            "step_s": grid.step_s,
            "at_s": grid.columns,
            "latencies": [_row(key, found[key], grid) for key in sorted(found)],
        }

    def prune(self, now_s: int) -> None:
        for level, kept_s in LEVELS.items():
            self._database.execute(
                "DELETE FROM latencies WHERE level = ? AND at < ?", (level, now_s - kept_s)
            )


def quantile(counts: Sequence[int], part: float) -> float:
    """As Prometheus does. counts: cumulative, the last not 0"""
    rank = part * counts[-1]
    number = bisect_left(counts, rank)
    if number == len(_METRIC.buckets):
        return _METRIC.buckets[-1]
    low, before = (_METRIC.buckets[number - 1], counts[number - 1]) if number else (0.0, 0)
    inside = (rank - before) / (counts[number] - before)
    return round(low + (_METRIC.buckets[number] - low) * inside, 6)


def _counts(samples: Iterable[MetricSample]) -> dict[_Key, Sequence[int]]:
    found: dict[_Key, Sequence[int]] = {}
    tiers: set[str] = set()
    for sample in samples:
        if sample.name != _METRIC.name or len(sample.counts) != len(_NONE):
            continue
        tier, operation, *_ = sample.labels
        if operation in OPERATIONS and (tier in tiers or len(tiers) < MOST_TIERS):
            tiers.add(tier)
            key = tier, operation
            found[key] = tuple(map(add, found.get(key, _NONE), sample.counts))
    return found


def _row(key: _Key, columns: dict[int, list[int]], grid: TimeGrid) -> LatencyRow:
    whole = [sum(parts) for parts in zip(*columns.values(), strict=True)]

    def over_time(part: float) -> list[float | None]:
        return [quantile(columns[at], part) if at in columns else None for at in grid.columns]

    return {
        "tier": key[0],
        "operation": key[1],
        "calls": whole[-1],
        "median_s": quantile(whole, 0.5),
        "p99_s": quantile(whole, 0.99),
        "medians_s": over_time(0.5),
        "p99s_s": over_time(0.99),
    }


def _merged(old: bytes, new: bytes) -> bytes:
    if len(old) != len(new):
        return new
    return (np.frombuffer(old, _COUNT) + np.frombuffer(new, _COUNT)).tobytes()
