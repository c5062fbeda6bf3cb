"""Loads and stores inside a pass: each layer is there before it is read, and what was computed after a failed load reaches nobody."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch

from kvhold.core.config import Config, NodeConfig
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.layerwise import Layerwise, LoadLayer, refusal
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.worker import WorkerSide
from tests.vllm.scheduling import (
    LAYERS,
    Engine,
    NodeProcess,
    Options,
    RealHands,
    answer_to,
    damage,
    eventually,
    make_folder,
    make_prompt,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

BLOCK = 16
NAMES = tuple(f"layer {number}" for number in range(4))


@pytest.fixture
def passing() -> Iterator[Layerwise]:
    group = Group(layers=len(NAMES), planes=2, heads=1, head_dim=8, dtype="float32", packing="test", block_tokens=BLOCK, block_bytes=1024)
    with ThreadPoolExecutor(1) as loader, ThreadPoolExecutor(1) as copier:
        yield Layerwise(Part(0, NAMES, group), loader, copier)


def load(name: str, *blocks: int) -> Load:
    return Load(name, 1, 0, [list(blocks)], inside=True)


class TestOnePass:
    def test_a_layer_is_waited_for_until_all_loads_have_it_and_no_longer(self, passing: Layerwise) -> None:
        go = [threading.Semaphore(0) for _ in NAMES]
        copied: list[tuple[str, int]] = []

        def prepare(one: Load, stack: ExitStack) -> list[LoadLayer]:
            def copy(layer: int) -> list[int]:
                assert go[layer].acquire(timeout=20)
                copied.append((one.request_id, layer))
                return []

            return [copy]

        passing.begin([load("a", 1), load("b", 2)], prepare)
        for number, name in enumerate(NAMES):
            go[number].release(2)
            passing.wait(name)
            assert copied == [(one, layer) for layer in range(number + 1) for one in "ab"], "the next layer cannot be there yet"
        assert passing.end() == {"a": [], "b": []}

    def test_what_fails_is_named_with_its_blocks_and_holds_up_nobody(self, passing: Layerwise) -> None:
        closed: list[str] = []

        def prepare(one: Load, stack: ExitStack) -> list[LoadLayer]:
            if one.request_id == "gone":
                raise KVHoldError("the hit is gone")
            stack.callback(closed.append, one.request_id)

            def copy(layer: int) -> list[int]:
                if one.request_id == "broken" and layer == 2:
                    raise RuntimeError("unforeseen")
                return []

            return [copy]

        passing.begin([load("gone", 3, -1, 4), load("broken", 5), load("well", 6)], prepare)
        for name in NAMES:
            passing.wait(name)
        assert passing.end() == {"gone": [3, 4], "broken": [5], "well": []}
        assert sorted(closed) == ["broken", "well"], "what was claimed is given back"
        assert passing.end() == {}, "a pass without loads has none"

    def test_a_damaged_chunk_fails_its_own_blocks_and_all_its_layers_go_on(self, passing: Layerwise) -> None:
        copied: list[int] = []

        def prepare(one: Load, stack: ExitStack) -> list[LoadLayer]:
            def copy(layer: int) -> list[int]:
                copied.append(layer)
                return {1: [4], 2: [6, 4]}.get(layer, [])

            return [copy]

        passing.begin([load("a", 3, 4, 5, 6)], prepare)
        for name in NAMES:
            passing.wait(name)
        assert passing.end() == {"a": [4, 6]}
        assert copied == [0, 1, 2, 3], "what is not damaged needs its other layers"

    def test_a_pass_that_does_not_wait_for_a_layer_has_read_what_was_not_there(self, passing: Layerwise) -> None:
        passing.begin([load("a", 1, 2)], lambda one, stack: [lambda layer: []])
        for name in NAMES[:-1]:
            passing.wait(name)
        assert passing.end() == {"a": [1, 2]}

    def test_layers_of_others_are_not_waited_for(self, passing: Layerwise) -> None:
        passing.wait("of a draft model")
        passing.save("of a draft model", [lambda layer: pytest.fail("it is not ours")])
        assert not passing.saved(), "and are none of the pass's"

    def test_a_layer_that_could_not_be_copied_out_is_told(self, passing: Layerwise) -> None:
        copied: list[int] = []

        def copy(layer: int) -> None:
            copied.append(layer)
            if layer == 1:
                raise RuntimeError("unforeseen")

        for name in NAMES:
            passing.save(name, [copy])
        assert not passing.saved()
        assert copied == [0, 1, 2, 3]
        for name in NAMES:
            passing.save(name, [])
        assert passing.saved(), "that was the pass before"

    def test_a_pass_that_leaves_a_layer_out_has_not_copied_all(self, passing: Layerwise) -> None:
        for name in NAMES[:-1]:
            passing.save(name, [lambda layer: None])
        assert not passing.saved()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node") / "node.sock")
    yield process
    process.kill()


def options(folder: Path, **changes: Any) -> Options:
    return Options(folder, caching=False, settings={"layerwise": True}, **changes)


@pytest.fixture
def engine(node: NodeProcess, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(options(make_folder(tmp_path / "model")), node.socket, real_worker=True)
    yield engine
    eventually(lambda: node.held() == {"tickets": 0, "loans": 0, "rooms": 0})
    engine.close()


def ask(engine: Engine, name: str, prompt: list[int]) -> None:
    engine.add(name, prompt, max_tokens=3)
    engine.run()
    assert engine.outputs[name] == answer_to(prompt, 3)
    eventually(lambda: not engine.hands.client.status()["held"]["rooms"])  # what was stored is committed beside the passes


@pytest.mark.parametrize("handed_over", [1, len(LAYERS)])
def test_every_layer_is_stored_whatever_the_pass_hands_over(node: NodeProcess, handed_over: int) -> None:
    group = Group(
        layers=len(LAYERS), planes=2, heads=1, head_dim=32, dtype="float32", packing="t", block_tokens=16, block_bytes=16 * 64 * 4
    )
    namespace = Namespace(f"handed over {handed_over}", Layout((group,), tokens_per_chunk=64, tail_tokens=16))
    geometry = Geometry((Part(0, tuple(LAYERS), group),), namespace.layout, shards=1, per_worker=1, copies=1, width=1)
    config = Config(node=NodeConfig(socket=str(node.socket), autostart=False))
    side = WorkerSide(config, namespace, geometry, num_blocks=40, layerwise=True)
    caches = {name: torch.randn(40, 1, 16, 64) for name in LAYERS}
    side.register(caches)
    prompt = namespace.prompt(make_prompt("handed over", 128))
    side.begin(Steps(stores=[Store("a", prompt.chunks(), [list(range(8))])]))
    for one in side._reserved:
        one.room.result(timeout=20)  # there before the first layer: what is handed over is copied inside the pass
    for name in LAYERS[:handed_over]:
        side.save_layer(name)
    assert all(one.copies for one in side._reserved)
    side.store()
    hit = eventually(lambda: hit if (hit := side._cache.lookup(prompt.query())).num_tokens else hit.close())
    side.start_loads(Steps(loads=[Load("b", hit.ticket, 0, [list(range(20, 28))], inside=True)]))
    for name in LAYERS:
        side.wait_for_layer(name)
    side.store()
    assert side.take_failed_blocks() == set()
    assert all(torch.equal(cache[20:28], cache[:8]) for cache in caches.values())
    hit.close()
    side.close()


class TestEngine:
    @pytest.mark.parametrize(("length", "loaded"), [(640, 624), (641, 640), (700, 688), (17, 16), (16, 0)])
    def test_what_was_seen_is_loaded_but_for_the_last_block(self, engine: Engine, length: int, loaded: int) -> None:
        prompt = make_prompt(f"layerwise {length}", length)
        ask(engine, "first", prompt)
        ask(engine, "second", prompt)
        assert [one.inside for one in engine.loads] == [True] * bool(loaded)
        assert engine.tokens_computed["second"] == length - loaded + 2

    def test_a_load_waits_for_no_pass_of_its_own(self, engine: Engine) -> None:
        prompt = make_prompt("no pass of its own", 640)
        ask(engine, "first", prompt)
        engine.add("second", prompt, max_tokens=1)
        assert engine.next_pass().num_scheduled_tokens == {"second": 16}
        assert engine.loads, "the pass that loads is the one that computes"
        engine.run()

    def test_after_a_failed_load_the_request_is_computed_and_nothing_of_the_failed_pass_is_stored(self, engine: Engine) -> None:
        assert isinstance(engine.worker, RealHands)
        prompt = make_prompt("failed", 640)
        ask(engine, "first", prompt)
        cache = engine.worker.connector.worker._cache
        claim, longer = cache.claim, prompt + make_prompt("the rest", 300)

        def fail(*_: Any, **__: Any) -> None:
            cache.claim = claim  # type: ignore[method-assign]

        cache.claim = fail  # type: ignore[assignment,method-assign]
        engine.excused = {"second"}
        ask(engine, "second", longer)
        assert engine.tokens_computed["second"] == 300 + 940 + 2
        engine.excused = set()
        ask(engine, "third", longer)
        assert len(engine.loads) == 2
        assert engine.tokens_computed["third"] == 940 - 928 + 2, "what the second has computed at last is what is loaded"

    def test_after_a_load_of_a_damaged_chunk_what_is_before_it_is_not_computed(self, engine: Engine) -> None:
        prompt = make_prompt("damaged", 640)
        ask(engine, "first", prompt)
        damage(engine, prompt, chunk=6)
        engine.excused = {"second"}  # one pass has read the damaged chunk; nobody hears what it answered
        ask(engine, "second", prompt)
        assert engine.tokens_computed["second"] == 16 + (640 - 6 * 64) + 2
        engine.excused = set()
        ask(engine, "third", prompt)
        assert engine.tokens_computed["third"] == 16 + 2, "what was computed for the damaged chunk was stored"

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_happens_no_token_is_read_that_is_not_the_request_s_own(self, node: NodeProcess, tmp_path: Path, seed: int) -> None:
        rng = random.Random(seed)
        crowded = options(
            make_folder(tmp_path / "small"), num_blocks=rng.choice([60, 90]), budget=rng.choice([64, 100, 400]), max_running=6
        )
        tight = Engine(crowded, node.socket, real_worker=True)
        asked: dict[str, tuple[list[int], int]] = {}
        prompts: list[list[int]] = []
        for number in range(120):
            if rng.random() < 0.35 and len(tight.scheduler.requests) < 12:
                prefix = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
                prompts.append((prefix + make_prompt(f"{seed} {number}", rng.choice([1, 15, 16, 64, rng.randrange(1, 500)])))[:700])
                asked[str(number)] = (prompts[-1], rng.choice([1, 2, 5, 40]))
                tight.add(str(number), prompts[-1], max_tokens=asked[str(number)][1])
            if rng.random() < 0.08 and tight.scheduler.requests:
                gone = rng.choice(list(tight.scheduler.requests))
                asked.pop(gone, None)
                tight.abort(gone)
            if rng.random() < 0.05:
                tight.hands.client.clear()
            tight.step()
        tight.run()
        assert {name: tight.outputs[name] for name in asked} == {name: answer_to(prompt, count) for name, (prompt, count) in asked.items()}
        assert tight.loads
        assert all(one.inside for one in tight.loads)
        tight.close()


def test_where_a_failed_load_could_not_be_undone_it_is_refused(node: NodeProcess, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"layerwise: .*prefix cache is on"):
        Engine(Options(make_folder(tmp_path / "model"), settings={"layerwise": True}), node.socket)


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        ("cache_config", "enable_prefix_caching", True, "prefix cache"),
        ("scheduler_config", "async_scheduling", True, "asynchronous"),
        ("parallel_config", "world_size", 2, "2 workers"),
        ("geometry", "groups", 2, "2 KV cache groups"),
        ("geometry", "attention", "state", "a state"),
    ],
)
def test_each_reason_is_named_alone(section: str, name: str, value: object, reason: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "cache_config": {"enable_prefix_caching": False},
        "scheduler_config": {"async_scheduling": False},
        "parallel_config": {"world_size": 1},
        "geometry": {"groups": 1, "attention": "full"},
    }
    assert not refusal(*set_up(given))
    given[section][name] = value
    assert reason in refusal(*set_up(given))
    assert ";" not in refusal(*set_up(given))


def set_up(given: dict[str, dict[str, Any]]) -> tuple[Any, Any]:
    """As much of an engine's configuration and geometry as `refusal` looks at."""
    of_model = given["geometry"]
    part = SimpleNamespace(group=SimpleNamespace(attention=of_model["attention"]))
    config = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in given.items()})
    return config, SimpleNamespace(parts=[part] * of_model["groups"])


def test_a_graph_of_a_whole_pass_would_wait_for_no_layer() -> None:
    assert KVHoldConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not KVHoldConnector.requires_piecewise_for_cudagraph({})
