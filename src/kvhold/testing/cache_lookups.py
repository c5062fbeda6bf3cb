from secrets import token_hex

import pytest
from msgspec.structs import replace

from kvhold.core.api import Cache
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Layout
from kvhold.core.planning import ComputeCost, ComputeIntent
from kvhold.core.reasons import REASONS
from kvhold.testing.cache import (
    HYBRID,
    LAYOUTS,
    PLAIN,
    CacheFixtures,
    a_prompt,
    check,
    fill,
    read,
    registered,
    store,
)


class CacheLookups(CacheFixtures):
    def test_a_prompt_that_was_never_stored_is_a_miss(self, cache: Cache, space: Namespace) -> None:
        with cache.lookup(a_prompt(space, 100).query()) as hit:
            assert (hit.num_tokens, hit.ticket) == (0, 0)
            assert cache.claim(hit.ticket) is None

    def test_an_announcement_ends_with_its_hit_or_with_its_chunks(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 100)
        intent = ComputeIntent(ComputeCost("request", 100, token_s=1.0))

        def announced() -> int:
            return cache.status()["announced_chunks"]

        with cache.lookup(prompt.query(), intent=intent, wait_s=10):
            assert announced() == 6
        assert announced() == 0
        with cache.lookup(prompt.query(), intent=intent, wait_s=10) as hit:
            announcement = hit.take_announcement()
            assert hit.take_announcement() is None
        assert announcement is not None and announced() == 6
        store(cache, prompt)
        assert announced() == 0
        announcement.close()
        with cache.lookup(prompt.query(), intent=intent, wait_s=10) as hit:
            assert hit.num_tokens == 100
            assert hit.take_announcement() is None

    def test_a_prompt_without_tokens_is_a_miss_and_needs_no_room(
        self, cache: Cache, space: Namespace
    ) -> None:
        assert store(cache, a_prompt(space, 0)) == []
        assert read(cache, a_prompt(space, 0)) == 0

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    @pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 92, 96])
    def test_what_was_stored_comes_back_bit_for_bit(
        self, cache: Cache, layout: Layout, num_tokens: int
    ) -> None:
        space = registered(cache, Namespace(model="model", layout=layout))
        prompt = a_prompt(space, num_tokens)
        store(cache, prompt)
        step = layout.tail_tokens or layout.tokens_per_chunk
        assert read(cache, prompt) == num_tokens // step * step

    def test_the_hit_is_the_longest_prefix_that_two_prompts_share(
        self, cache: Cache, space: Namespace
    ) -> None:
        store(cache, a_prompt(space, 80))
        branch = a_prompt(space, 96).tokens.copy()
        branch[50] += 1
        assert read(cache, space.prompt(branch)) == 48
        assert read(cache, a_prompt(space, 72)) == 64

    def test_a_missing_chunk_ends_the_hit(self, cache: Cache, space: Namespace) -> None:
        prompt = a_prompt(space, 80)
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            fill(reservation, PLAIN, prompt.chunks())
            reservation.commit([0, 1, 3, 4])
        assert read(cache, prompt) == 32
        assert store(cache, prompt) == [2]
        assert read(cache, prompt) == 80

    def test_a_store_that_begins_later_in_the_prompt_continues_it(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 90)
        store(cache, a_prompt(space, 32))
        assert store(cache, prompt, first=2) == [0, 1, 2, 3]
        assert read(cache, prompt) == 90

    def test_a_tail_is_found_by_its_own_prompt_and_by_no_longer_one(
        self, cache: Cache, space: Namespace
    ) -> None:
        store(cache, a_prompt(space, 41))
        assert read(cache, a_prompt(space, 41)) == 41
        assert read(cache, a_prompt(space, 42)) == 32
        assert read(cache, a_prompt(space, 40)) == 32

    def test_of_tails_that_end_with_a_block_the_longest_is_found(self, cache: Cache) -> None:
        space = registered(cache, Namespace(model="model", layout=LAYOUTS["tails-in-blocks"]))
        store(cache, a_prompt(space, 16 + 5))
        assert read(cache, a_prompt(space, 16 + 15)) == 16 + 4
        store(cache, a_prompt(space, 16 + 9))
        assert read(cache, a_prompt(space, 16 + 15)) == 16 + 8
        assert read(cache, a_prompt(space, 16 + 7)) == 16 + 4

    def test_a_tail_of_which_one_group_is_missing_is_not_found(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        store(cache, a_prompt(hybrid, 40), tail=False)
        assert read(cache, a_prompt(hybrid, 40)) == 32

    def test_a_hit_needs_every_shard(self, cache: Cache) -> None:
        space = registered(cache, Namespace(model="model", layout=HYBRID, shards=3))
        prompt = a_prompt(space, 90)
        store(cache, prompt, 0)
        store(cache, prompt, 2)
        assert read(cache, prompt) == 0
        store(cache, a_prompt(space, 32), 1)
        for shard in range(3):
            assert read(cache, prompt, shard) == 32
        store(cache, prompt, 1)
        with cache.lookup(prompt.query()) as hit:
            assert hit.num_tokens == 90
            for shard in (2, 0, 1):
                lease = cache.claim(hit.ticket, shard)
                assert lease is not None
                with lease:
                    check(lease, prompt, 90, shard)

    def test_a_hit_of_some_shards_needs_only_those_and_lends_only_those(self, cache: Cache) -> None:
        space = registered(cache, Namespace(model="model", layout=HYBRID, shards=4))
        prompt = a_prompt(space, 90)
        store(cache, prompt, 1)
        store(cache, a_prompt(space, 32), 3)
        for only, num_tokens in {(1,): 90, (3,): 32, (1, 3): 32, (0, 1): 0, (): 0}.items():
            with cache.lookup(replace(prompt.query(), only=only)) as hit:
                assert hit.num_tokens == num_tokens
                for shard in range(4):
                    lease = cache.claim(hit.ticket, shard)
                    assert (lease is not None) == (num_tokens > 0 and shard in only)
                    if lease is not None:
                        with lease:
                            check(lease, prompt, num_tokens, shard)

    def test_a_claim_may_begin_later_in_the_prompt(self, cache: Cache, hybrid: Namespace) -> None:
        prompt = a_prompt(hybrid, 90)
        store(cache, prompt)
        for first_chunk in (1, 5, 6):
            with cache.lookup(prompt.query()) as hit:
                lease = cache.claim(hit.ticket, first_chunk=first_chunk)
                assert lease is not None
                with lease:
                    assert lease.first_chunk == first_chunk
                    check(lease, prompt, 90)

    def test_a_hit_says_where_it_came_from_and_why_it_ends(self, cache: Cache) -> None:
        hybrid = registered(cache, Namespace(model="model", layout=HYBRID, cache_salt=token_hex(8)))
        prompt = a_prompt(hybrid, 48)

        def answer(num_tokens: int) -> tuple[int, dict[str, int], str]:
            with cache.lookup(a_prompt(hybrid, num_tokens).query()) as hit:
                assert hit.reason in REASONS
                return hit.num_tokens, hit.sources, hit.reason

        assert answer(48) == (0, {}, "never_stored")
        with cache.reserve(HYBRID, prompt.chunks()) as reservation:
            assert answer(48) == (0, {}, "being_written")
            fill(reservation, HYBRID, prompt.chunks())
            reservation.commit()
        assert answer(48) == (48, {"ram": 48}, "whole")
        assert answer(64) == (48, {"ram": 48}, "never_stored")
        store(cache, a_prompt(hybrid, 64), groups=[[True] * 4, [True] * 4, [False] * 4])
        assert answer(64) == (48, {"ram": 48}, "incomplete")
        cache.clear()
        assert answer(48) == (0, {}, "cleared")

    def test_what_is_looked_up_is_counted_as_found_or_as_missed(
        self, cache: Cache, space: Namespace
    ) -> None:
        def counted(name: str) -> float:
            return sum(
                float(value)
                for key, value in cache.status()["counters"].items()
                if key.partition("{")[0] == name
            )

        before = [
            counted(name)
            for name in ("kvhold_lookup_tokens", "kvhold_hit_tokens", "kvhold_missed_tokens")
        ]
        store(cache, a_prompt(space, 40))
        found = sum(read(cache, a_prompt(space, num_tokens)) for num_tokens in (40, 48, 17, 80))
        asked, hit, missed = (
            counted(name) - was
            for name, was in zip(
                ("kvhold_lookup_tokens", "kvhold_hit_tokens", "kvhold_missed_tokens"),
                before,
                strict=True,
            )
        )
        assert (asked, hit, missed) == (185, found, 185 - found)

    def test_a_cache_that_keeps_no_events_says_so(self, cache: Cache) -> None:
        with pytest.raises(KVHoldError, match="event_buffer"):
            cache.snapshot()
        with pytest.raises(KVHoldError, match="event_buffer"):
            cache.events(0)

    def test_namespaces_do_not_mix(self, cache: Cache, space: Namespace) -> None:
        other = registered(cache, Namespace(model="model", layout=PLAIN, cache_salt="tenant"))
        store(cache, a_prompt(space, 64))
        assert read(cache, a_prompt(other, 64)) == 0
        store(cache, a_prompt(other, 64))
        assert read(cache, a_prompt(other, 64)) == read(cache, a_prompt(space, 64)) == 64
        cache.clear(other.digest)
        assert read(cache, a_prompt(other, 64)) == 0
        assert read(cache, a_prompt(space, 64)) == 64
