"""Retained prompts stay in memory until their deadline, and demoted ones leave it first."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvhold.cache import demotions, retains
from kvhold.core.errors import LayoutError, ProtocolError
from kvhold.core.keys import Namespace, Prompt
from tests.cache.computing import HYBRID, PLAIN, SPACE, TEXT, Cache, cache_of
from tests.cache.keeping import assert_books_of_kept_agree
from tests.cache.laws import assert_counters_reconcile, finish_chores

PROMPT = SPACE.prompt(TEXT)
CHUNKS = 11  # with the tail
SLOTS = 60
SHARE = SLOTS // 4
OTHER = SPACE.prompt([7] * 40)


@pytest.fixture
def memory() -> Cache:
    return cache_of(PLAIN, HYBRID, slots=SLOTS)


def press(cache: Cache, prompts: int = 2 * SLOTS // 10, first: int = 1000) -> None:
    """More new prompts than memory can hold."""
    for number in range(first, first + prompts):
        cache.store("other", SPACE.prompt([number] * 40))


def evict(cache: Cache, chunks: int) -> None:
    """Fill memory, and have this many chunks evicted."""
    free = SLOTS - cache.state.status()["chunks"]
    for number in range(free + chunks):
        cache.store("other", SPACE.prompt([9000 + number] * 4))


def is_here(cache: Cache, prompt: Prompt = PROMPT) -> bool:
    state, layout = cache.state, prompt.namespace.layout
    names = prompt.chunks(0, tail=False)
    return all(
        state.ram.find(prompt.chunk_key(chunk, group=group)) is not None
        for chunk in range(len(names))
        for group in range(len(layout.groups))
    )


def num_kept(cache: Cache) -> int:
    return cache.state.status()["retained_chunks"]


def ends(cache: Cache) -> dict[str, float]:
    return {
        one.labels[0]: one.value
        for one in cache.state.metrics.samples()
        if one.metric.name == "kvhold_retains"
    }


def assert_free(cache: Cache) -> None:
    finish_chores(cache.state)
    assert num_kept(cache) == cache.state.status()["pinned_chunks"] == 0
    press(cache, first=5000)
    assert not is_here(cache)
    assert_counters_reconcile(cache.state)


class TestRetain:
    @pytest.mark.parametrize("stored_first", [True, False])
    def test_a_prompt_stays_until_its_deadline(self, memory: Cache, stored_first: bool) -> None:
        if stored_first:
            memory.store("a", PROMPT)
        answer = memory.state.retain("a", PROMPT.query(), 30.0)
        assert (answer.num_tokens, answer.present_tokens) == (42, 42 if stored_first else 0)
        if not stored_first:
            memory.store("b", PROMPT)
        assert num_kept(memory) == CHUNKS
        memory.now_s += 29.0
        press(memory)
        assert is_here(memory)
        memory.now_s += 1.0
        assert_free(memory)
        assert ends(memory) == {"deadline": 1}

    def test_its_holder_can_let_it_go(self, memory: Cache) -> None:
        memory.store("a", PROMPT)
        answer = memory.state.retain("a", PROMPT.query(), 30.0)
        memory.state.release("b", answer.number)
        assert num_kept(memory) == CHUNKS, "the number of another owner"
        memory.state.release("a", answer.number)
        memory.state.release("a", answer.number)
        assert_free(memory)
        assert ends(memory) == {"released": 1}

    @pytest.mark.parametrize("how", ["release_owner", "give_up"])
    def test_it_ends_with_its_owner(self, memory: Cache, how: str) -> None:
        memory.store("a", PROMPT)
        memory.state.retain("a", PROMPT.query(), 30.0)
        memory.state.retain("b", PROMPT.query(), 30.0)
        getattr(memory.state, how)("a")
        assert num_kept(memory) == CHUNKS, "b keeps it"
        getattr(memory.state, how)("b")
        assert_free(memory)
        assert ends(memory) == {"owner left": 2}

    @pytest.mark.parametrize("prefix", [None, SPACE.digest])
    def test_a_clear_ends_it(self, memory: Cache, prefix: bytes | None) -> None:
        memory.store("a", PROMPT)
        memory.state.retain("a", PROMPT.query(), 30.0)
        memory.state.clear(prefix)
        finish_chores(memory.state)
        assert not is_here(memory)
        memory.store("a", PROMPT)
        assert_free(memory)
        assert ends(memory) == {"cleared": 1}

    def test_a_clear_of_another_namespace_does_not(self, memory: Cache) -> None:
        memory.store("a", PROMPT)
        memory.state.retain("a", PROMPT.query(), 30.0)
        memory.state.clear(Namespace("another", PLAIN).digest)
        assert num_kept(memory) == CHUNKS
        memory.state.release_owner("a")

    def test_all_groups_are_kept(self, memory: Cache) -> None:
        prompt = Namespace("model", HYBRID).prompt(TEXT[:20])
        memory.store("a", prompt)
        memory.state.retain("a", prompt.query(), 30.0)
        assert num_kept(memory) == 2 * 5
        press(memory)
        assert is_here(memory, prompt)
        memory.state.release_owner("a")

    def test_a_quarter_of_memory_is_kept_at_most(self, memory: Cache) -> None:
        first = memory.state.retain("a", PROMPT.query(), 30.0)
        second = memory.state.retain("b", OTHER.query(), 30.0)
        assert (first.num_tokens, second.num_tokens) == (42, 4 * (SHARE - CHUNKS))
        third = memory.state.retain("c", SPACE.prompt([8] * 40).query(), 30.0)
        assert (third.number, third.num_tokens) == (0, 0)
        again = memory.state.retain("c", PROMPT.query(), 30.0)
        assert again.num_tokens == 42, "kept by another already"
        memory.state.release("a", first.number)
        assert memory.state.retain("d", OTHER.query(), 30.0).num_tokens == 16, "c keeps it"
        for owner in "abcd":
            memory.state.release_owner(owner)
        assert_free(memory)
        assert ends(memory) == {"released": 1, "owner left": 3}

    def test_a_setting_takes_the_place_of_the_quarter(self) -> None:
        memory = cache_of(PLAIN, slots=SLOTS, hints_slots=2 * SHARE)
        first = memory.state.retain("a", PROMPT.query(), 30.0)
        second = memory.state.retain("a", OTHER.query(), 30.0)
        assert (first.num_tokens, second.num_tokens) == (42, 40), "of one namespace"
        third = memory.state.retain("a", SPACE.prompt([8] * 40).query(), 30.0)
        assert third.num_tokens == 4 * (2 * SHARE - CHUNKS - 10)

    def test_a_namespaces_quota_bounds_it(self) -> None:
        memory = cache_of(PLAIN, slots=SLOTS, quota_slots=20)
        assert memory.state.retain("a", PROMPT.query(), 30.0).num_tokens == 20
        other = Namespace("another", PLAIN).prompt(TEXT)
        assert memory.state.retain("a", other.query(), 30.0).num_tokens == 20

    @pytest.mark.parametrize("limit", ["_MOST_RETAINS", "_MOST_KEYS"])
    def test_an_owner_has_a_limit(
        self, memory: Cache, limit: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retains, limit, 1)
        assert memory.state.retain("a", PROMPT.query(), 30.0).num_tokens > 0
        assert memory.state.retain("a", OTHER.query(), 30.0).number == 0
        assert memory.state.retain("b", OTHER.query(), 30.0).number

    def test_a_long_prompt_is_kept_in_steps(self) -> None:
        memory = cache_of(PLAIN, slots=4000)
        prompt = SPACE.prompt(list(range(4 * 900)))
        memory.store("a", prompt)
        turns = memory.state.retain_turns("a", prompt.query(), 30.0)
        steps = 0
        try:
            while steps < 1000:
                assert next(turns) <= 100
                steps += 1
        except StopIteration as end:
            answer = end.value
        assert steps > 5
        assert answer.present_tokens == answer.num_tokens == 4 * 900

    def test_an_owner_may_leave_between_the_steps(self) -> None:
        memory = cache_of(PLAIN, slots=4000)
        prompt = SPACE.prompt(list(range(4 * 900)))
        memory.store("a", prompt)
        turns = memory.state.retain_turns("a", prompt.query(), 30.0)
        next(turns)
        memory.state.release_owner("a")
        with pytest.raises(StopIteration) as end:
            next(turns)
        assert end.value.value.number == 0
        finish_chores(memory.state)
        assert num_kept(memory) == memory.state.status()["pinned_chunks"] == 0

    def test_bad_requests_are_refused(self, memory: Cache) -> None:
        with pytest.raises(LayoutError):
            memory.state.retain("a", Namespace("m", STRANGE).prompt(TEXT).query(), 30.0)
        query = PROMPT.query()
        for bad in (type(query)(b"x", query.layout, 1, query.hashes), short_hashes(query)):
            with pytest.raises(ProtocolError):
                memory.state.retain("a", bad, 30.0)
            with pytest.raises(ProtocolError):
                memory.state.demote(bad)
        for ttl_s in (0.0, -1.0, float("nan")):
            assert memory.state.retain("a", query, ttl_s).number == 0
        short = SPACE.prompt(TEXT[:3])
        assert memory.state.retain("a", short.query(), 30.0).number == 0, "no whole chunk"


STRANGE = type(PLAIN)(groups=PLAIN.groups, tokens_per_chunk=8)


def short_hashes(query: Any) -> Any:
    return type(query)(query.namespace, query.layout, 1, query.hashes[:-1])


class TestDemote:
    def test_its_chunks_go_first(self, memory: Cache) -> None:
        memory.store("a", OTHER)
        memory.store("a", PROMPT)
        assert memory.state.demote(PROMPT.query()).num_chunks == CHUNKS
        evict(memory, CHUNKS)
        assert not is_here(memory)
        assert is_here(memory, OTHER)

    def test_only_chunks_from_the_first_on_go(self, memory: Cache) -> None:
        memory.store("a", PROMPT)
        assert memory.state.demote(PROMPT.query(), 8).num_chunks == 3
        evict(memory, 3)
        here = [memory.state.ram.find(PROMPT.chunk_key(chunk)) is not None for chunk in range(10)]
        assert here == [True] * 8 + [False] * 2

    def test_a_use_takes_it_back(self, memory: Cache) -> None:
        memory.store("a", OTHER)
        memory.store("a", PROMPT)
        memory.state.demote(PROMPT.query())
        memory.state.release("a", memory.lookup("a", PROMPT).ticket)
        evict(memory, CHUNKS)
        assert is_here(memory)
        assert not is_here(memory, OTHER)

    def test_chunks_that_are_stored_soon_are_demoted(self, memory: Cache) -> None:
        assert memory.state.demote(PROMPT.query()).num_chunks == 0
        memory.store("a", OTHER)
        memory.now_s += 9.0
        memory.store("a", PROMPT)
        evict(memory, CHUNKS)
        assert not is_here(memory)
        assert is_here(memory, OTHER)

    def test_chunks_that_are_stored_late_are_not(self, memory: Cache) -> None:
        memory.state.demote(PROMPT.query())
        memory.now_s += 10.0
        memory.store("a", OTHER)
        memory.store("a", PROMPT)
        evict(memory, CHUNKS)
        assert is_here(memory)
        assert not memory.state._demotions._pending.keys() & {
            entry.key[: len(name)]
            for entry in memory.state.ram.entries()
            for name in memory.state._demotions._pending
        }

    def test_pinned_chunks_are_left_alone(self, memory: Cache) -> None:
        memory.store("a", PROMPT)
        memory.state.retain("a", PROMPT.query(), 30.0)
        answer = memory.state.demote(PROMPT.query())
        assert (answer.num_chunks, answer.pinned_chunks) == (0, CHUNKS)
        press(memory)
        assert is_here(memory)
        memory.state.release_owner("a")

    def test_what_is_awaited_has_a_limit(
        self, memory: Cache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demotions, "_MOST_PENDING", 5)
        memory.state.demote(PROMPT.query())
        memory.state.demote(OTHER.query())
        assert len(memory.state._demotions._pending) == 5


class AnyOrder(RuleBasedStateMachine):
    """Owners store, retain, demote, look up, clear and leave in any order."""

    owners = st.sampled_from(("a", "b"))
    prompts = st.sampled_from([SPACE.prompt(([1] * 12 + TEXT)[:n]) for n in (3, 8, 21, 42)])

    @initialize()
    def begin(self) -> None:
        self.cache = cache_of(PLAIN, slots=SLOTS)
        self.retained: list[tuple[str, int]] = []

    @rule(owner=owners, prompt=prompts)
    def store(self, owner: str, prompt: Prompt) -> None:
        self.cache.store(owner, prompt)

    @rule(owner=owners, prompt=prompts)
    def look_up(self, owner: str, prompt: Prompt) -> None:
        found = self.cache.lookup(owner, prompt)
        self.cache.state.release(owner, found.ticket or found.announcement)

    @rule(owner=owners, prompt=prompts, ttl_s=st.sampled_from((1.0, 30.0)))
    def retain(self, owner: str, prompt: Prompt, ttl_s: float) -> None:
        answer = self.cache.state.retain(owner, prompt.query(), ttl_s)
        assert 0 <= answer.present_tokens <= answer.num_tokens <= prompt.num_tokens
        assert bool(answer.number) == bool(answer.num_tokens)
        if answer.number:
            self.retained.append((owner, answer.number))

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def end_retain(self, data: st.DataObject) -> None:
        self.cache.state.release(*data.draw(st.sampled_from(self.retained)))

    @rule(prompt=prompts, first_chunk=st.integers(0, 12))
    def demote(self, prompt: Prompt, first_chunk: int) -> None:
        self.cache.state.demote(prompt.query(), first_chunk)

    @rule(namespace=st.sampled_from((None, SPACE.digest)))
    def clear(self, namespace: bytes | None) -> None:
        self.cache.state.clear(namespace)
        finish_chores(self.cache.state)

    @rule(seconds=st.sampled_from((0.5, 5.0, 20.0)))
    def time_passes(self, seconds: float) -> None:
        self.cache.now_s += seconds

    @rule(owner=owners)
    def leave(self, owner: str) -> None:
        self.cache.state.release_owner(owner)

    @rule(prompts=st.integers(1, 8))
    def press(self, prompts: int) -> None:
        press(self.cache, prompts)

    @invariant()
    def retained_chunks_are_here_until_their_deadline(self) -> None:
        if not hasattr(self, "cache"):
            return
        kept, ram = self.cache.state._retains, self.cache.state.ram
        kept.expire()
        for entry in kept.kept():
            assert entry.pins
            assert ram.find(entry.key) is entry
        prompts = kept._retains()
        assert all(self.cache.now_s < prompt.due_s for prompt in prompts)
        names = {name for prompt in prompts for name in prompt.names}
        assert_books_of_kept_agree(kept._kept, names, ram.capacity_bytes // 4)
        assert_counters_reconcile(self.cache.state)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for owner in ("a", "b"):
                self.cache.state.release_owner(owner)
            finish_chores(self.cache.state)
            assert self.cache.state.status()["pinned_chunks"] == 0


def test_no_order_of_events_loses_a_pin() -> None:
    run_state_machine_as_test(
        AnyOrder, settings=settings(max_examples=12, stateful_step_count=25, deadline=None)
    )
