"""Prompts that are handed over stay in memory until another engine has read them, or until their
deadline.
"""

import math
from dataclasses import dataclass

import pytest

from kvhold.cache import handover_pins
from kvhold.cache.chores import Turns, finish
from kvhold.core.api import Found
from kvhold.core.keys import Namespace, Prompt, make_key
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from tests.cache.computing import FULL, HYBRID, PLAIN, SPACE, TEXT, Cache, cache_of
from tests.cache.laws import assert_counters_reconcile, finish_chores

PROMPT = SPACE.prompt(TEXT)
CHUNKS = 11  # with the tail
SLOTS = 60
SHARE = SLOTS // 4
KEEP_S = 30.0
AWAITS = ComputeIntent(
    ComputeCost("request", len(TEXT)), waits=False, announces=False, handover=HandoverWait(60.0)
)


def keeps(keep_s: float = KEEP_S, request: str = "request") -> ComputeIntent:
    return ComputeIntent(ComputeCost(request, len(TEXT)), waits=False, keep_s=keep_s)


@dataclass
class Pressed:
    """A small memory, and other prompts that need all of it."""

    cache: Cache
    pressed: int = 0

    def hand_over(
        self, prompt: Prompt = PROMPT, *, owner: str = "a", keep_s: float = KEEP_S
    ) -> None:
        self.cache.lookup(owner, prompt, keeps(keep_s))
        self.cache.store(owner, prompt)

    def press(self, prompts: int = 2 * SLOTS // 10) -> None:
        for _ in range(prompts):
            self.pressed += 1
            self.cache.store("other", SPACE.prompt([self.pressed] * 40))

    def is_here(self, prompt: Prompt = PROMPT) -> bool:
        found = self.cache.lookup(
            "probe", prompt, ComputeIntent(ComputeCost("", 1), announces=False)
        )
        self.cache.state.release("probe", found.ticket)
        return found.num_tokens == prompt.num_tokens

    @property
    def num_kept(self) -> int:
        return self.cache.state.status()["handover_chunks"]

    def counted(self, name: str) -> dict[str, float]:
        samples = self.cache.state.metrics.samples()
        return {one.labels[0]: one.value for one in samples if one.metric.name == name}

    @property
    def ends(self) -> dict[str, float]:
        return self.counted("kvhold_handovers")

    def assert_free(self) -> None:
        """All can be evicted."""
        finish_chores(self.cache.state)
        status = self.cache.state.status()
        assert status["handover_chunks"] == status["pinned_chunks"] == 0
        self.press()
        assert not self.is_here()
        assert_counters_reconcile(self.cache.state)


def pressed_of(slots: int = SLOTS, quota_slots: int = 0) -> Pressed:
    return Pressed(cache_of(PLAIN, HYBRID, slots=slots, quota_slots=quota_slots))


@pytest.fixture
def memory() -> Pressed:
    return pressed_of()


@pytest.mark.parametrize("keep_s", [0.0, math.nan, KEEP_S])
def test_only_what_is_handed_over_survives_others(memory: Pressed, keep_s: float) -> None:
    memory.hand_over(keep_s=keep_s)
    memory.press()
    assert memory.is_here() == (keep_s > 0)
    assert memory.num_kept == (CHUNKS if keep_s > 0 else 0)
    assert memory.ends == {}


def test_chunks_that_are_there_before_are_kept_too(memory: Pressed) -> None:
    memory.cache.store("a", PROMPT, last=4)
    memory.hand_over()
    assert memory.num_kept == CHUNKS
    other = SPACE.prompt(TEXT[:24])
    memory.cache.store("a", other)
    memory.cache.lookup("a", other, keeps(request="other"))
    memory.press()
    assert memory.is_here()
    assert memory.is_here(other)


def test_chunks_of_all_groups_and_shards_are_kept() -> None:
    memory = pressed_of(400)
    prompt = Namespace("hybrid", HYBRID, shards=2).prompt(TEXT[:40])
    memory.cache.lookup("a", prompt, keeps())
    for shard in range(2):
        memory.cache.store("a", prompt, shard=shard)
    assert memory.num_kept == 10 * 2 * 2


def test_a_prompt_of_less_than_a_chunk_is_kept_until_it_is_read() -> None:
    pressed, prompt = pressed_of(), SPACE.prompt(TEXT[:3])
    pressed.hand_over(prompt)
    pressed.press()
    assert pressed.is_here(prompt)
    assert pressed.num_kept == 1
    pressed.cache.lookup("b", prompt, AWAITS)
    assert pressed.ends == {"read": 1}
    assert pressed.num_kept == 0


class TestDeadline:
    def test_after_it_they_are_cache_like_any_other(self, memory: Pressed) -> None:
        memory.hand_over()
        memory.cache.now_s += KEEP_S - 0.1
        memory.press()
        assert memory.is_here()
        memory.cache.now_s += 0.1
        memory.press()
        assert not memory.is_here()
        assert memory.ends == {"deadline": 1}
        memory.assert_free()

    def test_it_counts_from_the_last_stored_chunk(self, memory: Pressed) -> None:
        memory.cache.lookup("a", PROMPT, keeps())
        for chunk in range(10):
            memory.cache.now_s += KEEP_S - 1
            memory.cache.store("a", PROMPT, first=chunk, last=chunk + 1)
            memory.press()
        assert memory.num_kept == 10
        memory.cache.now_s += KEEP_S
        assert memory.num_kept == 0

    def test_each_prompt_has_its_own(self, memory: Pressed) -> None:
        memory.hand_over()
        begins_alike = SPACE.prompt([*TEXT[:8], *TEXT[:8]])
        memory.cache.lookup("a", begins_alike, keeps(request="longer", keep_s=2 * KEEP_S))
        memory.cache.store("a", begins_alike)
        assert memory.num_kept == CHUNKS + 2
        memory.cache.now_s += KEEP_S
        assert memory.num_kept == 4
        memory.press()
        assert memory.is_here(begins_alike)
        assert not memory.is_here()


class TestReading:
    def test_the_hit_holds_them_from_then_on(self, memory: Pressed) -> None:
        memory.hand_over()
        hit = memory.cache.lookup("b", PROMPT, AWAITS)
        assert hit.num_tokens == len(TEXT)
        assert memory.num_kept == 0
        memory.press()
        assert memory.is_here()
        memory.cache.state.release("b", hit.ticket)
        assert memory.ends == {"read": 1}
        memory.assert_free()

    def test_a_lookup_that_waits_reads_when_all_is_there(self, memory: Pressed) -> None:
        memory.cache.lookup("a", PROMPT, keeps())
        waiting = memory.cache.lookup("b", PROMPT, AWAITS)
        assert waiting.waits
        memory.cache.store("a", PROMPT)
        assert memory.num_kept == CHUNKS
        hit = memory.cache.asked_again(waiting)
        assert (hit.num_tokens, memory.num_kept) == (len(TEXT), 0)
        memory.cache.state.release("b", hit.ticket)
        memory.assert_free()

    def test_an_ordinary_lookup_does_not_count(self, memory: Pressed) -> None:
        memory.hand_over()
        assert memory.is_here()
        memory.press()
        assert memory.num_kept == CHUNKS

    def test_of_two_alike_one_is_left(self, memory: Pressed) -> None:
        for owner in ("a", "c"):
            memory.hand_over(owner=owner)
        for left in (CHUNKS, 0):
            hit = memory.cache.lookup("b", PROMPT, AWAITS)
            memory.cache.state.release("b", hit.ticket)
            assert memory.num_kept == left

    def test_the_longest_prompt_is_read(self, memory: Pressed) -> None:
        start = SPACE.prompt(TEXT[:20])
        memory.cache.lookup("a", start, keeps(request="start"))
        memory.hand_over()
        memory.cache.lookup("b", PROMPT, AWAITS)
        assert memory.num_kept == 5
        memory.cache.lookup("b", SPACE.prompt(TEXT[:16]), AWAITS)
        assert memory.num_kept == 5, "a shorter prompt does not read it"
        memory.cache.lookup("b", start, AWAITS)
        assert memory.ends == {"read": 2}

    def test_another_host_has_read_it_with_the_last_chunk(self, memory: Pressed) -> None:
        memory.hand_over()
        state, keys = memory.cache.state, [PROMPT.chunk_key(chunk) for chunk in range(10)]
        sent = [*state.hold_for_peer(keys[:9]), *state.hold_for_peer(keys[:9])]
        assert memory.num_kept == CHUNKS
        sent += state.hold_for_peer(keys[9:])
        assert memory.ends == {"read": 1}
        state.ram.unpin_all([one[0] for one in sent if one is not None])
        memory.assert_free()

    def test_another_host_needs_all_shards_of_groups_with_full_attention(self) -> None:
        memory = pressed_of(400)
        prompt = Namespace("hybrid", HYBRID, shards=2).prompt(TEXT[:40])
        memory.cache.lookup("a", prompt, keeps())
        for shard in range(2):
            memory.cache.store("a", prompt, shard=shard)
        for shard, group in ((0, 0), (0, 1), (1, 1), (1, 0)):
            assert memory.ends == {}
            key = make_key(prompt.namespace.digest, prompt.hash_at(9), group, shard)
            [held] = memory.cache.state.hold_for_peer([key])
            assert held is not None
            memory.cache.state.ram.unpin(held[0])
        assert memory.ends == {"read": 1}

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_reader_that_leaves_lets_go(self, memory: Pressed, waits: bool) -> None:
        memory.cache.lookup("a", PROMPT, keeps())
        if not waits:
            memory.cache.store("a", PROMPT)
        assert memory.cache.lookup("b", PROMPT, AWAITS).waits == waits
        memory.cache.store("a", PROMPT)
        memory.cache.state.release_owner("b")
        assert memory.ends == {"read": 1}
        memory.assert_free()


class TestShare:
    def test_a_quarter_of_memory_is_kept_at_most(self, memory: Pressed) -> None:
        longer = SPACE.prompt(range(80))
        memory.hand_over(longer)
        assert memory.num_kept == SHARE
        assert memory.counted("kvhold_handover_skipped_chunks") == {"no share": 20 - SHARE}
        memory.press()
        assert memory.is_here(SPACE.prompt(range(4 * SHARE)))
        assert not memory.is_here(longer)
        assert memory.pressed
        assert memory.is_here(SPACE.prompt([memory.pressed] * 40)), "others have room"

    def test_what_is_given_back_can_be_used_again(self, memory: Pressed) -> None:
        memory.hand_over(SPACE.prompt(range(80)))
        memory.cache.now_s += KEEP_S
        memory.hand_over()
        assert memory.num_kept == CHUNKS

    def test_a_quarter_of_a_quota(self) -> None:
        memory = pressed_of(200, quota_slots=20)
        memory.hand_over()
        assert memory.num_kept == 5
        memory.press()
        assert memory.is_here(SPACE.prompt(TEXT[:20]))
        assert memory.is_here(SPACE.prompt([memory.pressed] * 40))

    @pytest.mark.parametrize("name", ["_MOST_KEYS", "_MOST_CHUNKS"])
    def test_a_long_prompt_is_kept_in_part(
        self, memory: Pressed, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover_pins, name, 3)
        memory.hand_over()
        assert memory.num_kept == 3
        assert memory.counted("kvhold_handover_skipped_chunks") == {"too many": 7}
        memory.cache.lookup("b", PROMPT, AWAITS)
        assert memory.ends == {"read": 1}

    def test_an_engine_has_a_number_of_prompts(
        self, memory: Pressed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover_pins, "_MOST_PROMPTS", 2)
        for number in range(3):
            prompt = SPACE.prompt([number] * 8)
            memory.cache.lookup("a", prompt, keeps(request=f"{number}"))
            memory.cache.store("a", prompt)
        assert memory.num_kept == 4
        assert memory.counted("kvhold_handover_skipped_chunks") == {"too many": 2}
        memory.hand_over(SPACE.prompt(range(8)), owner="c")
        assert memory.num_kept == 6


class TestSteps:
    """A long prompt is kept in steps, between which its owner and others act."""

    LONG = SPACE.prompt(list(range(4 * 900)))

    def begun(self, memory: Pressed) -> Turns[Found]:
        memory.cache.store("a", self.LONG)
        return memory.cache.state.lookup_turns("a", self.LONG.query(), intent=keeps())

    def test_no_step_is_long(self) -> None:
        memory = pressed_of(4_000)
        turns, steps = self.begun(memory), 0
        for units in turns:
            assert units <= 900 // 2
            steps += memory.num_kept < 900
        assert steps > 10
        assert memory.num_kept == 900

    @pytest.mark.parametrize("how", ["owner left", "cleared", "repeated"])
    def test_a_prompt_that_ends_between_two_keeps_nothing(self, how: str) -> None:
        memory = pressed_of(4_000)
        turns = self.begun(memory)
        for _ in range(5):
            next(turns)
        assert 0 < memory.num_kept < 900
        if how == "owner left":
            memory.cache.state.release_owner("a")
        elif how == "cleared":
            memory.cache.state.clear(None)
        else:
            memory.cache.lookup("a", SPACE.prompt(TEXT[:8]), keeps())
        assert memory.num_kept == (2 if how == "repeated" else 0)
        next(turns)
        turns.close()
        assert memory.num_kept == (2 if how == "repeated" else 0)
        assert memory.ends == {how: 1}

    def test_others_may_take_the_share(self) -> None:
        memory = pressed_of(4_000)
        turns = self.begun(memory)
        next(turns)
        other = SPACE.prompt(list(range(7, 7 + 4 * 400)))
        memory.hand_over(other, owner="b")
        finish(turns)
        assert memory.num_kept == 1_000
        assert memory.counted("kvhold_handover_skipped_chunks") == {"no share": 300}


class TestEnds:
    @pytest.mark.parametrize("namespace", [None, SPACE.digest])
    def test_a_clear_frees_their_memory(self, memory: Pressed, namespace: bytes | None) -> None:
        memory.hand_over()
        memory.cache.state.clear(namespace)
        finish_chores(memory.cache.state)
        assert memory.cache.state.status()["used_bytes"] == 0
        assert memory.ends == {"cleared": 1}
        memory.cache.store("a", PROMPT)
        assert memory.num_kept == 0, "stored since"

    def test_a_clear_of_another_namespace_changes_nothing(self, memory: Pressed) -> None:
        memory.hand_over()
        memory.cache.state.clear(Namespace("another model", PLAIN).digest)
        assert memory.num_kept == CHUNKS

    @pytest.mark.parametrize("is_stopped", [True, False])
    def test_an_engine_that_leaves(self, memory: Pressed, is_stopped: bool) -> None:
        memory.hand_over()
        memory.hand_over(SPACE.prompt(range(16)), owner="c")
        if is_stopped:
            memory.cache.state.give_up("a")
        else:
            memory.cache.state.release_owner("a")
        assert memory.num_kept == 4
        assert memory.ends == {"owner left": 1}
        memory.cache.state.release_owner("c")
        memory.assert_free()

    def test_a_request_that_is_looked_up_again_is_one_prompt(self, memory: Pressed) -> None:
        for _ in range(3):
            memory.hand_over()
        assert memory.num_kept == CHUNKS
        assert memory.ends == {"repeated": 2}
        memory.cache.lookup("b", PROMPT, AWAITS)
        assert memory.num_kept == 0

    def test_the_memory_of_a_damaged_chunk_is_freed(self, memory: Pressed) -> None:
        memory.hand_over()
        state = memory.cache.state
        used_bytes = state.ram.used_bytes
        entry = state.ram.find(PROMPT.chunk_key(3))
        assert entry is not None
        state.remove_damaged([entry], "scrubber")
        assert used_bytes - state.ram.used_bytes == entry.taken_bytes == FULL.head_dim * 4
        assert memory.num_kept == CHUNKS - 1
        memory.cache.store("a", PROMPT)
        assert memory.num_kept == CHUNKS, "stored again"
