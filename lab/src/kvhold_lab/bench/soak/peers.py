"""Nodes are killed, links fail. At the end one node clears, and all must be empty."""

import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, check, store
from kvhold_lab.bench.relay import RelayedLink, RelayedNetwork
from kvhold_lab.bench.servers import serve_command
from kvhold_lab.quiet import quiet
from kvhold_lab.servers.base import free_port

SPACE = Namespace(
    model="peers soak",
    layout=Layout(
        groups=(Group(layers=2, planes=2, heads=2, head_dim=64, dtype="bfloat16"),),
        tokens_per_chunk=16,
    ),
)
_PROMPTS = 200  # of up to 1 MB: several times one node's memory
_MOST_TOKENS = 1000
_RAM_BYTES = 32 << 20
_CALL_S, _ARRIVAL_S = 5.0, 5.0
_SLACK_S = 10.0
_PATIENCE_S = 60.0
_CHAOS_S = (0.3, 2.0)
_STOP_S = 20.0
_KINDS = ("kills", "cuts", "forgotten")


@dataclass(frozen=True)
class PeersSoak:
    """wrong, late and left must be 0."""

    nodes: int
    requests: int
    stored_tokens: int
    found_tokens: int
    loaded_tokens: int
    refused: int
    kills: int
    cuts: int
    forgotten: int
    wrong: int
    late: int
    left: int
    findings: list[str]
    seconds: float
    passed: bool


@dataclass
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int = 1, finding: str = "") -> None:
        with self.lock:
            self.counts[name] += count
            if finding and len(self.findings) < 20:
                self.findings.append(finding)


@quiet("kvhold.node")
def run(seconds: float, seed: int, *, nodes: int = 8) -> PeersSoak:
    began_s = time.monotonic()
    chance, tally = random.Random(seed), _Tally()
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-peers-soak-") as folder,
        RelayedNetwork() as network,
        ExitStack() as stack,
    ):
        ports = [free_port() for _ in range(nodes)]
        links = {
            (source, target): network.link(("127.0.0.1", ports[target]))
            for source in range(nodes)
            for target in range(nodes)
            if source != target
        }
        fleet = [
            _Node(
                Path(folder) / f"node-{number}",
                ports[number],
                [link.port for (source, _), link in links.items() if source == number],
            )
            for number in range(nodes)
        ]
        for node in fleet:
            stack.callback(node.stop)
            node.start()
        for node in fleet:
            node.wait_until_ready()
        ended = threading.Event()
        asking = [
            threading.Thread(target=_ask, args=(node, random.Random(f"{seed} {at}"), tally, ended))
            for at, node in enumerate(fleet)
        ]
        for thread in asking:
            thread.start()
        try:
            _break(fleet, links, chance, tally, time.monotonic() + seconds)
        finally:
            ended.set()
            for thread in asking:
                thread.join()
        for link in links.values():
            link.mend()
        left = _at_baseline(fleet, tally)
    counts = tally.counts
    met = all(counts[name] for name in ("loaded", *_KINDS))
    return PeersSoak(
        nodes,
        counts["requests"],
        counts["stored"],
        counts["found"],
        counts["loaded"],
        counts["refused"],
        counts["kills"],
        counts["cuts"],
        counts["forgotten"],
        counts["wrong"],
        counts["late"],
        left,
        tally.findings,
        round(time.monotonic() - began_s, 1),
        met and not (counts["wrong"] or counts["late"] or left),
    )


def _break(
    fleet: list["_Node"],
    links: dict[tuple[int, int], RelayedLink],
    chance: random.Random,
    tally: _Tally,
    until_s: float,
) -> None:
    kinds: list[str] = []
    while time.monotonic() < until_s:
        number = chance.randrange(len(fleet))
        own = [link for pair, link in links.items() if number in pair]
        time.sleep(chance.uniform(*_CHAOS_S))
        kinds = kinds or chance.sample(_KINDS, len(_KINDS))
        what = kinds.pop()
        tally.add(what)
        if what == "kills":
            fleet[number].kill()
            time.sleep(chance.uniform(0, 2))
            fleet[number].start()
            fleet[number].wait_until_ready()
        elif what == "cuts":
            some = chance.sample(own, chance.randint(1, len(own)))
            for link in some:
                link.cut()
            time.sleep(chance.choice((0.5, 2, 8)))
            for link in some:
                link.mend()
        else:
            for link in own:
                link.forget()


def _ask(node: "_Node", chance: random.Random, tally: _Tally, ended: threading.Event) -> None:
    config = ClientConfig(
        connect_timeout_s=_CALL_S,
        call_timeout_s=_CALL_S,
        arrival_timeout_s=_ARRIVAL_S,
        reconnect_interval_s=0.1,
    )
    with NodeClient(node.socket, config, name="soak") as client:
        client.register(SPACE)
        while not ended.is_set():
            prompt = a_prompt(
                SPACE, chance.randint(1, _MOST_TOKENS), seed=chance.randrange(_PROMPTS)
            )
            tally.add("requests")
            began_s = time.monotonic()
            try:
                if chance.random() < 0.3:
                    _store(client, prompt, tally)
                else:
                    _read(client, prompt, tally)
            except KVHoldError:
                tally.add("refused")
                ended.wait(0.05)
            took_s = time.monotonic() - began_s
            if took_s > 4 * _CALL_S + _ARRIVAL_S + _SLACK_S:
                tally.add("late", finding=f"a request took {took_s:.1f} s")


def _store(client: NodeClient, prompt: Prompt, tally: _Tally) -> None:
    store(client, prompt)
    tally.add("stored", prompt.num_tokens)


def _read(client: NodeClient, prompt: Prompt, tally: _Tally) -> None:
    began_s = time.monotonic()
    with client.lookup(prompt.query()) as hit:
        took_s = time.monotonic() - began_s
        if took_s > _CALL_S + _ARRIVAL_S + _SLACK_S:
            tally.add("late", finding=f"a lookup took {took_s:.1f} s")
        if not hit.num_tokens or (lease := client.claim(hit.ticket)) is None:
            return
        with lease:
            try:
                check(lease, prompt, hit.num_tokens)
            except (AssertionError, KVHoldError) as error:
                tally.add("wrong", finding=f"{prompt.num_tokens} tokens: {error}")
        tally.add("found", hit.num_tokens)
        tally.add("loaded", sum(n for tier, n in hit.sources.items() if tier != "ram"))


def _at_baseline(fleet: list["_Node"], tally: _Tally) -> int:
    until_s = time.monotonic() + _PATIENCE_S
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for node in fleet]
        left = dict(enumerate(clients))
        clients[0].clear()
        while left and time.monotonic() < until_s:
            left = {number: one for number, one in left.items() if not _is_empty(one)}
            time.sleep(0.1)
        for number, client in left.items():
            status = client.status()
            kept = {
                name: status[name]
                for name in ("used_bytes", "pinned_chunks", "arriving_chunks", "held")
            }
            tally.add("left", finding=f"node {number}: {kept}")
        return len(left)


def _is_empty(client: NodeClient) -> bool:
    status = client.status()
    return not (
        status["used_bytes"]
        or status["pinned_chunks"]
        or status["arriving_chunks"]
        or status["served_peers"]["in_flight_bytes"]
        or any(status["held"].values())
    )


class _Node:
    def __init__(self, folder: Path, port: int, links: list[int]) -> None:
        folder.mkdir()
        self._folder = folder
        self.socket = folder / "node.sock"
        hosts = ",".join(f"127.0.0.1:{link}" for link in links)
        (folder / "kvhold.toml").write_text(
            f'tiers = ["peers://{hosts}?answer_timeout_s=1&forget_s=5&probe_timeout_s=2"]\n'
            f"[peers]\nlisten = {json.dumps(f'127.0.0.1:{port}')}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = serve_command("--socket", str(self.socket), "--ram-bytes", str(_RAM_BYTES))
        command += ["--config", str(self._folder / "kvhold.toml")]
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
        } | {"XDG_STATE_HOME": str(self._folder)}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=environ
            )

    def wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as said:
            if b" ready on " not in said.readline():
                log_end = (self._folder / "log").read_text()[-2000:]
                raise RuntimeError(f"the node did not start: {log_end}")

    def client(self) -> NodeClient:
        config = ClientConfig(call_timeout_s=_PATIENCE_S)
        return NodeClient(self.socket, config, name="soak, end")

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self.kill()
