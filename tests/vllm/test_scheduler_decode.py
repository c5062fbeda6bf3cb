"""Under vLLM's real scheduler: what is stored of generated tokens, and beside a drafter."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm import lookups
from kvhold.integrations.vllm.drafts import DraftLimit, Undrafted
from tests.vllm.engines import (
    BLOCK,
    CHUNK,
    MakeEngine,
    engine,
    forget_locally,
    free_blocks,
    node,
    tokens_held,
)
from tests.vllm.scheduling import Engine, answer_to, eventually, make_prompt

__all__ = ["engine", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


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
