"""The tier worker writes to a tier that is slow, hangs or fails, clears it, and ends: nothing is
lost, nothing comes back.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvhold.cache.state import CacheState
from kvhold.cache.transfer.tier_worker import TierWorker, make_tier_worker
from kvhold.core.config import Config
from kvhold.core.errors import TierUnavailable
from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import PLAIN, a_prompt, read, store
from tests.cache.below import (
    CHUNK_BYTES,
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    cache_over,
    eventually,
    forget,
    has_arrived,
    set_deadlines,
    tier_counter,
)
from tests.cache.places import place
from tests.cache.working import SOON_S, keys_of, put_below, second
from tests.tiers.memory import Place

__all__ = ["place", "second"]


class TestWrites:
    def test_nothing_waits_for_them(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            place.hold("put")
            store(cache, a_prompt(SPACE, 160))
            assert read(cache, a_prompt(SPACE, 160)) == 160
            assert not cache.flush(deadline_s=0)
            assert cache.status()["write_behind"] == {"chunks": 10, "bytes": 10 * CHUNK_BYTES}
            place.let_go("put")
            assert cache.flush(deadline_s=60)
            assert len(place.values) == 10

    def test_the_beginning_is_written_first_in_batches(self, place: Place) -> None:
        with a_cache_over(place.url(batch_bytes=3 * CHUNK_BYTES, concurrent_calls=1)) as cache:
            store(cache, a_prompt(SPACE, 160))
            assert cache.flush()
            keys = keys_of(160)
            assert place.asked["put"] == [keys[at : at + 3] for at in range(0, 10, 3)]

    def test_what_is_too_much_is_dropped_and_the_rest_is_written(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            a_cache_over(place.url(), write_behind_bytes=3 * CHUNK_BYTES) as cache,
            caplog.at_level(logging.WARNING),
        ):
            place.hold("put")
            store(cache, a_prompt(SPACE, 160))
            assert (
                cache.status()["counters"]["kvhold_tier_dropped_chunks{tier=all,reason=queue full}"]
                == 7
            )
            place.let_go("put")
            assert cache.flush()
            assert sorted(place.values) == sorted(keys_of(48))
            assert read(cache, a_prompt(SPACE, 160)) == 160
            assert sum("do not keep up" in record.message for record in caplog.records) == 1

    def test_a_mark_waits_for_its_own_and_not_for_later_ones(self, place: Place) -> None:
        with a_cache_over(place.url(batch_bytes=1, concurrent_calls=1)) as cache:
            with cache.reserve(PLAIN, a_prompt(SPACE, 16).chunks()) as reservation:
                reservation.buffer[int(reservation.chunks().offsets[0])] = 1
                mark = reservation.commit()
            assert cache.flush(mark, deadline_s=60)
            place.hold("put")
            store(cache, a_prompt(SPACE, 64, seed=1))
            assert cache.flush(mark, deadline_s=0)
            assert not cache.flush(deadline_s=0)
            place.let_go("put")

    def test_what_the_tier_has_already_is_not_written_again(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            store(cache, a_prompt(SPACE, 96))
            cache.flush()
            assert [key for keys in place.asked["put"] for key in keys] == keys_of(96)

    def test_each_tier_gets_all_and_a_slow_one_holds_up_no_other(
        self, place: Place, second: Place
    ) -> None:
        with a_cache_over(place.url(), second.url()) as cache:
            place.hold("put")
            store(cache, a_prompt(SPACE, 64))
            eventually(lambda: sorted(second.values) == sorted(keys_of(64)))
            assert place.values == {}
            assert cache.status()["write_behind"]["chunks"] == 4, "held until the last tier has it"
            place.let_go("put")
            assert cache.flush()
            assert place.values == second.values

    def test_what_came_from_the_second_tier_is_written_to_the_first(
        self, place: Place, second: Place
    ) -> None:
        with a_cache_over(place.url(), second.url()) as cache:
            put_below(cache, 64)
            kept, place.values = place.values, {}
            before = second.calls.copy()
            assert read(cache, a_prompt(SPACE, 64)) == 64
            assert cache.flush()
            assert place.values == kept
            assert second.calls["put"] == before["put"]
            assert second.calls["probe"] == before["probe"] + 1, "for the lookup, not for a write"

    @pytest.mark.parametrize("ttl_s", [None, 500.0])
    def test_a_time_to_live_is_passed_on(self, place: Place, ttl_s: float | None) -> None:
        with a_cache_over(place.url()) as cache:
            names = a_prompt(SPACE, 32).chunks()
            with cache.reserve(
                PLAIN, names, store_options=StoreOptions(ttl_s=ttl_s)
            ) as reservation:
                reservation.commit()
            cache.flush()
            [one, two] = [place.ttls[key] for key in keys_of(32)]
            assert one == two
            assert one is None if ttl_s is None else 490 < (one or 0) <= 501

    def test_what_has_expired_by_then_is_not_written(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            place.hold("probe")
            with cache.reserve(
                PLAIN, a_prompt(SPACE, 32).chunks(), store_options=StoreOptions(ttl_s=1)
            ) as reservation:
                reservation.commit()
            with cache._lock:
                clock, cache._state.ram._clock = cache._state.ram._clock, lambda: 4e9
            place.let_go("probe")
            assert cache.flush()
            assert place.calls["put"] == 0
            cache._state.ram._clock = clock

    def test_memory_of_a_write_that_hangs_is_kept_until_it_lets_go(self, place: Place) -> None:
        with a_cache_over(place.url(put_timeout_s=SOON_S)) as cache:
            place.deaf = True
            place.hold("put")
            store(cache, a_prompt(SPACE, 32))
            eventually(lambda: cache.status()["tiers"][0]["stuck_calls"] == 1)
            set_deadlines(cache, put_timeout_s=PATIENT_S)
            assert not cache.flush(deadline_s=0)
            cache.clear(deadline_s=5)
            assert cache.status()["used_bytes"] == 2 * CHUNK_BYTES
            place.let_go("put")
            eventually(lambda: cache.status()["used_bytes"] == 0)

    def test_a_batch_that_cannot_be_framed_is_counted_and_the_next_is_written(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with a_cache_over(place.url()) as cache:
            with monkeypatch.context() as patched:
                patched.setattr("kvhold.cache.transfer.framing.Framer.framed", lambda *_: 1 / 0)
                store(cache, a_prompt(SPACE, 32))
                assert cache.flush()
            assert (
                tier_counter(cache, "kvhold_tier_dropped_chunks", tier="plugin", reason="internal")
                == 2
            )
            store(cache, a_prompt(SPACE, 32, seed=1))
            assert cache.flush()
            assert sorted(place.values) == sorted(keys_of(32, seed=1))


class LateThread(threading.Thread):
    """One that the machine begins to run when the test says so."""

    begins = threading.Event()

    def run(self) -> None:
        assert self.begins.wait(PATIENT_S)
        super().run()


def test_chunks_stored_before_the_workers_thread_has_begun_are_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Thread", LateThread)
    LateThread.begins.clear()
    with a_cache_over(place.url()) as cache:
        monkeypatch.undo()
        try:
            store(cache, a_prompt(SPACE, 64))
        finally:
            LateThread.begins.set()
        assert cache.flush()
        assert place.values.keys() == set(keys_of(64))


def test_the_worker_s_thread_may_report_before_the_cache_knows_the_worker(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_and_report(
        config: Config, state: CacheState, happen: Callable[[Callable[[], None]], None]
    ) -> TierWorker | None:
        worker = make_tier_worker(config, state, happen)
        happen(lambda: None)
        return worker

    monkeypatch.setattr("kvhold.cache.local.make_tier_worker", make_and_report)
    with a_cache_over(place.url()) as cache:
        put_below(cache, 96)
        assert read(cache, a_prompt(SPACE, 96)) == 96


class TestClears:
    def test_it_removes_one_namespace_s_from_all_tiers(self, place: Place, second: Place) -> None:
        with a_cache_over(place.url(), second.url()) as cache:
            store(cache, a_prompt(SPACE, 64))
            store(cache, a_prompt(HYBRID_SPACE, 64))
            cache.flush()
            cache.clear(SPACE.digest)
            assert place.values.keys() == second.values.keys()
            assert place.values
            assert all(key.startswith(HYBRID_SPACE.digest) for key in place.values)
            forget(cache)
            assert read(cache, a_prompt(SPACE, 64)) == 0
            assert read(cache, a_prompt(HYBRID_SPACE, 64)) == 64

    @pytest.mark.parametrize("held", ["probe", "put"])
    def test_neither_what_waits_nor_what_is_being_written_comes_back(
        self, place: Place, held: str
    ) -> None:
        with (
            a_cache_over(place.url(batch_bytes=1, concurrent_calls=1)) as cache,
            ThreadPoolExecutor(1) as pool,
        ):
            place.hold(held)
            store(cache, a_prompt(SPACE, 64))
            place.wait_for(held)
            cleared = pool.submit(cache.clear)
            eventually(lambda: cache.status()["chunks"] <= 1)
            place.let_go(held)
            assert cleared.result(60) == 4
            assert cache.flush()
            assert place.values == {}
            assert read(cache, a_prompt(SPACE, 64)) == 0

    def test_nor_what_a_call_that_hung_wrote_after_all(self, place: Place) -> None:
        with a_cache_over(place.url(put_timeout_s=SOON_S)) as cache:
            place.deaf = True
            place.hold("put")
            store(cache, a_prompt(SPACE, 32))
            eventually(lambda: cache.status()["tiers"][0]["stuck_calls"] == 1)
            set_deadlines(cache, put_timeout_s=PATIENT_S)
            cache.clear()
            assert place.values == {}
            place.let_go("put")
            eventually(lambda: cache.status()["used_bytes"] == 0)
            eventually(lambda: place.calls["delete"] == 1 and not place.inside["delete"])
            assert place.values == {}

    def test_what_arrives_meanwhile_is_not_seen(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache, ThreadPoolExecutor(1) as pool:
            put_below(cache, 64)
            place.hold("get")
            hit = cache.lookup(a_prompt(SPACE, 64).query(), wait_s=0)
            place.wait_for("get")
            cleared = pool.submit(cache.clear)
            cleared.result(60)
            place.let_go("get")
            eventually(lambda: has_arrived(hit))
            assert hit.num_tokens == 0
            hit.close()
            assert cache.status()["used_bytes"] == 0

    def test_while_it_is_under_way_nothing_is_asked_for_below(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            place.hold("delete")
            assert cache.clear(deadline_s=0) == 0
            before = place.calls["probe"]
            assert read(cache, a_prompt(SPACE, 64)) == 0
            assert place.calls["probe"] == before
            assert not cache.flush(0, deadline_s=0)
            place.let_go("delete")
            assert cache.flush(0, deadline_s=60)

    def test_chunks_that_a_tier_could_not_clear_are_not_used_and_are_removed_later(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url(breaker_pause_s=0.01)) as cache:
            put_below(cache, 64)
            place.faults = {"scan": TierUnavailable("memory", "scan", "away")}
            cache.clear()
            assert read(cache, a_prompt(SPACE, 64)) == 0
            assert cache.status()["tiers"][0]["pending_clears"] == 1
            assert len(place.values) == 4
            place.faults = {}
            eventually(lambda: not place.values)
            eventually(lambda: cache.status()["tiers"][0]["pending_clears"] == 0)
            put_below(cache, 64)
            assert read(cache, a_prompt(SPACE, 64)) == 64

    def test_one_that_a_tier_fails_ends_all_the_same(self, place: Place, second: Place) -> None:
        with a_cache_over(place.url(), second.url()) as cache:
            put_below(cache, 64)
            place.faults["scan"] = RuntimeError("contract?")
            cache.clear()
            assert cache.flush(0, deadline_s=60)
            assert second.values == {}
            place.faults = {}


class TestEnds:
    def test_what_waits_is_written_before_the_end(self, place: Place) -> None:
        with cache_over(place.url(batch_bytes=1, concurrent_calls=1), drain_timeout_s=60) as cache:
            place.hold("put")
            store(cache, a_prompt(SPACE, 64))
            ending = threading.Thread(target=cache.close)
            ending.start()
            place.let_go("put")
            ending.join(60)
            assert not ending.is_alive()
            assert sorted(place.values) == sorted(keys_of(64))
            assert place.calls["close"] == 1

    def test_a_second_close_takes_nothing_from_under_the_first(self, place: Place) -> None:
        with cache_over(place.url(batch_bytes=1, concurrent_calls=1), drain_timeout_s=60) as cache:
            place.hold("probe")
            store(cache, a_prompt(SPACE, 64))
            ending = threading.Thread(target=cache.close)
            ending.start()
            eventually(lambda: cache._closed)
            cache.close()
            place.let_go("probe")
            ending.join(60)
            assert sorted(place.values) == sorted(keys_of(64))

    def test_for_as_long_as_the_settings_say_and_then_it_says_what_was_not(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        with cache_over(
            place.url(batch_bytes=1, concurrent_calls=1), drain_timeout_s=0.01
        ) as cache:
            place.hold("put")
            store(cache, a_prompt(SPACE, 64))
            place.wait_for("put")
            with caplog.at_level(logging.WARNING):
                cache.close()
            assert any("3 chunks were not written" in record.message for record in caplog.records)

    @pytest.mark.parametrize("held", ["probe", "get"])
    def test_a_lookup_that_waits_is_a_miss(self, place: Place, held: str) -> None:
        with cache_over(place.url()) as cache:
            put_below(cache, 64)
            place.hold(held)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(cache.lookup, a_prompt(SPACE, 64).query())
                place.wait_for(held)
                cache.close()
                with waiting.result(60) as hit:
                    assert (hit.ticket, hit.num_tokens) == (0, 0)

    def test_tiers_that_cannot_be_leave_no_thread_behind(self) -> None:
        before = set(threading.enumerate())
        with pytest.raises(Exception, match="no tier"):
            cache_over("nowhere://x")
        assert set(threading.enumerate()) <= before
