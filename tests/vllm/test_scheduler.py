"""The connector under vLLM's real scheduler and over a real node: what is stored and loaded, and
when.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from vllm.v1.request import RequestStatus

from kvhold.integrations.vllm import lookups
from tests.vllm.engines import (
    BLOCK,
    CHUNK,
    NOTHING,
    MakeEngine,
    engine,
    forget_locally,
    node,
    store,
    table,
    tokens_held,
)
from tests.vllm.scheduling import Engine, NodeProcess, answer_to, eventually, make_prompt

__all__ = ["engine", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


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
