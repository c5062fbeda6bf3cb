"""A real vLLM engine with two tensor parallel workers, on hosts that share only a network.

Each host has its own network namespace, its own /dev/shm and its own node.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold_lab.engines.engine import kvhold_connector
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.process import LoggedProcess
from kvhold_lab.engines.prompts import make_prompt
from tests.namespaces import Host, two_hosts
from tests.node.nodes import PATIENT_S, RunningNode

pytestmark = pytest.mark.vllm

NUM_TOKENS = 700
RAM_BYTES = 128 << 20
MASTER_PORT = 29_517
START_S = 400.0
# in the mount namespace that `ip netns exec` makes
_OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


class Part:
    """One host's process of the engine."""

    def __init__(self, host: Host, rank: int, master: Host, arguments: dict[str, Any]) -> None:
        given = {
            "nnodes": 2,
            "node_rank": rank,
            "master_addr": master.address,
            "master_port": MASTER_PORT,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            **arguments,
        }
        command = [sys.executable, "-m", "tests.vllm.span_engine", json.dumps(given)]
        self.process = LoggedProcess(
            f"rank {rank}",
            [*host.enter, *_OWN_MEMORY, *command],
            log_path=None,
            environment={"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": host.name},
            pipes=True,
        )

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        line = json.dumps(prompt).encode()
        answered: dict[str, Any] = json.loads(self.process.ask(line, "a prompt", START_S))
        return answered


@contextmanager
def engine_on(pair: tuple[Host, Host], nodes: list[RunningNode]) -> Iterator[Part]:
    model = make_model("tiny")
    with ExitStack() as started:
        parts = []
        for rank, (host, node) in enumerate(zip(pair, nodes, strict=True)):
            connector = kvhold_connector(
                node.path,
                RAM_BYTES,
                client={"call_timeout_s": 30, "arrival_timeout_s": PATIENT_S},
                span={"listen": "auto", "insecure": True},
            )
            connector["kv_connector_extra_config"]["node"]["autostart"] = False
            parts.append(
                Part(
                    host,
                    rank,
                    pair[0],
                    {
                        "model": str(model.path),
                        "dtype": "float32",
                        "enforce_eager": True,
                        "max_model_len": 1024,
                        "kv_cache_memory_bytes": 2048 * model.kv_bytes_per_token,
                        "max_num_batched_tokens": 1024,
                        "max_num_seqs": 4,
                        "seed": 0,
                        "kv_transfer_config": connector,
                    },
                )
            )
            started.callback(parts[-1].process.kill)
        assert parts[0].answer([]) == {}
        yield parts[0]


def test_an_engine_on_two_hosts_stores_hits_and_survives_the_loss_of_a_node(
    tmp_path: Path,
) -> None:
    prompt = make_prompt(make_model("tiny").path, NUM_TOKENS)
    arguments = ("--ram-bytes", str(RAM_BYTES))
    with two_hosts() as pair, ExitStack() as started:
        nodes = []
        for host in pair:
            (tmp_path / host.name).mkdir()
            path = tmp_path / host.name / "node.sock"
            nodes.append(RunningNode(path, *arguments, under=host.enter))
            started.callback(nodes[-1].close)
        with engine_on(pair, nodes) as engine:
            cold = engine.answer(prompt)
            assert cold["cached"] == 0
            warm = engine.answer(prompt)
            assert (warm["tokens"], warm["cached"] >= 512) == (cold["tokens"], True)

            nodes[1].kill()
            for _ in range(2):
                lost = engine.answer(prompt)
                assert (lost["tokens"], lost["cached"]) == (cold["tokens"], 0)
            assert lost["missed"]["host_away"] >= NUM_TOKENS - 1

            nodes[1] = RunningNode(nodes[1].path, *arguments, under=pair[1].enter)
            started.callback(nodes[1].close)
            cached = []
            for _ in range(8):
                back = engine.answer(prompt)
                assert back["tokens"] == cold["tokens"]
                cached.append(back["cached"])
                if back["cached"]:
                    break
            assert cached[-1] >= 512, cached
