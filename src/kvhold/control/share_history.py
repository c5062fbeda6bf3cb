"""Each sample and sum keeps `MOST_APART` names of each kind: at most 270,000 rows."""

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypedDict

from kvhold.control.time_grid import COARSE, COARSE_STEP_S, FINE, LEVELS, TimeGrid
from kvhold.core.usage import LookupShare

MOST_APART = 8
KINDS = ("tenant", "client", "session")
_ALL = "all"
_MOST_NAME = 100
_SCHEMA = """
CREATE TABLE IF NOT EXISTS shares (
    level INTEGER, kind TEXT, at INTEGER, tenant TEXT, name TEXT, asked REAL, hit REAL,
    PRIMARY KEY (level, kind, at, tenant, name)
) WITHOUT ROWID;
"""

_Key = tuple[str, str, str]  # kind, tenant, name


class ShareRow(TypedDict):
    """asked: tokens looked up, by column; null: unknown
    hit:   of these, found
    """

    name: str
    tenant: str
    asked: list[float | None]
    hit: list[float | None]


class SharesAnswer(TypedDict):
    """step_s, at_s: as in `HistoryAnswer`
    others: null for a tenant's token
    """

    step_s: int
    at_s: list[int]
    shares: list[ShareRow]
    others: ShareRow | None


class ShareHistory:
    """One thread at a time."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.executescript(_SCHEMA)
        self._run = ""
        self._last: dict[_Key, LookupShare] = {}
        self._sum_at = 0
        self._in_sum: dict[str, set[tuple[str, str]]] = {}

    def add(self, at_s: float, run: str, shares: Sequence[LookupShare]) -> None:
        """See `History.add`. shares: by kind, the busiest first"""
        is_first, last = not self._run, self._last if run == self._run else {}
        self._run = run
        self._last = {(one.kind, one.tenant, one.name): one for one in shares}
        if is_first:
            return
        added = {
            key: grown
            for key, one in self._last.items()
            if (grown := _grown(one, last.get(key)))[0] > 0
        }
        at = int(at_s)
        coarse = at - at % COARSE_STEP_S
        fine_rows = [key for kind in (_ALL, *KINDS) for key in islice(_of(kind, added), MOST_APART)]
        with self._database:
            self._write(FINE, at, {key: added[key] for key in fine_rows})
            self._write(
                COARSE, coarse, {key: added[key] for key in added if self._fits(key, coarse)}
            )

    def read(self, kind: str, grid: TimeGrid, *, tenant: str | None = None) -> SharesAnswer:
        rows = self._read(kind, grid, tenant)
        found = sorted(rows.values(), key=lambda row: -_sum(row["asked"]))
        kept = found[:MOST_APART]
        others: ShareRow | None = None
        if tenant is None:
            everything = self._read(_ALL, grid, None).get(("", ""), _empty("", "", grid))
            others = _less(everything, kept)
        return {
            "step_s": grid.step_s,
            "at_s": grid.columns,
            "shares": kept,
            "others": others,
        }

    def prune(self, now_s: int) -> None:
        for level, kept_s in LEVELS.items():
            self._database.execute(
                "DELETE FROM shares WHERE level = ? AND kind IN (?, ?, ?, ?) AND at < ?",
                (level, _ALL, *KINDS, now_s - kept_s),
            )

    def _fits(self, key: _Key, coarse: int) -> bool:
        if coarse != self._sum_at:
            self._sum_at, self._in_sum = coarse, {}
            for kind, tenant, name in self._database.execute(
                "SELECT kind, tenant, name FROM shares "
                "WHERE level = ? AND kind IN (?, ?, ?) AND at = ?",
                (COARSE, *KINDS, coarse),
            ):
                self._in_sum.setdefault(kind, set()).add((tenant, name))
        kind, tenant, name = key
        names = self._in_sum.setdefault(kind, set())
        stored = (tenant, name[:_MOST_NAME])
        if stored not in names and len(names) >= MOST_APART:
            return False
        names.add(stored)
        return True

    def _write(self, level: int, at: int, added: Mapping[_Key, tuple[float, float]]) -> None:
        self._database.executemany(
            "INSERT INTO shares VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "asked = asked + excluded.asked, hit = hit + excluded.hit",
            [
                (level, kind, at, tenant, name[:_MOST_NAME], asked, hit)
                for (kind, tenant, name), (asked, hit) in added.items()
            ],
        )

    def _read(
        self, kind: str, grid: TimeGrid, tenant: str | None
    ) -> dict[tuple[str, str], ShareRow]:
        column = {at: number for number, at in enumerate(grid.columns)}
        rows: dict[tuple[str, str], ShareRow] = {}
        for of, name, at, asked, hit in self._database.execute(
            "SELECT tenant, name, at / ? * ?, SUM(asked), SUM(hit) FROM shares "
            "WHERE level = ? AND kind = ? AND at >= ? AND (? IS NULL OR tenant = ?) "
            "GROUP BY 1, 2, 3",
            (grid.step_s, grid.step_s, grid.level, kind, grid.first_s, tenant, tenant),
        ):
            if at in column:
                row = rows.setdefault((of, name), _empty(of, name, grid))
                row["asked"][column[at]], row["hit"][column[at]] = asked, hit
        return rows


def _grown(now: LookupShare, before: LookupShare | None) -> tuple[float, float]:
    if before is None or now.asked_tokens < before.asked_tokens:
        return now.asked_tokens, now.hit_tokens
    hit_tokens = max(0, now.hit_tokens - before.hit_tokens)
    return now.asked_tokens - before.asked_tokens, hit_tokens


def _of(kind: str, added: Mapping[_Key, tuple[float, float]]) -> "list[_Key]":
    return [key for key in added if key[0] == kind]


def _empty(tenant: str, name: str, grid: TimeGrid) -> ShareRow:
    nothing: list[float | None] = [None] * len(grid.columns)
    return {"name": name, "tenant": tenant, "asked": nothing, "hit": list(nothing)}


def _less(everything: ShareRow, kept: Sequence[ShareRow]) -> ShareRow:
    def left(field: str) -> list[float | None]:
        totals: list[float | None] = everything[field]  # type: ignore[literal-required]
        parts = [row[field] for row in kept]  # type: ignore[literal-required]
        return [
            None if total is None else max(0.0, total - sum(part[at] or 0 for part in parts))
            for at, total in enumerate(totals)
        ]

    return {"name": "", "tenant": "", "asked": left("asked"), "hit": left("hit")}


def _sum(values: Sequence[float | None]) -> float:
    return sum(value or 0 for value in values)
