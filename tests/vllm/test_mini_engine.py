"""Real requests over real KV: tokens and KV bytes with kvhold are those of the same engine without
it, whatever vLLM does to its blocks.
"""

import itertools
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch

from kvhold.core.errors import LayoutError
from kvhold.integrations.vllm.worker import WorkerSide
from kvhold.memory.copier import HostCopier
from kvhold.testing.damage import OpenArena
from kvhold_lab.mini_engine import SHAPES, MiniEngine
from tests.vllm.scheduling import NodeProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS = {"llama": 700, "mla": 650, "sliding": 650}
BLOCKS = {"llama": 28, "mla": 28, "sliding": 32}  # so few that requests are preempted
FEW: dict[str, Any] = {"max_tokens": 192, "budget": 64, "max_running": 8}
MANY: dict[str, Any] = {
    "num_blocks": 400,
    "max_tokens": 192,
    "budget": 512,
    "max_running": 24,
    "prefix_caching": False,
}
VOCAB = 200


@dataclass(frozen=True)
class Asked:
    """A request. aborted_after: steps of its engine, after which its caller goes away;
    0: it stays.
    """

    name: str
    tokens: tuple[int, ...]
    max_tokens: int
    aborted_after: int = 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path / "node.sock", ram="48MiB")
    yield process
    process.kill()


@pytest.fixture
def start(node: NodeProcess, notes: None) -> Iterator[Callable[..., MiniEngine]]:
    """Start engines on the node; `connected=False`: one without kvhold."""
    engines: list[MiniEngine] = []

    def start(
        model: str,
        *,
        connected: bool = True,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> MiniEngine:
        always: dict[str, Any] = {
            "tokens_per_chunk": 32,
            "node": {"socket": str(node.socket), "autostart": False},
            "client": {"call_timeout_s": 20.0},  # a busy machine is no lost node
            "rules": {"plan": False},  # computing so small a model is faster than any load
        }
        engines.append(
            MiniEngine(
                model,
                connector=always | (settings or {}) if connected else None,
                keep_digests=True,
                **options,
            )
        )
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def traffic(seed: str, count: int, *, aborts: bool = True) -> list[Asked]:
    """Requests of which most share the beginning of their prompt with others."""
    rng = random.Random(seed)
    texts = [[rng.randrange(VOCAB) for _ in range(120)] for _ in range(max(4, count // 12))]
    asked = []
    for number in range(count):
        text = texts[min(rng.randrange(len(texts)), rng.randrange(len(texts)))]
        tokens = text[: rng.randrange(16, 116)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))
        ]
        aborted_after = rng.randrange(1, 12) if aborts and not rng.randrange(12) else 0
        asked.append(
            Asked(f"{seed} {number}", tuple(tokens), rng.choice([1, 1, 2, 4, 40]), aborted_after)
        )
    return asked


def serve(engines: list[MiniEngine], asked: list[Asked], *, at_once: int = 10) -> None:
    """The engines take requests in turns as others end, and step in turns until all have ended."""
    waiting, steps = deque(asked), [0] * len(engines)
    leaving: list[dict[str, int]] = [{} for _ in engines]
    while waiting or any(engine.is_busy() for engine in engines):
        moved = False
        for number, engine in enumerate(engines):
            while waiting and engine.scheduler.get_num_unfinished_requests() < at_once:
                one = waiting.popleft()
                engine.add(one.name, one.tokens, one.max_tokens)
                if one.aborted_after:
                    leaving[number][one.name] = steps[number] + one.aborted_after
            steps[number] += 1
            moved |= engine.is_busy() and engine.step()
            for name in [name for name, step in leaving[number].items() if step == steps[number]]:
                engine.abort(name)
        if not moved:
            engines[0].idle()


def compare(engines: list[MiniEngine], asked: list[Asked], reference: MiniEngine) -> list[str]:
    """The requests whose tokens or KV bytes differ from the reference's.

    All must have been answered.
    """
    for one in asked:
        reference.add(one.name, one.tokens, one.max_tokens)
    reference.run()
    wrong = []
    for one in asked:
        (engine,) = [engine for engine in engines if one.name in engine.outputs]
        tokens, digest = engine.outputs[one.name], engine.kv_digests.get(one.name)
        assert one.aborted_after or len(tokens) == one.max_tokens
        if tokens != reference.outputs[one.name][: len(tokens)] or digest not in (
            None,
            reference.kv_digests[one.name],
        ):
            wrong.append(one.name)
    return wrong


def worker_of(engine: MiniEngine) -> Any:
    """The worker's side of its connector."""
    assert engine.connector is not None
    return engine.connector.worker


def is_over(engine: MiniEngine, request: str) -> bool:
    return request in engine.kv_digests


def damage(engine: MiniEngine, tokens: Sequence[int], *, chunk: int) -> None:
    """Invert one bit of a chunk of this prompt in the node's memory."""
    cache, side = worker_of(engine)._cache, engine.scheduler.connector.scheduler
    with cache.lookup(side._namespace.prompt(np.array(tokens, dtype=np.int32)).query()) as hit:
        lease = cache.claim(hit.ticket)
        with lease, OpenArena(cache.status()["pid"]) as arena:
            arena.flip(int(lease.chunks().offsets[chunk]) + 5)


def lose_every_second_hit(engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the worker every second hit is gone when it comes to claim it."""
    cache, calls = worker_of(engine)._cache, itertools.count()
    claim = cache.claim
    monkeypatch.setattr(
        cache, "claim", lambda *args, **kwargs: claim(*args, **kwargs) if next(calls) % 2 else None
    )


def test_tokens_and_kv_do_not_depend_on_batches_cuts_or_blocks(
    model: str, start: Callable[..., MiniEngine]
) -> None:
    asked = traffic("alone", 40, aborts=False)
    few: dict[str, Any] = {
        "num_blocks": 20 if model == "sliding" else 14,
        "max_tokens": 192,
        "max_running": 5,
    }
    cut = start(
        model,
        connected=False,
        budget=17,
        scheduling={"long_prefill_token_threshold": 13},
        kv_layout="BLNHC",
        **few,
    )
    serve([cut], asked)
    assert cut.counts.preemptions
    assert compare([cut], asked, start(model, connected=False, **MANY)) == []
    assert len(cut.kv_digests) == len(asked)
    assert len({tuple(answer) for answer in cut.outputs.values()}) > 20, (
        "answers depend on their prompts"
    )


def test_random_requests_have_the_tokens_and_the_kv_of_an_engine_without_kvhold(
    model: str, start: Callable[..., MiniEngine]
) -> None:
    engines = [
        start(model, num_blocks=BLOCKS[model], **FEW, asynchronous=True, second_runner=True),
        start(
            model,
            num_blocks=BLOCKS[model],
            **FEW,
            prefix_caching=False,
            zero_blocks=True,
            second_runner=False,
        ),
    ]
    asked = traffic("random", REQUESTS[model])
    serve(engines, asked)
    assert compare(engines, asked, start(model, connected=False, **MANY)) == []
    assert sum(len(engine.kv_digests) for engine in engines) > 0.9 * len(asked)
    assert sum(engine.counts.preemptions for engine in engines) > 0
    for engine in engines:
        assert engine.counts.loaded_tokens > 1000
        assert engine.counts.failed_loads <= sum(bool(one.aborted_after) for one in asked), (
            "only of requests that are aborted meanwhile"
        )
    assert engines[0].counts.cached_tokens > 0
    assert engines[1].counts.cached_tokens == 0


def test_a_block_that_is_loaded_has_the_bytes_of_the_block_that_was_stored(
    model: str, start: Callable[..., MiniEngine]
) -> None:
    storing, loading = start(model, prefix_caching=False), start(model, prefix_caching=False)
    prompt = traffic(model, 1)[0].tokens[:1] * 5 + tuple(range(100))
    for engine in (storing, loading):
        engine.add("a", prompt, 4)
        engine.run(until=partial(is_over, engine, "a"))
    assert loading.counts.loaded_tokens >= 96
    assert storing.kv_digests == loading.kv_digests
    for group, stored, loaded in zip(
        storing.kv_config.kv_cache_groups,
        storing.block_ids("a"),
        loading.block_ids("a"),
        strict=True,
    ):
        in_window = (
            slice(-2, None) if "Sliding" in type(group.kv_cache_spec).__name__ else slice(None)
        )
        for layer in group.layer_names:
            assert [storing.block_bytes(layer, block) for block in stored[in_window]] == [
                loading.block_bytes(layer, block) for block in loaded[in_window]
            ]


def test_one_bit_that_is_wrong_in_one_loaded_block_is_noticed(
    model: str, start: Callable[..., MiniEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the other tests: they would fail."""
    asked = traffic("control", 30, aborts=False)
    storing, loading = start(model, prefix_caching=False), start(model, prefix_caching=False)
    serve([storing], asked)
    scatter, spoilt = WorkerSide._scatter, list[str]()
    layer = loading.kv_config.kv_cache_groups[-1].layer_names[0]

    def scatter_and_flip(side: WorkerSide, load: Any, *arguments: Any) -> list[int]:
        damaged = scatter(side, load, *arguments)
        if not spoilt:
            block = next(block for block in load.block_ids[-1] if block >= 0)
            loading.caches[layer][block].view(torch.int32)[0, 0, 0] ^= 1
            spoilt.append(load.request_id)
        return damaged

    monkeypatch.setattr(WorkerSide, "_scatter", scatter_and_flip)
    serve([loading], asked)
    assert loading.counts.loaded_tokens > 0
    assert compare([loading], asked, start(model, connected=False, **MANY)) == spoilt != []


def test_what_was_lost_or_damaged_before_its_load_is_computed(
    model: str, start: Callable[..., MiniEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = traffic("failing", 40, aborts=False)
    storing, loading = (
        start(model, num_blocks=BLOCKS[model], **FEW),
        start(model, num_blocks=BLOCKS[model], **FEW),
    )
    serve([storing], asked)
    for one in asked[:14]:
        damage(loading, one.tokens, chunk=0)
    lose_every_second_hit(loading, monkeypatch)
    serve([loading], asked)
    assert loading.counts.failed_loads > 5
    assert loading.counts.loaded_tokens > 0
    assert compare([loading], asked, start(model, connected=False, **MANY)) == []


@pytest.mark.parametrize("second_runner", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_blocks_that_are_stored_are_read_before_the_next_pass_zeroes_them(
    model: str,
    second_runner: bool,
    start: Callable[..., MiniEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies are slow: they begin a moment after the next step's first call of the connector,
    or half a second later.
    """
    few: dict[str, Any] = {
        "num_blocks": 14,
        "max_tokens": 192,
        "budget": 256,
        "prefix_caching": False,
    }
    engine = start(model, zero_blocks=True, second_runner=second_runner, **few)
    assert engine.connector is not None
    gather, handle, save = (
        HostCopier.gather,
        engine.connector.handle_preemptions,
        engine.connector.wait_for_save,
    )
    # the last step that has begun, and the last whose pass is over
    begun, steps = (itertools.count(1), [0, 0])

    def gather_late(*arguments: Any, **options: Any) -> Any:
        until_s = time.monotonic() + 0.5
        while steps[0] <= steps[1] and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.02)
        return gather(*arguments, **options)

    def handle_and_count(metadata: Any) -> None:
        steps[0] = next(begun)
        handle(metadata)

    def save_and_count() -> None:
        steps[1] = steps[0]
        save()

    monkeypatch.setattr(HostCopier, "gather", gather_late)
    monkeypatch.setattr(engine.connector, "handle_preemptions", handle_and_count)
    monkeypatch.setattr(engine.connector, "wait_for_save", save_and_count)
    asked = [
        Asked(str(number), tuple((number + 7 * at) % VOCAB for at in range(180)), 1)
        for number in range(2)
    ]
    serve([engine], asked)  # the second one gets the blocks of the first
    steps[0] = next(begun)  # for the copies of the last step
    worker_of(engine).end_reading()
    worker_of(engine)._settler.submit(int).result()  # all is committed
    loading = start(model, **few)
    serve([loading], asked)
    assert loading.counts.loaded_tokens == 2 * 176
    assert compare([loading], asked, start(model, connected=False, **MANY)) == []


@pytest.mark.parametrize("model", ["llama", "mla"], indirect=True)
def test_loads_inside_the_passes_give_the_same_tokens_and_kv(
    model: str, start: Callable[..., MiniEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = traffic("inside", 100)
    few: dict[str, Any] = FEW | {"num_blocks": BLOCKS[model], "prefix_caching": False}
    engines = [
        start(model, settings={"layerwise": True}, second_runner=second, **few)
        for second in (False, True)
    ]
    lose_every_second_hit(engines[1], monkeypatch)
    serve(engines, asked)
    assert min(engine.counts.loaded_tokens for engine in engines) > 0
    assert engines[1].counts.failed_loads > 0
    assert compare(engines, asked, start(model, connected=False, **MANY)) == []


@pytest.mark.parametrize(
    ("model", "caching", "reason"),
    [("llama", True, "prefix cache"), ("sliding", False, "2 KV cache groups")],
)
def test_loads_inside_the_passes_are_refused_where_they_cannot_be_undone(
    model: str, caching: bool, reason: str, start: Callable[..., MiniEngine]
) -> None:
    with pytest.raises(LayoutError, match=reason):
        start(model, settings={"layerwise": True}, prefix_caching=caching)


_WITHOUT_KERNELS = """
import sys

class NoKernels:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("vllm.") and name.split(".")[1].startswith("_") and "_C" in name:
            raise ImportError(f"{name} is not built")

sys.meta_path.insert(0, NoKernels())
from kvhold_lab.mini_engine import SHAPES, MiniEngine

for model in SHAPES:
    for _ in range(2):
        node = {"socket": sys.argv[1], "autostart": False}
        engine = MiniEngine(model, connector={"node": node, "rules": {"plan": False}})
        engine.add("a", range(150), 4)
        engine.run()
        engine.close()
    assert engine.counts.loaded_tokens >= 128, engine.counts
"""


def test_no_kernel_of_vllm_s_is_needed(node: NodeProcess) -> None:
    """A machine with a GPU has vLLM's Python files and torch."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_KERNELS, str(node.socket)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
