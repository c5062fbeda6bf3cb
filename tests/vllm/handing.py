"""Parts of requests for two engines, as a proxy gives them, and what such tests ask the node."""

from typing import Any

import pytest

from kvhold.node import NodeClient
from tests.vllm.engines import MakeEngine
from tests.vllm.scheduling import UNHURRIED, WITHIN_S, Engine, NodeProcess, answer_to

TOKENS = 500
NIXL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DECODER = {"remote_decoder": {"kv_request_id": "id"}}
DISAGG = {
    "ret_first_tok": True,
    "disagg_spec": {
        "req_id": "id",
        "receiver_host": "203.0.113.1",
        "receiver_init_port": [1],
        "receiver_alloc_port": [2],
    },
}
PREFILLER = {
    "remote_prefiller": {"kv_request_id": "id", "remote_host": "203.0.113.1", "remote_port": 1}
}
PATIENT = {"client": {"handover_timeout_s": WITHIN_S, "handover_grace_s": WITHIN_S}}
HASTY = {"client": {"handover_timeout_s": 0.05, "handover_grace_s": 0.05}}


def patient(config: dict[str, Any]) -> dict[str, Any]:
    """Settings with deadlines of calls that a busy machine keeps."""
    return {"client": {"call_timeout_s": WITHIN_S} | config["client"]}


@pytest.fixture
def engines(engine: MakeEngine) -> tuple[Engine, Engine]:
    """A prefill and a decode engine."""
    return engine(), engine(settings=patient(PATIENT))


def ask(
    one: Engine, name: str, prompt: list[int], params: Any = None, *, max_tokens: int = 1
) -> None:
    extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
    one.add(name, prompt, max_tokens=max_tokens, sampling=extra)


def waits(node: NodeProcess) -> dict[str, float]:
    """Ended waits for other engines, by result."""
    return _counted(node, "kvhold_waited_for_computing")


def ended(node: NodeProcess) -> dict[str, float]:
    """Prompts that are not kept any more, by result."""
    return _counted(node, "kvhold_handovers")


def _counted(node: NodeProcess, counter: str) -> dict[str, float]:
    with NodeClient(node.socket, UNHURRIED, name="test-status") as client:
        counters = client.status()["counters"]
    begin = f"{counter}{{result="
    return {
        name.removeprefix(begin).removesuffix("}"): value
        for name, value in counters.items()
        if name.startswith(begin)
    }


def since(node: NodeProcess, before: dict[str, float]) -> dict[str, float]:
    return {
        name: value - before.get(name, 0)
        for name, value in waits(node).items()
        if value > before.get(name, 0)
    }


def announced(node: NodeProcess) -> int:
    with NodeClient(node.socket, UNHURRIED, name="test-status") as client:
        return int(client.status()["announced_chunks"])


def kept(node: NodeProcess) -> int:
    """Chunks that stay in memory for a decode engine."""
    with NodeClient(node.socket, UNHURRIED, name="test-status") as client:
        return int(client.status()["handover_chunks"])


def assert_waits(one: Engine, name: str) -> None:
    for _ in range(20):
        one.step()
    assert name not in one.tokens_computed


def has_planned_a_pass(one: Engine) -> bool:
    if one.schedule().total_num_scheduled_tokens:
        return True
    one.execute()
    return False


def prefill(one: Engine, prompt: list[int], name: str = "p") -> dict[str, Any]:
    """Return the answer's parameters."""
    ask(one, name, prompt, NIXL)
    one.run()
    assert one.outputs[name] == answer_to(prompt, 1)
    return one.handed[name]


def decode(one: Engine, prompt: list[int], params: Any, name: str = "d") -> int:
    """Return how many tokens of the prompt were computed: of a whole hit, the last one."""
    ask(one, name, prompt, params, max_tokens=4)
    one.run()
    assert one.outputs[name] == answer_to(prompt, 4)
    return one.tokens_computed[name] - 3
