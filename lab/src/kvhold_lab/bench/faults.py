"""The fault matrix (docs/faults.md)."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, read, store
from kvhold_lab.bench.places import BenchPlace, open_place
from kvhold_lab.bench.servers import serve_command

LAYOUT = Layout(
    groups=(Group(layers=4, planes=2, heads=2, head_dim=64, dtype="bfloat16"),), tokens_per_chunk=64
)
SPACE = Namespace(model="fault matrix", layout=LAYOUT)
PROMPT_TOKENS = 8 * 64
NUM_PROMPTS = 6
SLACK_S = 1.0
CALL_S, _ARRIVAL_S = 2.0, 3.0
_GUARD = (
    "probe_timeout_s=0.3&get_timeout_s=0.6&put_timeout_s=0.6"
    "&breaker_failures=2&breaker_pause_s=0.1&batch_bytes=256KiB"
)
_FAULT_COUNTERS = (
    "kvhold_tier_errors",
    "kvhold_tier_bad_frames",
    "kvhold_tier_dropped_chunks",
    "kvhold_withdrawn_chunks",
)


@dataclass(frozen=True)
class FaultRow:
    tier: str
    fault: str
    right: bool
    alive: bool
    in_deadline: bool
    baseline: bool
    counted: bool | None
    detail: str = ""


class Trial:
    def __init__(self, url: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvhold-trial-")
        socket = Path(self._folder.name) / "node.sock"
        command = serve_command("--socket", str(socket), "--ram-bytes", "64MiB")
        environ = os.environ | {"KVHOLD_TIERS": with_guard(url)}
        self._log = (Path(self._folder.name) / "log").open("wb")
        self._node = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._node.stdout is not None
        if not self._node.stdout.readline():
            raise RuntimeError(f"the node did not start: {Path(self._log.name).read_text()}")
        config = ClientConfig(call_timeout_s=CALL_S, arrival_timeout_s=_ARRIVAL_S)
        self.client = NodeClient(socket, config, name="fault matrix")
        self.client.register(SPACE)
        self.right = self.alive = self.in_deadline = True
        self._error = ""

    def store(self, *seeds: int) -> None:
        for seed in seeds:
            self._timed(CALL_S, partial(store, self.client, prompt(seed)))

    def read(self, *seeds: int) -> int:
        return sum(
            self._timed(_ARRIVAL_S + CALL_S, partial(read, self.client, prompt(seed))) or 0
            for seed in seeds
        )

    def flush(self) -> bool:
        return bool(self._timed(60.0, lambda: self.client.flush(deadline_s=60.0)))

    def counters(self) -> dict[str, float]:
        status = self.client.status()
        return status["counters"] | status["tier_counters"]

    def count(self, name: str) -> float:
        return sum(
            value for counter, value in self.counters().items() if counter.split("{")[0] == name
        )

    def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> bool:
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def row(self, tier: str, fault: str, *, countable: bool = True) -> FaultRow:
        counted = any(self.count(name) for name in _FAULT_COUNTERS) if countable else None
        self.store(1000)
        self.alive = self.alive and self.read(1000) == PROMPT_TOKENS and self._node.poll() is None
        baseline = False
        with suppress(KVHoldError):
            self.client.clear()
            baseline = self.until(self._is_at_baseline)
        return FaultRow(
            tier, fault, self.right, self.alive, self.in_deadline, baseline, counted, self._error
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.client.close()
        self._node.terminate()
        try:
            self._node.wait(20)
        except subprocess.TimeoutExpired:
            self._node.kill()
            self._node.wait()
        assert self._node.stdout is not None
        self._node.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def _is_at_baseline(self) -> bool:
        status = self.client.status()
        return not any(
            (
                status["used_bytes"],
                status["arriving_chunks"],
                status["write_behind"]["chunks"],
                *status["held"].values(),
            )
        )

    def _timed(self, deadline_s: float, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return call()
        except AssertionError:
            self.right = False
        except KVHoldError as error:
            self.alive = False
            self._error = self._error or str(error)
        finally:
            self.in_deadline = self.in_deadline and time.monotonic() - began <= deadline_s + SLACK_S
        return None


def prompt(seed: int) -> Prompt:
    return a_prompt(SPACE, PROMPT_TOKENS, seed)


def with_guard(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{_GUARD}"


def wrapped(url: str, rules: str) -> str:
    return f"faults+{url}{'&' if '?' in url else '?'}faults={rules}&faults_seed=7"


SEEDS = range(NUM_PROMPTS)
REFUSE_WHEN_FULL = ("redis", "memcached")


def _stored(place: BenchPlace) -> None:
    with Trial(place.url()) as trial:
        trial.client.clear()
        trial.store(*SEEDS)
        if not trial.flush():
            raise RuntimeError(f"{place.name}: the prompts could not be stored")


def _dead_at_start(place: BenchPlace) -> FaultRow:
    place.kill()
    try:
        with Trial(place.url()) as trial:
            trial.store(*SEEDS)
            trial.read(*SEEDS, 99)
            trial.flush()
            return trial.row(place.name, "dead at start")
    finally:
        place.revive()


def _dies_mid_put(place: BenchPlace) -> FaultRow:
    with Trial(wrapped(place.url(), "put:delay:1:50ms")) as trial:
        trial.store(*SEEDS)
        trial.until(lambda: trial.count("kvhold_tier_bytes") > 0)
        place.kill()
        try:
            trial.store(10, 11)
            trial.read(*SEEDS, 10, 11)
            trial.flush()
            return trial.row(place.name, "dies mid-put")
        finally:
            place.revive()


def _dies_mid_get(place: BenchPlace) -> FaultRow:
    _stored(place)
    with Trial(wrapped(place.url(), "get:delay:1:100ms")) as trial:
        for seed in SEEDS:
            trial.client.prefetch(prompt(seed).query())
        trial.until(lambda: trial.count("kvhold_promoted_chunks") > 0)
        place.kill()
        try:
            trial.read(*SEEDS)
            return trial.row(place.name, "dies mid-get")
        finally:
            place.revive()


def _hangs(place: BenchPlace) -> FaultRow:
    _stored(place)
    pausable = place.pause()
    if pausable:
        place.resume()
    url = place.url() if pausable else wrapped(place.url(), "get:hang,put:hang")
    with Trial(url.replace(",", "%20")) as trial:
        trial.until(lambda: trial.count("kvhold_tier_seconds_count") > 0)
        if pausable:
            place.pause()
        try:
            trial.store(10)
            trial.read(*SEEDS, 10)
            trial.flush()
        finally:
            if pausable:
                place.resume()
        return trial.row(place.name, "hangs")


def _slow(place: BenchPlace) -> FaultRow:
    _stored(place)
    with Trial(
        wrapped(place.url(), "get:delay:1:200ms%20put:delay:1:200ms%20probe:delay:1:100ms")
    ) as trial:
        trial.store(10)
        trial.read(*SEEDS, 10)
        trial.flush()
        return trial.row(place.name, "slow", countable=False)


def _full(place: BenchPlace) -> FaultRow | None:
    url = place.full_url()
    if url is None:
        return None
    with Trial(url) as trial:
        seeds = range(20, 40)
        trial.store(*seeds)
        trial.flush()
        trial.read(*seeds)
        return trial.row(place.name, "full", countable=place.name in REFUSE_WHEN_FULL)


def _damaged(place: BenchPlace, fault: str, rules: str) -> FaultRow:
    _stored(place)
    with Trial(wrapped(place.url(), rules)) as trial:
        trial.read(*SEEDS)
        trial.read(*SEEDS)
        return trial.row(place.name, fault)


def _stale(place: BenchPlace) -> FaultRow:
    _stored(place)
    with Trial(wrapped(place.url(), "probe:stale:0.5%20get:stale:0.3")) as trial:
        trial.read(*SEEDS)
        trial.read(*SEEDS)
        return trial.row(place.name, "stale")


def _denied(place: BenchPlace) -> FaultRow | None:
    url = place.denied_url()
    if url is None:
        return None
    with Trial(url) as trial:
        trial.store(*SEEDS)
        trial.read(*SEEDS, 99)
        trial.flush()
        return trial.row(place.name, "auth fails")


def _comes_back(place: BenchPlace) -> FaultRow:
    with Trial(place.url()) as trial:
        trial.store(0)
        trial.flush()
        place.kill()
        try:
            trial.store(*range(10, 14))
            trial.flush()
            trial.read(98)
        finally:
            place.revive()
        back = trial.until(
            lambda: all(tier["available"] for tier in trial.client.status()["tiers"])
        )
        before, seeds = trial.count("kvhold_tier_bytes"), count(20)

        def is_written() -> bool:  # a server's first answers may be late
            trial.store(next(seeds))
            trial.flush()
            return trial.count("kvhold_tier_bytes") > before

        trial.alive = trial.alive and back and trial.until(is_written)
        return trial.row(place.name, "comes back")


FAULTS: dict[str, Callable[[BenchPlace], FaultRow | None]] = {
    "dead at start": _dead_at_start,
    "dies mid-put": _dies_mid_put,
    "dies mid-get": _dies_mid_get,
    "hangs": _hangs,
    "slow": _slow,
    "full": _full,
    "truncated": lambda place: _damaged(place, "truncated", "get:truncate:0.3"),
    "bit-flipped": lambda place: _damaged(place, "bit-flipped", "get:corrupt:0.3"),
    "swapped": lambda place: _damaged(place, "swapped", "get:swap:0.5"),
    "stale": _stale,
    "auth fails": _denied,
    "comes back": _comes_back,
}


def rows(tiers: Sequence[str], faults: Sequence[str]) -> Iterator[FaultRow]:
    for tier in tiers:
        with open_place(tier) as place:
            for fault in faults:
                row = FAULTS[fault](place)
                if row is not None:
                    yield row
