"""Lookups over time by tenant, engine and session: kept within a bound, and shown to whom they
belong.
"""

import asyncio
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvhold.control.history import History
from kvhold.control.share_history import KINDS, MOST_APART
from kvhold.core.keys import Namespace
from kvhold.core.planning import RequestInfo
from kvhold.core.usage import LookupShare
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt
from tests.browsing import Page, browser
from tests.control.running import RunningControl, running_control
from tests.control.test_dashboard import _until_sampled
from tests.control.test_held import keep
from tests.control.test_history import START, Clock
from tests.node.nodes import RunningNode

__all__ = ["browser"]

ACME = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),), title="/models/one")
GLOBEX = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),), title="/models/one")
DAY_S = 86_400


@pytest.fixture
def clock() -> Clock:
    return Clock()


def named(answer: Any) -> dict[str, tuple[float, float]]:
    rows = [*answer["shares"], *([answer["others"]] if answer["others"] else [])]
    return {
        row["name"] or "others": (
            sum(value or 0 for value in row["asked"]),
            sum(value or 0 for value in row["hit"]),
        )
        for row in rows
    }


def add(history: History, clock: Clock, shares: Sequence[LookupShare], run: str = "a") -> None:
    history.add(clock.now, run, [], shares)
    clock.now += 10


def totals(asked: int, *rows: LookupShare) -> list[LookupShare]:
    return [LookupShare("all", "", "", 0, asked, asked // 2), *rows]


def tenant(name: str, asked: int, hit: int) -> LookupShare:
    return LookupShare("tenant", name, name, 0, asked, hit)


def test_names_have_their_increments_and_the_rest_is_of_others(
    tmp_path: Path, clock: Clock
) -> None:
    history = History(tmp_path / "h", clock=clock)
    add(history, clock, totals(1000, tenant("a", 600, 60)))
    add(history, clock, totals(1100, tenant("a", 640, 70), tenant("b", 10, 10)))
    add(history, clock, totals(1200, tenant("b", 5, 5)))  # it had to make way meanwhile
    add(history, clock, totals(30, tenant("a", 20, 0)), run="b")  # a new node
    answer = history.read_shares("tenant", 3600, None)
    assert named(answer) == {"a": (60, 10), "b": (15, 15), "others": (155, 90)}
    assert {len(row["asked"]) for row in answer["shares"]} == {len(answer["at_s"])}
    mine = history.read_shares("tenant", 3600, "b")
    assert named(mine) == {"b": (15, 15)} and mine["others"] is None
    history.close()


def test_a_file_of_an_earlier_version_is_read_and_goes_on(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "h"
    with sqlite3.connect(path) as old:
        old.executescript(
            "CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT UNIQUE);"
            "CREATE TABLE jobs (number INTEGER PRIMARY KEY, row TEXT);"
            "CREATE TABLE points (level INTEGER, series INTEGER, at INTEGER, value REAL,"
            " PRIMARY KEY (level, series, at)) WITHOUT ROWID;"
        )
        old.execute("INSERT INTO series VALUES (1, 'kvhold_lookup_tokens')")
        old.execute("INSERT INTO points VALUES (0, 1, ?, 7)", (START - 5,))
        old.execute("INSERT INTO jobs VALUES (3, '{}')")
    old.close()
    history = History(path, clock=clock)
    add(history, clock, totals(0))
    add(history, clock, totals(9, tenant("a", 9, 0)))
    series = history.read(["kvhold_lookup_tokens"], 3600)["series"]["kvhold_lookup_tokens"]
    assert [value for value in series if value] == [7]
    assert history.jobs() == ["{}"]
    assert named(history.read_shares("tenant", 3600, None)) == {"a": (9, 0), "others": (0, 4)}
    history.close()


def test_however_many_names_come_the_file_is_bounded(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "h"
    history = History(path, clock=clock)
    asked = 0
    for number in range(200):
        rows = [
            LookupShare(kind, "t", f"{number} {place} {'x' * 300}", 1, 10, 5)
            for kind in KINDS
            for place in range(64)
        ]
        asked += 64 * 10
        add(history, clock, totals(asked, *rows))
        if number % 40 == 0:  # what a restart forgets is read from the file
            history.close()
            history = History(path, clock=clock)
    answer = history.read_shares("session", 3600, None)
    assert len(answer["shares"]) == MOST_APART
    missed = 1 + 5 * 1  # samples after each start only begin
    assert sum(asked for asked, _ in named(answer).values()) == (200 - missed) * 640
    history.close()
    with sqlite3.connect(path) as database:
        per_column = database.execute(
            "SELECT level, at, kind, COUNT(*), MAX(LENGTH(name)) FROM shares GROUP BY 1, 2, 3"
        ).fetchall()
    database.close()
    assert {row[0] for row in per_column} == {0, 1}
    assert max(row[3] for row in per_column) == MOST_APART
    assert max(row[4] for row in per_column) == 100


def test_old_rows_go(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    for number in range(2):
        add(history, clock, totals(10 * number, tenant("old", 10 * number, 0)))
    for kept_s, since_s in ((7 * 3600, 3600), (31 * DAY_S, 30 * DAY_S)):
        assert "old" in named(history.read_shares("tenant", 30 * DAY_S, None))
        clock.now += kept_s
        for number in range(61):
            add(history, clock, totals(20 + number, tenant("old", 10, 0)))
        assert "old" not in named(history.read_shares("tenant", since_s, None))
    with sqlite3.connect(tmp_path / "h") as database:
        assert database.execute("SELECT COUNT(*) FROM shares WHERE name = 'old'").fetchone() == (0,)
    database.close()
    history.close()


def look(client: NodeClient, space: Namespace, session: str, *, seed: int = 0) -> None:
    query = a_prompt(space, 64, seed=seed).query()
    client.lookup(query, info=RequestInfo("request", session)).close()


async def shares_of(control: RunningControl, by: str, headers: Any = None) -> Any:
    status, answer = await control.ask("GET", f"/v1/shares?by={by}&since_s=600", headers=headers)
    assert status == 200, answer
    return answer


async def test_a_tenants_token_sees_only_its_own(
    node: RunningNode, tmp_path: Path, browser: Any
) -> None:
    files, page = {}, Page(browser)
    for name in ("acme", "read"):
        files[name] = tmp_path / name
        files[name].write_text(f"t-{name}")
        files[name].chmod(0o600)
    tokens = {
        "tenant_read_token_files": {"acme": str(files["acme"])},
        "read_token_file": str(files["read"]),
    }
    mine, all_ = ({"Authorization": f"Bearer t-{name}"} for name in ("acme", "read"))
    client = node.client(name="an engine")
    async with running_control(node.path, history_interval_s=0.05, **tokens) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(_work, client)
        for _ in range(500):
            found = await shares_of(control, "session", all_)
            if len(found["shares"]) == 2:
                break
            await asyncio.sleep(0.02)
        assert named(found) == {"s-acme": (64, 64), "s-globex": (64, 0), "others": (0, 0)}
        found = await shares_of(control, "tenant", all_)
        assert named(found) == {"acme": (64, 64), "globex": (64, 0), "others": (0, 0)}
        found = await shares_of(control, "client", all_)
        assert found["shares"][0]["name"] == f"an engine (pid {os.getpid()})"
        for by, name in (("tenant", "acme"), ("session", "s-acme")):
            found = await shares_of(control, by, mine)
            assert named(found) == {name: (64, 64)} and found["others"] is None
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.until, "#problem", "a token is needed")
        await asyncio.to_thread(page.type, "#token", "t-acme\n")
        await asyncio.to_thread(page.until, "#node", "the tenant of the token")
        await asyncio.to_thread(page.click, 'button[data-by="session"]')
        await asyncio.to_thread(page.until, "#callers", "s-acme")
        await asyncio.to_thread(page.until, "#prompts", "s-acme")
        shown = page.text("main")
        assert "globex" not in shown and "an engine" not in page.text("#callers")
        assert not any(title in shown for title in ("Why tokens are missed", "Tiers", "Clients"))
        page.run("sessionStorage.clear()")
        assert all("40" in one["message"] for one in page.errors), "refusals are logged"
        for query, headers, wanted in (
            ("?by=client", mine, (403, "tenant")),
            ("?by=model", all_, (400, "bad_request")),
            ("?since_s=0", all_, (400, "bad_request")),
            ("?by=tenant", None, (401, "no_token")),
        ):
            status, problem = await control.ask("GET", f"/v1/shares{query}", headers=headers)
            assert (status, problem["reason"]) == wanted, query


def _work(client: NodeClient) -> None:
    for space in (ACME, GLOBEX):
        client.register(space)
    keep(client, ACME)
    look(client, ACME, "s-acme")
    look(client, GLOBEX, "s-globex")


async def test_the_page_shows_the_hit_rate_by_tenant_engine_and_session(
    node: RunningNode, browser: Any
) -> None:
    client, page = node.client(name="<i>an engine</i>"), Page(browser)
    async with running_control(node.path, history_interval_s=0.05) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(_work, client)
        await asyncio.to_thread(page.open, control.url)
        for by, words in (
            ("tenant", ("acme", "globex", "100 %", "0 %")),
            ("client", ("<i>an engine</i>", "50 %")),
            ("session", ("acme: s-acme", "globex: s-globex")),
        ):
            await asyncio.to_thread(page.click, f'button[data-by="{by}"]')
            for _ in range(100):
                await asyncio.to_thread(page.run, "show()")
                await asyncio.sleep(0.1)
                if all(word in page.text("#callers") for word in words):
                    break
            await asyncio.to_thread(page.until, "#callers", *words)
            await asyncio.to_thread(page.until, "#shares .legend", words[0])
        assert page.count("#callers i") == 0, "text is never markup"
        assert page.errors == []
