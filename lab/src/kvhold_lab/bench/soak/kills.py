"""After a kill, a flushed prompt must be a full hit, and used bytes the file system's."""

import logging
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError, NodeError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, read, store
from kvhold_lab.bench.servers import serve_command
from kvhold_lab.quiet import quiet

LAYOUT = Layout(
    groups=(Group(layers=4, planes=2, heads=2, head_dim=64, dtype="bfloat16"),), tokens_per_chunk=64
)
PROMPT_TOKENS = 3 * 64 + 10
_ROUNDS_A_SPACE = 20
_REREAD = 6
_CLEARED_S = 60.0


@dataclass(frozen=True)
class Kills:
    """lost, wrong and misaccounted must be 0."""

    rounds: int
    acknowledged: int
    looked_up: int
    lost: int
    wrong: int
    misaccounted: int
    seconds: float
    passed: bool


@dataclass
class _Run:
    folder: Path
    chance: random.Random
    seeds: int = 0
    kept: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    acknowledged: int = 0
    looked_up: int = 0
    lost: int = 0
    wrong: int = 0
    misaccounted: int = 0
    space: int = 0


@quiet("kvhold.node", logging.ERROR)
def run(rounds: int, seed: int) -> Kills:
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvhold-kills-"))
    work = _Run(folder, random.Random(seed))
    try:
        for number in range(rounds):
            _round(work, number)
        _round(work, rounds, last=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = work.lost + work.wrong + work.misaccounted
    seconds = round(time.monotonic() - began, 1)
    return Kills(
        rounds,
        work.acknowledged,
        work.looked_up,
        work.lost,
        work.wrong,
        work.misaccounted,
        seconds,
        found == 0,
    )


def _round(work: _Run, number: int, *, last: bool = False) -> None:
    with _Node(work.folder) as node, node.client() as client:
        client.register(_space(work))
        _wait_for_clears(work, client)
        _look(work, client, everything=last)
        _account(work, client)
        if last:
            return
        if number % _ROUNDS_A_SPACE == _ROUNDS_A_SPACE - 1:
            # a killed clear may or may not take effect
            work.space, work.kept, work.fresh = (work.space + 1, [], [])
            threading.Timer(work.chance.uniform(0, 0.05), node.kill).start()
            with suppress(KVHoldError):
                client.clear()
        else:
            threading.Timer(work.chance.uniform(0.01, 0.25), node.kill).start()
            _store_until_dead(work, client)
        node.wait()


def _wait_for_clears(work: _Run, client: NodeClient) -> None:
    """Until then, the disk takes no values."""
    client.lookup(_prompt(work, 0).query()).close()  # the tier has then read its pending clears
    until_s = time.monotonic() + _CLEARED_S
    while client.status()["tiers"][0]["pending_clears"]:
        if time.monotonic() > until_s:
            raise NodeError(f"a clear has not ended within {_CLEARED_S:.0f} s")
        time.sleep(0.01)


def _store_until_dead(work: _Run, client: NodeClient) -> None:
    work.kept, work.fresh = [*work.kept, *work.fresh], []
    with suppress(KVHoldError):
        while True:
            work.seeds += 1
            store(client, _prompt(work, work.seeds))
            if client.flush(deadline_s=30):
                work.fresh.append(work.seeds)
                work.acknowledged += 1


def _look(work: _Run, client: NodeClient, *, everything: bool) -> None:
    earlier = (
        work.kept if everything else work.chance.sample(work.kept, min(_REREAD, len(work.kept)))
    )
    for seed in (*work.fresh, *earlier):
        work.looked_up += 1
        try:
            work.lost += read(client, _prompt(work, seed)) != PROMPT_TOKENS
        except AssertionError:
            work.wrong += 1


def _account(work: _Run, client: NodeClient) -> None:
    until_s = time.monotonic() + _CLEARED_S
    while not _is_accounted(work, client):
        if time.monotonic() > until_s:
            work.misaccounted += 1
            return
        time.sleep(0.05)


def _is_accounted(work: _Run, client: NodeClient) -> bool:
    (tier,) = client.status()["tiers"]
    files = (path for path in (work.folder / "kv").glob("??/*") if path.is_file())
    try:
        return tier["used_bytes"] == sum(path.stat().st_blocks * 512 for path in files)
    except FileNotFoundError:
        return False


def _space(work: _Run) -> Namespace:
    return Namespace(model=f"kills {work.space}", layout=LAYOUT)


def _prompt(work: _Run, seed: int) -> Prompt:
    return a_prompt(_space(work), PROMPT_TOKENS, seed)


class _Node:
    def __init__(self, folder: Path) -> None:
        self._socket = folder / "node.sock"
        command = serve_command("--socket", str(self._socket), "--ram-bytes", "32MiB")
        patient = "probe_timeout_s=60&get_timeout_s=60&put_timeout_s=60"
        command += ["--tier", f"disk://{folder}/kv?max_bytes=4GiB&{patient}"]
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
        }
        self._log = (folder / "log").open("ab")
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env=environ
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the node did not start: {(folder / 'log').read_text()[-2000:]}")

    def client(self) -> NodeClient:
        return NodeClient(
            self._socket, ClientConfig(call_timeout_s=60, arrival_timeout_s=60), name="kills"
        )

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        self._process.wait()

    def __enter__(self) -> "_Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
