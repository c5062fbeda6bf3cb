"""The connector under vLLM's real scheduler and over a real node: what is stored and loaded, when,
and whatever goes wrong.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from multiprocessing import Pipe
from pathlib import Path
from threading import Event
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvhold.core.config import ClientConfig, Config, load_config
from kvhold.core.errors import ConfigError, LayoutError, NodeError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm import lookups, namespace, register
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.drafts import DraftLimit, Undrafted
from kvhold.integrations.vllm.geometry import geometry_of, mixes_adapters
from kvhold.integrations.vllm.naming import adapters
from kvhold.integrations.vllm.request_state import RequestState
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.node import NodeClient
from tests.vllm.scheduling import (
    WITHIN_S,
    Engine,
    NodeProcess,
    Options,
    answer_to,
    damage,
    eventually,
    make_config,
    make_folder,
    make_kv_config,
    make_prompt,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

BLOCK, CHUNK = 16, 64
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}
IMPATIENT = {
    "client": {
        "call_timeout_s": 0.2,
        "connect_timeout_s": 2.0,
        "reconnect_interval_s": 0.05,
        "heartbeat_interval_s": 0.2,
    }
}

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node for the tests that leave it alone."""
    process = NodeProcess(tmp_path_factory.mktemp("node") / "node.sock")
    yield process
    process.kill()


@pytest.fixture
def engine(node: NodeProcess, folder: Path) -> Iterator[MakeEngine]:
    """Engines on the node.

    In the end each has finished its requests, and nothing is held for it any more.
    """
    yield from engines_on(node, folder)


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node of the test's own."""
    process = NodeProcess(tmp_path / "frail.sock")
    yield process
    process.go_on()
    process.kill()


def engines_on(node: NodeProcess, folder: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(*, real_worker: bool = False, **options: Any) -> Engine:
        engines.append(Engine(Options(folder, **options), node.socket, real_worker=real_worker))
        return engines[-1]

    yield make
    for engine in engines:
        engine.hands.hold = False
        engine.run()
        assert engine.followed() == 0
    eventually(lambda: node.held() == NOTHING)
    for engine in engines:
        engine.close()


def forget_locally(engine: Engine) -> None:
    """Empty vLLM's own prefix cache, when all that a worker has copied is committed."""
    node = engine.connector.scheduler._cache
    eventually(lambda: not node.status()["held"]["reservations"])
    assert engine.scheduler.reset_prefix_cache()


def tokens_held(engine: Engine, text: list[int]) -> int:
    """How much of a text the node has."""
    side = engine.connector.scheduler
    with side._cache.lookup(side._namespace.prompt(text).query()) as hit:
        return hit.num_tokens


def free_blocks(engine: Engine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def store(engine: Engine, prompt: list[int]) -> None:
    """Have the prompt computed and stored, and nothing left of it in the engine."""
    engine.add(f"store-{len(engine.outputs)}", prompt, max_tokens=1)
    engine.run()
    forget_locally(engine)
    for record in (engine.stores, engine.loads, engine.outputs, engine.tokens_computed):
        record.clear()


def table(engine: Engine, request_id: str) -> list[int]:
    """A request's blocks."""
    return list(engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0])


def matched(engine: Engine, request: Request, computed: int = 0) -> tuple[int, bool]:
    """The connector's answer about a request, once it has one."""
    answers: list[tuple[int | None, bool]] = []

    def is_answered() -> bool:
        answers.append(engine.connector.get_num_new_matched_tokens(request, computed))
        return answers[-1][0] is not None

    eventually(is_answered)
    tokens, asynchronous = answers[-1]
    assert tokens is not None
    return tokens, asynchronous


def unanswered(one: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Event:
    """The engine has the prompt itself, its node has not, and lookups are answered when the event
    is set.
    """
    one.add("a", prompt)
    one.run()
    one.hands.client.clear()
    one.stores.clear()
    side = one.connector.scheduler
    answer, lookup = Event(), side.lookups._lookup
    monkeypatch.setattr(
        side.lookups, "_lookup", lambda *call, **how: answer.wait(20) and lookup(*call, **how)
    )
    return answer


class TestStores:
    @pytest.mark.parametrize(("block", "chunk"), [(16, 64), (32, 64), (128, 128), (128, 256)])
    def test_chunks_are_stored_as_they_become_whole_and_the_tail_at_the_end(
        self, engine: MakeEngine, block: int, chunk: int
    ) -> None:
        miss = engine(block=block, chunk=chunk, budget=200)
        prompt = make_prompt(f"whole {block} {chunk}", 700)
        miss.add("a", prompt, max_tokens=4)
        stored = 0
        for computed in (200, 400, 600, 700, 701):
            miss.next_pass()
            end = computed // chunk * chunk if computed < 700 else 700 // block * block
            blocks = [b for s in miss.stores for b in s.block_ids[0]]
            assert blocks == table(miss, "a")[: end // block], f"after {computed} tokens"
            assert sum(len(s.names) for s in miss.stores) == -(-end // chunk)
            stored = max(stored, end)
        miss.run()
        assert miss.outputs["a"] == answer_to(prompt, 4)
        assert miss.loads == []
        assert miss.hands.granted_chunks == -(-stored // chunk)

    def test_the_scheduled_tokens_add_up_as_the_real_scheduler_counts_them(
        self, engine: MakeEngine
    ) -> None:
        counted = engine(budget=400)
        counted.add("a", make_prompt("sums", 1000), max_tokens=4)
        sums = []
        for _ in range(5):
            counted.next_pass()
            tracker = counted.connector.scheduler._request_states["a"].tracker
            assert tracker is not None
            sums.append((tracker.num_scheduled_tokens, tracker.computed_tokens))
        assert sums == [(400, 400), (800, 800), (1000, 1000), (1001, 1000), (1002, 1000)]

    def test_blocks_that_were_hit_count_as_computed_and_are_not_stored_again(
        self, engine: MakeEngine
    ) -> None:
        """20 blocks hit, 160 tokens scheduled: blocks 20 to 29 are stored."""
        warm = engine(chunk=160, budget=160)
        prompt = make_prompt("bound", 480)
        store(warm, prompt[:320])
        request = warm.add("a", prompt, max_tokens=2)
        warm.run(until=lambda: request.status == RequestStatus.RUNNING)
        assert [len(load.block_ids[0]) for load in warm.loads] == [20]
        assert [s.block_ids[0] for s in warm.stores] == [table(warm, "a")[20:30]]
        warm.run()
        assert warm.tokens_computed["a"] == 160 + 1
        assert warm.outputs["a"] == answer_to(prompt, 2)

    def test_what_the_engine_has_and_the_node_has_not_is_stored(self, engine: MakeEngine) -> None:
        shared = engine()
        prompt = make_prompt("forgotten by the node", 320)
        shared.add("a", prompt)
        shared.run()
        shared.hands.client.clear()
        shared.stores.clear()
        shared.add("b", [*prompt, 1, 2, 3])
        shared.run()
        assert [len(s.names) for s in shared.stores] == [5], (
            "from the first chunk on, though vLLM found all of it in its own cache"
        )
        forget_locally(shared)
        shared.add("c", prompt)
        shared.run()
        assert shared.tokens_computed["c"] == 1 + 1

    @pytest.mark.parametrize("save_decode", [False, True])
    @pytest.mark.parametrize("max_tokens", [2, 40])
    @pytest.mark.parametrize(
        "asynchronous", [False, True], ids=["one pass at a time", "two passes at a time"]
    )
    def test_an_answer_that_comes_when_the_request_runs_is_caught_up_with(
        self,
        engine: MakeEngine,
        monkeypatch: pytest.MonkeyPatch,
        *,
        asynchronous: bool,
        max_tokens: int,
        save_decode: bool,
    ) -> None:
        """What the engine has itself waits for no answer; what the node has not is stored when it
        says so, or when the request ends.
        """
        late = engine(asynchronous=asynchronous, settings={"save_decode": save_decode})
        prompt = make_prompt(f"late {asynchronous} {max_tokens} {save_decode}", 320)
        answer = unanswered(late, prompt, monkeypatch)
        request = late.add("b", prompt, max_tokens=max_tokens)
        late.next_pass()
        assert late.stores == []
        if max_tokens > 2:
            late.run(until=lambda: request.num_output_tokens >= 3)
            assert late.stores == []
        monkeypatch.setattr(lookups, "_PATIENCE_S", 20.0)
        late.connector.scheduler.lookups.patience_s = 20.0
        answer.set()
        late.run()
        assert late.outputs["b"] == answer_to(prompt, max_tokens)
        named = [name for stored in late.stores for name in range(len(stored.names))]
        assert len(named) == (5 if not save_decode or max_tokens == 2 else 6), "each once"
        forget_locally(late)
        late.add("c", prompt)
        late.run()
        assert late.tokens_computed["c"] == 1 + 1

    @pytest.mark.parametrize("length", [320, 345])
    @pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
    def test_a_request_that_ends_before_there_is_an_answer_is_stored_all_the_same(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, role: str, length: int
    ) -> None:
        late = engine(role=role)
        prompt = make_prompt(f"unanswered {role} {length}", length)
        answer = unanswered(late, prompt, monkeypatch)
        late.add("b", prompt)
        late.run()
        assert [len(stored.names) for stored in late.stores] == [-(-length // CHUNK)]
        answer.set()
        reader = engine()
        reader.add("c", prompt)
        reader.run()
        assert (
            reader.tokens_computed["c"]
            == length - length // BLOCK * BLOCK + (length % BLOCK == 0) + 1
        )
        eventually(lambda: late.followed() == 0)

    def test_a_prompt_that_the_node_holds_whole_is_not_stored_again(
        self, engine: MakeEngine
    ) -> None:
        warm = engine()
        prompt = make_prompt("held whole", 4 * CHUNK)
        store(warm, prompt)
        warm.add("a", prompt, max_tokens=8)
        warm.run()
        assert warm.stores == []

    def test_two_requests_with_one_prompt_store_it_once(self, engine: MakeEngine) -> None:
        both = engine(budget=1000)
        prompt = make_prompt("twins", 300)
        for request_id in "ab":
            both.add(request_id, prompt)
        both.run()
        assert both.hands.granted_chunks == 5


class TestLoads:
    @pytest.mark.parametrize(
        "asynchronous", [False, True], ids=["one pass at a time", "two passes at a time"]
    )
    @pytest.mark.parametrize("real_worker", [False, True], ids=["worker played", "worker real"])
    @pytest.mark.parametrize(
        ("length", "loaded"), [(1000, 992), (1008, 1008), (960, 960), (15, 0), (17, 16), (64, 64)]
    )
    def test_a_prompt_that_was_seen_is_loaded_not_computed(
        self, engine: MakeEngine, length: int, loaded: int, real_worker: bool, asynchronous: bool
    ) -> None:
        """All of it up to the last whole block; the last token is always computed, to
        go on from.
        """
        warm = engine(real_worker=real_worker, asynchronous=asynchronous)
        prompt = make_prompt(f"seen {length} {real_worker} {asynchronous}", length)
        store(warm, prompt)
        # A store is committed beside the passes.
        counters = warm.hands.client.status
        eventually(lambda: not counters()["held"]["reservations"])
        warm.add("a", prompt, max_tokens=3)
        warm.run(until=lambda: warm.tokens_computed.get("a"))
        if loaded:
            (load,) = warm.loads
            assert (load.first_chunk, load.block_ids[0]) == (0, table(warm, "a")[: loaded // BLOCK])
        warm.run()
        assert warm.tokens_computed["a"] == max(1, length - loaded) + 2
        assert warm.outputs["a"] == answer_to(prompt, 3)

    def test_vllm_counts_what_came_from_here_as_external(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("external", 500)
        store(warm, prompt)
        request = warm.add("a", prompt)
        stats = request.prefill_stats
        warm.run()
        assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (0, 496)

    def test_a_longer_prompt_loads_what_it_shares_in_whole_chunks(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("shared", 300)
        # 4 chunks, and a tail of 2 blocks that the longer prompt has no use for
        store(warm, prompt)
        longer = prompt + make_prompt("own", 100)
        warm.add("a", longer)
        warm.run(until=lambda: warm.tokens_computed.get("a"))
        (load,) = warm.loads
        assert load.block_ids[0] == table(warm, "a")[:16]
        assert [s.block_ids[0] for s in warm.stores] == [table(warm, "a")[16:25]]

    def test_a_shorter_prompt_loads_whole_chunks(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("shorter", 300)
        store(warm, prompt)
        warm.add("a", prompt[:200])
        warm.run()
        assert [len(load.block_ids[0]) for load in warm.loads] == [12]

    @pytest.mark.parametrize(
        ("local", "first_chunk", "kept"), [(96, 1, 2), (128, 2, 0), (16, 0, 1), (176, 2, 3)]
    )
    def test_blocks_that_vllm_has_itself_are_never_written(
        self, engine: MakeEngine, local: int, first_chunk: int, kept: int
    ) -> None:
        warm = engine()
        prompt = make_prompt(f"overlap {local}", 300)
        store(warm, prompt)
        warm.hands.client.clear()
        # now the first blocks are in vLLM's own cache
        warm.add("short", prompt[:local], max_tokens=1)
        warm.run()
        other = engine()
        other.add("whole", prompt, max_tokens=1)  # and all of them in the node
        other.run()
        warm.loads.clear()
        warm.add("a", prompt)
        warm.run(until=lambda: warm.tokens_computed.get("a"))
        (load,) = warm.loads
        assert load.first_chunk == first_chunk
        assert load.block_ids[0] == [-1] * kept + table(warm, "a")[local // BLOCK : 18]

    def test_what_vllm_has_itself_is_neither_loaded_nor_held(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        warm = engine()
        prompt = make_prompt("local", 300)
        warm.add("a", prompt)
        warm.run()
        request = warm.add("b", prompt, max_tokens=300)
        warm.next_pass()
        eventually(lambda: warm.step() and node.held() == NOTHING)
        assert request.num_output_tokens < 300, "while it runs"
        warm.run()
        assert warm.loads == []
        assert warm.tokens_computed["b"] == 300 - 288 + 299

    def test_where_vllm_has_all_but_the_last_block_nothing_is_loaded(
        self, engine: MakeEngine
    ) -> None:
        """vLLM computes a prompt's last token again, and with it the block it is in; the hit has
        that, too.
        """
        warm = engine()
        prompt = make_prompt("all but a block", 320)
        warm.add("a", prompt)
        warm.run()
        eventually(lambda: tokens_held(warm, prompt) == 320)
        warm.add("b", prompt, max_tokens=1)
        warm.run()
        assert warm.loads == []
        assert warm.tokens_computed["b"] == BLOCK
        assert warm.outputs["b"] == answer_to(prompt, 1)

    def test_a_hit_is_kept_while_its_request_waits_for_blocks_even_where_vllm_had_as_much_at_first(
        self, engine: MakeEngine
    ) -> None:
        """vLLM evicts its own blocks meanwhile: 39 are there, 20 are cached, and the other request
        grows.
        """
        tight = engine(num_blocks=40)
        prompt = make_prompt("evicted meanwhile", 325)
        tight.add("first", prompt, max_tokens=1)
        tight.run()
        tight.add("growing", make_prompt("growing", 300), max_tokens=100)
        tight.next_pass()
        tight.add("a", prompt)
        tight.run()
        assert [load.block_ids[0].count(-1) for load in tight.loads] != [20], (
            "else vLLM evicted nothing"
        )
        assert tight.tokens_computed["a"] == 325 - 320 + 1

    def test_without_prefix_caching_in_vllm_hits_are_loaded_just_the_same(
        self, engine: MakeEngine
    ) -> None:
        warm = engine(caching=False)
        prompt = make_prompt("no local cache", 300)
        for request_id in "ab":
            warm.add(request_id, prompt)
            warm.run()
        assert len(warm.loads) == 1
        assert warm.tokens_computed["b"] == 300 - 288 + 1


class TestWork:
    def test_what_a_step_does_in_python_does_not_grow_with_the_prompt(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Counted, not timed: the instructions that kvhold's own code runs on the scheduler's
        thread.
        """
        # an answer that is late leaves a part of the work to the next step
        monkeypatch.setattr(lookups, "_PATIENCE_S", 20.0)
        counts = {}
        for num_chunks in (2, 60):
            warm = engine(num_blocks=600, budget=8192)
            prompt = make_prompt(f"work {num_chunks}", num_chunks * CHUNK)
            most_storing, _ = self.most(warm, "a", prompt)
            forget_locally(warm)
            most_loading, loaded = self.most(warm, "b", prompt)
            assert loaded == num_chunks * CHUNK // BLOCK
            counts[num_chunks] = (most_storing, most_loading)
        assert counts[60] == pytest.approx(counts[2], rel=0.1), "30 times the tokens"

    @staticmethod
    def most(engine: Engine, name: str, prompt: list[int]) -> tuple[int, int]:
        """Of the request's steps: instructions of the one with the most; and the blocks that were
        loaded.
        """
        engine.add(name, prompt, max_tokens=1)
        naming = engine.connector.scheduler._request_states[name].naming
        assert naming is not None
        eventually(naming.done)
        counts = []
        while engine.scheduler.has_requests():
            with counted() as instructions:
                engine.schedule()
            counts.append(len(instructions))
            engine.execute()
        return max(counts), sum(len(load.block_ids[0]) for load in engine.loads)


@contextmanager
def counted() -> Iterator[list[int]]:
    """An item for each instruction of kvhold's that this thread runs in the block."""
    instructions: list[int] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "/kvhold/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            instructions.append(frame.f_lasti)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield instructions
    finally:
        sys.settrace(before)


class TestQueues:
    def test_what_waits_in_the_queue_pins_nothing_and_finds_what_was_stored_meanwhile(
        self, engine: MakeEngine, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # else vLLM asks about the second while the first is looked up
        monkeypatch.setattr(lookups, "_PATIENCE_S", 20.0)
        one = engine(max_running=1, caching=False)
        prompt = make_prompt("twins", 300)
        one.add("first", prompt, max_tokens=2)
        one.add("twin", prompt, max_tokens=2)
        assert node.held() == NOTHING
        one.run()
        assert one.outputs["twin"] == one.outputs["first"] == answer_to(prompt, 2)
        assert [load.request_id for load in one.loads] == ["twin"]


class TestPreemption:
    @pytest.mark.parametrize(
        "asynchronous", [False, True], ids=["one pass at a time", "two passes at a time"]
    )
    def test_a_preempted_request_comes_back_with_other_blocks_and_its_own_kv(
        self, engine: MakeEngine, asynchronous: bool
    ) -> None:
        tight = engine(num_blocks=48, asynchronous=asynchronous, caching=False)
        prompts = {name: make_prompt(f"{name} {asynchronous}", 200) for name in "abc"}
        for name, prompt in prompts.items():
            tight.add(name, prompt, max_tokens=100)
        tight.run(until=lambda: tight.preempted)
        (name,) = tight.preempted
        before = len(tight.loads)
        tight.run()
        assert [load.request_id for load in tight.loads[before:]] == [name]
        assert tight.outputs == {name: answer_to(prompt, 100) for name, prompt in prompts.items()}

    def test_a_request_that_comes_back_stores_what_the_node_has_lost(
        self, engine: MakeEngine
    ) -> None:
        tight = engine(num_blocks=48, caching=False)
        prompts = {name: make_prompt(f"comes back {name}", 200) for name in "abc"}
        for name, prompt in prompts.items():
            tight.add(name, prompt, max_tokens=100)
        tight.run(until=lambda: tight.preempted)
        (name,) = tight.preempted
        assert tight.connector.scheduler._request_states[name].lookup is None, (
            "it was looked up last before it was preempted"
        )
        tight.hands.client.clear()
        store(engine(), prompts[name][:CHUNK])
        tight.loads.clear()
        tight.stores.clear()
        tight.run(until=lambda: tight.stores)
        assert [(load.request_id, load.block_ids[0]) for load in tight.loads] == [
            (name, table(tight, name)[:4])
        ]
        assert [(s.request_id, s.block_ids[0]) for s in tight.stores] == [
            (name, table(tight, name)[4:12])
        ]

    def test_what_was_generated_before_the_preemption_is_not_stored_as_prompt(
        self, engine: MakeEngine
    ) -> None:
        tight = engine(num_blocks=48, caching=False)
        for name in "abc":
            tight.add(name, make_prompt(f"generated {name}", 200), max_tokens=100)
        tight.run()
        tokens = sum(
            int(s.names.num_tokens(tight.connector.scheduler._namespace.layout).sum())
            for s in tight.stores
        )
        assert tokens <= 3 * 192, "only whole blocks of the three prompts"


class TestAborts:
    def test_before_the_lookup_is_answered(self, folder: Path, frail: NodeProcess) -> None:
        engines = engines_on(frail, folder)
        aborting = next(engines)()
        prompt = make_prompt("abort early", 300)
        store(aborting, prompt)
        frail.hold_up()
        for number in range(3):
            aborting.add(str(number), prompt)
        aborting.step()
        aborting.abort("0", "1", "2")
        frail.go_on()
        assert next(engines, None) is None

    def test_while_it_waits_for_blocks(self, engine: MakeEngine, node: NodeProcess) -> None:
        tight = engine(num_blocks=41)
        prompt = make_prompt("abort waiting", 320)
        store(tight, prompt)
        tight.add("large", make_prompt("abort large", 600), max_tokens=30)
        tight.next_pass()
        tight.add("a", prompt)
        tight.step()
        eventually(lambda: node.held()["tickets"] == 1)
        tight.abort("a")
        eventually(lambda: node.held()["tickets"] == 0)

    def test_while_its_load_is_under_way(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("abort loading", 300)
        store(warm, prompt)
        free = warm.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        all_free = free()
        warm.hands.hold = True
        warm.add("a", prompt)
        warm.run(until=lambda: warm.loads)
        warm.step()
        warm.abort("a")
        warm.step()
        assert free() < all_free, "the worker may be writing to its blocks"
        warm.hands.hold = False
        warm.run()
        assert free() == all_free
        warm.add("b", prompt)
        warm.run()
        assert warm.outputs["b"] == answer_to(prompt, 2)

    def test_while_it_runs(self, engine: MakeEngine) -> None:
        warm = engine(budget=100)
        prompt = make_prompt("abort running", 300)
        warm.add("a", prompt)
        warm.next_pass()
        warm.next_pass()
        warm.abort("a")
        warm.run()
        forget_locally(warm)
        warm.add("b", prompt)
        warm.run()
        assert [len(load.block_ids[0]) for load in warm.loads] == [12], (
            "what it had computed is in the node: 3 whole chunks"
        )

    def test_in_the_moment_it_arrives(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("abort at once", 300)
        store(warm, prompt)
        for number in range(20):
            warm.add(str(number), prompt)
            warm.abort(str(number))


class TestBrokenPromises:
    def test_a_load_that_fails_is_computed_once_and_not_tried_again(
        self, engine: MakeEngine
    ) -> None:
        warm = engine()
        prompt = make_prompt("failing", 300)
        store(warm, prompt)
        warm.hands.fail = True
        warm.add("a", prompt, max_tokens=3)
        warm.run()
        assert len(warm.loads) == 1
        assert warm.tokens_computed["a"] == 300 + 2
        assert warm.outputs["a"] == answer_to(prompt, 3)

    def test_what_vllm_had_itself_is_kept_when_the_rest_fails(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("failing in part", 300)
        store(warm, prompt)
        warm.add("short", prompt[:96], max_tokens=1)
        warm.run()
        warm.hands.fail = True
        warm.add("a", prompt)
        warm.run()
        assert warm.tokens_computed["a"] == 300 - 96 + 1
        assert warm.outputs["a"] == answer_to(prompt, 2)

    def test_it_is_stored_again_where_the_promise_was_broken(self, engine: MakeEngine) -> None:
        warm = engine()
        prompt = make_prompt("broken", 300)
        store(warm, prompt)
        warm.hands.fail = True
        warm.hands.hold = True
        warm.add("a", prompt)
        warm.run(until=lambda: warm.loads)
        warm.hands.client.clear()
        warm.hands.hold = False
        warm.run()
        assert sum(len(s.names) for s in warm.stores) == 5
        warm.hands.fail = False
        forget_locally(warm)
        warm.add("b", prompt)
        warm.run()
        assert warm.tokens_computed["b"] == 300 - 288 + 1

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("caching", [False, True])
    def test_what_is_before_a_damaged_chunk_is_loaded_and_not_computed(
        self, engine: MakeEngine, caching: bool, asynchronous: bool
    ) -> None:
        warm = engine(real_worker=True, caching=caching, asynchronous=asynchronous)
        prompt = make_prompt(f"damaged {caching} {asynchronous}", 640)
        store(warm, prompt)
        eventually(lambda: not warm.hands.client.status()["held"]["reservations"])
        damage(warm, prompt, chunk=6)
        for name, computed in {
            "damaged": 640 - 6 * CHUNK,
            "whole": 1,
        }.items():  # what was computed was stored
            warm.add(name, prompt)
            warm.run()
            assert warm.outputs[name] == answer_to(prompt, 2)
            assert warm.tokens_computed[name] == computed + 1
            forget_locally(warm)
            eventually(lambda: not warm.hands.client.status()["held"]["reservations"])

    def test_vllm_is_told_to_compute_what_did_not_arrive_whatever_its_own_policy(
        self, engine: MakeEngine
    ) -> None:
        warm = engine()
        assert KVTransferConfig().kv_load_failure_policy == "fail"
        assert warm.scheduler.recompute_kv_load_failures


class TestNeverAFalseHit:
    @pytest.fixture
    def warm(self, engine: MakeEngine, request: pytest.FixtureRequest) -> Engine:
        """An engine whose node holds PROMPT."""
        warm = engine()
        store(warm, self.PROMPT)
        return warm

    PROMPT = make_prompt("never false", 300)

    def test_the_prompt_itself_is_one(self, warm: Engine) -> None:
        assert matched(warm, warm.add("a", self.PROMPT)) == (288, True)

    @pytest.mark.parametrize(
        "changes",
        [
            {"cache_salt": "somebody else"},
            {
                "mm_features": [
                    MultiModalFeatureSpec(
                        None, "image", "hash", PlaceholderRange(offset=0, length=10)
                    )
                ]
            },
            {"prompt_embeds": torch.zeros(300, 8)},
            {"prompt_embeds": torch.zeros(300, 8), "prompt_is_token_ids": [True] * 299 + [False]},
            {"sampling": {"skip_reading_prefix_cache": True}},
            {"sampling": {"prompt_logprobs": 1, "skip_reading_prefix_cache": True}},
            {"pooling_params": PoolingParams(), "sampling_params": None},
        ],
        ids=lambda changes: " and ".join(changes),
    )
    def test_for_what_its_kv_depends_on_besides_tokens(
        self, warm: Engine, changes: dict[str, Any]
    ) -> None:
        if "pooling_params" in changes:
            request = Request("a", list(self.PROMPT), None, PoolingParams())
            warm.connector.on_new_request(request)
            assert matched(warm, request) == (0, False)
            warm.connector.request_finished(request, [])
            return
        request = warm.add("a", self.PROMPT, **changes)
        assert matched(warm, request) == (0, False)
        warm.abort("a")

    def test_for_one_salt_and_another(self, warm: Engine) -> None:
        for salt in ("alice", "bob"):
            warm.add(salt, self.PROMPT, cache_salt=salt)
            warm.run()
            forget_locally(warm)
        assert warm.loads == []
        warm.add("again", self.PROMPT, cache_salt="alice")
        warm.run()
        assert len(warm.loads) == 1

    def test_a_request_that_wants_all_its_logits_is_computed_whole(self, warm: Engine) -> None:
        warm.add("a", self.PROMPT, sampling={"skip_reading_prefix_cache": True})
        warm.run()
        assert warm.loads == []
        assert warm.tokens_computed["a"] == 300 + 1

    def test_for_an_image_whose_identifier_has_stood_for_another(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM answers the second with the first one's KV, because its caches go by identifiers."""
        fed = engine()
        monkeypatch.setattr(  # the model here has no encoder
            fed.scheduler,
            "_try_schedule_encoder_inputs",
            lambda request, first, count, budget, **_: ([], count, budget, [], []),
        )
        prompt = make_prompt("images", 300)
        for name, identifier, pixels in (
            ("a", "cat", torch.zeros(3, 4)),
            ("b", "cat", torch.ones(3, 4)),
            ("c", "another cat", torch.ones(3, 4)),
        ):
            stored = len(fed.stores)
            fed.add(name, prompt, mm_features=[image(identifier, pixels)])
            fed.run()
            assert (len(fed.stores) > stored) == (name != "b")
            if name == "b":
                forget_locally(fed)
        assert fed.loads == [], "nothing was stored under the second image's content"

    def test_for_a_token_that_is_none(self, warm: Engine) -> None:
        request = warm.add("a", [2**40, *self.PROMPT[1:]])
        assert matched(warm, request) == (0, False)
        warm.abort("a")


def image(identifier: str, pixels: torch.Tensor) -> MultiModalFeatureSpec:
    data: Any = {"pixels": SimpleNamespace(data=pixels)}
    return MultiModalFeatureSpec(data, "image", identifier, PlaceholderRange(offset=2, length=9))


@pytest.fixture
def files_count_as_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are named only if they are older than the engine: see
    tests/vllm/test_adapters.py.
    """
    monkeypatch.setattr(adapters, "MARGIN_NS", -(10**18))


@pytest.mark.usefixtures("files_count_as_old")
class TestAdapters:
    PROMPT = make_prompt("adapters", 300)

    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Callable[..., LoRARequest]:
        def make(
            folder: str, weights: bytes = b"weights", *, name: str = "tuned", number: int = 1
        ) -> LoRARequest:
            path = tmp_path / folder
            path.mkdir(exist_ok=True)
            (path / "adapter_config.json").write_text("{}")
            (path / "adapter_model.safetensors").write_bytes(weights)
            return LoRARequest(name, number, str(path))

        return make

    def hit(self, engine: Engine, adapter: LoRARequest | None) -> int:
        """Tokens that a request with this adapter finds; it is computed and stored afterwards."""
        before = len(engine.loads)
        engine.add(f"{before} {len(engine.outputs)}", self.PROMPT, lora_request=adapter)
        engine.run()
        forget_locally(engine)
        return sum(BLOCK * len(load.block_ids[0]) for load in engine.loads[before:])

    def test_each_has_its_own_kv_whatever_its_name(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        tuned = engine()
        assert self.hit(tuned, None) == 0
        assert self.hit(tuned, adapter("one", number=1)) == 0
        assert self.hit(tuned, adapter("one", number=1)) == 288
        assert self.hit(tuned, adapter("other", b"Weights", number=2)) == 0
        assert self.hit(tuned, None) == 288

    def test_one_loaded_again_from_changed_files_is_not_cached_whatever_its_number(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        """vLLM's prefix cache goes by name and path: it answers with the first one's KV."""
        tuned = engine()
        tuned.add("first", self.PROMPT, lora_request=adapter("one", b"old", number=1))
        tuned.run()
        stored = len(tuned.stores)
        assert stored
        tuned.add("second", self.PROMPT, lora_request=adapter("one", b"new", number=2))
        tuned.run()
        assert len(tuned.stores) == stored
        assert self.hit(tuned, adapter("elsewhere", b"new", number=3)) == 0

    def test_the_same_content_elsewhere_is_the_same(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        one, two = engine(), engine()
        tuned, copy = adapter("here", b"the same"), adapter("there", b"the same", number=7)
        assert self.hit(one, tuned) == 0
        assert self.hit(two, copy) == 288

    def test_files_that_change_in_place_are_not_cached_any_more(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        """vLLM evicts adapters and loads them from their files again, so a worker may have either
        state. Another engine has the new one.
        """
        old = engine()
        assert self.hit(old, adapter("mutable", b"first")) == 0
        assert self.hit(old, adapter("mutable", b"first")) == 288, (
            "written again with the same content"
        )
        changed = adapter("mutable", b"second version")
        stored = len(old.stores)
        reloaded = LoRARequest("tuned", 1, changed.lora_path, load_inplace=True)
        for request in (changed, changed, reloaded):
            assert self.hit(old, request) == 0
        assert self.hit(old, adapter("mutable", b"first")) == 0, "back again, and too late"
        assert len(old.stores) == stored
        changed = adapter("mutable", b"second version")
        fresh = engine()
        assert self.hit(fresh, changed) == 0
        assert self.hit(fresh, changed) == 288

    def test_files_that_change_before_a_step_is_planned_store_nothing(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        """The worker loads the adapter with its first step, which is after the request
        was named.
        """
        changing = engine()
        request = adapter("soon", b"before")
        changing.add("named", self.PROMPT, lora_request=request)
        naming = changing.connector.scheduler._request_states["named"].naming
        assert naming is not None and naming.result(timeout=10) is not None
        adapter("soon", b"after")
        changing.run()
        assert changing.stores == []

    @pytest.mark.parametrize(
        "path",
        [
            "/nowhere/at/all",
            "~/nowhere-at-all",
            "no-such-user/no-such-adapter",
            "not a name:at all",
            "s3://bucket/adapter",
        ],
    )
    def test_one_that_cannot_be_told_is_computed_and_not_stored(
        self, engine: MakeEngine, path: str
    ) -> None:
        unknown = engine()
        for _ in range(2):
            assert self.hit(unknown, LoRARequest("unknown", 1, path)) == 0
        assert unknown.stores == []


class Restart:
    """A start of the next node that ends when the test says so."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._goes_on = Event()
        self._fails = False
        self.missed: Counter[str] = Counter()  # tokens, by reason, since it began

    def begin(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the engine start the next node from now on, and kill this one."""
        cache = engine.connector.scheduler._cache
        cache._revive = self._revive
        monkeypatch.setattr(engine.connector.scheduler.tally, "looked_up", self._count)
        self._node.kill()
        eventually(lambda: cache.is_rejoining)

    def end(self, *, fail: bool = False) -> None:
        """The node listens, or could not start."""
        if not fail:
            self._node.start_again()
        self._fails = fail
        self._goes_on.set()

    def _count(self, num_tokens: int, *, sources: Mapping[str, int], reason: str) -> None:
        self.missed[reason] += num_tokens - sum(sources.values())

    def _revive(self, closed: Event) -> None:
        self._goes_on.wait(WITHIN_S)
        if self._fails:
            raise NodeError("the test says so")


def followed(engine: Engine, request_id: str) -> Any:
    """What the connector keeps about a request."""
    return engine.connector.scheduler._request_states[request_id]


class TestLostNode:
    @pytest.fixture
    def warm(self, folder: Path, frail: NodeProcess) -> Iterator[Engine]:
        warm = Engine(Options(folder, settings=IMPATIENT), frail.socket)
        store(warm, make_prompt("lost", 300))
        yield warm
        assert warm.followed() == 0
        warm.close()

    def check(self, warm: Engine, prompt: list[int], count: int = 8) -> None:
        """All requests are computed, and end."""
        for number in range(count):
            warm.add(f"{number}", [*prompt, number])
        warm.run()
        for number in range(count):
            assert warm.outputs[f"{number}"] == answer_to([*prompt, number], 2)

    def test_when_it_is_killed_requests_are_computed(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        frail.kill()
        self.check(warm, make_prompt("lost", 300))
        assert warm.loads == []

    def test_when_it_is_held_up_requests_are_computed_and_it_is_used_again_later(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        frail.hold_up()
        self.check(warm, make_prompt("lost", 300))
        assert warm.loads == []
        frail.go_on()
        eventually(
            lambda: warm.connector.scheduler._cache.connected and warm.hands.client.connected
        )
        forget_locally(warm)
        prompt = make_prompt("lost", 300)
        warm.add("back", prompt)
        warm.run()
        assert warm.tokens_computed["back"] == 300 - 288 + 1
        eventually(lambda: frail.held() == NOTHING)

    @pytest.fixture
    def restart(
        self, warm: Engine, frail: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Restart]:
        """The node is killed, and another is being started."""
        restart = Restart(frail)
        restart.begin(warm, monkeypatch)
        yield restart
        restart.end(fail=True)

    def test_a_lookup_waits_for_the_next_one_if_computing_takes_longer(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm.connector.scheduler._costs, "compute_s", lambda *_: WITHIN_S)
        prompt = make_prompt("lost", 300)
        warm.add("a", prompt)
        lookup = eventually(
            lambda: not warm.step().total_num_scheduled_tokens and followed(warm, "a").lookup
        )
        lookup.result()
        assert followed(warm, "a").is_lost
        for _ in range(20):
            assert warm.step().total_num_scheduled_tokens == 0, (
                "it is asked again, and no pass waits"
            )
        restart.end()
        warm.run()
        assert warm.outputs["a"] == answer_to(prompt, 2)
        assert restart.missed == {"never_stored": 300}, "the next one has answered"

    def test_a_lookup_that_would_wait_longer_than_computing_does_not_and_others_wait(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        computed_in_s = {1: 0.0, 300: WITHIN_S}
        monkeypatch.setattr(
            warm.connector.scheduler._costs,
            "compute_s",
            lambda num_tokens, _: computed_in_s[num_tokens],
        )
        monkeypatch.setattr(lookups, "_START_S", WITHIN_S)
        long, short = make_prompt("lost", 300), make_prompt("lost", 1)
        warm.add("long", long)
        warm.add("short", short)
        eventually(lambda: warm.step() and restart.missed)
        assert restart.missed == {"not_awaited": 1}
        restart.end()
        warm.run()
        assert warm.outputs == {"long": answer_to(long, 2), "short": answer_to(short, 2)}
        assert restart.missed == {"not_awaited": 1, "never_stored": 300}

    def test_when_the_node_is_away_for_long_nobody_waits(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm.connector.scheduler._costs, "compute_s", lambda *_: 1e9)
        monkeypatch.setattr(warm.connector.scheduler._cache, "_lost_at_s", time.monotonic() - 3600)
        began_s = time.monotonic()
        warm.add("a", make_prompt("lost", 300))
        eventually(lambda: warm.step() and restart.missed)
        assert restart.missed == {"not_awaited": 300}
        assert (
            time.monotonic() - began_s
            < warm.connector.scheduler._config.client.arrival_timeout_s / 2
        ), "which is as long as any waits"
        warm.run()

    def test_where_the_start_has_failed_nobody_waits(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm.connector.scheduler._costs, "compute_s", lambda *_: 1e9)
        restart.end(fail=True)
        eventually(lambda: not warm.connector.scheduler._cache.is_rejoining)
        self.check(warm, make_prompt("lost", 300), count=2)
        assert restart.missed == {"no_answer": 602}

    def test_what_the_engine_has_itself_does_not_wait_for_it(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        prompt = make_prompt("lost", 300)
        warm.add("a", prompt)
        warm.run()
        frail.hold_up()
        request = warm.add("b", prompt)
        assert warm.step().num_scheduled_tokens == {request.request_id: 300 - 288}, (
            "in the very next pass"
        )
        warm.run()
        assert warm.outputs["b"] == answer_to(prompt, 2)
        frail.go_on()
        eventually(lambda: frail.held() == NOTHING)

    def test_when_it_dies_under_a_load_the_request_is_computed(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        prompt = make_prompt("lost", 300)
        warm.hands.hold = True
        warm.add("a", prompt)
        warm.run(until=lambda: warm.hands.waiting)
        frail.kill()
        warm.hands.hold = False
        warm.run()
        assert len(warm.hands.gone) == 1
        assert warm.outputs["a"] == answer_to(prompt, 2)

    def test_when_another_took_its_place_a_hit_of_the_first_is_not_one_of_the_second(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        prompt = make_prompt("lost", 300)
        warm.hands.hold = True
        warm.add("a", prompt)
        warm.run(until=lambda: warm.hands.waiting)
        frail.kill()
        second = NodeProcess(frail.socket)
        try:
            eventually(
                lambda: warm.hands.client.connected and warm.connector.scheduler._cache.connected
            )
            other = Engine(Options(warm.options.folder), second.socket)
            store(other, make_prompt("something else", 300))
            warm.hands.hold = False
            warm.run()
            assert warm.outputs["a"] == answer_to(prompt, 2)
            other.close()
            eventually(lambda: second.held() == NOTHING)
        finally:
            second.kill()

    def test_one_pass_waits_for_all_its_lookups_together_not_for_each(
        self, warm: Engine, frail: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever waits uses up the patience of the whole pass."""
        side, patience = warm.connector.scheduler, []

        def resolve(followed: RequestState, patience_s: float) -> bool:
            patience.append(patience_s)
            return real(followed, patience_s)

        real = side.lookups.resolve
        monkeypatch.setattr(side.lookups, "resolve", resolve)
        frail.hold_up()
        for number in range(400):
            warm.add(f"{number}", make_prompt(number, 20), max_tokens=1)
        warm.step()
        assert len(patience) > 10
        assert patience[0] == lookups._PATIENCE_S
        assert sum(left > 0 for left in patience) < 5, "the first has waited for nearly all of it"
        monkeypatch.undo()
        warm.run()

    def test_lookups_that_nobody_waits_for_any_more_are_not_made(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        frail.hold_up()
        for number in range(50):
            warm.add(f"{number}", make_prompt(number, 100))
        warm.step()
        pending = [
            followed.lookup
            for followed in warm.connector.scheduler._request_states.values()
            if followed.lookup is not None
        ]
        warm.abort(*map(str, range(50)))
        assert len(pending) > 10
        assert sum(lookup.cancelled() for lookup in pending) >= len(pending) - 1
        warm.run()


class TestReset:
    def test_nothing_of_before_is_found_by_anybody_who_was_reset(self, engine: MakeEngine) -> None:
        reset = engine()
        prompts = {None: make_prompt("reset", 300), "salt": make_prompt("reset salted", 300)}
        for salt, prompt in prompts.items():
            reset.add(f"first {salt}", prompt, cache_salt=salt)
            reset.run()
        assert reset.scheduler.reset_prefix_cache(reset_connector=True)
        for salt, prompt in prompts.items():
            reset.add(f"second {salt}", prompt, cache_salt=salt)
            reset.run()
        assert reset.loads == []
        forget_locally(reset)
        reset.add("third", prompts[None])
        reset.run()
        assert len(reset.loads) == 1, "what was stored since then is"

    def test_a_hit_that_a_waiting_request_has_is_given_up(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        tight = engine(num_blocks=41)
        prompt = make_prompt("reset waiting", 320)
        store(tight, prompt)
        tight.add("large", make_prompt("reset large", 600), max_tokens=3)
        tight.next_pass()
        tight.add("a", prompt)
        tight.step()
        eventually(lambda: node.held()["tickets"] == 1)
        tight.scheduler.reset_connector_cache()
        tight.run()
        assert [load for load in tight.loads if load.request_id == "a"] == []
        assert tight.tokens_computed["a"] == 320 + 1

    def test_what_was_begun_before_is_not_stored_after(self, engine: MakeEngine) -> None:
        reset = engine(budget=100)
        reset.add("a", make_prompt("reset running", 300))
        reset.next_pass()
        reset.scheduler.reset_connector_cache()
        reset.stores.clear()
        reset.run()
        assert reset.stores == []

    def test_others_do_not_find_what_is_stored_after_a_reset(self, engine: MakeEngine) -> None:
        """The weights may be others since then."""
        updated, original = engine(), engine()
        updated.scheduler.reset_connector_cache()
        prompt = make_prompt("updated", 300)
        store(updated, prompt)
        original.add("a", prompt)
        original.run()
        assert original.loads == []

    def test_it_succeeds_without_a_node(self, folder: Path, frail: NodeProcess) -> None:
        lone = Engine(Options(folder, settings=IMPATIENT), frail.socket)
        frail.kill()
        assert lone.scheduler.reset_connector_cache()
        lone.close()


class TestStreaming:
    def test_a_session_that_goes_on_keeps_its_kv_and_holds_nothing_in_the_end(
        self, engine: MakeEngine
    ) -> None:
        warm = engine(budget=100)
        first, second = make_prompt("turn 1", 150), make_prompt("turn 2", 150)
        store(warm, first)
        warm.add("a", first, max_tokens=5, resumable=True)
        warm.run(
            until=lambda: (
                warm.scheduler.requests["a"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
            )
        )
        warm.add("a", second, max_tokens=5, resumable=True)
        warm.run(until=lambda: len(warm.outputs["a"]) == 10)
        warm.add("a", [], resumable=False)
        warm.run()
        heard = first + answer_to(first, 4) + second
        assert warm.outputs["a"] == answer_to(first, 5) + answer_to(heard, 5)

    def test_a_request_that_ends_in_its_first_step_is_stored(self, engine: MakeEngine) -> None:
        warm = engine(asynchronous=True)
        prompt = make_prompt("one step", 300)
        warm.add("a", prompt, max_tokens=1)
        warm.run()
        forget_locally(warm)
        warm.add("b", prompt, max_tokens=1)
        warm.run()
        assert warm.tokens_computed["b"] == 12


@pytest.mark.parametrize("real_worker", [False, True], ids=["worker played", "worker real"])
@pytest.mark.parametrize(
    "asynchronous", [False, True], ids=["one pass at a time", "two passes at a time"]
)
@pytest.mark.parametrize(("seed", "caching"), [(0, False), (1, True), (2, False)])
def test_whatever_happens_no_token_is_read_that_is_not_the_request_s_own(
    engine: MakeEngine, seed: int, caching: bool, asynchronous: bool, real_worker: bool
) -> None:
    """Shared prefixes, few blocks, aborts, failed and late loads, a cache that is cleared now and
    then.
    """
    rng = random.Random(seed)
    block = rng.choice([16, 32])
    tight = engine(
        block=block,
        chunk=block * rng.choice([1, 2, 4]),
        num_blocks=rng.choice([900, 1200, 2400]) // block,
        budget=rng.choice([64, 100, 400]),
        max_running=rng.choice([3, 8]),
        caching=caching,
        asynchronous=asynchronous,
        real_worker=real_worker,
    )
    asked: dict[str, tuple[list[int], int]] = {}
    prompts: list[list[int]] = []
    for number in range(120):
        if rng.random() < 0.35 and len(tight.scheduler.requests) < 12:
            prefix = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
            prefix = prefix[: rng.choice([len(prefix), rng.randrange(len(prefix) + 1)])]
            length = rng.choice([1, 5, block - 1, block, 4 * block, rng.randrange(1, 500)])
            prompts.append((prefix + make_prompt(f"{seed} {number}", length))[:700])
            asked[str(number)] = (prompts[-1], rng.choice([1, 2, 5, 40]))
            tight.add(str(number), prompts[-1], max_tokens=asked[str(number)][1])
        if rng.random() < 0.08 and tight.scheduler.requests:
            gone = rng.choice(list(tight.scheduler.requests))
            asked.pop(gone, None)
            tight.abort(gone)
        if rng.random() < 0.1:
            tight.hands.hold = not tight.hands.hold
        if rng.random() < 0.1:
            tight.hands.fail = rng.random() < 0.4
        if rng.random() < 0.05:
            tight.hands.client.clear()
        if rng.random() < 0.05:
            tight.scheduler.reset_prefix_cache()
        tight.step()
    tight.hands.hold = False
    tight.run()
    assert {name: tight.outputs[name] for name in asked} == {
        name: answer_to(prompt, count) for name, (prompt, count) in asked.items()
    }
    assert tight.stores
    assert tight.loads or caching


@pytest.mark.parametrize("real_worker", [False, True], ids=["worker played", "worker real"])
@pytest.mark.parametrize(
    "asynchronous", [False, True], ids=["one pass at a time", "two passes at a time"]
)
class TestSaveDecode:
    """What is generated is stored, too, so that the next turn of a conversation finds it."""

    def test_the_next_turn_loads_the_answer(
        self, engine: MakeEngine, asynchronous: bool, real_worker: bool
    ) -> None:
        talk = engine(
            asynchronous=asynchronous, real_worker=real_worker, settings={"save_decode": True}
        )
        prompt = make_prompt(f"talk {asynchronous} {real_worker}", 100)
        talk.add("a", prompt, max_tokens=150)
        talk.run()
        answer = answer_to(prompt, 150)
        assert talk.outputs["a"] == answer
        text = [*prompt, *answer]
        stored = (len(text) - 1) // BLOCK * BLOCK  # the last token's KV was never computed
        assert stored == 240
        forget_locally(talk)
        talk.add("b", [*text, *make_prompt("and then", 5)], max_tokens=3)
        talk.run()
        assert talk.tokens_computed["b"] == len(text) + 5 - stored + 2
        assert talk.outputs["b"] == answer_to([*text, *make_prompt("and then", 5)], 3)
        assert free_blocks(talk) == talk.options.num_blocks - 1, "no block is kept for ever"

    def test_an_aborted_request_keeps_no_blocks(
        self, engine: MakeEngine, asynchronous: bool, real_worker: bool
    ) -> None:
        talk = engine(
            asynchronous=asynchronous, real_worker=real_worker, settings={"save_decode": True}
        )
        request = talk.add(
            "a", make_prompt(f"aborted talk {asynchronous} {real_worker}", 100), max_tokens=500
        )
        talk.run(until=lambda: request.num_output_tokens > 60)
        talk.abort("a")
        talk.run()
        assert free_blocks(talk) == talk.options.num_blocks - 1

    def test_without_tails_whole_chunks_alone_are_stored(
        self, engine: MakeEngine, asynchronous: bool, real_worker: bool
    ) -> None:
        settings = {"save_decode": True, "store_tails": False}
        talk = engine(asynchronous=asynchronous, real_worker=real_worker, settings=settings)
        prompt = make_prompt(f"no tails {asynchronous} {real_worker}", 100)
        talk.add("a", prompt, max_tokens=150)
        talk.run()
        forget_locally(talk)
        text = [*prompt, *answer_to(prompt, 150)]
        talk.add("b", text, max_tokens=1)
        talk.run()
        assert talk.tokens_computed["b"] == len(text) - 3 * CHUNK

    def test_the_last_tokens_may_be_left_out(
        self, engine: MakeEngine, asynchronous: bool, real_worker: bool
    ) -> None:
        talk = engine(
            asynchronous=asynchronous, real_worker=real_worker, settings={"skip_last_n_tokens": 20}
        )
        prompt = make_prompt(f"skipped {asynchronous} {real_worker}", 4 * CHUNK)
        talk.add("a", prompt)
        talk.run()
        forget_locally(talk)
        talk.add("b", prompt, max_tokens=1)
        talk.run()
        assert talk.tokens_computed["b"] == 4 * CHUNK - (4 * CHUNK - 20) // BLOCK * BLOCK
        assert talk.outputs["b"] == answer_to(prompt, 1)

    def test_a_preempted_request_loads_what_it_had_generated(
        self, engine: MakeEngine, asynchronous: bool, real_worker: bool
    ) -> None:
        settings = {"save_decode": True}
        tight = engine(
            asynchronous=asynchronous,
            real_worker=real_worker,
            num_blocks=40,
            caching=False,
            settings=settings,
        )
        prompts = {
            name: make_prompt(f"{name} loads its own {asynchronous} {real_worker}", 40)
            for name in "abc"
        }
        requests = [tight.add(name, prompt, max_tokens=300) for name, prompt in prompts.items()]
        tight.run(until=lambda: tight.preempted)
        (name,) = tight.preempted
        request = next(request for request in requests if request.request_id == name)
        known = request.num_tokens
        before = tight.tokens_computed[name]
        assert known > 3 * CHUNK, "most of it is generated"
        # a worker stores beside its passes
        eventually(lambda: tokens_held(tight, list(request.all_token_ids)) >= 3 * CHUNK)
        tight.run(until=lambda: len(tight.outputs[name]) > known - 40 + 1)
        loaded = [load for load in tight.loads if load.request_id == name]
        assert len(loaded) == 1
        assert tight.tokens_computed[name] - before <= CHUNK + 3, (
            "what was generated was not computed again, but for an unfinished chunk"
        )
        tight.run()
        assert tight.outputs == {name: answer_to(prompt, 300) for name, prompt in prompts.items()}

    def test_a_preempted_request_stores_nothing_wrong(
        self, engine: MakeEngine, asynchronous: bool, real_worker: bool
    ) -> None:
        tight = engine(
            asynchronous=asynchronous,
            real_worker=real_worker,
            num_blocks=40,
            settings={"save_decode": True},
        )
        prompts = {
            name: make_prompt(f"{name} decodes {asynchronous} {real_worker}", 150) for name in "abc"
        }
        for name, prompt in prompts.items():
            tight.add(name, prompt, max_tokens=150)
        tight.run()
        assert tight.preempted
        for name, prompt in prompts.items():
            assert tight.outputs[name] == answer_to(prompt, 150)
            forget_locally(tight)
            text = [*prompt, *tight.outputs[name]]
            tight.add(f"{name} again", text, max_tokens=2)
            tight.run()
            assert tight.outputs[f"{name} again"] == answer_to(text, 2)


@pytest.mark.usefixtures("files_count_as_old")
def test_where_adapters_may_leak_into_plain_requests_these_are_not_stored(
    engine: MakeEngine, tmp_path: Path
) -> None:
    """vLLM's CPU build computes a request without an adapter with that of another one
    in its batch.
    """
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    adapter = LoRARequest("tuned", 1, str(tmp_path))
    leaky = engine(caching=False)
    leaky.connector.scheduler._stores_plain = False
    prompt = make_prompt("leaks", 300)
    for request_id, changes in (
        ("plain", {}),
        ("tuned", {"lora_request": adapter}),
        ("tuned again", {"lora_request": adapter}),
    ):
        leaky.add(request_id, prompt, **changes)
        leaky.run()
    assert {store.request_id for store in leaky.stores} == {"tuned"}
    assert [load.request_id for load in leaky.loads] == ["tuned again"]


@pytest.mark.parametrize(("lora", "trusted"), [(None, True), (SimpleNamespace(), False)])
def test_adapters_leak_where_they_are_enabled_on_a_cpu(lora: object, trusted: bool) -> None:
    assert mixes_adapters(SimpleNamespace(lora_config=lora)) is not trusted


class TestRefusals:
    """What is not proven to come back exactly is refused at the start, with the reason."""

    def refused(
        self,
        folder: Path,
        change: Callable[[Any], None] | None = None,
        kv: KVCacheConfig | None = None,
    ) -> str:
        options = Options(folder)
        config = make_config(options, Path("unused"))
        # Of vLLM's configuration only what is asked for; the real one would refuse some of these
        # changes itself.
        view = SimpleNamespace(
            model_config=config.model_config,
            cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_layout="LBNHC"),
            parallel_config=SimpleNamespace(
                nnodes_within_dp=1,
                pipeline_parallel_size=1,
                tensor_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            speculative_config=None,
            scheduler_config=config.scheduler_config,
            load_config=config.load_config,
        )
        if change is not None:
            change(view)
        with pytest.raises(LayoutError) as caught:
            geometry_of(view, kv or make_kv_config(options), Config())
        return str(caught.value)

    @pytest.mark.parametrize(
        ("section", "name", "value", "reason"),
        [
            ("cache_config", "cache_dtype", "nvfp4", "kv_cache_dtype is nvfp4"),
            (
                "parallel_config",
                "pipeline_parallel_size",
                3,
                "2 layers are not divided evenly among 3 pipeline stages",
            ),
            ("parallel_config", "nnodes_within_dp", 2, "its workers are on 2 hosts"),
            (
                "parallel_config",
                "decode_context_parallel_size",
                2,
                "decode_context_parallel_size > 1",
            ),
            (
                "parallel_config",
                "prefill_context_parallel_size",
                2,
                "prefill_context_parallel_size > 1",
            ),
            (
                None,
                "speculative_config",
                SimpleNamespace(method="medusa"),
                "decoding by medusa; ngram, suffix, draft_model, eagle",
            ),
            (
                None,
                "speculative_config",
                SimpleNamespace(method="eagle3"),
                "by eagle3 has not been shown to be exact (allow_unproven",
            ),
            (
                None,
                "speculative_config",
                SimpleNamespace(method="eagle", num_speculative_tokens_per_batch_size=[4]),
                "does not draft in each pass",
            ),
        ],
    )
    def test_of_an_engine_that_is_set_up_otherwise(
        self, folder: Path, section: str | None, name: str, value: object, reason: str
    ) -> None:
        assert reason in self.refused(
            folder, lambda view: setattr(getattr(view, section) if section else view, name, value)
        )

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"attention_chunk_size": 128}, "attention is chunked"),
            ({"non_causal": True}, "looks ahead"),
        ],
    )
    def test_of_attention_of_another_kind(
        self, folder: Path, changes: dict[str, Any], reason: str
    ) -> None:
        assert reason in self.refused(folder, kv=make_kv_config(Options(folder), **changes))

    def test_of_groups_of_another_kind(self, folder: Path) -> None:
        one = make_kv_config(Options(folder)).kv_cache_groups[0]
        state = {"block_size": 16, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
        chunked = {
            "block_size": 16,
            "num_kv_heads": 1,
            "head_size": 32,
            "dtype": torch.float32,
            "attention_chunk_size": 64,
        }
        for groups, reason in [
            (
                [one, KVCacheGroupSpec(["a"], ChunkedLocalAttentionSpec(**chunked))],
                "its layers are ChunkedLocalAttentionSpec",
            ),
            ([one, KVCacheGroupSpec(["a"], MambaSpec(**state))], "mamba_cache_mode is none"),
            (
                [KVCacheGroupSpec(one.layer_names, one.kv_cache_spec, enable_kv_transfer=False)],
                "not for transfer",
            ),
            ([], "has no KV cache"),
        ]:
            assert reason in self.refused(
                folder, kv=KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
            )

    def test_of_all_reasons_at_once(self, folder: Path) -> None:
        def change(view: Any) -> None:
            view.speculative_config = SimpleNamespace(method="medusa")
            view.parallel_config.decode_context_parallel_size = 4

        message = self.refused(
            folder, change, make_kv_config(Options(folder), attention_chunk_size=64)
        )
        assert (
            "chunked" in message
            and "decode_context_parallel_size" in message
            and "speculative" in message
        )

    def test_of_heads_that_cannot_be_divided(self, folder: Path) -> None:
        options = Options(folder)
        with pytest.raises(LayoutError, match="head_shards is 3, but 1 workers with 4 heads each"):
            geometry_of(
                make_config(options, Path("unused")),
                make_kv_config(options, num_kv_heads=4),
                Config(head_shards=3),
            )

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"tokens_per_chnk": 64}, "tokens_per_chunk"),
            ({"ram": "1GiB"}, "ram_bytes"),
            ({"client": {"call_timeout": 1}}, "client.call_timeout_s"),
            ({"policy": "lrru"}, "lru"),
            ({"tokens_per_chunk": "many"}, "whole number"),
        ],
    )
    def test_of_settings_that_are_none(
        self, folder: Path, settings: dict[str, Any], named: str
    ) -> None:
        config = make_config(Options(folder, settings=settings), Path("unused"))
        with pytest.raises(ConfigError, match=named):
            KVHoldConnector(config, KVConnectorRole.SCHEDULER, make_kv_config(Options(folder)))


class TestIdentity:
    """Whose KV it is: the same for the same weights wherever they lie, another for any others."""

    def digest(self, folder: Path, settings: Config | None = None, **changes: Any) -> bytes:
        options = Options(folder)
        config = make_config(options, Path("unused"))
        for name, value in changes.items():
            section, _, field = name.partition("__")
            setattr(getattr(config, section), field, value)
        kv = make_kv_config(options)
        geometry = geometry_of(config, kv, settings or Config())
        return namespace.namespace_of(config, kv, geometry, settings or Config()).digest

    def test_the_same_model_in_another_folder_is_the_same(self, tmp_path: Path) -> None:
        one, two = (
            make_folder(tmp_path / "one" / "llama"),
            make_folder(tmp_path / "two" / "elsewhere"),
        )
        assert self.digest(one) == self.digest(two)

    def test_one_byte_anywhere_in_the_weights_makes_another(self, tmp_path: Path) -> None:
        weights = random.Random(1).randbytes(1_000_000)
        digests = {self.digest(make_folder(tmp_path / "original", weights=weights))}
        places = [0, 4_095, 33_000, 500_001, 777_777, 999_999]
        for at in places:
            changed = weights[:at] + bytes([weights[at] ^ 1]) + weights[at + 1 :]
            digests.add(self.digest(make_folder(tmp_path / f"changed {at}", weights=changed)))
        assert len(digests) == 1 + len(places)

    def test_weights_that_changed_in_their_place_are_others(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "trained on", weights=b"before")
        before = self.digest(folder)
        (folder / "model.safetensors").write_bytes(b"after.")
        assert self.digest(folder) != before

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_theta": 500_000.0},
            {"num_hidden_layers": 3},
            {"rms_norm_eps": 1e-6},
            {"sliding_window": 7},
        ],
        ids=str,
    )
    def test_other_settings_of_the_model_make_another(
        self, tmp_path: Path, folder: Path, changes: dict[str, Any]
    ) -> None:
        assert self.digest(make_folder(tmp_path / "changed", **changes)) != self.digest(folder)

    def test_weights_that_are_not_read_from_the_folder_need_a_name(self, folder: Path) -> None:
        with pytest.raises(LayoutError, match="set model_id"):
            self.digest(folder, model_config__model_weights="s3://bucket/tuned")
        one, two = (load_config({"model_id": name}) for name in ("one", "two"))
        bucket = {"model_config__model_weights": "s3://bucket/tuned"}
        assert self.digest(folder, one, **bucket) != self.digest(folder, two, **bucket)

    def test_random_weights_are_not_those_of_the_folder(self, folder: Path) -> None:
        assert self.digest(folder, load_config__load_format="dummy") != self.digest(folder)

    def test_how_long_a_prompt_may_be_matters_only_where_it_chooses_the_rotation(
        self, tmp_path: Path, folder: Path
    ) -> None:
        assert self.digest(folder, model_config__max_model_len=100) == self.digest(folder)
        rope = {
            "rope_type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 1024,
        }
        long = make_folder(tmp_path / "longrope", rope_scaling=rope)
        assert self.digest(long, model_config__max_model_len=1024) != self.digest(
            long, model_config__max_model_len=2048
        )


class TestRegistration:
    def test_by_the_entry_point_and_its_name(self) -> None:
        (plugin,) = entry_points(group="vllm.general_plugins", name="kvhold")
        assert plugin.load() is register
        register()
        register()
        by_name = KVTransferConfig(kv_connector="KVHoldConnector", kv_role="kv_both")
        assert KVConnectorFactory.get_connector_class(by_name) is KVHoldConnector

    def test_by_the_path_of_the_module(self) -> None:
        by_path = KVTransferConfig(
            kv_connector="KVHoldConnector",
            kv_role="kv_both",
            kv_connector_module_path="kvhold.integrations.vllm",
        )
        assert KVConnectorFactory.get_connector_class(by_path) is KVHoldConnector


class TestRoles:
    """vLLM holds freed blocks back from a pass under way only for an engine that loads."""

    def test_a_producer_only_stores(self, engine: MakeEngine) -> None:
        producer = engine(role="kv_producer")
        prompt = make_prompt("producer", 300)
        store(producer, prompt)
        producer.add("a", prompt)
        producer.run()
        assert producer.loads == []
        assert producer.tokens_computed["a"] == 300 + 1
        consumer = engine(role="kv_consumer")
        consumer.add("a", prompt)
        consumer.run()
        assert consumer.tokens_computed["a"] == 300 - 288 + 1

    def test_a_producer_waits_for_no_lookup(self, folder: Path, frail: NodeProcess) -> None:
        producer = Engine(Options(folder, role="kv_producer", settings=IMPATIENT), frail.socket)
        frail.hold_up()
        request = producer.add("a", make_prompt("producer", 300))
        assert producer.step().num_scheduled_tokens == {request.request_id: 300}
        frail.go_on()
        producer.run()
        producer.close()

    def test_a_consumer_only_loads(self, engine: MakeEngine) -> None:
        consumer = engine(role="kv_consumer")
        for name in "ab":
            consumer.add(name, make_prompt("consumer", 300))
            consumer.run()
            forget_locally(consumer)
        assert (consumer.loads, consumer.stores) == ([], [])


def test_steps_cross_processes_unchanged() -> None:
    group = Group(layers=1, planes=2, heads=1, head_dim=8, dtype="float32")
    prompt = Namespace("model", Layout((group,), tokens_per_chunk=CHUNK, tail_tokens=BLOCK)).prompt(
        make_prompt("pipe", 200)
    )
    steps = Steps(
        [Load("a", 2**60, 1, [[-1, 2]])],
        [Store("b", prompt.chunks(1), [[3, 4, 5, 6, 7, 8, 9, 10]])],
    )
    one, other = Pipe()
    with one, other:
        one.send(steps)
        assert other.recv() == steps


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


def asks(**rules: Any) -> dict[str, Any]:
    """A request's word about the cache, as vLLM's server passes it on."""
    return {"sampling": {"extra_args": {"kv_transfer_params": {"kvhold": rules}}}}


class TestRules:
    def test_what_is_not_to_be_stored_is_not_and_what_is_there_is_loaded(
        self, engine: MakeEngine
    ) -> None:
        one = engine()
        prompt = make_prompt("rules store", 300)
        one.add("a", prompt, **asks(store=False))
        one.run()
        assert one.stores == []
        forget_locally(one)
        store(one, prompt)
        one.add("b", [*prompt, 5], **asks(store=False))
        one.run()
        assert one.tokens_computed["b"] == 301 - 288 + 1
        assert one.stores == []

    def test_a_lookup_says_which_chunks_it_uses(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[str] = []
        look_up = NodeClient.lookup

        def heard_too(client: NodeClient, *args: Any, uses: Any, **kwargs: Any) -> Any:
            heard.append(uses)
            return look_up(client, *args, uses=uses, **kwargs)

        monkeypatch.setattr(NodeClient, "lookup", heard_too)
        one, consumer = engine(), engine(role="kv_consumer")
        one.add("a", make_prompt("uses a", 100))
        one.run()
        one.add("b", make_prompt("uses b", 100), **asks(store=False))
        one.run()
        consumer.add("c", make_prompt("uses c", 100))
        consumer.run()
        assert heard == ["all", "known", "known"]
        tight = engine(num_blocks=48, caching=False)
        for name in "abc":
            tight.add(name, make_prompt(f"uses tight {name}", 200), max_tokens=100)
        tight.run()
        assert heard[3:] == ["all"] * 3 + ["none"] * (len(heard) - 6)
        assert len(heard) > 6, "one was preempted"

    def test_what_is_not_to_be_loaded_is_computed_and_not_stored_twice(
        self, engine: MakeEngine
    ) -> None:
        one = engine()
        prompt = make_prompt("rules load", 300)
        store(one, prompt)
        one.hands.granted_chunks = 0
        one.add("a", prompt, **asks(load=False))
        one.run()
        assert one.loads == []
        assert one.tokens_computed["a"] == 300 + 1
        assert one.hands.granted_chunks == 0, "the node has it already"
        other = make_prompt("rules load other", 300)
        one.add("b", other, **asks(load=False))
        one.run()
        assert one.hands.granted_chunks == 5

    @pytest.mark.parametrize(
        ("settings", "asked", "ttl_s"),
        [(0, 50, 50.0), (30, None, 30.0), (30, 50, 30.0), (30, 20, 20.0), (0, None, None)],
    )
    def test_a_time_to_live_goes_with_what_is_stored(
        self, engine: MakeEngine, settings: float, asked: float | None, ttl_s: float | None
    ) -> None:
        one = engine(settings={"rules": {"ttl_s": settings}})
        one.add(
            "a",
            make_prompt(f"rules ttl {settings} {asked}", 300),
            **asks(**({} if asked is None else {"ttl_s": asked})),
        )
        one.run()
        assert one.stores
        assert {each.store_options.ttl_s for each in one.stores} == {ttl_s}

    def test_what_has_outlived_its_time_is_computed_again(self, engine: MakeEngine) -> None:
        one = engine(real_worker=True)
        prompt = make_prompt("rules ttl over", 300)
        one.add("a", prompt, **asks(ttl_s=0.5))
        one.run()
        numbers = iter(range(1000))

        def computed_whole() -> bool:
            forget_locally(one)
            one.add(name := f"again {next(numbers)}", prompt, **asks(store=False))
            one.run()
            return one.tokens_computed[name] == 300 + 1

        eventually(computed_whole)

    def test_tags_must_match(self, engine: MakeEngine) -> None:
        one = engine()
        prompt = make_prompt("rules tags", 300)
        tagged = asks(tags={"tenant": "a"})
        one.add("a", prompt, **tagged)
        one.run()
        computed = {}
        for name, rules in (("none", {}), ("other", asks(tags={"tenant": "b"})), ("same", tagged)):
            forget_locally(one)
            one.add(name, prompt, **rules)
            one.run()
            computed[name] = one.tokens_computed[name]
        assert computed == {"none": 301, "other": 301, "same": 300 - 288 + 1}

    @pytest.mark.parametrize(
        "rules", [{"stor": False}, {"store": "no"}, {"ttl_s": -1}, {"tags": "a"}], ids=str
    )
    def test_a_request_that_is_not_understood_is_computed_and_not_cached(
        self, engine: MakeEngine, rules: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        one = engine()
        prompt = make_prompt("rules nonsense", 300)
        store(one, prompt)
        one.add("a", prompt, **asks(**rules))
        one.run()
        assert one.tokens_computed["a"] == 300 + 1
        assert (one.stores, one.loads) == ([], [])

    def test_a_request_that_allows_less_than_the_engines_codec_loses_is_computed_and_counted(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = engine(settings={"memory_codec": "int8"})
        prompt = make_prompt("rules of a codec", 300)
        refused: list[str] = []
        monkeypatch.setattr(
            one.connector.scheduler.tally, "add", lambda name, value, label="": refused.append(name)
        )
        one.add("strict", prompt, **asks(max_error=0.001))
        one.run()
        assert (one.stores, one.loads) == ([], [])
        assert refused == ["refused_requests"]
        one.add("lenient", prompt, **asks(max_error=0.01))
        one.run()
        assert one.stores

    def test_a_request_that_names_another_tenant_than_the_engines_is_computed_and_counted(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = engine(settings={"rules": {"tenant": "acme"}})
        prompt = make_prompt("rules of a tenant", 300)
        store(one, prompt)
        refused: list[str] = []
        monkeypatch.setattr(
            one.connector.scheduler.tally, "add", lambda name, value, label="": refused.append(name)
        )
        one.add("other", prompt, **asks(tags={"tenant": "victim"}))
        one.run()
        assert one.tokens_computed["other"] == 300 + 1
        assert (one.stores, one.loads) == ([], [])
        assert refused == ["refused_requests"]
        one.add("same", prompt, **asks(tags={"tenant": "acme"}))
        one.run()
        assert one.tokens_computed["same"] == 300 - 288 + 1

    def test_what_the_settings_forbid_no_request_may(self, engine: MakeEngine) -> None:
        one, forbidden = engine(), engine(settings={"rules": {"store": False, "load": False}})
        prompt = make_prompt("rules forbidden", 300)
        store(one, prompt)
        for name, text in (("a", prompt), ("b", make_prompt("rules forbidden too", 300))):
            forbidden.add(name, text, **asks(store=True, load=True))
            forbidden.run()
            assert forbidden.tokens_computed[name] == 300 + 1
        assert (forbidden.stores, forbidden.loads) == ([], [])


def part_of(block_tokens: int) -> Any:
    return SimpleNamespace(group=SimpleNamespace(block_tokens=block_tokens), table=0)


def planned(spans: dict[str, tuple[int, int]], tables: dict[str, tuple[list[int], ...]]) -> Any:
    """A step that computes (first token, number of tokens) of each request."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        finished_req_ids=set(),
        num_scheduled_tokens={name: num for name, (_, num) in spans.items()},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(spans),
            num_computed_tokens=[start for start, _ in spans.values()],
            resumed_req_ids=set(),
        ),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


class TestDrafts:
    """A pass with a request near the drafter's limit has no drafter: what it computes is not
    stored.
    """

    @pytest.fixture
    def one(self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Engine:
        monkeypatch.setattr(lookups, "_PATIENCE_S", 20.0)
        one = engine(budget=600)
        side = one.connector.scheduler
        side._undrafted = Undrafted(side._geometry.parts, DraftLimit(250, late=0))
        return one

    def test_what_is_computed_beside_a_long_request_is_not_stored_nor_what_others_share_of_it(
        self, one: Engine
    ) -> None:
        short = make_prompt("drafts short", 128)
        one.add("long", make_prompt("drafts long", 300))
        one.add("short", short)
        one.run()
        assert one.stores == []
        # the engine's own prefix cache has its beginning
        one.add("again", [*short, *make_prompt("drafts more", 64)])
        one.run()
        assert one.tokens_computed["again"] < 128
        assert not [store for store in one.stores if store.request_id == "again"]
        one.add("alone", make_prompt("drafts alone", 128))
        one.run()
        assert [store for store in one.stores if store.request_id == "alone"]

    def test_blocks_computed_after_those_without_a_drafter_are_not_stored(self) -> None:
        undrafted = Undrafted([part_of(16)], DraftLimit(1000, late=0))
        tables: dict[str, tuple[list[int], ...]] = {
            "a": ([1, 2, 3, 4],),
            "b": (list(range(100, 170)),),
        }
        undrafted.planned(planned({"a": (0, 32), "b": (998, 4)}, tables))
        undrafted.planned(planned({"a": (32, 32)}, tables))
        assert undrafted.are_among([[3, 4]]), "the drafter has read what is missing in 1 and 2"
        undrafted.planned(planned({"a": (0, 32)}, tables))
        undrafted.planned(planned({"a": (32, 32)}, tables))
        assert not undrafted.are_among([[1, 2, 3, 4]])

    def test_a_pass_may_begin_earlier_than_planned_when_drafts_were_rejected(self) -> None:
        undrafted = Undrafted([part_of(16)], DraftLimit(1000, late=6))
        tables: dict[str, tuple[list[int], ...]] = {"a": ([10, 11],), "b": (list(range(100, 170)),)}
        undrafted.planned(planned({"a": (12, 4)}, tables))
        undrafted.planned(planned({"a": (16, 4), "b": (998, 4)}, tables))
        assert undrafted.are_among([[10]]) and undrafted.are_among([[11]])

    def test_blocks_that_another_pass_fills_are_good_again(self, one: Engine) -> None:
        undrafted = one.connector.scheduler._undrafted
        assert undrafted is not None
        one.add("long", make_prompt("drafts first", 300))
        one.run()
        lacking = set(undrafted._blocks[0])
        assert lacking
        for number in range(60):  # until the engine has used each of its blocks again
            one.add(f"r{number}", make_prompt(f"drafts {number}", 128))
            one.run()
        assert not undrafted._blocks[0]
        undrafted._blocks[0].update({3, 4})
        undrafted.loaded([[4, -1]])
        assert undrafted._blocks[0] == {3}
        assert undrafted.are_among([[3]])
        assert not undrafted.are_among([[4, -1]])
