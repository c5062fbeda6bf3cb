"""Under vLLM's real scheduler: prompts that only a tier below the node's memory has."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from tests.vllm.engines import NOTHING, MakeEngine, Restart, asks, engines_on, followed, store
from tests.vllm.scheduling import WITHIN_S, Engine, NodeProcess, answer_to, eventually, make_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]
LATE = {"client": {"arrival_timeout_s": 0.2}}
PATIENT = {"client": {"arrival_timeout_s": 600}}


class TestTiersBelow:
    """Prompts that only a tier below the node's memory has."""

    @pytest.fixture
    def start(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., tuple[NodeProcess, Engine]]]:
        """A function that starts a node over a disk, with faults in its reads if told so, and an
        engine on it.
        """
        nodes: list[NodeProcess] = []
        made: list[Iterator[MakeEngine]] = []

        def start(
            faults: str = "", options: str = "", **engine_options: Any
        ) -> tuple[NodeProcess, Engine]:
            url = f"disk://{tmp_path}/kv?max_bytes=1GiB{options}"
            with monkeypatch.context() as patched:
                patched.setenv("KVHOLD_TIERS", f"faults+{url}&faults={faults}" if faults else url)
                nodes.append(NodeProcess(tmp_path / f"node{len(nodes)}.sock"))
            made.append(engines_on(nodes[-1], folder))
            return nodes[-1], next(made[-1])(**engine_options)

        def end() -> None:
            try:
                while made:
                    assert next(made.pop(0), None) is None  # all done, and nothing held
            finally:
                for node in nodes:
                    node.go_on()
                    node.kill()  # before another may have the disk

        start.end = end  # type: ignore[attr-defined]
        yield start
        end()

    @pytest.fixture
    def prompt(self, start: Callable[..., tuple[NodeProcess, Engine]]) -> list[int]:
        """One of 300 tokens that is on the disk already."""
        prompt = make_prompt("below", 300)
        _, storing = start()
        store(storing, prompt)
        assert storing.hands.client.flush(deadline_s=60)
        start.end()  # type: ignore[attr-defined]
        return prompt

    def test_a_request_whose_chunks_are_on_their_way_is_answered_by_the_next_node(
        self,
        start: Callable[..., tuple[NodeProcess, Engine]],
        prompt: list[int],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        node, waits = start("get:delay:1:600s", settings=PATIENT)
        monkeypatch.setattr(waits.connector.scheduler._costs, "compute_s", lambda *_: WITHIN_S)
        waits.add("a", prompt)
        eventually(
            lambda: not waits.step().total_num_scheduled_tokens and followed(waits, "a").arriving
        )
        restart = Restart(node)
        restart.begin(waits, monkeypatch)
        eventually(
            lambda: not waits.step().total_num_scheduled_tokens and followed(waits, "a").is_lost
        )
        monkeypatch.setenv("KVHOLD_TIERS", f"disk://{tmp_path}/kv?max_bytes=1GiB")
        restart.end()
        eventually(lambda: waits.hands.client.connected)
        waits.run()
        assert waits.outputs["a"] == answer_to(prompt, 2)
        assert waits.tokens_computed["a"] == 300 - 288 + 1
        assert restart.missed == {"below_minimum": 12}

    @pytest.mark.parametrize("rest", [0, 20], ids=["the same prompt", "and more that no tier has"])
    def test_what_vllm_has_itself_is_not_brought_up_nor_waited_for(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int], rest: int
    ) -> None:
        _, engine = start("get:hang", "&get_timeout_s=1000", settings=PATIENT)
        engine.add("alone", prompt, **asks(load=False, store=False))
        engine.run()
        longer = prompt + make_prompt("rest", rest)
        engine.add("a", longer)
        engine.run()
        assert engine.outputs["a"] == answer_to(longer, 2)
        assert engine.tokens_computed["a"] == len(longer) - 288 + 1
        status = engine.hands.client.status()
        assert status["arriving_chunks"] == 0
        assert not [name for name in status["tier_counters"] if "operation=get" in name], (
            "nothing was read"
        )

    @pytest.mark.parametrize(
        "asynchronous", [False, True], ids=["one pass at a time", "two passes at a time"]
    )
    @pytest.mark.parametrize("real_worker", [False, True], ids=["worker played", "worker real"])
    def test_it_is_loaded_when_it_has_come(
        self,
        start: Callable[..., tuple[NodeProcess, Engine]],
        prompt: list[int],
        real_worker: bool,
        asynchronous: bool,
    ) -> None:
        _, engine = start(
            "get:delay:1:50ms", settings=PATIENT, real_worker=real_worker, asynchronous=asynchronous
        )
        engine.add("a", prompt)
        engine.run()
        assert engine.outputs["a"] == answer_to(prompt, 2)
        assert engine.tokens_computed["a"] == 300 - 288 + 1
        assert len(engine.loads) == 1

    def test_while_it_comes_others_go_on_and_it_is_not_computed(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        node, engine = start("get:hang", "&get_timeout_s=1000", settings=PATIENT)
        engine.add("waits", prompt)
        for number in range(5):
            engine.add(f"{number}", other := make_prompt(number, 200))

            def has_two_tokens(name: str = f"{number}") -> bool:
                return len(engine.outputs.get(name, [])) == 2

            engine.run(until=has_two_tokens)
            assert engine.outputs[f"{number}"] == answer_to(other, 2)
        assert "waits" not in engine.tokens_computed
        assert engine.loads == []
        assert node.held()["tickets"] == 1
        engine.abort("waits")
        eventually(lambda: node.held() == NOTHING)

    def test_no_pass_is_held_up_by_what_arrives(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        """The answer about one that arrives is taken when it is there, however long the
        node takes.
        """
        node, engine = start("get:hang", "&get_timeout_s=1000", settings=PATIENT)
        engine.add("waits", prompt)
        eventually(
            lambda: engine.step() and engine.connector.scheduler._request_states["waits"].arriving
        )
        node.hold_up()
        engine.step()
        followed = engine.connector.scheduler._request_states["waits"]
        side = engine.connector.scheduler
        assert side.lookups.resolve(followed, WITHIN_FOR_EVER_S) is False
        side.lookups.patience_s = 0.0
        node.go_on()
        engine.abort("waits")

    def test_it_is_computed_when_it_comes_too_late(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        node, engine = start("get:hang", "&get_timeout_s=1000", settings=LATE)
        engine.add("a", prompt)
        engine.run()
        assert probed(node)
        assert engine.outputs["a"] == answer_to(prompt, 2)
        assert engine.tokens_computed["a"] == 300 + 1
        assert engine.loads == []

    @pytest.mark.parametrize("fault", ["get:error", "get:corrupt", "get:truncate", "get:stale"])
    def test_it_is_computed_when_it_does_not_come(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int], fault: str
    ) -> None:
        node, engine = start(fault, settings=PATIENT)
        engine.add("a", prompt)
        engine.run()
        assert probed(node)
        assert engine.outputs["a"] == answer_to(prompt, 2)
        assert engine.tokens_computed["a"] == 300 + 1

    def test_what_has_come_in_time_is_loaded_and_the_rest_computed(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        node, engine = start(
            "get:hang:@3", "&get_timeout_s=1000&batch_bytes=1&concurrent_calls=1", settings=LATE
        )
        engine.add("a", prompt)
        engine.run()
        assert probed(node)
        assert engine.outputs["a"] == answer_to(prompt, 2)
        assert engine.tokens_computed["a"] in (300 + 1, 300 - 64 + 1, 300 - 128 + 1), (
            "no more than two chunks came"
        )

    def test_requests_that_go_away_while_it_comes_leave_nothing_whatever_was_being_asked(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        node, engine = start("get:hang", "&get_timeout_s=1000", settings=PATIENT)
        names = [f"{number}" for number in range(20)]
        for name in names:
            engine.add(name, prompt)
        followed = engine.connector.scheduler._request_states
        eventually(lambda: engine.step() and all(followed[name].arriving for name in names))
        node.hold_up()
        engine.step()
        asked = [followed[name].lookup for name in names]
        engine.abort(*names)
        assert any(lookup is not None and lookup.cancelled() for lookup in asked), (
            "some were never asked again"
        )
        node.go_on()
        engine.run()
        eventually(lambda: node.held() == NOTHING)

    def test_one_that_may_not_load_does_not_wait(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        node, engine = start("get:hang", "&get_timeout_s=1000", settings=PATIENT)
        engine.add("a", prompt, **asks(load=False))
        engine.step()
        eventually(lambda: probed(node))
        engine.run()
        assert engine.tokens_computed["a"] == 300 + 1

    def test_an_engine_that_only_stores_does_not_wait(
        self, start: Callable[..., tuple[NodeProcess, Engine]], prompt: list[int]
    ) -> None:
        node, engine = start(
            "get:hang", "&get_timeout_s=1000", settings=PATIENT, role="kv_producer"
        )
        engine.add("a", prompt)
        engine.step()
        eventually(lambda: probed(node))
        engine.run()
        assert engine.tokens_computed["a"] == 300 + 1


WITHIN_FOR_EVER_S = 1e6


def probed(node: NodeProcess) -> bool:
    """Whether the node's disk was asked, and had something."""
    with NodeClient(node.socket, ClientConfig(), name="test-status") as client:
        counters = client.status()["tier_counters"]
    return counters.get("kvhold_tier_items{tier=disk,operation=probe,result=hit}", 0) > 0
