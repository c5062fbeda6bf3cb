import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhold.core.api import Cache
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace
from kvhold.testing.cache import (
    HYBRID,
    PLAIN,
    SLIDING,
    CacheFixtures,
    a_prompt,
    fill,
    read,
    store,
)

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


class CacheStores(CacheFixtures):
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
            "sliding attention needs 24 tokens, and 8 of them are missing"
        )
        assert store(cache, prompt, groups=[[False] * 3, [True, False, False], [False] * 3]) == [0]
        assert read(cache, prompt) == 32

    def test_what_a_chunk_is_missing_gets_memory_beside_what_is_there(
        self, cache: Cache, hybrid: Namespace
    ) -> None:
        prompt = a_prompt(hybrid, 48)
        full = [[True] * 3, [False] * 3, [False] * 3]
        assert store(cache, prompt, groups=full) == [0, 1, 2]
        assert read(cache, prompt) == 0, "a hit needs more than full attention"
        with cache.reserve(HYBRID, prompt.chunks()) as reservation:
            assert reservation.granted == [0, 1, 2]
            assert [(reservation.chunks(group).offsets != ABSENT).any() for group in range(3)] == [
                False,
                True,
                True,
            ]
            assert store(cache, prompt) == [], "another reservation is writing the rest"
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
        there: set[tuple[int, int]] = set()
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
                1: range(max(0, end - SLIDING.window), end),
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
        assert store(cache, prompt) == [0, 1, 2], "abandoned chunks may be stored"

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
