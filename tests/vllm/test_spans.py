"""One engine with two tensor parallel workers, each with a node of its own, as on two hosts.

vLLM's real scheduler, its real aggregation of the workers' answers, and the real connectors; only
the model is pretended.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.vllm.hosts import NodePlace, relay_address
from tests.vllm.hands import RealHands
from tests.vllm.scheduling import (
    LAYERS,
    Engine,
    NodeProcess,
    Options,
    answer_to,
    eventually,
    make_config,
    make_folder,
    make_kv_config,
    make_prompt,
)

pytestmark = pytest.mark.vllm

SPAN = {"span": {"listen": "127.0.0.1:0"}}
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}
NUM_TOKENS = 300


class TwoHands:
    """The workers of both hosts, beside one pass."""

    def __init__(self, workers: list[RealHands]) -> None:
        self.workers = workers
        self._aggregator = KVOutputAggregator(len(workers))

    def run(self, output: SchedulerOutput, compute: Callable[[], None]) -> KVConnectorOutput:
        first, second = self.workers
        answers = []

        def both() -> None:
            answers.append(second.run(output, compute))

        answers.insert(0, first.run(output, both))
        outputs = [
            replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=answer) for answer in answers
        ]
        aggregated = self._aggregator.aggregate(outputs)
        assert aggregated is not None and aggregated.kv_connector_output is not None
        return aggregated.kv_connector_output

    def enter(self, layer: str) -> None:
        pass

    def leave(self, layer: str) -> None:
        pass

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class SpanEngine(Engine):
    """The second worker's KV is the complement of the first one's, and is checked, too."""

    def __init__(self, options: Options, sockets: list[Path]) -> None:
        super().__init__(options, sockets[0])
        kv_config = make_kv_config(options)
        other = {name: torch.zeros_like(self.tensors[name]) for name in LAYERS}
        rows = other[LAYERS[0]].numpy().reshape(options.num_blocks, -1).view(self.slots.dtype)
        self.other_slots = rows[:, : options.block]
        first = RealHands(self.config, kv_config, self.tensors)
        second = RealHands(make_config(replace(options, rank=1), sockets[1]), kv_config, other)
        self.worker = TwoHands([first, second])
        self.missed: Counter[str] = Counter()  # tokens, by reason
        self.connector.scheduler.tally.looked_up = self._count  # type: ignore[method-assign]

    @property
    def places(self) -> dict[tuple[int, int], NodePlace]:
        """What the workers tell the scheduler."""
        return {
            (0, rank): worker.connector.get_handshake_metadata()
            for rank, worker in enumerate(self.worker.workers)  # type: ignore[attr-defined]
        }

    def ask(self, request_id: str, prompt: list[int]) -> int:
        """Answer a prompt, and return how many of its tokens were computed."""
        self.add(request_id, prompt, max_tokens=4)
        self.run()
        assert self.outputs[request_id] == answer_to(prompt, 4)
        for worker in self.worker.workers:  # type: ignore[attr-defined]
            cache = worker.connector.worker._cache
            if cache.connected:
                eventually(lambda: not cache.status()["held"]["reservations"])  # noqa: B023
        assert self.scheduler.reset_prefix_cache()
        return self.tokens_computed[request_id] - 3

    def _count(self, num_tokens: int, *, sources: Mapping[str, int], reason: str) -> None:
        self.missed[reason] += num_tokens - sum(sources.values())

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        sampled = super()._compute(output)
        for request_id, count in output.num_scheduled_tokens.items():
            running = self._running[request_id]
            first, last = running.computed, running.computed + count
            chain, places = ~running.chain()[:last], running.places(self.options.block)[:last]
            self.other_slots[places[first:, 0], places[first:, 1]] = chain[first:]
            found = self.other_slots[places[:, 0], places[:, 1]]
            assert (found == chain).all(), f"{request_id} reads another text's KV on worker 1"
        return sampled


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(NodeProcess(tmp_path / name / "node.sock"))
    yield made
    for node in made:
        node.go_on()
        node.kill()


@pytest.fixture
def make_engine(nodes: list[NodeProcess], tmp_path: Path) -> Iterator[Callable[..., SpanEngine]]:
    folder, engines = make_folder(tmp_path / "model"), list[SpanEngine]()

    def make(**options: Any) -> SpanEngine:
        settings = SPAN | options.pop("settings", {})
        engines.append(
            SpanEngine(
                Options(folder, num_hosts=2, settings=settings, **options),
                [node.socket for node in nodes],
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.run()
        assert engine.followed() == 0
        engine.close()
    for node in nodes:
        if node._process.poll() is None:
            eventually(lambda: node.held() == NOTHING)  # noqa: B023


@pytest.fixture
def engine(make_engine: Callable[..., SpanEngine]) -> SpanEngine:
    engine = make_engine()
    engine.connector.set_xfer_handshake_metadata_pp_aware(engine.places)
    return engine


def test_a_prompt_is_stored_on_both_hosts_and_loaded_on_both(engine: SpanEngine) -> None:
    prompt = make_prompt("both", NUM_TOKENS)
    assert engine.ask("cold", prompt) == NUM_TOKENS
    engine.slots[:], engine.other_slots[:] = 0, 0
    assert engine.ask("warm", prompt) < 20
    assert engine.missed["never_stored"] == NUM_TOKENS


def test_a_second_engine_finds_what_the_first_has_stored(
    make_engine: Callable[..., SpanEngine],
) -> None:
    prompt = make_prompt("two engines", NUM_TOKENS)
    computed = []
    for number in range(2):
        engine = make_engine()
        engine.connector.set_xfer_handshake_metadata_pp_aware(engine.places)
        computed.append(engine.ask(f"request-{number}", prompt))
    assert computed[0] == NUM_TOKENS and computed[1] < 20


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_node_is_a_miss_until_it_is_back(
    engine: SpanEngine, nodes: list[NodeProcess], lost: int
) -> None:
    prompt = make_prompt("loss", NUM_TOKENS)
    assert engine.ask("cold", prompt) == NUM_TOKENS
    assert engine.ask("warm", prompt) < 20
    nodes[lost].kill()
    for number in range(3):
        assert engine.ask(f"lost-{number}", prompt) == NUM_TOKENS
    assert engine.missed["host_away" if lost else "no_answer"] >= 2 * NUM_TOKENS
    nodes[lost].start_again()
    for worker in engine.worker.workers:  # type: ignore[attr-defined]
        eventually(lambda: worker.connector.worker._cache.connected)  # noqa: B023
    eventually(lambda: engine.connector.scheduler._cache.connected)
    assert engine.ask("back", prompt) == NUM_TOKENS
    assert engine.ask("warm again", prompt) < 20


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_between_hit_and_load_costs_the_load(
    engine: SpanEngine, nodes: list[NodeProcess], lost: int
) -> None:
    prompt = make_prompt("broken promise", NUM_TOKENS)
    assert engine.ask("cold", prompt) == NUM_TOKENS
    engine.add("warm", prompt, max_tokens=4)
    eventually(lambda: engine.schedule() and engine.loads)
    nodes[lost].kill()
    engine.run()
    assert engine.outputs["warm"] == answer_to(prompt, 4)
    assert engine.tokens_computed["warm"] >= NUM_TOKENS


def test_a_clear_on_one_host_holds_for_both(engine: SpanEngine) -> None:
    prompt = make_prompt("clear", NUM_TOKENS)
    assert engine.ask("cold", prompt) == NUM_TOKENS
    caches = [worker.connector.worker._cache for worker in engine.worker.workers]  # type: ignore[attr-defined]
    for number, cache in enumerate(caches):
        cache.clear()
        # this stores on the cleared host alone, and lets the next lookup see that
        assert engine.ask(f"cleared-{number}", prompt) == NUM_TOKENS
        assert engine.ask(f"both-{number}", prompt) <= NUM_TOKENS
        assert engine.ask(f"warm-{number}", prompt) < 20
    assert engine.missed["cleared"] > 0


def test_a_reset_holds_for_both_hosts(engine: SpanEngine) -> None:
    prompt = make_prompt("reset", NUM_TOKENS)
    assert engine.ask("cold", prompt) == NUM_TOKENS
    engine.connector.reset_cache()
    for worker in engine.worker.workers:  # type: ignore[attr-defined]
        assert worker.connector.worker._cache.status()["chunks"] == 0
    assert engine.ask("after", prompt) == NUM_TOKENS
    assert engine.ask("warm", prompt) < 20


def test_nothing_is_found_before_the_hosts_are_known(
    make_engine: Callable[..., SpanEngine],
) -> None:
    engine, prompt = make_engine(), make_prompt("early", NUM_TOKENS)
    assert engine.ask("cold", prompt) == NUM_TOKENS
    assert engine.ask("early", prompt) == NUM_TOKENS
    engine.connector.set_xfer_handshake_metadata_pp_aware(engine.places)
    assert engine.ask("warm", prompt) < 20


def test_other_weights_on_one_host_are_another_name(
    make_engine: Callable[..., SpanEngine],
) -> None:
    prompt, spaces = make_prompt("weights", NUM_TOKENS), []
    for number, weights in enumerate(["one", "one", "another"]):
        engine = make_engine()
        places = engine.places
        places[0, 1] = replace(places[0, 1], facts=(*places[0, 0].facts[:-1], ("weights", weights)))
        engine.connector.set_xfer_handshake_metadata_pp_aware(places)
        spaces.append(engine.connector.scheduler._namespace.digest)
        assert (engine.ask(f"request-{number}", prompt) < 20) == (number == 1)
    assert spaces[0] == spaces[1] != spaces[2]


def test_the_engine_is_refused_with_a_reason(make_engine: Callable[..., SpanEngine]) -> None:
    engine = make_engine()

    def refused(places: dict[tuple[int, int], NodePlace]) -> str:
        with pytest.raises(LayoutError) as caught:
            engine.connector.set_xfer_handshake_metadata_pp_aware(places)
        return str(caught.value)

    places = engine.places
    assert "the host of worker 1: " in refused(
        places | {(0, 1): replace(places[0, 1], relay="127.0.0.1:1")}
    )
    assert "the token is wrong" in refused(places | {(0, 1): replace(places[0, 1], token="x")})
    assert "Set span.listen" in refused(places | {(0, 1): replace(places[0, 1], relay="")})
    assert places[0, 1].token not in repr(places)
    planned = make_engine(settings={"rules": {"plan": True}})
    with pytest.raises(LayoutError, match=r"rules\.plan is set"):
        planned.connector.set_xfer_handshake_metadata_pp_aware(planned.places)
    announcing = make_engine(events=True)
    with pytest.raises(LayoutError, match="kv_events_config"):
        announcing.connector.set_xfer_handshake_metadata_pp_aware(announcing.places)


def test_a_relay_needs_an_address_of_its_host() -> None:
    assert relay_address("10.0.0.5:7713") == "10.0.0.5:7713"
    assert relay_address("auto").endswith(":0")
    for listen in ("0.0.0.0:7713", "[::]:7713"):
        with pytest.raises(LayoutError, match=r"span\.listen"):
            relay_address(listen)
    with pytest.raises(ConfigError, match=r"span\.listen"):
        load_config({"span": {"listens": "auto"}})
