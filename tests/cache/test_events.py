"""Whoever follows the events knows what memory holds, exactly; and is told when it cannot."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.cache import events as module
from kvhold.cache import open_cache
from kvhold.cache.events import EventLog
from kvhold.core.api import Cache, Event
from kvhold.core.keys import Namespace, make_key, split_key
from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import HYBRID, PLAIN, a_prompt, flood, store

SPACE = Namespace("model", PLAIN)
HYBRID_SPACE = Namespace("model", HYBRID)


class Follower:
    """An index that is kept by events alone."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.resets = 0
        self.start()

    def start(self) -> None:
        batch = self.cache.snapshot()
        assert all(event.kind == "admitted" for event in batch.events)
        self.there = {event.key: event for event in batch.events}
        assert len(self.there) == len(batch.events)
        self.next = batch.next

    def follow(self) -> None:
        """All that is new; from a snapshot, if something is missing."""
        while True:
            batch = self.cache.events(self.next)
            if batch.lost:
                self.resets += 1
                self.start()
                continue
            assert [event.number for event in batch.events] == list(
                range(self.next + 1, batch.next + 1)
            )
            for event in batch.events:
                self.see(event)
            self.next = batch.next
            if not batch.events:
                return

    def see(self, event: Event) -> None:
        if event.kind == "admitted":
            assert event.key not in self.there
            self.there[event.key] = event
        else:
            assert event.kind in ("evicted", "expired", "cleared")
            del self.there[event.key]


def visible(cache: Cache) -> set[bytes]:
    return {event.key for event in cache.snapshot().events}


def live(cache: Cache, follower: Follower, seed: int, *, steps: int = 60, pause: int = 3) -> None:
    """Random traffic that overfills memory; the follower looks now and then, and then
    it is right.
    """
    luck = random.Random(seed)
    for step in range(steps):
        space = luck.choice([SPACE, HYBRID_SPACE])
        store(cache, a_prompt(space, luck.randrange(16, 400), luck.randrange(100)), first=0)
        if luck.random() < 0.05:
            cache.clear(space.digest)
        if step % pause == 0:
            follower.follow()
            assert follower.there.keys() == visible(cache)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 12), st.integers(-3, 15)), max_size=12),
    st.integers(1, 5),
)
def test_a_log_returns_the_events_after_a_number_or_reports_them_lost(
    limit: int, steps: list[tuple[int, int]], most: int
) -> None:
    log = EventLog(limit)
    entry: Any = SimpleNamespace(key=bytes(40), num_tokens=16, first_token=0, parent=None)
    begin, added = log.last, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST", most)
        for count, after in steps:
            for _ in range(count):
                log.add("admitted", entry)
            added += count
            batch = log.after(begin + after)
            if max(0, added - limit) <= after <= added:
                expected = list(range(after + 1, min(added, after + most) + 1))
                assert [event.number - begin for event in batch.events] == expected
                assert (batch.next - begin, batch.lost) == (after + len(expected), False)
            else:
                assert (batch.events, batch.next - begin, batch.lost) == ([], added, True)


def test_a_number_of_another_run_is_lost() -> None:
    one, two = EventLog(100), EventLog(100)
    assert one.after(two.last).lost and two.after(one.last).lost and one.after(0).lost


def test_an_event_names_the_chunk_its_place_and_the_one_before_it() -> None:
    with open_cache(ram_bytes="16MiB", huge_pages="never", event_buffer=1000) as cache:
        cache.register(HYBRID_SPACE)
        begin = cache.snapshot()
        assert begin.events == []
        prompt = a_prompt(HYBRID_SPACE, 40)
        store(cache, prompt)
        events = cache.events(begin.next).events
        assert len(events) == 9
        for event in events:
            parts = split_key(event.key)
            chunk = event.first_token // 16
            assert (event.kind, event.tier, event.namespace) == (
                "admitted",
                "ram",
                HYBRID_SPACE.digest,
            )
            assert event.num_tokens == (16, 16, 8)[chunk]
            assert event.parent == (
                make_key(HYBRID_SPACE.digest, prompt.hash_at(chunk - 1), parts.group, 0)
                if chunk
                else b""
            )
        cache.clear()
        release_owner = cache.events(events[-1].number).events
        assert {event.kind for event in release_owner} == {"cleared"}
        assert {event.key for event in release_owner} == {event.key for event in events}


def test_nobody_hears_of_what_was_never_visible() -> None:
    with open_cache(ram_bytes="16MiB", huge_pages="never", event_buffer=1000) as cache:
        cache.register(SPACE)
        begin = cache.snapshot().next
        with cache.reserve(PLAIN, a_prompt(SPACE, 64).chunks()) as reservation:
            assert cache.snapshot().events == []
            cache.clear()
            reservation.commit()
        assert cache.events(begin).events == []


def test_what_has_outlived_its_time_is_told_when_it_is_noticed() -> None:
    with open_cache(ram_bytes="16MiB", huge_pages="never", event_buffer=1000) as cache:
        cache.register(SPACE)
        with cache.reserve(
            PLAIN, a_prompt(SPACE, 16).chunks(), store_options=StoreOptions(ttl_s=50)
        ) as reservation:
            reservation.commit()
        begin = cache.snapshot()
        cache._state.ram._clock = lambda: 1e12
        cache.lookup(a_prompt(SPACE, 16).query()).close()
        [event] = cache.events(begin.next).events
        assert (event.kind, event.key) == ("expired", begin.events[0].key)


@pytest.mark.parametrize("buffer", [100_000, 300])
def test_an_index_kept_by_events_is_what_memory_holds(buffer: int) -> None:
    with open_cache(ram_bytes="2MiB", huge_pages="never", event_buffer=buffer) as cache:
        for space in (SPACE, HYBRID_SPACE):
            cache.register(space)
        follower = Follower(cache)
        live(cache, follower, seed=buffer)
        assert cache.status()["counters"]["kvhold_evicted_chunks{tier=ram}"] > 0
        flood(cache, SPACE)
        follower.follow()
        assert follower.there.keys() == visible(cache)
        assert (follower.resets > 0) == (buffer == 300)
