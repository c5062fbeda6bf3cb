"""The contract of `core.api.Cache` as one test suite.

    class TestMyCache(CacheContract):
        @pytest.fixture
        def make_cache(self): ...          # a function that joins or makes a cache of 16 MiB
        lower_tiers = True                 # if there are tiers below memory

Each chunk's bytes are derived from its key. After each test nothing is held, and a clear empties
the arena.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhold.core.api import ABSENT, Cache, Lease, Reservation
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.reasons import REASONS

MakeCache = Callable[[], Cache]

_FULL = Group(layers=3, planes=2, heads=2, head_dim=64, dtype="bfloat16")
_SLIDING = Group(
    layers=2, planes=2, heads=1, head_dim=96, dtype="float16", attention="sliding", window=24
)
_STATE = Group(layers=1, planes=1, heads=1, head_dim=500, dtype="float32", attention="state")

PLAIN = Layout(groups=(_FULL,), tokens_per_chunk=16)
HYBRID = Layout(groups=(_FULL, _SLIDING, _STATE), tokens_per_chunk=16)
LAYOUTS = {
    "full": PLAIN,
    "tails-in-blocks": Layout(groups=(_FULL,), tokens_per_chunk=16, tail_tokens=4),
    "no-tails": Layout(groups=(_FULL,), tokens_per_chunk=16, tail_tokens=0),
    "one-latent-plane": Layout(
        groups=(Group(layers=5, planes=1, heads=1, head_dim=576, dtype="bfloat16"),),
        tokens_per_chunk=16,
    ),
    "packed-blocks": Layout(
        groups=(
            Group(
                layers=2,
                planes=2,
                heads=1,
                head_dim=64,
                dtype="int8",
                packing="x",
                block_tokens=8,
                block_bytes=1030,
            ),
        ),
        tokens_per_chunk=16,
        tail_tokens=8,
    ),
    "float8-beside-float32": Layout(
        groups=(
            _FULL,
            Group(layers=1, planes=2, heads=1, head_dim=7, dtype="float8_e4m3fn"),
            _STATE,
        ),
        tokens_per_chunk=16,
    ),
    "sliding-alone": Layout(groups=(_SLIDING,), tokens_per_chunk=16),
    "full-sliding-state": HYBRID,
}


_PATIENT_S = 60.0

# tokens of a prompt, and a mask [group][chunk] of stored chunks
_Partial = tuple[int, list[list[bool]]]
_partial_stores = st.lists(
    st.integers(1, 6).flatmap(
        lambda chunks: st.tuples(
            st.just(16 * chunks),
            st.lists(
                st.lists(st.booleans(), min_size=chunks, max_size=chunks), min_size=3, max_size=3
            ),
        )
    ),
    max_size=4,
)


def demanded_bytes(key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return [nbytes], the content of a chunk."""
    return np.random.default_rng(int.from_bytes(key, "little")).integers(
        0, 256, nbytes, dtype=np.uint8
    )


def a_prompt(namespace: Namespace, num_tokens: int, seed: int = 0) -> Prompt:
    """Return random tokens. Prompts of one seed share their beginning."""
    return namespace.prompt(
        np.random.default_rng(seed).integers(0, 50_000, 4096, dtype=np.int32)[:num_tokens]
    )


def fill(reservation: Reservation, layout: Layout, names: ChunkNames, shard: int = 0) -> None:
    for group in range(len(layout.groups)):
        places = reservation.chunks(group)
        for chunk in map(int, np.flatnonzero(places.offsets != ABSENT)):
            key = make_key(
                names.namespace,
                names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES],
                group,
                shard,
            )
            nbytes = layout.chunk_bytes(group, int(places.num_tokens[chunk]))
            at = int(places.offsets[chunk])
            reservation.buffer[at : at + nbytes] = demanded_bytes(key, nbytes)


def store(
    cache: Cache,
    prompt: Prompt,
    shard: int = 0,
    *,
    first: int = 0,
    tail: bool = True,
    groups: npt.ArrayLike | None = None,
) -> list[int]:
    """Reserve, fill and commit chunks from `first` on. Returns the granted ones."""
    layout, names = prompt.namespace.layout, prompt.chunks(first, tail=tail)
    with cache.reserve(layout, names, shard, groups=groups) as reservation:
        fill(reservation, layout, names, shard)
        reservation.commit()
        return reservation.granted


def check(lease: Lease, prompt: Prompt, num_tokens: int, shard: int = 0) -> None:
    """Assert that the lease has exactly what each group needs, with the right bytes."""
    layout, size = prompt.namespace.layout, prompt.namespace.layout.tokens_per_chunk
    lengths = [size] * (num_tokens // size) + ([num_tokens % size] if num_tokens % size else [])
    assert lease.num_tokens.tolist() == lengths[lease.first_chunk :]
    for number, geometry in enumerate(layout.groups):
        offsets = lease.chunks(number).offsets
        assert len(offsets) == len(lengths) - lease.first_chunk
        for at, chunk in enumerate(range(lease.first_chunk, len(lengths))):
            last = chunk == len(lengths) - 1
            in_window = chunk * size + lengths[chunk] > num_tokens - geometry.window
            needed = {"full": True, "sliding": in_window, "state": last}[geometry.attention]
            assert (offsets[at] != ABSENT) == needed, f"chunk {chunk} of group {number}"
            if needed:
                whole = lengths[chunk] == size
                chain_hash = prompt.hash_at(chunk) if whole else _tail_hash(prompt, lengths[chunk])
                nbytes = layout.chunk_bytes(number, lengths[chunk])
                key = make_key(prompt.namespace.digest, chain_hash, number, shard)
                found = lease.buffer[int(offsets[at]) : int(offsets[at]) + nbytes]
                assert np.array_equal(found, demanded_bytes(key, nbytes)), (
                    f"bytes of chunk {chunk} of group {number}"
                )
    lease.verify(layout)


def read(cache: Cache, prompt: Prompt, shard: int = 0) -> int:
    """Look up a prompt, and check every byte. Returns the number of tokens found."""
    with cache.lookup(prompt.query()) as hit:
        if hit.num_tokens:
            lease = cache.claim(hit.ticket, shard)
            assert lease is not None, "a ticket in hand is good"
            with lease:
                check(lease, prompt, hit.num_tokens, shard)
        return hit.num_tokens


def flood(cache: Cache, namespace: Namespace, seed: int = 1_000_000) -> None:
    """Store twice the arena's size."""
    layout = namespace.layout
    a_chunk = sum(
        layout.chunk_bytes(group, layout.tokens_per_chunk) for group in range(len(layout.groups))
    )
    for i in range(2 * int(cache.status()["arena_bytes"]) // (8 * a_chunk)):
        store(cache, a_prompt(namespace, 8 * layout.tokens_per_chunk, seed + i))


class CacheContract:
    """The suite. Needs a fixture `make_cache`; in one test, all its caches are the same."""

    lower_tiers = False
    """Whether evicted chunks come back from a lower tier.

    Chunks stay in memory until they are written.
    """

    def settle(self, cache: Cache) -> None:
        until = time.monotonic() + _PATIENT_S
        while self.lower_tiers and (
            (status := cache.status())["arriving_chunks"] or status["write_behind"]["chunks"]
        ):
            assert time.monotonic() < until, (
                f"something is on its way for more than {_PATIENT_S:g} s"
            )
            time.sleep(0.002)

    @pytest.fixture
    def cache(self, make_cache: MakeCache) -> Iterator[Cache]:
        cache = make_cache()
        cache.clear()
        assert cache.status()["used_bytes"] == 0
        yield cache
        self.settle(cache)
        status = cache.status()
        assert status["held"] == {"tickets": 0, "leases": 0, "reservations": 0}
        assert status["pinned_chunks"] == 0
        cache.clear()
        assert cache.status()["used_bytes"] == 0
        assert cache.status()["chunks"] == 0

    @pytest.fixture
    def space(self, cache: Cache) -> Namespace:
        return _registered(cache, Namespace(model="model", layout=PLAIN))

    @pytest.fixture
    def hybrid(self, cache: Cache) -> Namespace:
        return _registered(cache, Namespace(model="model", layout=HYBRID))

    # Loading

    def test_a_prompt_that_was_never_stored_is_a_miss(self, cache: Cache, space: Namespace) -> None:
        with cache.lookup(a_prompt(space, 100).query()) as hit:
            assert (hit.num_tokens, hit.ticket) == (0, 0)
            assert cache.claim(hit.ticket) is None

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
        space = _registered(cache, Namespace(model="model", layout=layout))
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
        space = _registered(cache, Namespace(model="model", layout=LAYOUTS["tails-in-blocks"]))
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
        space = _registered(cache, Namespace(model="model", layout=HYBRID, shards=3))
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
        # keys that were never here
        hybrid = _registered(
            cache, Namespace(model="model", layout=HYBRID, cache_salt=token_hex(8))
        )
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
        other = _registered(cache, Namespace(model="model", layout=PLAIN, cache_salt="tenant"))
        store(cache, a_prompt(space, 64))
        assert read(cache, a_prompt(other, 64)) == 0
        store(cache, a_prompt(other, 64))
        assert read(cache, a_prompt(other, 64)) == read(cache, a_prompt(space, 64)) == 64
        cache.clear(other.digest)
        assert read(cache, a_prompt(other, 64)) == 0
        assert read(cache, a_prompt(space, 64)) == 64

    # Reserve, write, commit

    def test_what_is_present_gets_no_memory_again(self, cache: Cache, hybrid: Namespace) -> None:
        assert store(cache, a_prompt(hybrid, 48)) == [0, 1, 2]
        used = cache.status()["used_bytes"]
        with cache.reserve(HYBRID, a_prompt(hybrid, 48).chunks()) as reservation:
            assert reservation.granted == []
            assert all((reservation.chunks(group).offsets == ABSENT).all() for group in range(3))
            reservation.commit()
        assert cache.status()["used_bytes"] == used
        assert store(cache, a_prompt(hybrid, 80)) == [3, 4]

    def test_of_a_chunk_only_the_groups_that_are_asked_for_get_memory(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt = a_prompt(hybrid, 40)
        mask = np.array([[1, 1, 0], [0, 1, 0], [0, 1, 0]], dtype=bool)
        with cache.reserve(HYBRID, prompt.chunks(), groups=mask) as reservation:
            assert reservation.granted == [0, 1]
            assert [
                (reservation.chunks(group).offsets != ABSENT).tolist() for group in range(3)
            ] == mask.tolist()
            fill(reservation, HYBRID, prompt.chunks())
            reservation.commit()
        assert read(cache, prompt) == 0, (
            "sliding attention looks back at 24 tokens, of which 8 are missing"
        )
        assert store(cache, prompt, groups=[[False] * 3, [True, False, False], [False] * 3]) == [0]
        assert read(cache, prompt) == 32

    def test_what_a_chunk_is_missing_gets_memory_beside_what_is_there(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt = a_prompt(hybrid, 48)
        full = [[True] * 3, [False] * 3, [False] * 3]
        assert store(cache, prompt, groups=full) == [0, 1, 2]
        assert read(cache, prompt) == 0, "full attention alone does not go on"
        with cache.reserve(HYBRID, prompt.chunks()) as reservation:
            assert reservation.granted == [0, 1, 2]
            assert [(reservation.chunks(group).offsets != ABSENT).any() for group in range(3)] == [
                False,
                True,
                True,
            ]
            assert store(cache, prompt) == [], "somebody else is writing the rest"
            fill(reservation, HYBRID, prompt.chunks())
            reservation.commit()
        assert read(cache, prompt) == 48

    def test_a_mask_of_nothing_gets_nothing(self, cache: Cache, hybrid: Namespace) -> None:
        assert store(cache, a_prompt(hybrid, 48), groups=np.zeros((3, 3), dtype=bool)) == []
        assert store(cache, a_prompt(hybrid, 0), groups=np.zeros((3, 0), dtype=bool)) == []
        assert cache.status()["used_bytes"] == 0

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )
    @given(stores=_partial_stores)
    def test_a_hit_ends_only_where_every_group_has_what_it_looks_at(
        self, cache: Cache, hybrid: Namespace, stores: list[_Partial]
    ) -> None:
        cache.clear()
        there: set[tuple[int, int]] = set()  # (group, first token of a chunk)
        for num_tokens, mask in stores:
            store(cache, a_prompt(hybrid, num_tokens), groups=mask, tail=False)
            there |= {
                (group, 16 * chunk)
                for group, row in enumerate(mask)
                for chunk, wanted in enumerate(row)
                if wanted
            }

        def goes_on(end: int) -> bool:
            looks_at = {
                0: range(end),
                1: range(max(0, end - _SLIDING.window), end),
                2: range(max(0, end - 1), end),
            }
            return all(
                (group, token // 16 * 16) in there
                for group, tokens in looks_at.items()
                for token in tokens
            )

        for num_tokens in (16, 40, 64, 96):
            assert read(cache, a_prompt(hybrid, num_tokens)) == max(
                filter(goes_on, range(0, num_tokens + 1, 16))
            )

    def test_what_somebody_else_is_writing_gets_no_memory(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 48)
        with cache.reserve(PLAIN, a_prompt(space, 32).chunks()) as reservation:
            assert reservation.granted == [0, 1]
            with cache.reserve(PLAIN, prompt.chunks()) as later:
                assert later.granted == [2]
        assert store(cache, prompt) == [0, 1, 2], "what was abandoned may be stored"

    def test_rooms_do_not_overlap(self, cache: Cache, hybrid: Namespace) -> None:
        layout = hybrid.layout
        with (
            cache.reserve(layout, a_prompt(hybrid, 90, 1).chunks()) as one,
            cache.reserve(layout, a_prompt(hybrid, 90, 2).chunks()) as two,
        ):
            fill(one, layout, a_prompt(hybrid, 90, 1).chunks())
            fill(two, layout, a_prompt(hybrid, 90, 2).chunks())
            one.commit()
            two.commit()
        assert read(cache, a_prompt(hybrid, 90, 1)) == read(cache, a_prompt(hybrid, 90, 2)) == 90

    def test_a_chunk_is_invisible_until_it_is_committed(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt = a_prompt(hybrid, 40)
        with cache.reserve(HYBRID, prompt.chunks()) as reservation:
            assert read(cache, prompt) == 0
            fill(reservation, HYBRID, prompt.chunks())
            assert read(cache, prompt) == 0
            reservation.commit()
            assert read(cache, prompt) == 40, "visible before the reservation is closed"

    def test_a_part_may_be_committed_and_the_rest_is_given_back(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 64)
        store(cache, a_prompt(space, 16, seed=9))
        of_one = cache.status()["used_bytes"]
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            fill(reservation, PLAIN, prompt.chunks())
            reservation.commit([0])
            assert read(cache, prompt) == 16
            reservation.commit([1])
        assert read(cache, prompt) == 32
        assert cache.status()["used_bytes"] == 3 * of_one

    def test_committing_twice_or_what_was_not_granted_changes_nothing(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 48)
        store(cache, a_prompt(space, 16))
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            fill(reservation, PLAIN, prompt.chunks())
            reservation.commit([0, 1, 7])
            reservation.commit([1])
        assert read(cache, prompt) == 32

    def test_an_abandoned_room_leaves_nothing(self, cache: Cache, hybrid: Namespace) -> None:
        prompt = a_prompt(hybrid, 90)
        with cache.reserve(HYBRID, prompt.chunks()) as reservation:
            fill(reservation, HYBRID, prompt.chunks())
        assert cache.status()["used_bytes"] == 0
        assert read(cache, prompt) == 0

    # A full arena

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
                "in order, and no tail without what comes before it"
            )
            assert cache.status()["used_bytes"] <= size
            with cache.reserve(PLAIN, a_prompt(space, 64, seed=5).chunks()) as none:
                assert none.granted == [], "nobody's reservation is taken for another"
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
        assert lease is not None, "it outlives its hit"
        with lease:
            flood(cache, hybrid)
            check(lease, prompt, 90)
            assert read(cache, prompt) == 90, "what is read is not evicted"
        self.settle(cache)
        flood(cache, hybrid, seed=2_000_000)
        self.settle(cache)
        assert read(cache, prompt) == (90 if self.lower_tiers else 0), "evicted when it was let go"

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
                assert cache.status()["used_bytes"] > 0, "what is lent is not free"
        self.settle(cache)
        assert cache.status()["used_bytes"] == 0

    def test_what_is_being_written_while_the_cache_is_cleared_does_not_appear(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 40)
        with cache.reserve(PLAIN, prompt.chunks()) as reservation:
            cache.clear()
            assert store(cache, prompt) == [0, 1, 2], "the key is free"
            fill(reservation, PLAIN, prompt.chunks())
            reservation.commit()
            assert read(cache, prompt) == 40
        cache.clear()
        self.settle(cache)
        assert cache.status()["used_bytes"] == 0
        assert read(cache, prompt) == 0

    # Tickets and endings

    def test_a_shard_may_be_claimed_by_several_and_is_pinned_until_the_last_lets_go(
        self, cache: Cache, space: Namespace
    ) -> None:
        prompt = a_prompt(space, 64)
        store(cache, prompt)

        def pinned() -> int:
            # a chunk is pinned while it is being written below, too
            assert cache.flush(deadline_s=_PATIENT_S)
            return int(cache.status()["pinned_chunks"])

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
        assert cache.flush(deadline_s=_PATIENT_S)
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
        space = _registered(cache, Namespace(model="model", layout=PLAIN))
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

    # Layouts and invalid requests

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
        unknown = Namespace(model="model", layout=Layout(groups=(_FULL,), tokens_per_chunk=48))
        with cache.reserve(PLAIN, a_prompt(space, 40, seed=1).chunks()) as reservation:
            with pytest.raises(KVHoldError, match="not registered"):
                cache.lookup(a_prompt(unknown, 100).query())
            with pytest.raises(KVHoldError, match="not registered"):
                cache.reserve(unknown.layout, a_prompt(unknown, 100).chunks())
            fill(reservation, PLAIN, a_prompt(space, 40, seed=1).chunks())
            reservation.commit()
        assert read(cache, a_prompt(space, 40)) == read(cache, a_prompt(space, 40, seed=1)) == 40

    def test_a_tail_that_the_layout_does_not_allow_is_an_error(self, cache: Cache) -> None:
        space = _registered(cache, Namespace(model="model", layout=LAYOUTS["tails-in-blocks"]))
        names = a_prompt(space, 16 + 8).chunks()
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
            "clear",
            "mask-shape",
            "mask-kind",
        ],
    )
    def test_a_request_that_makes_no_sense_is_an_error_and_takes_nothing(
        self, cache: Cache, make_cache: MakeCache, nonsense: str
    ) -> None:
        client = make_cache()
        space = _registered(client, Namespace(model="model", layout=PLAIN))
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
            "clear": lambda: client.clear(space.digest[:3]),
            "mask-shape": lambda: client.reserve(PLAIN, names, groups=np.ones((3, 1), dtype=bool)),
            "mask-kind": lambda: client.reserve(PLAIN, names, groups=np.ones((1, 3))),
        }
        with pytest.raises(KVHoldError):
            calls[nonsense]()
        assert cache.status()["used_bytes"] == 0

    # Concurrency

    def test_threads_that_store_and_read_at_once_see_only_what_the_keys_demand(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda seed: _live(cache, hybrid, seed), range(4)))
        assert sum(found) > 0, "some prompts were found"
        assert cache.status()["counters"]["kvhold_evicted_chunks{tier=ram}"] > 0, (
            "and the arena was too small for all"
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


def _registered(cache: Cache, space: Namespace) -> Namespace:
    cache.register(space)
    return space


def _tail_hash(prompt: Prompt, num_tokens: int) -> bytes:
    at = prompt.tail_lengths.index(num_tokens)
    return prompt.tails[at * HASH_BYTES : (at + 1) * HASH_BYTES]
