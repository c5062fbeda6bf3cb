"""Three OpenAI servers with vLLM's own defaults, its thread binding among them, on a host of few
cores; one of them starts the node.

They keep all cores busy with spinning threads, so each part of kvhold has to run beside those: the
node, and its threads in the engines.
"""

import fcntl
import os
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.status import NodeStatus
from kvhold.memory.placement import parse_list
from kvhold.node import NodeClient
from kvhold.node.start import end_node
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.prompts import make_prompt
from tests.node.nodes import RunningNode, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

SERVERS = 3
AT_ONCE = 6
TEXTS = 20  # each is sent to each server, one after the other
MOST_TOKENS = 1000
BLOCK = 128
RAM = "512MiB"
START_S = 600.0

Prompts = Sequence[list[int]]


class Host:
    """The servers, and what vLLM without a connector answers."""

    def __init__(
        self,
        folder: Path,
        model: ModelInfo,
        servers: Sequence[OpenAIServer],
        expected: dict[str, list[list[int]]],
    ) -> None:
        self.socket = folder / "kvhold" / "node.sock"
        self.model = model
        self.servers = servers
        self.expected = expected

    def counts(self) -> dict[str, float]:
        """What all engines have counted: tokens looked up, not answered, and loaded."""
        totals = {
            "looked up": 0.0,
            "not answered": 0.0,
            "not awaited": 0.0,
            "hit": 0.0,
            "failed loads": 0.0,
        }
        for server in self.servers:
            for sample, value in server.metrics().items():
                name = sample.split("{", 1)[0]
                if name == "vllm:kvhold_lookup_tokens_total":
                    totals["looked up"] += value
                elif name == "vllm:kvhold_missed_tokens_total" and 'reason="no_answer"' in sample:
                    totals["not answered"] += value
                elif name == "vllm:kvhold_missed_tokens_total" and 'reason="not_awaited"' in sample:
                    totals["not awaited"] += value
                elif name == "vllm:external_prefix_cache_hits_total":
                    totals["hit"] += value
                elif name == "vllm:kvhold_failed_loads_total":
                    totals["failed loads"] += value
        return totals

    def send(
        self, kind: str, *, rounds: Sequence[int] = (0, 1, 2), kill_at: int = -1
    ) -> dict[str, float]:
        """Send each text of a kind to each server, 6 prompts at a time, and compare the tokens.
        Returns what was counted meanwhile.

        kill_at: the number of the prompt before which the node is killed
        """
        before, prompts = self.counts(), prompts_of(self.model, kind)
        sent = 0
        for turn in rounds:
            with ThreadPoolExecutor(AT_ONCE) as senders:
                answers = []
                for number, prompt in enumerate(prompts):
                    if sent == kill_at:
                        os.kill(self.status()["pid"], signal.SIGKILL)
                    sent += 1
                    answers.append(
                        senders.submit(
                            self.servers[(number + turn) % SERVERS].complete, prompt, max_tokens=4
                        )
                    )
                for answer, expected in zip(answers, self.expected[kind], strict=True):
                    assert answer.result().token_ids == expected
        after = self.counts()
        return {name: after[name] - before[name] for name in after}

    def status(self) -> NodeStatus:
        with NodeClient(
            self.socket, ClientConfig(call_timeout_s=60, connect_timeout_s=60), name="test"
        ) as client:
            return client.status()

    def joined(self) -> int:
        """How many clients of the engines a node has now."""
        try:
            return sum(client["name"].startswith("vllm") for client in self.status()["clients"])
        except KVHoldError:
            return 0

    def all_have_joined(self) -> bool:
        return self.joined() == 2 * SERVERS


def prompts_of(model: ModelInfo, kind: str) -> Prompts:
    """Texts of 1 to 1,000 tokens."""
    lengths = [
        1,
        MOST_TOKENS,
        *(random.Random(kind).randint(1, MOST_TOKENS) for _ in range(TEXTS - 2)),
    ]
    return [
        make_prompt(model.path, length, seed=hash_of(kind, number))
        for number, length in enumerate(lengths)
    ]


def hash_of(kind: str, number: int) -> int:
    return int.from_bytes(kind.encode(), "little") % 10_000 * 100 + number


def could_hit(model: ModelInfo, kind: str) -> int:
    """Tokens in whole blocks of all prompts but the first round's: no cache could find more."""
    return 2 * sum(len(prompt) // BLOCK * BLOCK for prompt in prompts_of(model, kind))


KINDS = ("cold", "killed", "after the kill", "ahead")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder, model = tmp_path_factory.mktemp("host"), make_model("tiny")
    options = options_for(
        model,
        max_model_len=1024,
        kv_cache_bytes=8 * 1024 * model.kv_bytes_per_token,
        own_binding=True,
    )
    with OpenAIServer(options) as plain:
        expected = {
            kind: [
                plain.complete(prompt, max_tokens=4).token_ids for prompt in prompts_of(model, kind)
            ]
            for kind in KINDS
        }
    transfer = {"kv_connector": "KVHoldConnector", "kv_role": "kv_both"}
    with_cache = options_for(
        model,
        max_model_len=1024,
        kv_cache_bytes=options.kv_cache_bytes,
        own_binding=True,
        kv_transfer_config=transfer,
    )
    environment = {"XDG_RUNTIME_DIR": str(folder), "KVHOLD_RAM_BYTES": RAM}
    with ExitStack() as stack:
        # when no engine is left that would start another
        stack.callback(end_node, folder / "kvhold" / "node.sock")
        servers = [
            OpenAIServer(with_cache, environment=environment, log_path=folder / f"server{n}.log")
            for n in range(SERVERS)
        ]
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(SERVERS) as starters:
            for started in [starters.submit(server.start, START_S) for server in servers]:
                started.result()
        yield Host(folder, model, servers, expected)


def test_lookups_are_answered_from_the_first_one_on_and_after_the_node_was_killed(
    host: Host,
) -> None:
    cold = host.send("cold")
    killed = host.send("killed", kill_at=30)  # who asks before there is a node again waits for it
    eventually(host.all_have_joined, within_s=120)
    again = host.send("after the kill")

    # Another node, started ahead, from a shell: it has all cores by itself.
    with Path(f"{host.socket}.start").open("r+") as lock:  # no engine starts one meanwhile
        fcntl.flock(lock, fcntl.LOCK_EX)
        node = psutil.Process(host.status()["pid"])
        with NodeClient(host.socket, ClientConfig(), name="test") as client:
            client.stop_node()
        node.wait(60)
        ahead_node = RunningNode(host.socket, "--ram-bytes", RAM)
    try:
        eventually(host.all_have_joined, within_s=120)
        ahead = host.send("ahead")
    finally:
        ahead_node.kill()
    shares = {
        kind: counted["hit"] / could_hit(host.model, kind)
        for kind, counted in {
            "cold": cold,
            "killed": killed,
            "after the kill": again,
            "ahead": ahead,
        }.items()
    }
    print(
        "tokens:",
        {"cold": cold, "killed": killed, "after the kill": again, "ahead": ahead},
        "of what could be hit:",
        shares,
    )

    assert shares["ahead"] > 0.5
    # While there is no node (25 to 160 ms), the shortest prompts are computed sooner than one is
    # back.
    for kind, counted, most in (
        ("cold", cold, 0.01),
        ("killed", killed, 0.1),
        ("after the kill", again, 0.01),
    ):
        assert counted["looked up"] > 0
        assert counted["not answered"] + counted["not awaited"] <= most * counted["looked up"], kind
    unanswered = sum(
        counted["not answered"] + counted["not awaited"] for counted in (cold, killed, again)
    )
    assert unanswered <= 0.01 * sum(counted["looked up"] for counted in (cold, killed, again))
    for kind, counted in (("cold", cold), ("after the kill", again)):
        assert counted["failed loads"] == 0, kind
        assert shares[kind] >= 0.9 * shares["ahead"], shares


def test_the_node_and_kvholds_threads_are_not_bound_to_the_core_that_an_engine_spins_on(
    host: Host,
) -> None:
    eventually(host.all_have_joined, within_s=120)
    allowed = os.sched_getaffinity(0)
    node = Path(f"/proc/{host.status()['pid']}")
    assert {frozenset(cores_of(task)) for task in node.glob("task/*")} == {frozenset(allowed)}
    assert not [
        line
        for line in (node / "numa_maps").read_text().splitlines()
        if line.split()[1].startswith("bind")
    ]

    workers = [
        process
        for process in engine_processes(host)
        if any(len(cores_of(task)) == 1 for task in tasks_of(process))
    ]
    assert len(workers) == SERVERS, "vLLM has bound the threads of each worker"
    for worker in workers:
        names = {task: (task / "comm").read_text().strip() for task in tasks_of(worker)}
        spun = {
            core
            for task, name in names.items()
            if not name.startswith("kvhold")
            for core in only(cores_of(task))
        }
        own = {name: cores_of(task) for task, name in names.items() if name.startswith("kvhold")}
        assert {"kvhold-keeper", "kvhold-load_0", "kvhold-store_0"} <= own.keys()
        assert all(cores == (allowed - spun or allowed) for cores in own.values()), (spun, own)


def engine_processes(host: Host) -> list[psutil.Process]:
    return [
        child
        for server in host.servers
        for child in psutil.Process(server.pid).children(recursive=True)
    ]


def tasks_of(process: psutil.Process) -> list[Path]:
    return list(Path(f"/proc/{process.pid}/task").iterdir())


def cores_of(task: Path) -> set[int]:
    lines = (task / "status").read_text().splitlines()
    return set(
        parse_list(
            next(line.split(":", 1)[1] for line in lines if line.startswith("Cpus_allowed_list:"))
        )
    )


def only(cores: set[int]) -> set[int]:
    """The core of a thread that is bound to one."""
    return cores if len(cores) == 1 else set()
