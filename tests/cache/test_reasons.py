"""Each way in which a hit ends has its word, its tokens are counted under it, and each hit says
where its KV came from.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvhold.cache import LocalCache
from kvhold.cache.index.eviction_history import EvictionHistory
from kvhold.core.api import Hit
from kvhold.core.errors import TierError
from kvhold.core.keys import NAME_BYTES, Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.planning import ComputeCost
from kvhold.core.reasons import CLEARED, EVICTED, NEVER_STORED, REASONS, TIER_DOWN, Reason
from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import PLAIN, a_prompt, flood, store
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.ghosts import MOST_KINDS, queue_of
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    at_rest,
    cache_over,
    eventually,
    forget,
    has_arrived,
    set_deadlines,
)
from tests.cache.laws import assert_counters_reconcile
from tests.tiers.learnt import Clock, teach
from tests.tiers.memory import Place, a_place

SOON_S = 0.03  # a deadline that is to pass
BELOW = "plugin"
FULL = SPACE.prompt(np.arange(16 * 16 * 42))  # fills the arena: 42 chunks in each of 16 slabs


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with cache_over() as cache:
        yield cache
        assert_counters_reconcile(cache._state)


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


@pytest.fixture
def above(place: Place) -> Iterator[LocalCache]:
    """A cache over the place."""
    with cache_over(place.url()) as cache:
        yield cache
        place.let_go("probe", "get")
        eventually(lambda: at_rest(cache))
        with cache._lock:
            assert_counters_reconcile(cache._state)


def missed(cache: LocalCache, reason: str | None) -> float:
    return cache.status()["counters"].get(f"kvhold_missed_tokens{{reason={reason}}}", 0)


def ended(
    cache: LocalCache, space: Namespace, num_tokens: int, *, wait_s: float | None = None
) -> tuple[int, Reason | None]:
    """How far the hit of a prompt goes, and why; what it misses is counted under that."""
    prompt = a_prompt(space, num_tokens)
    with cache.lookup(prompt.query(), wait_s=wait_s) as hit:
        hit.settle()
        counted = missed(cache, hit.reason)
        answer = (hit.num_tokens, hit.reason)
    assert counted >= num_tokens - answer[0]
    assert (counted > 0) == (num_tokens > answer[0])
    return answer


def sources(cache: LocalCache, space: Namespace, num_tokens: int) -> dict[str, int]:
    with cache.lookup(a_prompt(space, num_tokens).query()) as hit:
        assert sum(hit.sources.values()) == hit.num_tokens
        return hit.sources


def why(cache: LocalCache, prompt: Prompt) -> str:
    """What is explained of the end of a hit."""
    cost = ComputeCost("why", prompt.num_tokens)
    with cache.lookup(prompt.query(), cost=cost, wait_s=PATIENT_S) as hit:
        hit.settle()
    return cache.explain("why")[0].missing


@contextmanager
def a_full_cache_that_has_learnt(*tiers: str) -> Iterator[tuple[LocalCache, Clock]]:
    """Memory has a prompt that comes back. Another was looked up, and is missing."""
    with cache_over(*tiers, policy="learned") as cache:
        policy = LearnedPolicy(clock := Clock())
        cache._state.ram._policy = policy
        cache._state._evictions._clock = clock
        other = a_prompt(SPACE, 32, seed=2)
        cache.lookup(FULL.query()).close()
        store(cache, FULL)
        for prompt in (FULL, other):
            cache.lookup(prompt.query()).close()
        assert cache.status()["chunks"] == 16 * 42
        back = policy._chunks.get(FULL.chunk_key(0))
        gone = policy.ghosts.find(other.chunk_key(0)[:NAME_BYTES])
        assert back is not None
        assert gone
        teach(policy, clock, back=back.queue % MOST_KINDS, gone=queue_of(gone) % MOST_KINDS)
        cache.lookup(FULL.query()).close()
        yield cache, clock
        assert_counters_reconcile(cache._state)


class TestInMemory:
    def test_nothing_is_missing(self, cache: LocalCache) -> None:
        store(cache, a_prompt(SPACE, 40))
        assert ended(cache, SPACE, 40) == (40, "whole")
        assert sources(cache, SPACE, 40) == {"ram": 40}

    def test_it_was_never_stored(self, cache: LocalCache) -> None:
        assert ended(cache, SPACE, 40) == (0, "never_stored")
        store(cache, a_prompt(SPACE, 40))
        assert ended(cache, SPACE, 64) == (32, "never_stored")
        assert ended(cache, SPACE, 33) == (32, "never_stored"), "a tail of another length"

    def test_a_group_or_a_shard_is_missing(self, cache: LocalCache) -> None:
        sharded = Namespace(model="model", layout=PLAIN, shards=2)
        store(cache, a_prompt(sharded, 32), 1)
        assert ended(cache, sharded, 32) == (0, "incomplete")
        full = np.array([[True] * 4, [False, True, True, True], [True] * 4])
        store(cache, a_prompt(HYBRID_SPACE, 64), groups=full)
        assert ended(cache, HYBRID_SPACE, 16) == (0, "incomplete")
        assert ended(cache, HYBRID_SPACE, 32) == (0, "incomplete"), "the window looks back at it"
        assert ended(cache, HYBRID_SPACE, 80) == (64, "never_stored")

    def test_what_no_longer_hit_would_need_is_not_the_reason(self, cache: LocalCache) -> None:
        shape: dict[str, Any] = {
            "layers": 1,
            "planes": 1,
            "heads": 1,
            "head_dim": 8,
            "dtype": "int8",
        }
        wide, narrow = (Group(**shape, attention="sliding", window=window) for window in (64, 8))
        space = Namespace("model", Layout((Group(**shape), wide, narrow), tokens_per_chunk=16))
        cache.register(space)
        store(
            cache,
            a_prompt(space, 64),
            groups=np.array([[True] * 4, [True] * 4, [False, False, False, True]]),
        )
        assert ended(cache, space, 80) == (64, "never_stored")

    def test_it_was_evicted(self, cache: LocalCache) -> None:
        store(cache, a_prompt(SPACE, 32))
        flood(cache, SPACE)
        assert ended(cache, SPACE, 32) == (0, "evicted")
        store(cache, a_prompt(SPACE, 32))
        assert ended(cache, SPACE, 32) == (32, "whole")

    def test_it_was_cleared(self, cache: LocalCache) -> None:
        store(cache, a_prompt(SPACE, 32))
        cache.clear()
        assert ended(cache, SPACE, 32) == (0, "cleared")

    def test_it_has_expired(self, cache: LocalCache) -> None:
        with cache.reserve(
            PLAIN, a_prompt(SPACE, 32).chunks(), store_options=StoreOptions(ttl_s=50)
        ) as reservation:
            reservation.commit()
        assert ended(cache, SPACE, 32) == (32, "whole")
        cache._state.ram._clock = lambda: 1e12
        assert ended(cache, SPACE, 32) == (0, "expired")
        assert ended(cache, SPACE, 32) == (0, "expired"), "and that is remembered"

    def test_somebody_is_writing_it(self, cache: LocalCache) -> None:
        store(cache, a_prompt(SPACE, 16))
        with cache.reserve(PLAIN, a_prompt(SPACE, 48).chunks()):
            assert ended(cache, SPACE, 48) == (16, "being_written")
        assert ended(cache, SPACE, 48) == (16, "never_stored"), "it was given up"

    def test_there_was_no_room_to_store_it(self, cache: LocalCache) -> None:
        chunks = 2 * cache.status()["arena_bytes"] // PLAIN.chunk_bytes(0, 16)
        with cache.reserve(PLAIN, SPACE.prompt(np.arange(16 * chunks)).chunks()):
            store(cache, a_prompt(SPACE, 32))
            assert ended(cache, SPACE, 32) == (0, "no_room")

    def test_it_was_not_worth_its_room(self) -> None:
        with a_full_cache_that_has_learnt() as (cache, _):
            prompt = a_prompt(SPACE, 32, seed=2)
            store(cache, prompt)
            with cache.lookup(prompt.query()) as hit:
                assert (hit.num_tokens, hit.reason) == (0, "declined")
            assert missed(cache, "declined") == 32
            counters = cache.status()["counters"]
            assert counters["kvhold_store_skipped_chunks{reason=declined}"] == 1
            assert "kvhold_store_skipped_chunks{reason=no room}" not in counters
            with cache.lookup(FULL.query()):  # all is pinned
                store(cache, prompt)
            assert cache.status()["counters"]["kvhold_store_skipped_chunks{reason=no room}"] == 1
            with cache.lookup(prompt.query()) as hit:
                assert (hit.num_tokens, hit.reason) == (0, "no_room")

    def test_nothing_is_declined_above_a_tier(self) -> None:
        with a_full_cache_that_has_learnt("null://") as (cache, _):
            cache.flush()
            prompt = a_prompt(SPACE, 32, seed=2)
            store(cache, prompt)
            assert "kvhold_store_skipped_chunks{reason=declined}" not in cache.status()["counters"]
            with cache.lookup(prompt.query()) as hit:
                assert hit.num_tokens == 32

    def test_it_is_explained_when_it_went_and_when_it_was_expected_back(self) -> None:
        with a_full_cache_that_has_learnt() as (cache, clock):
            for prompt in (a_prompt(SPACE, 32, seed=2), a_prompt(SPACE, 32, seed=3)):
                store(cache, prompt)  # the first is declined; the second was never looked up
            clock.now_s += 600.0
            assert why(cache, a_prompt(SPACE, 32, seed=2)) == (
                "the next chunk was not worth its room 10 min ago"
            )
            said = why(cache, FULL)
            assert re.fullmatch(
                r"the next chunk was evicted 10 min ago; it was expected back \d+ s after that",
                said,
            )
            clock.now_s += 60.0
            assert why(cache, FULL) == "the next chunk was evicted 11 min ago", "it was asked for"
            assert why(cache, a_prompt(SPACE, 32, seed=3)) == ""
            assert why(cache, a_prompt(SPACE, 32, seed=4)) == REASONS[NEVER_STORED]

    def test_removal_reasons_are_forgotten_in_the_end_and_memory_is_bounded(self) -> None:
        history = EvictionHistory(limit=10)
        for number in range(35):
            history.add(bytes([number]), EVICTED)
            assert len(history) <= 20
            assert all(
                history.why(bytes([recent])) == "evicted"
                for recent in range(max(0, number - 9), number + 1)
            )
        history.add(bytes([34]), CLEARED)
        assert (history.why(bytes([0])), history.why(bytes([34]))) == (None, "cleared")


class TestBelow:
    def test_where_it_came_from(self, above: LocalCache) -> None:
        store(above, a_prompt(SPACE, 72))
        forget(above)
        assert sources(above, SPACE, 32) == {BELOW: 32}
        assert sources(above, SPACE, 72) == {"ram": 32, BELOW: 40}
        assert sources(above, SPACE, 72) == {"ram": 72}
        counters = above.status()["counters"]
        assert counters["kvhold_hit_tokens{source=ram}"] == 32 + 72
        assert counters[f"kvhold_hit_tokens{{source={BELOW}}}"] == 32 + 40
        assert counters["kvhold_lookup_tokens"] == 32 + 72 + 72

    @pytest.mark.parametrize(
        ("group", "from_below"),
        [(0, {BELOW: 64}), (1, {"ram": 32, BELOW: 32}), (2, {"ram": 48, BELOW: 16})],
        ids=["of full attention all", "of sliding attention the window", "of a state the end"],
    )
    def test_of_a_chunk_of_several_groups_the_slowest_counts(
        self, above: LocalCache, group: int, from_below: dict[str, int]
    ) -> None:
        prompt = a_prompt(HYBRID_SPACE, 64)
        store(above, prompt)
        forget(above)
        store(above, prompt, groups=np.array([[other != group] * 4 for other in range(3)]))
        assert sources(above, HYBRID_SPACE, 64) == from_below

    def test_whoever_asks_has_it_already(self, above: LocalCache) -> None:
        prompt = a_prompt(SPACE, 64)
        store(above, prompt)
        forget(above)
        with above.lookup(prompt.query(), have_tokens=64) as hit:
            assert (hit.num_tokens, hit.reason) == (0, "not_needed")
        assert missed(above, "not_needed") == 64
        with above.lookup(prompt.query(), have_tokens=63) as hit:
            assert (hit.num_tokens, hit.reason) == (64, "whole")

    def test_a_prefetch_is_no_lookup(self, above: LocalCache) -> None:
        store(above, a_prompt(SPACE, 32))
        forget(above)
        above.prefetch(a_prompt(SPACE, 32).query())
        eventually(lambda: above.status()["chunks"] == 2 and at_rest(above))
        assert "kvhold_lookup_tokens" not in above.status()["counters"]
        assert sources(above, SPACE, 32) == {"ram": 32}

    @pytest.mark.parametrize("operation", ["probe", "get"])
    def test_a_tier_fails(self, place: Place, above: LocalCache, operation: str) -> None:
        store(above, a_prompt(SPACE, 32))
        forget(above)
        place.faults[operation] = TierError("memory", operation, "a test")
        assert ended(above, SPACE, 32) == (0, "tier_down")

    def test_one_value_cannot_be_read(self, place: Place, above: LocalCache) -> None:
        prompt = a_prompt(SPACE, 32)
        store(above, prompt)
        forget(above)
        place.unreadable.add(prompt.chunk_key(1))
        assert ended(above, SPACE, 32) == (16, "tier_down")

    @pytest.mark.parametrize("operation", ["probe", "get"])
    def test_it_does_not_come_in_time(
        self, place: Place, above: LocalCache, operation: str
    ) -> None:
        store(above, a_prompt(SPACE, 32))
        forget(above)
        place.hold(operation)
        assert ended(above, SPACE, 32, wait_s=0) == (0, "deadline")

    def test_its_asker_goes_before_it_comes(self, place: Place, above: LocalCache) -> None:
        store(above, a_prompt(SPACE, 32))
        forget(above)
        place.hold("get")
        hit: Hit = above.lookup(a_prompt(SPACE, 32).query(), wait_s=0)
        assert (hit.arriving, hit.reason, hit.sources) == (True, None, {})
        hit.close()
        assert missed(above, "deadline") == 32

    def test_the_tier_does_not_answer_in_its_own_time(
        self, place: Place, above: LocalCache
    ) -> None:
        store(above, a_prompt(SPACE, 32))
        forget(above)
        place.deaf = True
        place.hold("get")
        set_deadlines(above, get_timeout_s=SOON_S)
        assert ended(above, SPACE, 32) == (0, "deadline")
        assert ended(above, SPACE, 32) == (0, "deadline"), "the read of before hangs on"

    def test_its_bytes_are_wrong(self, place: Place, above: LocalCache) -> None:
        prompt = a_prompt(SPACE, 48)
        store(above, prompt)
        forget(above)
        key = prompt.chunk_key(1)
        place.values[key] = place.values[key][:-1] + bytes([place.values[key][-1] ^ 1])
        assert ended(above, SPACE, 48) == (16, "bad_frame")
        assert ended(above, SPACE, 48) == (16, "bad_frame"), (
            "it was removed, and that is remembered"
        )

    def test_the_tier_has_dropped_it_meanwhile(self, place: Place, above: LocalCache) -> None:
        prompt = a_prompt(SPACE, 32)
        store(above, prompt)
        forget(above)
        place.hold("get")
        with above.lookup(prompt.query(), wait_s=0) as hit:
            place.wait_for("get")
            del place.values[prompt.chunk_key(1)]
            place.let_go("get")
            eventually(lambda: has_arrived(hit))
            assert (hit.num_tokens, hit.reason, hit.sources) == (16, "evicted", {BELOW: 16})

    def test_there_is_no_room_to_bring_it_up(self, above: LocalCache) -> None:
        store(above, a_prompt(SPACE, 32))
        forget(above)
        chunks = 2 * above.status()["arena_bytes"] // PLAIN.chunk_bytes(0, 16)
        with above.reserve(PLAIN, SPACE.prompt(np.arange(16 * chunks)).chunks()):
            assert ended(above, SPACE, 32, wait_s=PATIENT_S) == (0, "no_room")

    def test_a_group_is_missing_below(self, place: Place, above: LocalCache) -> None:
        store(
            above,
            a_prompt(HYBRID_SPACE, 32),
            groups=np.array([[True] * 2, [False] * 2, [True] * 2]),
        )
        forget(above)
        assert ended(above, HYBRID_SPACE, 32) == (0, "incomplete")

    def test_a_group_is_missing_below_and_in_memory(self, above: LocalCache) -> None:
        store(above, a_prompt(HYBRID_SPACE, 32))
        store(
            above,
            a_prompt(HYBRID_SPACE, 48),
            groups=np.array([[True] * 3, [True] * 3, [False] * 3]),
        )
        assert ended(above, HYBRID_SPACE, 48) == (32, "incomplete")

    def test_it_has_expired_below(self, place: Place, above: LocalCache) -> None:
        with above.reserve(
            PLAIN, a_prompt(SPACE, 32).chunks(), store_options=StoreOptions(ttl_s=50)
        ) as reservation:
            reservation.commit()
        forget(above)
        above._state.ram._clock = lambda: 1e12
        assert ended(above, SPACE, 32) == (0, "expired")

    def test_it_is_explained_what_no_tier_has(self, place: Place, above: LocalCache) -> None:
        prompt = a_prompt(SPACE, 48)
        store(above, prompt)
        forget(above)
        assert why(above, prompt) == ""
        forget(above)
        del place.values[prompt.chunk_key(1)]
        above._state._evictions.add(prompt.chunk_key(1), EVICTED)
        now_s = above._state._evictions._clock()
        above._state._evictions._clock = lambda: now_s + 3 * 3600.0
        assert why(above, prompt) == "the next chunk was evicted 3 h ago"
        place.faults["probe"] = TierError("memory", "probe", "a test")
        assert why(above, prompt) == REASONS[TIER_DOWN]

    def test_it_is_being_cleared(self, place: Place, above: LocalCache) -> None:
        store(above, a_prompt(SPACE, 32))
        assert above.flush()
        place.hold("scan")
        above.clear(deadline_s=0.01)
        assert ended(above, SPACE, 32) == (0, "cleared")
        place.let_go("scan")

    def test_bytes_that_move_are_counted_as_tiers_see_them(
        self, place: Place, above: LocalCache
    ) -> None:
        for seed in range(3):
            store(above, a_prompt(SPACE, 72, seed))
        forget(above)
        nbytes = sum(map(len, place.values.values()))
        for seed in range(3):
            with above.lookup(a_prompt(SPACE, 72, seed).query()) as hit:
                assert hit.sources == {BELOW: 72}
        counters = above.status()["tier_counters"]
        assert counters[f"kvhold_tier_bytes{{tier={BELOW},operation=put}}"] == nbytes
        assert counters[f"kvhold_tier_bytes{{tier={BELOW},operation=get}}"] == nbytes
        promoted = sum(PLAIN.chunk_bytes(0, n) for n in (16, 16, 16, 16, 8)) * 3
        assert (
            above.status()["counters"]["kvhold_promoted_bytes"]
            == promoted
            == above.status()["counters"]["kvhold_stored_bytes"]
        )
