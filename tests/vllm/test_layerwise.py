"""Loads and stores inside a pass: each layer is there before it is read, and what was computed
after a failed load reaches nobody.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch

from kvhold.core.config import Config, NodeConfig
from kvhold.core.errors import DamagedChunks, KVHoldError, LayoutError
from kvhold.core.holdings import ChunkBytes
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.layerwise import Layerwise, refusal
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.worker import WorkerSide
from kvhold.memory.copier import Copier, Ended, Mark, Piece, Transfer
from kvhold.memory.views import View
from tests.vllm.hands import RealHands
from tests.vllm.scheduling import (
    LAYERS,
    Engine,
    NodeProcess,
    Options,
    answer_to,
    damage,
    eventually,
    make_folder,
    make_prompt,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

BLOCK = 16
NAMES = tuple(f"layer {number}" for number in range(4))


@dataclass
class Scripted:
    """A copier that does what a test says. copy: of a load's first block and a layer; returns what
    is damaged.
    """

    copy: Callable[[int, int], DamagedChunks | None] = lambda block, layer: None
    copied: list[tuple[int, int]] = field(default_factory=list)
    fenced: list[int] = field(default_factory=list)  # the layer of each transfer

    def mark(self) -> None:
        """See `Copier`."""

    def scatter(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> "OfLayer":
        """See `Copier`."""
        assert layers is not None
        found = [self.copy(int(piece.ids[0]), layers.start) for piece in pieces]
        self.copied += [(int(piece.ids[0]), layers.start) for piece in pieces]
        return OfLayer(found, layers.start)

    gather = scatter

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """See `Copier`."""
        self.fenced += [transfer.layer for transfer in transfers if isinstance(transfer, OfLayer)]


@dataclass(frozen=True)
class OfLayer(Ended):
    layer: int


@pytest.fixture
def copier() -> Scripted:
    return Scripted()


@pytest.fixture
def passing(copier: Scripted) -> Iterator[Layerwise]:
    group = Group(
        layers=len(NAMES),
        planes=2,
        heads=1,
        head_dim=8,
        dtype="float32",
        packing="test",
        block_tokens=BLOCK,
        block_bytes=1024,
    )
    with ThreadPoolExecutor(1) as loader, ThreadPoolExecutor(1) as saver:
        yield Layerwise(Part(0, NAMES, group, group), cast(Copier, copier), loader, saver)


def load(name: str, *blocks: int) -> Load:
    return Load(name, 1, 0, [list(blocks)], inside=True)


def piece(*blocks: int) -> Piece:
    """Chunks of one block each."""
    places = ChunkBytes(np.zeros(len(blocks), np.int64), np.full(len(blocks), BLOCK, np.int64))
    return Piece(cast("View", None), np.array(blocks, np.int64), np.zeros(1, np.uint8), places)


def prepare(one: Load, stack: ExitStack) -> list[Piece]:
    return [piece(*one.block_ids[0])]


class TestOnePass:
    def test_a_layer_is_waited_for_until_all_loads_have_it_and_no_longer(
        self, passing: Layerwise, copier: Scripted
    ) -> None:
        go = [threading.Semaphore(0) for _ in NAMES]

        def copy(block: int, layer: int) -> None:
            assert go[layer].acquire(timeout=20)

        copier.copy = copy
        passing.begin([load("a", 1), load("b", 2)], prepare)
        for number, name in enumerate(NAMES):
            go[number].release(2)
            passing.wait(name)
            assert copier.copied == [
                (one, layer) for layer in range(number + 1) for one in (1, 2)
            ], "the next layer cannot be there yet"
            assert copier.fenced == [layer for layer in range(number + 1) for _ in "ab"], (
                "the pass itself comes after the copies"
            )
        assert passing.end() == {"a": [], "b": []}

    def test_what_fails_is_named_with_its_blocks_and_holds_up_nobody(
        self, passing: Layerwise, copier: Scripted
    ) -> None:
        closed: list[str] = []

        def prepare_some(one: Load, stack: ExitStack) -> list[Piece]:
            if one.request_id == "gone":
                raise KVHoldError("the hit is gone")
            stack.callback(closed.append, one.request_id)
            return prepare(one, stack)

        def copy(block: int, layer: int) -> None:
            if (block, layer) == (5, 2):
                raise RuntimeError("unforeseen")

        copier.copy = copy
        passing.begin([load("gone", 3, -1, 4), load("broken", 5), load("well", 6)], prepare_some)
        for name in NAMES:
            passing.wait(name)
        assert passing.end() == {"gone": [3, 4], "broken": [5], "well": []}
        assert sorted(closed) == ["broken", "well"], "what was claimed is given back"
        assert passing.end() == {}, "a pass without loads has none"

    def test_claims_end_after_the_copies(
        self, passing: Layerwise, copier: Scripted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []

        def wait(transfer: OfLayer) -> list[DamagedChunks | None]:
            seen.append("waited")
            return transfer.damage

        def prepare_one(one: Load, stack: ExitStack) -> list[Piece]:
            stack.callback(seen.append, "closed")
            return prepare(one, stack)

        monkeypatch.setattr(OfLayer, "wait", wait)
        passing.begin([load("a", 1)], prepare_one)
        for name in NAMES:
            passing.wait(name)
        passing.end()
        assert seen == ["waited"] * len(NAMES) + ["closed"]

    def test_a_damaged_chunk_fails_its_own_blocks_and_all_its_layers_go_on(
        self, passing: Layerwise, copier: Scripted
    ) -> None:
        copier.copy = lambda block, layer: {1: DamagedChunks([1]), 2: DamagedChunks([3, 1])}.get(
            layer
        )
        passing.begin([load("a", 3, 4, 5, 6)], prepare)
        for name in NAMES:
            passing.wait(name)
        assert passing.end() == {"a": [4, 6]}
        assert copier.copied == [(3, layer) for layer in range(4)], (
            "what is not damaged needs its other layers"
        )

    def test_a_pass_that_does_not_wait_for_a_layer_has_read_what_was_not_there(
        self, passing: Layerwise
    ) -> None:
        passing.begin([load("a", 1, 2)], prepare)
        for name in NAMES[:-1]:
            passing.wait(name)
        assert passing.end() == {"a": [1, 2]}

    def test_layers_of_others_are_not_waited_for(
        self, passing: Layerwise, copier: Scripted
    ) -> None:
        passing.wait("of a draft model")
        assert passing.save("of a draft model", [piece(1)]) is None
        assert not passing.saved(), "and are none of the pass's"
        assert not copier.copied

    def test_a_layer_that_could_not_be_copied_out_is_told(
        self, passing: Layerwise, copier: Scripted
    ) -> None:
        asked: list[int] = []

        def copy(block: int, layer: int) -> None:
            asked.append(layer)
            if layer == 1:
                raise RuntimeError("unforeseen")

        copier.copy = copy
        for name in NAMES:
            passing.save(name, [piece(1)])
        assert not passing.saved()
        assert asked == [0, 1, 2, 3]
        for name in NAMES:
            passing.save(name, [])
        assert passing.saved(), "that was the pass before"

    def test_a_pass_that_leaves_a_layer_out_has_not_copied_all(self, passing: Layerwise) -> None:
        for name in NAMES[:-1]:
            passing.save(name, [piece(1)])
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
    eventually(lambda: node.held() == {"tickets": 0, "leases": 0, "reservations": 0})
    engine.close()


def ask(engine: Engine, name: str, prompt: list[int]) -> None:
    engine.add(name, prompt, max_tokens=3)
    engine.run()
    assert engine.outputs[name] == answer_to(prompt, 3)
    # what was stored is committed beside the passes
    eventually(lambda: not engine.hands.client.status()["held"]["reservations"])


@pytest.mark.parametrize("handed_over", [1, len(LAYERS)])
def test_every_layer_is_stored_whatever_the_pass_hands_over(
    node: NodeProcess, handed_over: int
) -> None:
    group = Group(
        layers=len(LAYERS),
        planes=2,
        heads=1,
        head_dim=32,
        dtype="float32",
        packing="t",
        block_tokens=16,
        block_bytes=16 * 64 * 4,
    )
    namespace = Namespace(
        f"handed over {handed_over}", Layout((group,), tokens_per_chunk=64, tail_tokens=16)
    )
    geometry = Geometry(
        (Part(0, tuple(LAYERS), group, group),),
        namespace.layout,
        shards=1,
        per_worker=1,
        copies=1,
        width=1,
    )
    config = Config(node=NodeConfig(socket=str(node.socket), autostart=False))
    side = WorkerSide(config, namespace, geometry, num_blocks=40, layerwise=True)
    caches = {name: torch.randn(40, 1, 16, 64) for name in LAYERS}
    side.register(caches)
    prompt = namespace.prompt(make_prompt("handed over", 128))
    side.begin(Steps(stores=[Store("a", prompt.chunks(), [list(range(8))])]))
    for one in side._reserved:
        # there before the first layer: what is handed over is copied inside the pass
        one.reservation.result(timeout=20)
    for name in LAYERS[:handed_over]:
        side.save_layer(name)
    assert all(one.pieces for one in side._reserved)
    side.store()
    hit = eventually(
        lambda: hit if (hit := side._cache.lookup(prompt.query())).num_tokens else hit.close()
    )
    side.start_loads(Steps(loads=[Load("b", hit.ticket, 0, [list(range(20, 28))], inside=True)]))
    for name in LAYERS:
        side.wait_for_layer(name)
    side.store()
    assert side.take_failed_blocks() == set()
    assert all(torch.equal(cache[20:28], cache[:8]) for cache in caches.values())
    hit.close()
    side.close()


class TestEngine:
    @pytest.mark.parametrize(
        ("length", "loaded"), [(640, 624), (641, 640), (700, 688), (17, 16), (16, 0)]
    )
    def test_what_was_seen_is_loaded_but_for_the_last_block(
        self, engine: Engine, length: int, loaded: int
    ) -> None:
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

    def test_a_request_that_is_preempted_right_after_its_load_loads_again(
        self, engine: Engine
    ) -> None:
        """`reset_prefix_cache(reset_running_requests=True)` preempts between two passes."""
        prompt = make_prompt("preempted after its load", 640)
        ask(engine, "first", prompt)
        engine.add("second", prompt, max_tokens=3)
        engine.next_pass()
        assert len(engine.loads) == 1
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.run()
        assert len(engine.loads) == 2, "its blocks are new, and hold nothing yet"

    def test_after_a_failed_load_the_request_is_computed_and_nothing_of_the_failed_pass_is_stored(
        self, engine: Engine
    ) -> None:
        assert isinstance(engine.worker, RealHands)
        prompt = make_prompt("failed", 640)
        ask(engine, "first", prompt)
        cache = engine.worker.connector.worker._cache
        claim, longer = cache.claim, prompt + make_prompt("the rest", 300)

        def fail(*_: Any, **__: Any) -> None:
            cache.claim = claim  # type: ignore[method-assign]

        cache.claim = fail  # type: ignore[method-assign]
        engine.excused = {"second"}
        ask(engine, "second", longer)
        assert engine.tokens_computed["second"] == 300 + 940 + 2
        engine.excused = set()
        ask(engine, "third", longer)
        assert len(engine.loads) == 2
        assert engine.tokens_computed["third"] == 940 - 928 + 2, (
            "what the second has computed at last is what is loaded"
        )

    def test_after_a_load_of_a_damaged_chunk_what_is_before_it_is_not_computed(
        self, engine: Engine
    ) -> None:
        prompt = make_prompt("damaged", 640)
        ask(engine, "first", prompt)
        damage(engine, prompt, chunk=6)
        # one pass has read the damaged chunk; nobody hears what it answered
        engine.excused = {"second"}
        ask(engine, "second", prompt)
        assert engine.tokens_computed["second"] == 16 + (640 - 6 * 64) + 2
        engine.excused = set()
        ask(engine, "third", prompt)
        assert engine.tokens_computed["third"] == 16 + 2, (
            "what was computed for the damaged chunk was stored"
        )

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_happens_no_token_is_read_that_is_not_the_request_s_own(
        self, node: NodeProcess, tmp_path: Path, seed: int
    ) -> None:
        rng = random.Random(seed)
        crowded = options(
            make_folder(tmp_path / "small"),
            num_blocks=rng.choice([60, 90]),
            budget=rng.choice([64, 100, 400]),
            max_running=6,
        )
        tight = Engine(crowded, node.socket, real_worker=True)
        asked: dict[str, tuple[list[int], int]] = {}
        prompts: list[list[int]] = []
        for number in range(120):
            if rng.random() < 0.35 and len(tight.scheduler.requests) < 12:
                prefix = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
                prompts.append(
                    (
                        prefix
                        + make_prompt(
                            f"{seed} {number}", rng.choice([1, 15, 16, 64, rng.randrange(1, 500)])
                        )
                    )[:700]
                )
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
        assert {name: tight.outputs[name] for name in asked} == {
            name: answer_to(prompt, count) for name, (prompt, count) in asked.items()
        }
        assert tight.loads
        assert all(one.inside for one in tight.loads)
        tight.close()


def test_where_a_failed_load_could_not_be_undone_it_is_refused(
    node: NodeProcess, tmp_path: Path
) -> None:
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
    refused = refusal(*set_up(given))
    assert refused is not None
    assert reason in refused
    assert ";" not in refused


def set_up(given: dict[str, dict[str, Any]]) -> tuple[Any, Any]:
    """As much of an engine's configuration and geometry as `refusal` looks at."""
    of_model = given["geometry"]
    part = SimpleNamespace(group=SimpleNamespace(attention=of_model["attention"]))
    config = SimpleNamespace(
        **{name: SimpleNamespace(**values) for name, values in given.items()},
        speculative_config=None,
    )
    return config, SimpleNamespace(parts=[part] * of_model["groups"])


def test_an_engine_that_speculates_is_refused() -> None:
    """vLLM's runner asks which loads failed before the pass has ended there; it would hear of it a
    pass too late.
    """
    given: dict[str, dict[str, Any]] = {
        "cache_config": {"enable_prefix_caching": False},
        "scheduler_config": {"async_scheduling": False},
        "parallel_config": {"world_size": 1},
        "geometry": {"groups": 1, "attention": "full"},
    }
    config, geometry = set_up(given)
    assert not refusal(config, geometry)
    config.speculative_config = SimpleNamespace(method="ngram")
    refused = refusal(config, geometry)
    assert refused is not None
    assert "it speculates" in refused


def test_a_graph_of_a_whole_pass_would_wait_for_no_layer() -> None:
    assert KVHoldConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not KVHoldConnector.requires_piecewise_for_cudagraph({})
