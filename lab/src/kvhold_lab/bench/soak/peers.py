"""Nodes are killed, restarted and cut off. At the end, all must be empty."""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold_lab.bench.soak.hash_engine import (
    SPACE,
    VOCABULARY,
    HashEngine,
    Tokens,
    answer,
    compute_kv,
)
from kvhold_lab.bench.soak.peers_fleet import (
    FleetNetwork,
    SoakNode,
    namespaces_network,
)
from kvhold_lab.quiet import quiet

_DOCUMENTS = 100  # twice one node's memory
_DOCUMENT_TOKENS = (200, 1000)
_QUESTION_TOKENS = (1, 60)
_NEW_DOCUMENTS = 0.05
_PAUSES_S = (0.4, 1.6)
_WARM_UP_REQUESTS = 300
_QUIET_S, _CUTS_S = (3.0, 5.0), (1.0, 4.0, 8.0, 14.0)
_BACK_S, _AFTER_S = 10.0, 10.0
_BACK_SHARE = 0.9
_OLD_S = 15.0  # then its memory is measured
_GROWTH_BYTES = 16 << 20
_ALLOWED_S = 1.0
_PATIENCE_S = 60.0
_CONFIG = ClientConfig(
    connect_timeout_s=2.0, call_timeout_s=2.0, arrival_timeout_s=2.0, reconnect_interval_s=0.1
)
_BROKEN = (
    "wrong tokens",
    "wrong bytes",
    "damaged",
    "late",
    "not back",
    "hit rate",
    "grown",
    "crossed",
    "left",
    "tracebacks",
)
_HELD = ("used_bytes", "pinned_chunks", "arriving_chunks", "held")


@dataclass(frozen=True)
class PeersSoak:
    """not_back:    heals with prompts found too late, or never
    grown_bytes: the most of a node, without its arena
    left:        nodes that held something at the end
    """

    network: str
    nodes: int
    requests: int
    calls: int
    stored_tokens: int
    hit_tokens: int
    peer_tokens: int
    refused: int
    kills: int
    restarts: int
    cuts: int
    forgotten: int
    wrong_tokens: int
    wrong_bytes: int
    damaged: int
    late: int
    not_back: int
    slowest_back_s: float
    hit_rate_before: float
    hit_rate_cut: float
    hit_rate_after: float
    grown_bytes: int
    measured_nodes: int
    left: int
    tracebacks: int
    findings: list[str]
    missing: list[str]
    seconds: float
    passed: bool


@dataclass
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    phase: str = "warm-up"
    back_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int = 1, finding: str = "") -> None:
        with self.lock:
            self.counts[name] += count
            if finding and len(self.findings) < 20:
                self.findings.append(f"{name}: {finding}")

    def hit_rate(self, phase: str) -> float:
        asked = self.counts[f"asked {phase}"]
        return round(self.counts[f"hit {phase}"] / asked, 3) if asked else 0.0


class _Texts:
    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._documents = [self._document() for _ in range(_DOCUMENTS)]
        self._lock = threading.Lock()

    def prompt(self) -> Tokens:
        with self._lock:
            number = int(self._chance.integers(_DOCUMENTS))
            if self._chance.random() < _NEW_DOCUMENTS:
                self._documents[number] = self._document()
            question = self._tokens(int(self._chance.integers(*_QUESTION_TOKENS)))
            return np.concatenate([self._documents[number], question])

    def unseen(self) -> Tokens:
        with self._lock:
            return self._document()

    def _document(self) -> Tokens:
        return self._tokens(int(self._chance.integers(*_DOCUMENT_TOKENS)))

    def _tokens(self, count: int) -> Tokens:
        return self._chance.integers(0, VOCABULARY, count, dtype=np.int32)


@quiet("kvhold.node")
def run(
    requests: int,
    seed: int,
    *,
    nodes: int = 8,
    network_of: Callable[[int], AbstractContextManager[FleetNetwork]] = namespaces_network,
) -> PeersSoak:
    """Raises NoSecondHost."""
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-peers-soak-") as folder,
        network_of(nodes) as network,
        ExitStack() as stack,
    ):
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text("kvhold bench soak peers\n")
        fleet = [
            SoakNode(number, network, Path(folder) / f"node-{number}", token)
            for number in range(nodes)
        ]
        for node in fleet:
            stack.callback(node.stop)
            node.start()
        for node in fleet:
            node.wait_until_ready()
        soak = _Soak(fleet, network, seed)
        soak.run(requests)
    return _report(soak, network.kind, time.monotonic() - began_s)


class _Soak:
    def __init__(self, fleet: list[SoakNode], network: FleetNetwork, seed: int) -> None:
        self.fleet = fleet
        self.tally = _Tally()
        self.grown: list[int] = []
        self._network = network
        self._chance = random.Random(seed)
        self._texts = _Texts(seed)
        self._ended = threading.Event()

    def run(self, requests: int) -> None:
        with ExitStack() as stack:
            engines = []
            for number, node in enumerate(self.fleet):
                client = stack.enter_context(node.client(_CONFIG, f"soak {number}"))
                client.register(SPACE)
                engines.append(HashEngine(client, _CONFIG, _ALLOWED_S))
            askers = stack.enter_context(ThreadPoolExecutor(len(engines)))
            asking = [
                askers.submit(self._ask, engine, random.Random(f"{self._chance.random()}"))
                for engine in engines
            ]
            stack.callback(self._ended.set)
            stack.callback(self._network.mend)
            while self.tally.counts["requests"] < _WARM_UP_REQUESTS and not self._ended.is_set():
                self._wait(0.05)
            while True:
                self._round(engines)
                if self.tally.counts["requests"] >= requests or self._ended.is_set():
                    break
            self._ended.set()
            for asked in asking:
                asked.result()
            self._measure_growth()
            self._count_left()

    def _measure_growth(self) -> None:
        for number, node in enumerate(self.fleet):
            grown = node.growth()
            if grown is None:
                continue
            self.grown.append(grown)
            if grown > _GROWTH_BYTES:
                self.tally.add("grown", finding=f"node {number} by {grown:,} bytes")

    def _count_left(self) -> None:
        """While engines are connected: lost connections free memory."""
        patient = ClientConfig(call_timeout_s=_PATIENCE_S)
        until_s = time.monotonic() + _PATIENCE_S
        with ExitStack() as stack:
            clients = [
                stack.enter_context(node.client(patient, "soak, end")) for node in self.fleet
            ]
            left = dict(enumerate(clients))
            clients[0].clear()
            while left and time.monotonic() < until_s:
                left = {number: one for number, one in left.items() if not _is_empty(one)}
                time.sleep(0.1)
            for number, client in left.items():
                status = client.status()
                kept = {name: status[name] for name in _HELD}  # type: ignore[literal-required]
                self.tally.add("left", finding=f"node {number}: {kept}")
        for number, node in enumerate(self.fleet):
            if "Traceback" in node.log:
                self.tally.add("tracebacks", finding=f"node {number}: {node.log[-1000:]}")

    def _round(self, engines: list[HashEngine]) -> None:
        everyone = range(len(self.fleet))
        side = self._chance.sample(everyone, self._chance.randint(1, len(everyone) // 2))
        interruptions = self._chance.sample(("kills", "restarts"), 2)
        for node in self.fleet:
            node.take_baseline(_OLD_S)
        self.tally.phase = "before"
        self._interrupt(interruptions[0])
        if self._network.forget(self._chance.choice(everyone)):
            self.tally.add("forgotten")
        self._wait(self._chance.uniform(*_QUIET_S))

        self.tally.phase = "cut"
        self._network.split(side)
        self.tally.add("cuts")
        until_s = time.monotonic() + self._chance.choice(_CUTS_S)
        self._interrupt(interruptions[1])
        self._wait(until_s - time.monotonic())
        others = [number for number in everyone if number not in side]
        far = [
            (self._store_unseen(engines, source), target)
            for source, target in ((side, others), (others, side))
        ]
        for tokens, numbers in far:
            if any(engines[number].find(tokens) for number in numbers):
                self.tally.add("crossed", finding="a prompt was found across a cut")

        self._network.mend()
        mended_s = time.monotonic()
        self.tally.phase = "after"
        self._wait_until_back(engines, far, mended_s)
        self._wait(mended_s + _AFTER_S - time.monotonic())

    def _interrupt(self, kind: str) -> None:
        """Not the first node, for its memory."""
        node = self._chance.choice(self.fleet[1:])
        self.tally.add(kind)
        if kind == "kills":
            node.kill()
        else:
            node.stop()
        self._wait(self._chance.uniform(0, 1))
        node.start()
        node.wait_until_ready()

    def _ask(self, engine: HashEngine, chance: random.Random) -> None:
        try:
            while not self._ended.wait(chance.uniform(*_PAUSES_S)):
                phase = self.tally.phase
                tokens = self._texts.prompt()
                self.tally.add("requests")
                hit_tokens = self._serve(engine, tokens)
                self.tally.add(f"asked {phase}", len(tokens))
                self.tally.add(f"hit {phase}", hit_tokens)
        finally:
            self._ended.set()

    def _serve(self, engine: HashEngine, tokens: Tokens) -> int:
        kv = compute_kv(tokens)
        served, tally, what = engine.serve(tokens, kv), self.tally, f"{len(tokens)} tokens"
        tally.add("calls", served.calls)
        tally.add("stored", served.stored_tokens)
        tally.add("hit", served.hit_tokens)
        tally.add("peer", served.peer_tokens)
        tally.add("refused", len(served.refused))
        if (expected := answer(kv)) != served.tokens:
            tally.add("wrong tokens", finding=f"{what}: {served.tokens}, not {expected}")
        if served.wrong_bytes:
            tally.add("wrong bytes", served.wrong_bytes, f"{what}, hit {served.hit_tokens}")
        if served.damaged:
            tally.add("damaged", finding=f"{what}: {served.damaged}")
        for late in served.late:
            tally.add("late", finding=late)
        return served.hit_tokens

    def _store_unseen(self, engines: list[HashEngine], among: list[int]) -> Tokens:
        tokens, until_s = self._texts.unseen(), time.monotonic() + _PATIENCE_S
        engine = engines[self._chance.choice(among)]
        while True:
            self._serve(engine, tokens)
            if engine.find(tokens) == len(tokens):
                return tokens
            if time.monotonic() > until_s:
                raise TimeoutError("a node stores nothing")
            time.sleep(0.05)

    def _wait_until_back(
        self, engines: list[HashEngine], far: list[tuple[Tokens, list[int]]], mended_s: float
    ) -> None:
        """far: prompts of one side, nodes of the other"""
        left = [(tokens, number) for tokens, numbers in far for number in numbers]
        until_s = mended_s + _PATIENCE_S
        while left and time.monotonic() < until_s and not self._ended.is_set():
            left = [
                (tokens, number)
                for tokens, number in left
                if engines[number].find(tokens) < len(tokens)
            ]
            self._wait(0.05)
        back_s = time.monotonic() - mended_s
        for tokens, numbers in far:
            for number in numbers:
                self._serve(engines[number], tokens)
        self.tally.back_s.append(round(back_s, 2))
        if left or back_s > _BACK_S:
            away = sorted({number for _, number in left})
            self.tally.add("not back", finding=f"{back_s:.1f} s after a heal; then away: {away}")

    def _wait(self, seconds: float) -> None:
        self._ended.wait(max(0.0, seconds))


def _is_empty(client: NodeClient) -> bool:
    status = client.status()
    return not (
        status["used_bytes"]
        or status["pinned_chunks"]
        or status["arriving_chunks"]
        or status["served_peers"]["in_flight_bytes"]
        or any(status["held"].values())
    )


def _report(soak: _Soak, network: str, seconds: float) -> PeersSoak:
    tally = soak.tally
    counts = tally.counts
    rates = {phase: tally.hit_rate(phase) for phase in ("before", "cut", "after")}
    met = {
        "kill": counts["kills"],
        "restart": counts["restarts"],
        "cut": counts["cuts"],
        "token from a peer": counts["peer"],
        "node old enough to measure its memory": len(soak.grown),
        "hit before a cut": rates["before"],
    }
    if rates["after"] < _BACK_SHARE * rates["before"]:
        tally.add("hit rate", finding=f"{rates['after']} after cuts, {rates['before']} before")
    missing = [
        f"no {name}: this run shows nothing of them" for name, is_met in met.items() if not is_met
    ]
    return PeersSoak(
        network=network,
        nodes=len(soak.fleet),
        requests=counts["requests"],
        calls=counts["calls"],
        stored_tokens=counts["stored"],
        hit_tokens=counts["hit"],
        peer_tokens=counts["peer"],
        refused=counts["refused"],
        kills=counts["kills"],
        restarts=counts["restarts"],
        cuts=counts["cuts"],
        forgotten=counts["forgotten"],
        wrong_tokens=counts["wrong tokens"],
        wrong_bytes=counts["wrong bytes"],
        damaged=counts["damaged"],
        late=counts["late"],
        not_back=counts["not back"],
        slowest_back_s=max(tally.back_s, default=0.0),
        hit_rate_before=rates["before"],
        hit_rate_cut=rates["cut"],
        hit_rate_after=rates["after"],
        grown_bytes=max(soak.grown, default=0),
        measured_nodes=len(soak.grown),
        left=counts["left"],
        tracebacks=counts["tracebacks"],
        findings=tally.findings,
        missing=missing,
        seconds=round(seconds, 1),
        passed=not (missing or any(counts[name] for name in _BROKEN)),
    )
