"""The API under load: its cost to lookups, and how soon the dashboard is shown."""

import http.client
import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvhold.control.exposition import state_samples
from kvhold.control.history import History
from kvhold.control.recorder import state_and_samples
from kvhold.control.share_history import KINDS, MOST_APART
from kvhold.core.errors import NodeError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.core.usage import LookupShare
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold_lab.bench.overload import RawClient, fresh_names, query_of, store_unwritten
from kvhold_lab.bench.ratios import Cell, Goal, ratio
from kvhold_lab.bench.servers import serving
from kvhold_lab.servers.base import NotInstalled, program

_LAYOUT = Layout(groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),))
_TOKENS = 32_000
_AT_ONCE = 1000
_PAUSE_S = 0.005
_LOADS = 5
_DAY_S, _FINE_S, _COARSE_S = 86_400, 6 * 3600, 300
_GOAL = 1.1  # p99 of lookups, with requests over without
_SHOWN_S = 1.0
_SCRAPE = "/metrics"
_CALLS = ("/v1/status", "/v1/namespaces", "/v1/clients", "/v1/reasons", "/v1/pins", "/health/ready")
_SHOWN = """
const done = arguments[0];
const look = () => {
  const isShown = document.querySelectorAll("#namespaces tr").length > 1
    && document.querySelectorAll("#clients tr").length > 1
    && document.querySelectorAll("#held tr").length > 1
    && document.querySelectorAll("#prompts tr").length > 1
    && document.querySelectorAll("#shares svg").length
    && document.querySelectorAll("#memory svg").length;
  if (isShown) done(performance.now()); else requestAnimationFrame(look);
};
look();
"""


@dataclass(frozen=True)
class ControlRow:
    """interval: of the ratio, 95 %
    noise:    factor between windows without requests
    ok:       None: there is no goal, or the noise hides whether it is met
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    noise: float | None = None
    ok: bool | None = None


@dataclass(frozen=True)
class ControlSizes:
    """windows: with requests, and as many without"""

    chunks: int = 1_000_000
    namespaces: int = 200
    windows: int = 10
    window_s: float = 10.0
    scrapes: int = 1_000
    calls: int = 10_000
    history_step_s: int = 10


def rows(sizes: ControlSizes) -> Iterator[ControlRow]:
    with tempfile.TemporaryDirectory(prefix="kvhold-control-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        path, settings = folder / "node.sock", folder / "kvhold.toml"
        settings.write_text(
            'huge_pages = "never"\nscrub_interval_s = 0\n'
            f'[node]\nsocket = "{path}"\n'
            f'[control]\nlisten = "127.0.0.1:0"\nhistory_file = "{folder}/history"\n'
        )
        ram_bytes = (sizes.chunks + 64 * _AT_ONCE) * size_class(128) + 64 * SLAB_BYTES
        stack.enter_context(serving(["--config", str(settings)], ram_bytes=ram_bytes))
        client = stack.enter_context(NodeClient(path, name="kvhold bench"))
        _fill(client, path, sizes)
        _write_history(folder / "history", client, sizes.history_step_s)
        port = stack.enter_context(_running_control(settings))
        yield from _cost_rows(path, port, sizes)
        yield from _dashboard_rows(port)


def look_up_steadily(path: str) -> None:
    """The entry point of a process: an engine, until standard input ends."""
    space = Namespace("an engine", _LAYOUT)
    names = fresh_names(space, _TOKENS // _LAYOUT.tokens_per_chunk)
    taken: list[tuple[float, float]] = []
    with RawClient(Path(path)) as client:
        client.ask(m.Register(_LAYOUT, space.digest))
        assert store_unwritten(client, space, names, 0)
        query = query_of(space, names)
        sys.stdout.write("\n")
        sys.stdout.flush()
        while not select.select([0], [], [], _PAUSE_S)[0]:
            began_s = time.monotonic()
            found = client.ask(m.Lookup(query))
            taken.append((began_s, time.monotonic() - began_s))
            assert found.num_tokens == _TOKENS, found
            client.ask(m.Release(found.ticket))
    sys.stdout.write(json.dumps(taken))


def _fill(client: NodeClient, path: Path, sizes: ControlSizes) -> None:
    each = sizes.chunks // sizes.namespaces
    with RawClient(path) as writer:
        for number in range(sizes.namespaces):
            tags = (("tenant", f"tenant {number}"),)
            space = Namespace(f"bench {number}", _LAYOUT, tags=tags)
            client.register(space)
            for first in range(0, each, _AT_ONCE):
                names = fresh_names(space, min(_AT_ONCE, each - first))
                assert store_unwritten(writer, space, names, 0)
                for query in (query_of(space, names), query_of(space, fresh_names(space, 1))):
                    client.lookup(query).close()


def _write_history(file: Path, client: NodeClient, step_s: int) -> None:
    status, measured = state_and_samples(client)
    samples = [*state_samples(status), *measured]
    now_s = int(time.time())
    history = History(file)
    coarse = range(now_s - _DAY_S, now_s - _FINE_S, _COARSE_S)
    for number, at_s in enumerate((*coarse, *range(now_s - _FINE_S, now_s, step_s))):
        history.add(at_s, "1", samples, list(_shares(number)))
    history.close()


def _shares(number: int) -> Iterator[LookupShare]:
    yield LookupShare("all", "", "", number, 200 * number, 150 * number)
    for kind in KINDS:
        since = 0 if kind == "tenant" else number - number % 360
        for place in range(MOST_APART):
            name = f"{kind} {place} {since}"
            yield LookupShare(kind, name, name, 1, 20 * (number - since + 1), 15 * (number - since))


@contextmanager
def _running_control(settings: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "kvhold", "control", "--config", str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            if " ready on " not in ready:
                raise NodeError("kvhold control did not start; what it said stands above")
            yield int(ready.rpartition(":")[2])
        finally:
            server.send_signal(signal.SIGTERM)


def _cost_rows(path: Path, port: int, sizes: ControlSizes) -> Iterator[ControlRow]:
    code = f"from kvhold_lab.bench.control import look_up_steadily; look_up_steadily({str(path)!r})"
    spans: list[tuple[bool, float]] = []
    taken: dict[str, list[float]] = {"scrape": [], "call": []}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        try:
            engine.stdout.readline()
            for number in range(2 * sizes.windows):
                with_requests = number % 4 in (1, 2)
                spans.append((with_requests, time.monotonic()))
                if with_requests:
                    _ask(port, sizes, taken)
                else:
                    time.sleep(sizes.window_s)
            spans.append((False, time.monotonic()))
        finally:
            engine.stdin.close()
        lookups: list[tuple[float, float]] = json.loads(engine.stdout.read())
    p99_s = [
        float(np.percentile([s for at_s, s in lookups if began_s <= at_s < ended_s], 99))
        for (_, began_s), (_, ended_s) in pairwise(spans)
    ]
    rate = f"{len(taken['scrape'])} scrapes, {len(taken['call']):,} calls"
    yield _compared(f"p99 of a lookup of {_TOKENS:,} tokens, {rate}", p99_s)
    for what, seconds in taken.items():
        yield ControlRow(f"a {what}", round(1e3 * median(seconds), 3), "ms")


def _compared(name: str, p99_s: Sequence[float]) -> ControlRow:
    """p99_s: by window; requests came in windows 1 and 2 of each 4"""
    beside, alone = (
        [seconds for number, seconds in enumerate(p99_s) if (number % 4 in (1, 2)) is with_requests]
        for with_requests in (True, False)
    )
    pairs = [_cell(beside=one, alone=other) for one, other in zip(beside, alone, strict=True)]
    cost = ratio(pairs, "beside", "alone")
    others = [_cell(before=one, after=other) for one, other in pairwise(alone)]
    same = ratio(others, "before", "after")
    noise = max(same.high, 1 / same.low)
    verdict = Goal(name, cost, _GOAL, noise).verdict
    return ControlRow(
        name,
        round(1e3 * median(beside), 3),
        "ms",
        round(1e3 * median(alone), 3),
        round(cost.median, 3),
        (round(cost.low, 3), round(cost.high, 3)),
        round(noise, 3),
        None if verdict == "undecided" else verdict == "yes",
    )


def _cell(**seconds: float) -> Cell:
    return Cell(0, _TOKENS, burst=False, seconds=seconds)


def _ask(port: int, sizes: ControlSizes, taken: dict[str, list[float]]) -> None:
    scrapes, calls = sizes.scrapes // sizes.windows, sizes.calls // sizes.windows
    paths = cycle(_CALLS)
    pause_s = sizes.window_s / calls
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    due_s, scraped = time.monotonic(), 0
    for number, path in enumerate(islice(paths, calls), 1):
        _get(connection, path, taken["call"])
        while scraped < number * scrapes // calls:
            _get(connection, _SCRAPE, taken["scrape"])
            scraped += 1
        due_s += pause_s
        time.sleep(max(0.0, due_s - time.monotonic()))
    connection.close()


def _get(connection: http.client.HTTPConnection, path: str, taken: list[float]) -> None:
    began_s = time.monotonic()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    taken.append(time.monotonic() - began_s)
    if answer.status != 200:
        raise NodeError(f"kvhold control answers {path} with {answer.status}")


def _dashboard_rows(port: int) -> Iterator[ControlRow]:
    try:
        with _browser() as browser:
            shown_s = []
            for _ in range(1 + _LOADS):
                browser.get("about:blank")
                browser.get(f"http://127.0.0.1:{port}/")
                shown_s.append(browser.execute_async_script(_SHOWN) / 1e3)
    except NotInstalled:
        return
    seconds = median(shown_s[1:])
    yield ControlRow(
        "the dashboard is shown, with a day of history",
        round(seconds, 3),
        "s",
        _SHOWN_S,
        round(seconds / _SHOWN_S, 3),
        ok=seconds <= _SHOWN_S,
    )


@contextmanager
def _browser() -> Iterator[Any]:
    chromium = program("chromium", "apt-get install chromium")
    driver = program("chromedriver", "apt-get install chromium-driver")
    try:
        from selenium import webdriver
    except ImportError:
        raise NotInstalled("selenium is not installed here: pip install selenium") from None
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    browser = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )
    browser.set_script_timeout(60)
    try:
        yield browser
    finally:
        browser.quit()
