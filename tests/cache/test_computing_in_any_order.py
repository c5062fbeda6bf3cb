"""Engines that announce chunks and wait for each other's, as a state machine."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvhold.cache.computing import AnnouncementWait, Wait
from kvhold.core.api import Found
from kvhold.core.keys import Prompt
from kvhold.core.planning import ComputeIntent, HandoverWait
from kvhold.core.reasons import WHOLE
from tests.cache.computing import LATE, NOTHING, PLAIN, SPACE, STEP, TEXT, cache_of, intent_of
from tests.cache.keeping import assert_books_of_kept_agree
from tests.cache.laws import assert_counters_reconcile, finish_chores


class Engines(RuleBasedStateMachine):
    """Engines look up, compute, store, abandon, hang, leave and ask again in any order."""

    tickets = Bundle("tickets")
    owners = st.sampled_from(("a", "b", "c", "d"))
    prompts = st.tuples(st.sampled_from((0, 1)), st.sampled_from((9, 21, 30, 42)))
    intents = st.sampled_from(
        (
            None,
            {},
            {},
            {"step": STEP},
            {"token_s": 0.0},
            {"token_s": 0.3},
            {"announces": False},
            {"handover": HandoverWait(4.0)},
            {"keep_s": 4.0},
            {"keep_s": 4.0, "announces_tail": True},
            {"handover": HandoverWait(4.0, 1.0), "waits": False, "announces": False},
        )
    )

    @initialize(target=tickets)
    def begin(self) -> MultipleResults[Found]:
        self.cache = cache_of(PLAIN, slots=60)
        self.began_s: dict[int, float] = {}
        self.asked: dict[int, tuple[str, Prompt, ComputeIntent]] = {}
        return multiple()

    @rule(
        target=tickets,
        owner=owners,
        prompt=prompts,
        changes=intents,
    )
    def lookup(
        self, owner: str, prompt: tuple[int, int], changes: dict[str, Any] | None
    ) -> Found | MultipleResults[Found]:
        text, length = prompt
        named = SPACE.prompt((TEXT if text else TEXT[:12] + TEXT)[:length])
        intent = None if changes is None else intent_of(length, **changes)
        found = self.cache.state.lookup(owner, named.query(), intent=intent)
        assert not (found.waits and found.announcement), "a waiting lookup announces nothing"
        if found.waits:
            assert intent is not None
            self.began_s[found.ticket] = self.cache.now_s
            self.asked[found.ticket] = (owner, named, intent)
            return found
        self.final(found, named)
        return multiple()

    def final(self, found: Found, prompt: Prompt) -> None:
        """A hit of chunks that are in memory, or a miss."""
        assert not found.arriving
        for chunk in range(found.num_tokens // 4):
            assert self.cache.state.ram.find(prompt.chunk_key(chunk)) is not None
        assert (found.num_tokens == prompt.num_tokens) == (found.reason == WHOLE)
        if found.ticket:
            self.cache.state.release("", found.ticket)

    @rule(found=tickets, settle=st.booleans())
    def ask_again(self, found: Found, settle: bool) -> None:
        if found.ticket not in self.asked:
            return
        owner, prompt, intent = self.asked[found.ticket]
        again = self.cache.asked_again(found, settle=settle)
        if again.waits:
            assert not settle
            known_s = intent.cost.token_s or 0.3  # the slowest of the others
            waited_s = self.cache.now_s - self.began_s[found.ticket]
            handover_s = intent.handover.timeout_s if intent.handover is not None else 0.0
            others_s = 3 * LATE * prompt.num_tokens * known_s if intent.waits else 0.0
            assert waited_s <= handover_s + others_s, "of two waits"
            return
        self.final(again, prompt)
        self.cache.state.release(owner, found.ticket)
        del self.asked[found.ticket]

    @rule(owner=owners, prompt=prompts, ok=st.booleans(), end=st.integers(1, 10))
    def store(self, owner: str, prompt: tuple[int, int], ok: bool, end: int) -> None:
        text, length = prompt
        named = SPACE.prompt((TEXT if text else TEXT[:12] + TEXT)[:length])
        if ok:
            self.cache.store(owner, named, last=min(end, named.num_whole))
        else:
            reservation = self.cache.reserve(owner, named)
            if reservation:
                self.cache.state.abandon(owner, reservation)

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.0, 5.0)))
    def time_passes(self, seconds: float) -> None:
        self.cache.now_s += seconds

    @rule(owner=owners)
    def leave(self, owner: str) -> None:
        self.cache.state.release_owner(owner)
        self.asked = {number: one for number, one in self.asked.items() if one[0] != owner}

    @rule(found=consumes(tickets))
    def release(self, found: Found) -> None:
        if found.ticket in self.asked:
            self.cache.state.release(self.asked.pop(found.ticket)[0], found.ticket)

    @rule(namespace=st.sampled_from((None, SPACE.digest)))
    def clear(self, namespace: bytes | None) -> None:
        self.cache.state.clear(namespace)
        finish_chores(self.cache.state)  # a full memory takes several steps

    @rule()
    def press(self) -> None:
        """The whole memory is needed."""
        for number in range(6):
            self.cache.store("", SPACE.prompt([number + 1000] * 40))

    @invariant()
    def kept_chunks_are_here_until_their_deadline(self) -> None:
        handovers, ram = self.cache.state._handovers, self.cache.state.ram
        handovers.expire()
        kept = handovers.kept()
        for entry in kept:
            assert entry.pins
            assert ram.find(entry.key) is entry
        prompts = handovers._prompts()
        assert all(self.cache.now_s < prompt.due_s for prompt in prompts)
        names = {name for prompt in prompts for name in prompt.names}
        assert {prompt.last for prompt in prompts} == handovers._by_last.keys()
        assert_books_of_kept_agree(handovers._kept, names, ram.capacity_bytes // 4)

    @invariant()
    def books_agree(self) -> None:
        computing = self.cache.state._computing
        announced = {
            name: announcement
            for held in computing._by_owner.values()
            for announcement in held.values()
            for name in announcement.chunks
        }
        assert announced == computing._by_name
        assert sum(
            len(announcement.chunks)
            for held in computing._by_owner.values()
            for announcement in held.values()
        ) == len(announced), "one announcement a chunk"
        num_expecting = 0
        for search in self.cache.state._searches._searches.values():
            wait = search.wait
            num_expecting += isinstance(wait, AnnouncementWait)
            if isinstance(wait, Wait):
                assert wait.announcement.owner != search.owner
                assert wait in wait.announcement.waits
                assert wait.is_broken or all(
                    announced.get(name) is wait.announcement for name in wait.names
                )
        assert num_expecting == computing._num_expecting
        assert_counters_reconcile(self.cache.state)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for number, (owner, _, _) in self.asked.items():
            self.cache.state.release(owner, number)
        for owner in ("a", "b", "c", "d", ""):
            self.cache.state.release_owner(owner)
        finish_chores(self.cache.state)
        assert self.cache.state.holdings() == NOTHING
        status = self.cache.state.status()
        assert status["announced_chunks"] == status["pinned_chunks"] == 0


def test_no_order_of_events_breaks_a_promise() -> None:
    run_state_machine_as_test(
        Engines, settings=settings(max_examples=50, stateful_step_count=30, deadline=None)
    )
