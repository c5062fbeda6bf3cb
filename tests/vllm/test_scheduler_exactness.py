"""Under vLLM's real scheduler, whatever goes wrong: no request reads another text's KV."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
from vllm.config import KVTransferConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.v1.request import Request

from tests.vllm.engines import (
    CHUNK,
    MakeEngine,
    engine,
    engines_on,
    forget_locally,
    frail,
    node,
    store,
)
from tests.vllm.scheduling import Engine, NodeProcess, answer_to, damage, eventually, make_prompt

__all__ = ["engine", "frail", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


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
