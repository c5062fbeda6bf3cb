"""The planner under vLLM's real scheduler and over a real node: engines whose passes take as long
as the test says load, or compute.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")


from kvhold.core.config import ClientConfig
from kvhold.core.planning import Decision
from kvhold.integrations.vllm.costs import Costs
from kvhold.node import NodeClient
from tests.vllm.scheduling import Engine, NodeProcess, Options, eventually, make_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

BLOCK = 16
MakeEngine = Callable[..., Engine]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path / "node.sock")
    yield process
    process.kill()


class Clock:
    """Stands still but for what the passes of one engine take."""

    def __init__(self, engine: Engine, *, token_s: float) -> None:
        self.now_s = 1000.0
        compute = engine._compute

        def timed(output: Any) -> dict[str, list[int]]:
            self.now_s += 0.001 + token_s * output.total_num_scheduled_tokens
            return compute(output)

        engine._compute = timed  # type: ignore[method-assign]
        engine.connector.scheduler.lookups.costs = Costs(
            engine.options.budget, clock=lambda: self.now_s
        )


@pytest.fixture
def engine(node: NodeProcess, folder: Path) -> Iterator[MakeEngine]:
    """Engines on the node, whose passes take so long for a token, by their own clock."""
    engines: list[Engine] = []

    def make(*, token_s: float, **options: Any) -> Engine:
        given = {"rules": {"plan": True}} | options.pop("settings", {})
        engines.append(
            Engine(
                Options(folder, block=BLOCK, caching=False, settings=given, **options), node.socket
            )
        )
        Clock(engines[-1], token_s=token_s)
        return engines[-1]

    yield make
    for one in engines:
        one.run()
        assert one.followed() == 0
        one.close()


def ask(one: Engine, name: str, prompt: list[int], **changes: Any) -> int:
    """Returns how many of its prompt's tokens were computed."""
    request = one.add(name, prompt, max_tokens=1, **changes)
    one.run()
    return one.tokens_computed.pop(request.request_id)


def explained(node: NodeProcess, name: str = "") -> list[Decision]:
    with NodeClient(node.socket, ClientConfig(), name="test-explain") as client:
        return client.explain(name)


def test_an_engine_for_which_computing_is_dear_loads(engine: MakeEngine, node: NodeProcess) -> None:
    one = engine(token_s=0.1)
    prompt = make_prompt("dear", 500)
    assert ask(one, "first", prompt) == 500
    assert [ask(one, f"again-{i}", prompt) for i in range(4)] == [500 - 496] * 4
    told = eventually(lambda: [d for d in explained(node, "again-3") if d.compute_s is not None])
    assert (told[0].num_tokens, told[0].hit_tokens, told[0].found) == (500, 496, {"ram": 496})
    assert told[0].alternatives["compute"].total_s == pytest.approx(50, rel=0.2)
    assert told[0].load_s is not None
    assert told[0].compute_s == pytest.approx(0.401)
    assert told[0].why.startswith("loading all of it takes")


def test_an_engine_for_which_loads_are_dearer_computes_and_answers_the_same(
    engine: MakeEngine, node: NodeProcess
) -> None:
    one = engine(token_s=0.1)
    cheap = engine(token_s=1e-7)
    prompt = make_prompt("cheap", 300)
    assert ask(one, "first", prompt) == 300
    for number in range(6):  # a load takes the other step at least, which takes a millisecond
        other = cheap.add(f"other-{number}", make_prompt(f"other {number}", 40), max_tokens=30)
        cheap.next_pass()
        computed = ask(cheap, f"again-{number}", prompt)
        assert other.is_finished()
    assert computed == 300, "it has seen what a load costs"
    [last] = explained(node, "again-5")
    assert (last.hit_tokens, last.found) == (0, {"ram": 288})
    assert last.why.startswith("computing it takes")
    assert cheap.outputs["again-5"] == one.outputs["first"]


def test_off_by_one_setting_and_by_a_request(engine: MakeEngine, node: NodeProcess) -> None:
    prompt = make_prompt("off", 500)
    ask(engine(token_s=0.1), "first", prompt)
    planned = [told.request for told in explained(node) if told.alternatives]
    off = engine(token_s=1e-7, settings={"rules": {"plan": False}})
    on = engine(token_s=1e-7)
    asked = {"kvhold": {"plan": False, "session_id": "chat"}}
    rules = {"sampling": {"extra_args": {"kv_transfer_params": asked}}}
    for number in range(5):
        assert ask(off, f"off-{number}", prompt) == ask(on, f"asked-{number}", prompt, **rules) == 4
    told = explained(node)
    assert [one.request for one in told if one.alternatives] == planned
    assert {one.session for one in told if one.request.startswith("asked-")} == {"chat"}
    [first] = eventually(lambda: [d for d in explained(node, "off-0") if d.compute_s is not None])
    assert (first.num_tokens, first.hit_tokens, first.found) == (500, 496, {"ram": 496})
    assert first.load_s is not None and first.session == ""
    assert first.compute_s == pytest.approx(0.001, rel=0.1)
