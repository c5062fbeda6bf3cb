"""Durations of tiers' calls over time: kept within a bound, and shown."""

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from kvhold.control.history import History
from kvhold.control.latency_history import MOST_TIERS, LatencyRow, quantile
from kvhold.core.metrics import TABLE
from kvhold.net.messages import MetricSample
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, store
from tests.browsing import Page, browser
from tests.control.running import running_control
from tests.control.test_dashboard import SPACE, _until_sampled
from tests.control.test_history import Clock
from tests.node.nodes import PATIENT_S, RunningNode

__all__ = ["browser"]

EDGES = TABLE["kvhold_tier_seconds"].buckets
DAY_S = 86_400


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sample(tier: str, operation: str, counts: Mapping[float, int], size: str = "") -> MetricSample:
    """counts: by upper edge"""
    each = [counts.get(edge, 0) for edge in (*EDGES, float("inf"))]
    return MetricSample(
        "kvhold_tier_seconds", (tier, operation, size), 1.0, tuple(accumulate(each))
    )


def add(history: History, clock: Clock, *samples: MetricSample, run: str = "a") -> None:
    history.add(clock.now, run, samples)
    clock.now += 10


def rows(history: History, since_s: float = 3600) -> dict[tuple[str, str], LatencyRow]:
    answer = history.read_latencies(since_s)
    found = {(row["tier"], row["operation"]): row for row in answer["latencies"]}
    for row in found.values():
        assert len(row["medians_s"]) == len(row["p99s_s"]) == len(answer["at_s"])
    return found


def test_a_row_has_the_calls_of_all_sizes_since_the_first_sample(
    tmp_path: Path, clock: Clock
) -> None:
    history = History(tmp_path / "h", clock=clock)
    add(history, clock, sample("d", "get", {30.0: 50}, "1MiB"))
    add(
        history,
        clock,
        sample("d", "get", {30.0: 50, 0.002: 60}, "1MiB"),
        sample("d", "get", {0.005: 40}, "larger"),
        sample("d", "check", {0.1: 3}),
    )
    add(
        history,
        clock,
        sample("d", "get", {30.0: 50, 0.002: 60}, "1MiB"),
        sample("d", "get", {0.005: 40}, "larger"),
        sample("d", "put", {float("inf"): 2}, "larger"),
    )
    found = rows(history)
    assert found.keys() == {("d", "get"), ("d", "put")}
    get, put = found["d", "get"], found["d", "put"]
    assert get["calls"] == 100
    assert get["median_s"] == pytest.approx(0.001 + 0.001 * 50 / 60, abs=1e-6)
    assert get["p99_s"] == pytest.approx(0.002 + 0.003 * 39 / 40, abs=1e-6)
    assert [value for value in get["medians_s"] if value is not None] == [get["median_s"]]
    assert [value for value in get["p99s_s"] if value is not None] == [get["p99_s"]]
    assert (put["calls"], put["median_s"], put["p99_s"]) == (2, 30.0, 30.0)
    history.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_quantile_lies_in_the_bucket_of_its_call(seed: int) -> None:
    rng = random.Random(seed)
    seconds = sorted(rng.choice([0.0001, 0.003, 0.04, 3.0]) * rng.random() for _ in range(101))
    counts = [sum(one <= edge for one in seconds) for edge in (*EDGES, float("inf"))]
    for part, exact in ((0.5, seconds[50]), (0.99, seconds[99])):
        above = next(edge for edge in EDGES if exact <= edge)
        below = max((edge for edge in EDGES if edge < exact), default=0.0)
        assert below <= quantile(counts, part) <= above


def test_a_new_node_counts_from_zero_and_a_restart_does_not_jump(
    tmp_path: Path, clock: Clock
) -> None:
    history = History(tmp_path / "h", clock=clock)
    for calls, run in ((100, "a"), (110, "a"), (7, "b")):
        add(history, clock, sample("d", "probe", {0.001: calls}), run=run)
    history.close()
    again = History(tmp_path / "h", clock=clock)
    for calls in (500, 503):
        add(again, clock, sample("d", "probe", {0.001: calls}))
    assert rows(again)["d", "probe"]["calls"] == 10 + 7 + 3
    again.close()


def test_old_calls_are_kept_in_sums_and_then_go(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    tiers = [f"t{number:02}" for number in range(MOST_TIERS + 4)]
    hours = 8
    for calls in range(hours * 60 + 1):
        made = [sample(tier, "get", {0.001: calls, 0.5: calls}) for tier in tiers]
        history.add(clock.now, "a", made)
        clock.now += 60
    found = rows(history, 2 * DAY_S)
    assert found.keys() == {(tier, "get") for tier in tiers[:MOST_TIERS]}
    assert {row["calls"] for row in found.values()} == {2 * hours * 60}
    assert abs(rows(history, 3600)["t00", "get"]["calls"] - 2 * 60) <= 2
    with sqlite3.connect(tmp_path / "h") as database:
        counted = dict(database.execute("SELECT level, COUNT(*) FROM latencies GROUP BY level"))
    database.close()
    assert counted[0] <= MOST_TIERS * (6 * 60 + 61)
    assert counted[1] <= MOST_TIERS * (hours * 12 + 1)
    clock.now += 31 * DAY_S
    for calls in range(61):
        history.add(clock.now, "b", [sample("t00", "get", {0.001: calls})])
        clock.now += 1
    assert rows(history, 30 * DAY_S)["t00", "get"]["calls"] == 60
    history.close()


def test_counts_with_other_buckets_are_left_out(tmp_path: Path, clock: Clock) -> None:
    history = History(tmp_path / "h", clock=clock)
    add(history, clock)
    add(history, clock, MetricSample("kvhold_tier_seconds", ("d", "get", ""), 1.0, (1, 2)))
    add(history, clock, sample("d", "get", {0.001: 1}))
    with sqlite3.connect(tmp_path / "h") as database:
        database.execute("UPDATE latencies SET counts = x'0102'")
    database.close()
    assert rows(history) == {}
    add(history, clock, sample("d", "get", {0.001: 5}))
    assert rows(history)["d", "get"]["calls"] == 4
    assert rows(history, 2 * DAY_S)["d", "get"]["calls"] == 4
    history.close()


@pytest.fixture
def node(tmp_path: Path, start_node: Callable[..., RunningNode]) -> RunningNode:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    return start_node("--config", str(settings))


def use_disk(client: NodeClient) -> None:
    """Probe, put, and get."""
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    with client.lookup(prompt.query()):
        pass
    store(client, prompt)
    assert client.flush(deadline_s=PATIENT_S)
    with client.copy("disk", prompt.query(), drop=True) as copying:
        copying.wait(time.monotonic() + PATIENT_S)
    with client.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
        assert hit.num_tokens == 64


async def test_the_api_has_them(node: RunningNode) -> None:
    async with running_control(node.path, history_interval_s=0.05) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(use_disk, node.client())
        found: dict[str, Any] = {}
        for _ in range(2000):
            answer = (await control.ask("GET", "/v1/latencies?since_s=60"))[1]
            found = {row["operation"]: row for row in answer["latencies"]}
            if len(found) == 3:
                break
            await asyncio.sleep(0.01)
        assert found.keys() == {"probe", "get", "put"}
        for row in found.values():
            assert row["tier"] == "disk" and row["calls"] > 0
            assert 0 < row["median_s"] <= row["p99_s"] <= 30
        status, problem = await control.ask("GET", "/v1/latencies?since_s=0")
        assert (status, problem["reason"]) == (400, "bad_request")


async def test_the_dashboard_shows_them(node: RunningNode, browser: Any) -> None:
    page = Page(browser)
    async with running_control(node.path, history_interval_s=0.05) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(use_disk, node.client())
        await asyncio.to_thread(page.open, control.url)
        cells = 'return [...document.querySelectorAll("#tiers td")].map((one) => one.innerText)'
        for _ in range(2000):
            shown = await asyncio.to_thread(page.run, cells)
            if shown and all(" / " in cell for cell in shown[3:6]):
                break
            await asyncio.to_thread(page.run, "show()")
            await asyncio.sleep(0.05)
        assert shown[:3] == ["disk", "in use", "100 %"]
        assert all(cell.split()[1] in ("ms", "s") for cell in shown[3:6]), shown
        await asyncio.to_thread(page.until, "#latencies", "disk, median", "disk, p99")
        await asyncio.to_thread(page.click, 'button[data-call="put"]')
        await asyncio.to_thread(page.until, "#latencies", "disk, p99")
        assert page.count("#latencies svg polyline, #latencies svg circle") >= 2
        assert page.errors == []
