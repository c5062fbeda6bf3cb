"""A handed-over prompt may end inside a block. The decode engine then computes its last token only,
and no other request's KV leaves the prefill engine.
"""

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.core.keys import ChunkNames
from kvhold.integrations.vllm import lookups
from kvhold.integrations.vllm.events import first_chunks
from tests.vllm.engines import BLOCK, MakeEngine, engine, node, tokens_held
from tests.vllm.handing import DECODER, NIXL, PATIENT, TOKENS, ask, decode, patient, prefill
from tests.vllm.scheduling import WITHIN_S, Engine, eventually, make_prompt

__all__ = ["engine", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

WHOLE = TOKENS // BLOCK * BLOCK


def stored_end(one: Engine, prompt: list[int]) -> list[npt.NDArray[np.int64]]:
    """The prompt's last block, by layer, as the node has it."""
    namespace = one.connector.scheduler._namespace
    group = namespace.layout.groups[0]
    with one.hands.client.lookup(namespace.prompt(prompt).query(to_end=True)) as hit:
        assert hit.num_tokens == len(prompt)
        lease = one.hands.client.claim(hit.ticket)
        assert lease is not None
        with lease:
            places = lease.chunks()
            size = group.layer_bytes(int(places.num_tokens[-1]))
            ends = [int(places.offsets[-1]) + (at + 1) * size for at in range(group.layers)]
            blocks = [lease.buffer[end - group.block_bytes : end] for end in ends]
            return [block.view(np.int64).copy() for block in blocks]


@pytest.mark.parametrize("budget", [400, TOKENS - 2], ids=["in one pass", "in two"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_other_requests_kv_is_stored(
    engine: MakeEngine, budget: int, asynchronous: bool
) -> None:
    """By the worker's real side. In the first layer, a number stands for each token's KV."""
    one = engine(real_worker=True, budget=budget, asynchronous=asynchronous)
    for tensor in one.tensors.values():
        tensor.fill_(7.0)
    prompt = make_prompt(f"not theirs {budget} {asynchronous}", TOKENS)
    ask(one, "p", prompt, NIXL)
    one.run()
    eventually(lambda: one.connector.scheduler._cache.status()["held"]["reservations"] == 0)
    first, *others = stored_end(one, prompt)
    assert (first != 0).tolist() == [at < TOKENS % BLOCK for at in range(first.size)]
    assert others and not np.any(others)


def test_a_block_that_is_not_zeroed_is_seen(engine: MakeEngine) -> None:
    """The tests' engine notices KV of another request."""
    one = engine(settings=patient(PATIENT))
    one.slots[:] = 7
    one.connector.scheduler._ends.take_zeroed = list  # type: ignore[method-assign]
    ask(one, "p", make_prompt("seen", TOKENS), NIXL)
    with pytest.raises(AssertionError, match="KV of another request"):
        one.run()
    one.abort("p")


def test_others_find_the_last_whole_block(engine: MakeEngine) -> None:
    one, two = engine(), engine(settings=patient(PATIENT))
    prompt = make_prompt("others", TOKENS)
    handed = prefill(one, prompt)
    assert tokens_held(one, prompt) == WHOLE
    assert tokens_held(one, [*prompt[:WHOLE], 1, 2, 3]) == WHOLE
    assert decode(two, prompt, handed) == 1


def test_an_end_expires(engine: MakeEngine) -> None:
    one = engine(settings=patient(PATIENT))
    prefill(one, make_prompt("expires", TOKENS))
    ttls = {store.names.tail_tokens % BLOCK: store.store_options.ttl_s for store in one.stores}
    assert ttls == {0: None, TOKENS % BLOCK: WITHIN_S}


def test_requests_of_one_engine_end_with_blocks(engine: MakeEngine) -> None:
    one = engine()
    one.add("whole", make_prompt("whole", TOKENS))
    one.run()
    assert [store.names.tail_tokens % BLOCK for store in one.stores] == [0] * len(one.stores)
    assert all(not any(ids) for ids in one.schedule().kv_connector_metadata.zeroed)
    one.execute()


def test_a_prompt_is_handed_over_twice_and_stored_once(engine: MakeEngine) -> None:
    one, two = engine(), engine(settings=patient(PATIENT))
    prompt = make_prompt("twice", TOKENS)
    decode(two, prompt, prefill(one, prompt), "d")
    stores = len(one.stores)
    assert one.scheduler.reset_prefix_cache()
    decode(two, prompt, prefill(one, prompt, "q"), "e")
    assert len(one.stores) == stores
    assert one.tokens_computed["q"] == 1, "it has the end itself"


def test_it_is_stored_by_a_request_that_ends_before_its_lookup(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engine(role="kv_producer"), engine(settings=patient(PATIENT))
    side, prompt = one.connector.scheduler, make_prompt("late end", TOKENS)
    resolve = side.lookups.resolve
    monkeypatch.setattr(
        side.lookups,
        "resolve",
        lambda state, patience_s, *, last=False: last and resolve(state, WITHIN_S, last=last),
    )
    ask(one, "p", prompt, NIXL)
    one.run()
    assert decode(two, prompt, one.handed["p"]) == 1


@pytest.mark.parametrize("length", [5, BLOCK, TOKENS])
def test_without_tails_only_chunks_are_handed_over(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(lookups, "_PATIENCE_S", WITHIN_S)
    one, two = engine(settings={"store_tails": False}), engine(settings=patient(PATIENT))
    prompt = make_prompt(f"chunks {length}", length)
    ask(one, "p", prompt, DECODER)
    one.run()
    assert decode(two, prompt, None) == length - length // 64 * 64


def test_a_preempted_prefill_is_handed_over(engine: MakeEngine) -> None:
    one, two = engine(num_blocks=70, caching=False), engine(settings=patient(PATIENT))
    prompts = {f"p{n}": make_prompt(f"crowded {n}", TOKENS) for n in range(3)}
    for name, prompt in prompts.items():
        ask(one, name, prompt, NIXL)
    one.run()
    for name, prompt in prompts.items():
        assert decode(two, prompt, one.handed[name], f"d{name}") == 1


def test_events_name_whole_blocks(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, told = engine(events=True), list[ChunkNames]()
    side, prompt = one.connector.scheduler, make_prompt("events", TOKENS)
    monkeypatch.setattr(side._announcer, "stored", lambda request, names: told.append(names))
    prefill(one, prompt)
    assert len(one.stores) > len(told) > 0
    assert [names.tail_tokens % BLOCK for names in told] == [0] * len(told)
    found = first_chunks(side._namespace.prompt(prompt), TOKENS)
    assert (len(found), found.tail_tokens) == (TOKENS // 64, 0)
