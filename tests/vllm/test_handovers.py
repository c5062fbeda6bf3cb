"""Prefill on one engine and decode on another, under vLLM's real scheduler and over a real node:
the decode engine waits for what the prefill engine computes or stores, and computes what does not
come.
"""

import random
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm import lookups
from kvhold.integrations.vllm.handovers import HANDED
from tests.vllm.engines import MakeEngine, engine, free_blocks, node
from tests.vllm.handing import (
    DECODER,
    HASTY,
    NIXL,
    PATIENT,
    PREFILLER,
    TOKENS,
    announced,
    ask,
    assert_waits,
    decode,
    ended,
    engines,
    has_planned_a_pass,
    kept,
    patient,
    prefill,
    since,
    waits,
)
from tests.vllm.scheduling import (
    WITHIN_S,
    Engine,
    NodeProcess,
    answer_to,
    eventually,
    make_prompt,
)

__all__ = ["engine", "engines", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


class TestOneAfterTheOther:
    """NIXL's protocol."""

    def test_the_prefill_engine_answers_what_a_proxy_passes_on(
        self, engines: tuple[Engine, Engine]
    ) -> None:
        one, _ = engines
        prompt = make_prompt("answer", TOKENS)
        handed = prefill(one, prompt)
        named = handed.pop(HANDED)
        assert handed == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": "p",
            "remote_engine_id": one.config.kv_transfer_config.engine_id,
            "remote_num_tokens": TOKENS,
            "remote_prefill_cached_tokens": 0,
            "remote_block_ids": [],
            "remote_host": "127.0.0.1",
            "remote_port": 0,
            "tp_size": 1,
            "pp_size": 1,
        }
        side = one.connector.scheduler
        assert named == {
            "namespace": side._namespace.digest.hex(),
            "num_tokens": TOKENS,
            "last": side._namespace.prompt(prompt).hash_at(TOKENS // 64 - 1).hex(),
        }

    def test_the_decode_engine_loads_what_the_prefill_engine_has_stored(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("stored", TOKENS)
        assert decode(two, prompt, prefill(one, prompt)) == 1
        assert since(node, before) == {}, "all was there"
        assert announced(node) == 0

    def test_the_chunks_are_kept_until_the_decode_engine_has_its_hit(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        eventually(lambda: kept(node) == 0)
        prompt = make_prompt("kept", TOKENS)
        handed = prefill(one, prompt)
        eventually(lambda: kept(node) == 8)
        prefill(one, make_prompt("kept, too", TOKENS), "q")
        eventually(lambda: kept(node) == 16)
        assert decode(two, prompt, handed) == 1
        assert kept(node) == 8

    def test_the_chunks_are_kept_until_a_deadline(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        one = engine(settings=patient(HASTY))
        before = ended(node).get("deadline", 0)
        prefill(one, make_prompt("kept for a moment", TOKENS))
        eventually(lambda: ended(node).get("deadline", 0) == before + 1)
        assert kept(node) == 0

    @pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 128, 400, 401])
    def test_any_length(self, engines: tuple[Engine, Engine], length: int) -> None:
        one, two = engines
        prompt = make_prompt(f"length {length}", length)
        ask(one, "p", prompt, NIXL)
        one.run()
        assert decode(two, prompt, one.handed["p"]) == 1

    def test_the_decode_engine_waits_for_chunks_that_are_being_stored(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("being stored", TOKENS)
        one.hands.holds_stores = True
        handed = prefill(one, prompt)
        ask(two, "d", prompt, handed, max_tokens=4)
        assert_waits(two, "d")
        one.hands.finish_stores()
        two.run()
        assert two.tokens_computed["d"] == 4
        assert two.outputs["d"] == answer_to(prompt, 4)
        assert since(node, before) == {"stored": 1}

    def test_a_proxy_may_drop_the_field_of_kvhold(self, engines: tuple[Engine, Engine]) -> None:
        one, two = engines
        prompt = make_prompt("dropped", TOKENS)
        one.hands.holds_stores = True
        handed = prefill(one, prompt)
        del handed[HANDED]
        ask(two, "d", prompt, handed)
        assert_waits(two, "d")
        one.hands.finish_stores()
        two.run()
        assert two.tokens_computed["d"] == 1

    def test_stores_that_fail_are_computed_at_once(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("failed", TOKENS)
        one.hands.holds_stores = True
        handed = prefill(one, prompt)
        ask(two, "d", prompt, handed, max_tokens=4)
        assert_waits(two, "d")
        one.hands.finish_stores(commit=False)
        two.run()
        assert two.tokens_computed["d"] == TOKENS + 3
        assert two.outputs["d"] == answer_to(prompt, 4)
        assert since(node, before) == {"ended": 1}

    def test_after_the_deadline_the_decode_engine_computes(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        one, two = engine(), engine(settings=patient(HASTY))
        before, prompt = waits(node), make_prompt("deadline", TOKENS)
        one.hands.holds_stores = True
        assert decode(two, prompt, prefill(one, prompt)) == TOKENS
        assert since(node, before) == {"deadline": 1}
        one.hands.finish_stores()

    def test_without_parameters_nothing_is_awaited_or_answered(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("none", TOKENS)
        ask(one, "p", prompt)
        one.run()
        assert "p" not in one.handed
        assert announced(node) == 0
        other = make_prompt("none, being stored", TOKENS)
        one.hands.holds_stores = True
        prefill(one, other, "q")
        assert decode(two, other, None) == TOKENS
        assert since(node, before) == {}
        one.hands.finish_stores()

    @pytest.mark.parametrize("status", ["aborted", "not stored"])
    def test_what_is_not_stored_is_not_handed_over(
        self, engines: tuple[Engine, Engine], status: str
    ) -> None:
        one, two = engines
        prompt = make_prompt(status, TOKENS)
        if status == "aborted":
            ask(one, "p", prompt, NIXL)
            one.run(until=lambda: one.tokens_computed.get("p"))
            one.abort("p")
        else:
            ask(one, "p", prompt, NIXL | {"kvhold": {"store": False}})
        one.run()
        assert "p" not in one.handed
        # an aborted prefill has stored the chunks of its first pass
        stored = 400 // 64 * 64 if status == "aborted" else 0
        assert decode(two, prompt, {"do_remote_prefill": True}) == TOKENS - stored

    def test_roles_of_their_own(
        self, engine: MakeEngine, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both wait for their lookups' answers, however busy the machine is."""
        monkeypatch.setattr(lookups, "_PATIENCE_S", WITHIN_S)
        one, two = engine(role="kv_producer"), engine(role="kv_consumer")
        for number in range(5):
            prompt = make_prompt(f"roles {number}", 300)
            handed = prefill(one, prompt, f"p{number}")
            assert decode(two, prompt, handed, f"d{number}") == 1
        eventually(lambda: announced(node) == 0)

    def test_a_prompt_that_is_stored_after_the_end_stays_announced_until_then(
        self, engine: MakeEngine, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two = engine(role="kv_producer"), engine(settings=patient(PATIENT))
        side, prompt = one.connector.scheduler, make_prompt("late", TOKENS)
        resolve = side.lookups.resolve
        # the answer counts as late until the request has ended
        monkeypatch.setattr(
            side.lookups,
            "resolve",
            lambda state, patience_s, *, last=False: last and resolve(state, WITHIN_S, last=last),
        )
        ask(one, "p", prompt, NIXL)
        one.run(until=lambda: one.handed.get("p"))
        assert one.stores == []
        ask(two, "d", prompt, one.handed["p"])
        assert_waits(two, "d")
        one.run()
        two.run()
        assert two.tokens_computed["d"] == 1
        eventually(lambda: announced(node) == 0)


class TestBothAtOnce:
    """The p2p protocol: each engine gets its part, in any order."""

    def test_the_decode_engine_waits_from_pass_to_pass(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("passes", TOKENS)
        ask(one, "p", prompt, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        ask(two, "d", prompt, PREFILLER, max_tokens=4)
        assert_waits(two, "d")
        one.execute()
        assert_waits(two, "d")  # the second pass is not over
        one.run()
        two.run()
        assert two.tokens_computed["d"] == 4
        assert two.outputs["d"] == answer_to(prompt, 4)
        assert since(node, before) == {"stored": 1}
        assert "p" not in one.handed, "this protocol has no answer"

    def test_the_decode_engine_may_be_first(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("first", TOKENS)
        ask(two, "d", prompt, PREFILLER, max_tokens=4)
        assert_waits(two, "d")
        ask(one, "p", prompt, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        assert_waits(two, "d")
        one.run()
        two.run()
        assert two.tokens_computed["d"] == 4
        assert since(node, before) == {"announced": 1, "stored": 1}

    def test_it_waits_for_an_engine_that_is_done_at_the_next_look(
        self, engines: tuple[Engine, Engine], node: NodeProcess
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt("done", TOKENS)
        ask(two, "d", prompt, PREFILLER)
        assert_waits(two, "d")
        ask(one, "p", prompt, DECODER)
        one.run()
        two.run()
        assert two.tokens_computed["d"] == 1
        assert since(node, before) == {"announced": 1}

    def test_without_a_prefill_it_computes_after_the_grace(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        two, before = engine(settings=patient(HASTY)), waits(node)
        assert decode(two, make_prompt("alone", TOKENS), PREFILLER) == TOKENS
        assert since(node, before) == {"not announced": 1}

    def test_an_engine_with_both_parts_does_not_wait_for_itself(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        one, prompt = engine(settings=patient(PATIENT), caching=False), make_prompt("both", TOKENS)
        ask(one, "p", prompt, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        ask(one, "d", prompt, PREFILLER, max_tokens=4)
        one.run()
        assert one.outputs["d"] == answer_to(prompt, 4)

    @pytest.mark.parametrize("how", ["aborted", "gone"])
    def test_it_computes_when_the_prefill_is(
        self, engines: tuple[Engine, Engine], node: NodeProcess, how: str
    ) -> None:
        one, two = engines
        before, prompt = waits(node), make_prompt(f"prefill {how}", TOKENS)
        ask(one, "p", prompt, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        ask(two, "d", prompt, PREFILLER, max_tokens=4)
        assert_waits(two, "d")
        if how == "aborted":
            one.abort("p")
        else:
            one.connector.scheduler._cache.close()
        two.run()
        assert two.tokens_computed["d"] == TOKENS + 3
        assert two.outputs["d"] == answer_to(prompt, 4)
        assert since(node, before) == {"ended": 1}

    def test_it_computes_after_the_deadline(self, engine: MakeEngine, node: NodeProcess) -> None:
        """The prefill engine is stopped in its first pass."""
        one, two = engine(), engine(settings=patient(HASTY))
        before, prompt = waits(node), make_prompt("stopped", TOKENS)
        ask(one, "p", prompt, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        assert decode(two, prompt, PREFILLER) == TOKENS
        assert since(node, before) == {"deadline": 1}

    def test_an_aborted_decode_leaves_nothing(self, engines: tuple[Engine, Engine]) -> None:
        one, two = engines
        free, prompt = free_blocks(two), make_prompt("left", TOKENS)
        ask(one, "p", prompt, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        ask(two, "d", prompt, PREFILLER)
        assert_waits(two, "d")
        two.abort("d")
        two.run()
        assert free_blocks(two) == free
        assert two.followed() == 0

    def test_the_id_names_no_kv(self, engines: tuple[Engine, Engine]) -> None:
        """Two prompts under one id: each answer is that of its own prompt."""
        one, two = engines
        first, second = (make_prompt(f"id {number}", TOKENS) for number in range(2))
        ask(one, "p", first, DECODER)
        one.run()
        ask(one, "q", second, DECODER)
        eventually(lambda: has_planned_a_pass(one))
        ask(two, "d", first, PREFILLER, max_tokens=4)
        ask(two, "e", second, PREFILLER, max_tokens=4)
        two.run(until=lambda: not two.scheduler.requests.get("d"))
        one.run()
        two.run()
        assert two.outputs == {"d": answer_to(first, 4), "e": answer_to(second, 4)}
        assert two.tokens_computed == {"d": 4, "e": 4}


@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_protocols_and_aborts(
    engine: MakeEngine, node: NodeProcess, seed: int
) -> None:
    """Real workers. Parameters are sometimes those of an earlier prompt; both engines step in
    turns.
    """
    chance = random.Random(seed)
    one = engine(real_worker=True, budget=200, asynchronous=bool(seed % 2))
    two = engine(real_worker=True, settings=patient(HASTY), budget=200)
    begin = make_prompt(f"random {seed}", 300)
    prompts: dict[str, list[int]] = {}
    handed: list[dict[str, Any]] = []
    aborted: set[str] = set()
    for number in range(25):
        name = f"r{number}"
        own = make_prompt(f"random {seed} {number}", chance.randrange(1, 500))
        prompts[name] = prompt = begin[: chance.randrange(0, 300)] + own
        protocol = chance.choice(["nixl", "p2p", "none"])
        if protocol == "nixl":
            ask(one, name, prompt, NIXL)
        elif protocol == "p2p" and chance.random() < 0.5:
            ask(one, name, prompt, DECODER)
        if protocol == "nixl" and chance.random() < 0.8:
            one.run(until=partial(one.outputs.get, name))
        handed += [one.handed[name]] if name in one.handed else []
        params: Any = {"nixl": handed[-1] if handed else None, "p2p": PREFILLER}.get(protocol)
        if handed and chance.random() < 0.2:
            params = chance.choice(handed)
        ask(two, name, prompt, params, max_tokens=4)
        if protocol == "p2p" and chance.random() < 0.5:
            ask(one, f"late {name}", prompt, DECODER)
        for _ in range(chance.randrange(4)):
            one.step()
            two.step()
        if chance.random() < 0.2:
            one.abort(name, f"late {name}")
        if chance.random() < 0.1:
            aborted.add(name)
            two.abort(name)
    one.run()
    two.run()
    for name, prompt in prompts.items():
        if name not in aborted:
            assert two.outputs[name] == answer_to(prompt, 4), name
    assert two.loads
    eventually(lambda: announced(node) == 0)
