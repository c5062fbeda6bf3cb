"""`kvhold top`: its figures, and a real terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.cli.top_view import at_its_start, figures, is_same_run, lines
from kvhold.core.keys import Namespace
from kvhold.core.store_options import StoreOptions
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, fill, read, store
from tests.node.nodes import PATIENT_S, RunningNode, clean_environ, run_kvhold

SPACE = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),), title="/models/one\x1b[2J")
OTHER = Namespace("content:2", PLAIN, title="two")

rates = st.floats(0, 1e15, allow_nan=False)


def use(client: NodeClient) -> None:
    for space, found in ((SPACE, 64), (OTHER, 0)):
        client.register(space)
        names = a_prompt(space, 64).chunks()
        options = StoreOptions(tenant=space.tenant)
        with client.reserve(PLAIN, names, store_options=options) as reservation:
            fill(reservation, PLAIN, names)
            reservation.commit()
        assert read(client, a_prompt(space, 64, seed=0 if found else 9)) == found


@pytest.fixture
def client(tmp_path: Path, start_node: Callable[..., RunningNode]) -> NodeClient:
    file = tmp_path / "kvhold.toml"
    file.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    return start_node("--config", str(file)).client(name="an engine\n")


def test_the_figures_are_those_between_two_statuses(client: NodeClient) -> None:
    use(client)
    assert client.flush(deadline_s=PATIENT_S)
    first = client.status()
    whole = figures(at_its_start(first), first, {SPACE.digest.hex(): SPACE.title}, 1.0)
    assert whole.hit_rate == 0.5 and whole.lookups.keys() == {"hit", "miss"}
    assert whole.lookup_tokens_s == pytest.approx(128 / first["uptime_s"])
    assert whole.missed["never_stored"] == pytest.approx(64 / first["uptime_s"])
    ram, disk = whole.tiers
    assert (ram.name, ram.used_bytes, ram.size_bytes) == ("ram", first["used_bytes"], 16 << 20)
    assert disk.ms["put"] is not None and disk.ms["put"] > 0 and disk.written_bytes_s > 0
    busy = {one.name: one for one in whole.namespaces}
    assert busy[SPACE.digest.hex()].hit_rate == 1 and busy[OTHER.digest.hex()].hit_rate == 0
    assert busy[SPACE.digest.hex()].tenant == "acme"
    assert [(one.name, one.hit_rate) for one in whole.tenants] == [("acme", 1)]
    assert [one.name for one in whole.clients] == ["an engine\n"]
    text = "\n".join(lines(whole))
    assert "hit rate  50.0 % [##########----------]" in text and "/models/one?[2J (acme)" in text
    read(client, a_prompt(SPACE, 64))
    second = client.status()
    later = figures(first, second, {}, 2.0)
    assert is_same_run(first, second) and not is_same_run(second, first)
    assert later.hit_rate == 1 and not later.missed
    assert later.namespaces[0].name == SPACE.digest.hex()
    assert later.namespaces[1].lookups_s == 0 and later.namespaces[1].hit_rate is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_counters_can_be_shown(data: st.DataObject) -> None:
    names = [
        "kvhold_lookup_tokens",
        "kvhold_hit_tokens{source=ram}",
        "kvhold_hit_tokens{source=disk}",
        "kvhold_missed_tokens{reason=evicted}",
        "kvhold_tier_seconds_count{tier=disk,operation=get,size=1MiB}",
        "kvhold_tier_seconds_sum{tier=disk,operation=get,size=1MiB}",
        "kvhold_tier_queued_chunks{tier=disk}",
    ]

    def status(uptime_s: float) -> Any:
        tier = {
            "name": data.draw(st.text(max_size=20)) or "disk",
            "available": data.draw(st.booleans()),
            "last_fault": data.draw(st.text(max_size=30)),
            "used_bytes": data.draw(st.none() | st.integers(0, 1 << 50)),
            "pending_clears": data.draw(st.integers(0, 5)),
        }
        activity = {
            "namespace": data.draw(st.sampled_from(["", "ab", "cd"])),
            "tenant": data.draw(st.text(max_size=5)),
            **{k: data.draw(st.integers(0, 9)) for k in ("lookups", "lookup_tokens", "hit_tokens")},
        }
        return {
            "version": "1",
            "pid": 1,
            "socket": data.draw(st.text(max_size=20)),
            "uptime_s": uptime_s,
            "used_bytes": 1,
            "arena_bytes": 2,
            "chunks": 3,
            "pinned_chunks": 4,
            "namespaces": {"ab": 5},
            "counters": {name: data.draw(rates) for name in names if data.draw(st.booleans())},
            "tiers": [tier] * data.draw(st.integers(0, 2)),
            "busiest_namespaces": [activity] * data.draw(st.integers(0, 2)),
            "busiest_tenants": [activity] * data.draw(st.integers(0, 2)),
            "clients": [{"name": data.draw(st.text(max_size=40)), "pid": 1, "silent_s": 0.1}],
        }

    shown = figures(status(1.0), status(data.draw(st.floats(1, 1e6))), {}, 0.0)
    assert shown.hit_rate is None or shown.hit_rate >= 0
    width = data.draw(st.integers(1, 200))
    page = lines(shown, width=width)
    assert all(len(line) <= width and line.isprintable() for line in page)
    json.dumps(shown.__dict__, default=lambda one: one.__dict__)


def test_once_needs_no_terminal(client: NodeClient, tmp_path: Path) -> None:
    use(client)
    file = tmp_path / "figures.jsonl"
    arguments = ("top", "--socket", str(client.path), "--interval", "0.1")
    for _ in range(2):
        done = run_kvhold(*arguments, "--once", "--json", str(file))
        assert done.returncode == 0 and "hit rate  - " in done.stdout, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 and rows[0]["tiers"][1]["name"] == "disk"
    assert rows[0]["clients"][0]["name"] == "an engine\n"
    done = run_kvhold(*arguments, "--once", "--json", "-")
    assert json.loads(done.stdout)["pid"] == client.status()["pid"]
    for wrong, told in (
        ((), "needs a terminal, or --once"),
        (("--once", "--json", str(tmp_path / "no" / "file")), "--json"),
        (("--once", "--interval", "0"), "--interval"),
    ):
        done = run_kvhold(*arguments, *wrong)
        assert done.returncode != 0 and told in done.stderr and "Traceback" not in done.stderr


class Terminal:
    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self.descriptor = descriptor
        self.text = ""

    def until(self, wanted: str) -> str:
        until_s = time.monotonic() + PATIENT_S
        while wanted not in self.text:
            assert time.monotonic() < until_s, self.text[-2000:]
            ready, _, _ = select.select([self.descriptor], [], [], 1.0)
            if ready:
                self.text += os.read(self.descriptor, 65536).decode(errors="replace")
        seen, _, self.text = self.text.partition(wanted)
        return seen


@contextmanager
def a_terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvhold", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=clean_environ(TERM="xterm", COLUMNS="100", LINES="40"),
        start_new_session=True,
    )
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.communicate()
        os.close(theirs)
        os.close(ours)


@pytest.mark.parametrize("end", ["q", "ctrl-c"])
def test_in_a_terminal_it_refreshes_until_it_is_ended(
    client: NodeClient, start_node: Callable[..., RunningNode], end: str
) -> None:
    use(client)
    with a_terminal("top", "--socket", str(client.path), "--interval", "0.1") as terminal:
        terminal.until("\x1b[?1049h")
        assert "hit rate  50.0 %" in terminal.until("CLIENT"), "first of the whole run"
        store(client, a_prompt(SPACE, 128))
        terminal.until("hit rate  - ")
        read(client, a_prompt(SPACE, 128))
        terminal.until("hit rate  100.0 %")
        if end == "q":
            os.write(terminal.descriptor, b"q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        terminal.until("\x1b[?25h\x1b[?1049l")
        assert terminal.process.wait(PATIENT_S) == 0


def test_it_waits_for_a_lost_node(client: NodeClient) -> None:
    path = client.path
    with a_terminal("top", "--socket", str(path), "--interval", "0.1") as terminal:
        terminal.until("CLIENT")
        client.stop_node()
        terminal.until("no node: ")
        os.write(terminal.descriptor, b"q")
        assert terminal.process.wait(PATIENT_S) == 0
