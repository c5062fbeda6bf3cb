"""Two engines that get the same prompt at the same time, under vLLM's real scheduler and over a
real node: one computes it, the other waits and loads it. By the engines' own clocks computing is
so slow that every wait is worth it.
"""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from tests.vllm.scheduling import Engine, NodeProcess, eventually, make_prompt
from tests.vllm.test_planning import MakeEngine, ask, engine, explained, node

__all__ = ["engine", "node"]  # fixtures

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

WAITS = {"rules": {"plan": False, "wait_for_computing": True}}


@pytest.fixture
def engines(engine: MakeEngine) -> tuple[Engine, Engine]:
    """Two engines that know how long computing takes."""
    one, two = (engine(token_s=0.1, settings=WAITS) for _ in range(2))
    for number, each in enumerate((one, two)):
        ask(each, "first", make_prompt(f"first {number}", 100))
    return one, two


def status(node: NodeProcess) -> dict[str, Any]:
    with NodeClient(node.socket, ClientConfig(), name="test-status") as client:
        return dict(client.status())


def has_planned_a_pass(engine: Engine) -> bool:
    if engine.schedule().total_num_scheduled_tokens:
        return True
    engine.execute()
    return False


def begin(one: Engine, two: Engine, prompt: list[int]) -> None:
    """The first engine has planned its pass, the second waits for it."""
    one.add("a", prompt, max_tokens=1)
    eventually(lambda: has_planned_a_pass(one))
    two.add("b", prompt, max_tokens=1)
    assert_waits(two, "b")


def assert_waits(one: Engine, name: str) -> None:
    for _ in range(20):
        one.step()
    assert name not in one.tokens_computed


def test_a_prompt_is_computed_once_by_two_engines(
    engines: tuple[Engine, Engine], node: NodeProcess
) -> None:
    one, two = engines
    begin(one, two, make_prompt("both", 500))
    one.execute()
    assert_waits(two, "b")  # the second pass of the first engine is not over
    one.run()
    two.run()
    assert two.tokens_computed["b"] == 500 - 496
    assert two.outputs["b"] == one.outputs["a"]
    counters = status(node)["counters"]
    assert counters["kvhold_waited_for_computing{result=stored}"] == 1
    [decision] = explained(node, "b")
    assert decision.why.startswith("another engine computes the next ")
    eventually(lambda: not status(node)["announced_chunks"])


def test_the_waiting_engine_computes_when_the_other_aborts(
    engines: tuple[Engine, Engine], node: NodeProcess
) -> None:
    one, two = engines
    begin(one, two, make_prompt("aborted", 500))
    one.abort("a")
    two.run()
    assert two.tokens_computed["b"] == 500
    assert status(node)["counters"]["kvhold_waited_for_computing{result=ended}"] == 1


def test_the_waiting_engine_computes_when_the_other_is_gone(
    engines: tuple[Engine, Engine], node: NodeProcess
) -> None:
    one, two = engines
    begin(one, two, make_prompt("gone", 500))
    one.connector.scheduler._cache.close()
    two.run()
    assert two.tokens_computed["b"] == 500


def test_a_request_may_turn_it_off(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    prompt = make_prompt("off", 500)
    one.add("a", prompt, max_tokens=1)
    eventually(lambda: has_planned_a_pass(one))
    rules = {"kv_transfer_params": {"kvhold": {"wait_for_computing": False}}}
    assert ask(two, "b", prompt, sampling={"extra_args": rules}) == 500
    one.run()
