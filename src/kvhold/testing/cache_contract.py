"""The contract of `core.api.Cache` as one test suite.

    class TestMyCache(CacheContract):
        @pytest.fixture
        def make_cache(self): ...         # a function that joins or makes a cache of 16 MiB
        lower_tiers = True             # if there are tiers below memory

All caches in one test share their chunks. After it nothing is held.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from kvhold.core.api import Cache
from kvhold.core.errors import KVHoldError
from kvhold.core.holdings import Reservation
from kvhold.core.keys import ChunkNames, Namespace
from kvhold.core.layout import Layout
from kvhold.testing.cache import (
    FULL,
    LAYOUTS,
    PATIENT_S,
    PLAIN,
    MakeCache,
    a_prompt,
    check,
    fill,
    flood,
    read,
    registered,
    store,
)
from kvhold.testing.cache_lookups import CacheLookups
from kvhold.testing.cache_spans import CacheSpans
from kvhold.testing.cache_stores import CacheStores


class CacheContract(CacheLookups, CacheSpans, CacheStores):
    """Override the fixture `make_cache`."""

    def test_a_prompt_longer_than_the_arena_gets_memory_for_its_beginning(
        self, cache: Cache, space: Namespace
    ) -> None:
        size = cache.status()["arena_bytes"]
        num_chunks = 2 * size // PLAIN.chunk_bytes(0, 16)
        tokens = np.arange(num_chunks * 16 + 3, dtype=np.int32)
        prompt = space.prompt(tokens)
        names = prompt.chunks()
        with cache.reserve(PLAIN, names) as reservation:
            assert 0 < len(reservation.granted) < num_chunks
            assert reservation.granted == list(range(len(reservation.granted))), (
                "granted in order, and no tail without the chunks before it"
            )
            assert cache.status()["used_bytes"] <= size
            with cache.reserve(PLAIN, a_prompt(space, 64, seed=5).chunks()) as none:
                assert none.granted == [], "reserved memory is not given to another reservation"
            fill(reservation, PLAIN, names)
            reservation.commit()
            granted = len(reservation.granted)
        assert read(cache, prompt) == granted * 16

    def test_a_full_arena_makes_room_by_evicting(self, cache: Cache, hybrid: Namespace) -> None:
        flood(cache, hybrid)
        self.settle(cache)
        assert store(cache, a_prompt(hybrid, 90)) == [0, 1, 2, 3, 4, 5]
        assert read(cache, a_prompt(hybrid, 90)) == 90

    def test_a_hit_that_nobody_has_claimed_yet_stays_whole_under_pressure(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt = a_prompt(hybrid, 90)
        store(cache, prompt)
        with cache.lookup(prompt.query()) as hit:
            flood(cache, hybrid)
            lease = cache.claim(hit.ticket)
            assert lease is not None
            with lease:
                check(lease, prompt, 90)

    def test_a_loan_stays_exact_under_pressure(self, cache: Cache, hybrid: Namespace) -> None:
        prompt = a_prompt(hybrid, 90)
        store(cache, prompt)
        self.settle(cache)
        with cache.lookup(prompt.query()) as hit:
            lease = cache.claim(hit.ticket)
        assert lease is not None, "a lease outlives its hit"
        with lease:
            flood(cache, hybrid)
            check(lease, prompt, 90)
            assert read(cache, prompt) == 90, "leased chunks are not evicted"
        self.settle(cache)
        flood(cache, hybrid, seed=2_000_000)
        self.settle(cache)
        assert read(cache, prompt) == (90 if self.lower_tiers else 0), "evicted after its release"

    def test_a_retained_prompt_stays_under_pressure_until_it_is_let_go(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt = a_prompt(hybrid, 90)
        with cache.retain(prompt.query(), 600.0) as retained:
            assert (retained.num_tokens, retained.present_tokens) == (90, 0)
            store(cache, prompt)
            self.settle(cache)
            flood(cache, hybrid)
            kept = cache.status()["retained_chunks"]
            assert kept == 6 * len(hybrid.layout.groups)
            assert read(cache, prompt) == 90
        self.settle(cache)
        status = cache.status()
        assert status["retained_chunks"] == status["pinned_chunks"] == 0

    def test_a_demoted_prompt_goes_first(self, cache: Cache, hybrid: Namespace) -> None:
        prompts = [a_prompt(hybrid, 96, seed=seed) for seed in range(3)]
        for prompt in prompts:
            store(cache, prompt)
        self.settle(cache)
        with cache.lookup(prompts[2].query()):
            answers = [cache.demote(prompt.query()) for prompt in prompts[1:]]
        num_keys = 6 * len(hybrid.layout.groups)
        assert answers[0].num_chunks == num_keys
        assert 0 < answers[1].pinned_chunks <= num_keys
        assert cache.demote(prompts[0].query(), first_chunk=6).num_chunks == 0
        assert cache.demote(prompts[0].query(), first_chunk=4).num_chunks == num_keys // 3
        assert all(read(cache, prompt) == 96 for prompt in prompts), "nothing is lost at once"

    def test_a_loan_stays_exact_after_a_clear(self, cache: Cache, hybrid: Namespace) -> None:
        prompt = a_prompt(hybrid, 90)
        store(cache, prompt)
        with cache.lookup(prompt.query()) as hit:
            lease = cache.claim(hit.ticket)
            assert lease is not None
            with lease:
                assert cache.clear() > 0
                assert read(cache, prompt) == 0
                flood(cache, hybrid)
                check(lease, prompt, 90)
                cache.clear()
                assert cache.status()["used_bytes"] > 0, "leased memory is not free"
        self.settle(cache)
        assert cache.status()["used_bytes"] == 0

    def test_what_is_being_written_while_the_cache_is_cleared_does_not_appear(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 40)
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            cache.clear()
            assert store(cache, prompt) == [0, 1, 2], "cleared keys can be reserved again"
            fill(reservation, PLAIN, prompt.chunks())
            reservation.commit()
            assert read(cache, prompt) == 40
        cache.clear()
        self.settle(cache)
        assert cache.status()["used_bytes"] == 0
        assert read(cache, prompt) == 0

    def test_a_prompt_is_cleared_alone_and_its_loans_stay_exact(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt, other = a_prompt(hybrid, 90), a_prompt(hybrid, 90, seed=7)
        store(cache, prompt)
        store(cache, other)
        with cache.lookup(prompt.query()) as hit:
            lease = cache.claim(hit.ticket)
            assert lease is not None
            with lease:
                assert cache.clear_prompt(prompt.query()) > 0
                assert (read(cache, prompt), read(cache, other)) == (0, 90)
                store(cache, prompt)
                check(lease, prompt, 90)
        assert read(cache, prompt) == 90, "it can be stored again"

    def test_what_is_being_written_while_its_prompt_is_cleared_does_not_appear(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 40)
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            assert cache.clear_prompt(prompt.query()) == 3
            fill(reservation, PLAIN, prompt.chunks())
            reservation.commit()
            assert read(cache, prompt) == 0
        assert store(cache, prompt) == [0, 1, 2]
        assert read(cache, prompt) == 40

    def test_of_a_prompt_the_part_that_another_continues_may_stay(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 70)
        other = prompt.until(32).followed_by(list(range(500, 564)))
        store(cache, prompt)
        store(cache, other)
        assert cache.clear_prompt(prompt.query(), only_end=True) == 3
        assert (read(cache, prompt), read(cache, other)) == (32, 96)

    def test_a_shard_may_be_claimed_by_several_and_is_pinned_until_the_last_lets_go(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 64)
        store(cache, prompt)

        def pinned() -> int:
            # a write to a lower tier pins its chunk, too
            assert cache.flush(deadline_s=PATIENT_S)
            return cache.status()["pinned_chunks"]

        hit = cache.lookup(prompt.query())
        whole, end, again = (
            cache.claim(hit.ticket),
            cache.claim(hit.ticket, first_chunk=3),
            cache.claim(hit.ticket),
        )
        assert whole is not None and end is not None and again is not None
        whole.close()
        assert pinned() == 4, "the hit is open"
        hit.close()
        assert pinned() == 4
        flood(cache, space)
        check(again, prompt, 64)
        again.close()
        assert pinned() == 1
        flood(cache, space, seed=2_000_000)
        check(end, prompt, 64)
        end.close()
        assert pinned() == 0

    def test_each_of_several_loans_outlives_a_clear(self, cache: Cache, hybrid: Namespace) -> None:
        prompt = a_prompt(hybrid, 90)
        store(cache, prompt)
        with cache.lookup(prompt.query()) as hit:
            one = cache.claim(hit.ticket)
            assert one is not None
            cache.clear()
            two = cache.claim(hit.ticket)
            assert two is not None, "the hit is open"
        one.close()
        flood(cache, hybrid)
        check(two, prompt, 90)
        cache.clear()
        assert cache.flush(deadline_s=PATIENT_S)
        assert cache.status()["used_bytes"] > 0
        two.close()
        assert cache.status()["used_bytes"] == 0

    def test_a_ticket_that_is_not_good_is_none(self, cache: Cache, space: Namespace) -> None:
        store(cache, a_prompt(space, 32))
        with cache.lookup(a_prompt(space, 32).query()) as hit:
            for ticket, shard in (
                (0, 0),
                (hit.ticket + 1, 0),
                (hit.ticket, 1),
                (-1, 0),
                (2**63, 0),
            ):
                assert cache.claim(ticket, shard) is None
        assert cache.claim(hit.ticket) is None, "the hit was closed"

    def test_closing_twice_is_harmless(self, cache: Cache, space: Namespace) -> None:
        prompt = a_prompt(space, 32)
        store(cache, prompt)
        one, two = cache.lookup(prompt.query()), cache.lookup(prompt.query())
        lease, other = cache.claim(one.ticket), cache.claim(two.ticket)
        reservation = cache.reserve(PLAIN, a_prompt(space, 64, seed=7).chunks())
        assert lease is not None and other is not None
        for holding in (one, two, lease, reservation):
            holding.close()
            holding.close()
        with other:
            flood(cache, space)
            check(other, prompt, 32)

    def test_a_closed_cache_says_so_and_may_be_closed_again(self, make_cache: MakeCache) -> None:
        cache = make_cache()
        space = registered(cache, Namespace(model="model", layout=PLAIN))
        prompt = a_prompt(space, 32)
        store(cache, prompt)
        hit = cache.lookup(prompt.query())
        reservation = cache.reserve(PLAIN, a_prompt(space, 32, seed=3).chunks())
        lease = cache.claim(hit.ticket)
        assert lease is not None
        cache.close()
        check(lease, prompt, 32)
        for call in (
            lambda: cache.register(space),
            lambda: cache.lookup(prompt.query()),
            lambda: cache.claim(1),
            lambda: cache.reserve(PLAIN, prompt.chunks()),
            lambda: cache.clear(),
            lambda: cache.reencode("disk", "raw"),
            lambda: cache.status(),
            lambda: cache.arena_buffer,
            reservation.commit,
        ):
            with pytest.raises(KVHoldError, match="closed"):
                call()
        for holding in (hit, lease, reservation):
            holding.close()
        cache.close()

    def test_reencoding_a_tier_that_is_not_there_is_an_error_that_says_so_and_ends_nothing(
        self, cache: Cache, space: Namespace
    ) -> None:
        store(cache, a_prompt(space, 40))
        with pytest.raises(KVHoldError, match="tier 'nowhere' is unknown"):
            cache.reencode("nowhere", "raw")
        assert read(cache, a_prompt(space, 40)) == 40

    def test_registering_twice_is_harmless(self, cache: Cache, space: Namespace) -> None:
        store(cache, a_prompt(space, 40))
        cache.register(space)
        assert read(cache, a_prompt(space, 40)) == 40

    def test_a_layout_that_was_not_registered_is_an_error_that_says_so_and_ends_nothing(
        self, cache: Cache, space: Namespace
    ) -> None:
        store(cache, a_prompt(space, 40))
        unknown = Namespace(model="model", layout=Layout(groups=(FULL,), tokens_per_chunk=48))
        with cache.reserve(PLAIN, a_prompt(space, 40, seed=1).chunks()) as reservation:
            with pytest.raises(KVHoldError, match="not registered"):
                cache.lookup(a_prompt(unknown, 100).query())
            with pytest.raises(KVHoldError, match="not registered"):
                cache.reserve(unknown.layout, a_prompt(unknown, 100).chunks())
            fill(reservation, PLAIN, a_prompt(space, 40, seed=1).chunks())
            reservation.commit()
        assert read(cache, a_prompt(space, 40)) == read(cache, a_prompt(space, 40, seed=1)) == 40

    def test_a_tail_that_the_layout_does_not_allow_is_an_error(self, cache: Cache) -> None:
        space = registered(cache, Namespace(model="model", layout=LAYOUTS["no-tails"]))
        names = a_prompt(space, 16 + 16).chunks()
        with pytest.raises(KVHoldError, match="tail of 7 tokens"):
            cache.reserve(space.layout, ChunkNames(names.namespace, names.hashes, 7))

    @pytest.mark.parametrize(
        "nonsense",
        [
            "shard-1",
            "shard65536",
            "namespace",
            "hashes",
            "tail-alone",
            "claim",
            "query-tail",
            "only-unknown",
            "only-twice",
            "clear",
            "mask-shape",
            "mask-kind",
        ],
    )
    def test_a_request_that_makes_no_sense_is_an_error_and_takes_nothing(
        self, cache: Cache, make_cache: MakeCache, nonsense: str
    ) -> None:
        client = make_cache()
        space = registered(client, Namespace(model="model", layout=PLAIN))
        names, query = a_prompt(space, 40).chunks(), a_prompt(space, 40).query()
        calls: dict[str, Callable[[], object]] = {
            "shard-1": lambda: client.reserve(PLAIN, names, -1),
            "shard65536": lambda: client.reserve(PLAIN, names, 1 << 16),
            "namespace": lambda: client.reserve(PLAIN, ChunkNames(b"short", names.hashes)),
            "hashes": lambda: client.reserve(PLAIN, ChunkNames(names.namespace, names.hashes[:-1])),
            "tail-alone": lambda: client.reserve(PLAIN, ChunkNames(names.namespace, b"", 3)),
            "claim": lambda: client.claim(1, first_chunk=-1),
            "query-tail": lambda: client.lookup(
                type(query)(
                    query.namespace,
                    query.layout,
                    1,
                    query.hashes,
                    query.tail_hashes,
                    (PLAIN.tokens_per_chunk,),
                )
            ),
            "only-unknown": lambda: client.lookup(replace(query, shards=3, only=(1, 3))),
            "only-twice": lambda: client.lookup(replace(query, shards=3, only=(1, 1))),
            "clear": lambda: client.clear(space.digest[:3]),
            "mask-shape": lambda: client.reserve(PLAIN, names, groups=np.ones((3, 1), dtype=bool)),
            "mask-kind": lambda: client.reserve(PLAIN, names, groups=np.ones((1, 3))),
        }
        with pytest.raises(KVHoldError):
            calls[nonsense]()
        assert cache.status()["used_bytes"] == 0

    def test_threads_that_store_and_read_at_once_see_only_what_the_keys_demand(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda seed: _live(cache, hybrid, seed), range(4)))
        assert sum(found) > 0, "some prompts were found"
        assert cache.status()["counters"]["kvhold_evicted_chunks{tier=ram}"] > 0, (
            "the arena was too small for all prompts"
        )


def _live(cache: Cache, space: Namespace, seed: int) -> int:
    luck = random.Random(seed)
    found = 0
    for _ in range(60):
        prompt = a_prompt(space, luck.randrange(16, 200), luck.randrange(40))
        found += read(cache, prompt)
        if luck.random() < 0.1:
            names = prompt.chunks()
            with cache.reserve(space.layout, names) as reservation:
                for group in range(len(space.layout.groups)):
                    _scribble(reservation, reservation.chunks(group).offsets[reservation.granted])
        else:
            store(cache, prompt)
    return found


def _scribble(reservation: Reservation, offsets: Sequence[int] | npt.NDArray[np.int64]) -> None:
    for at in offsets:
        reservation.buffer[int(at) : int(at) + 64] = 0xEE
