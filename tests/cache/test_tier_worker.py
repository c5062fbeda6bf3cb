"""The tier worker and a tier that is slow, hangs, fails or lies: nothing waits for it, nothing is
lost, nothing comes back.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvhold.cache import LocalCache
from kvhold.cache.state import CacheState
from kvhold.cache.transfer.read_buffer import ReadBuffer
from kvhold.cache.transfer.tier_worker import TierWorker, make_tier_worker
from kvhold.core.config import Config
from kvhold.core.errors import TierFull, TierUnavailable
from kvhold.core.keys import make_key
from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import HYBRID, PLAIN, a_prompt, check, read, store
from tests.cache.below import (
    CHUNK_BYTES,
    HYBRID_SPACE,
    NOTHING,
    PATIENT_S,
    SPACE,
    a_cache_over,
    at_rest,
    cache_over,
    eventually,
    forget,
    has_arrived,
    set_deadlines,
    tier_counter,
)
from tests.tiers.memory import Place, a_place

SOON_S = 0.03  # a deadline that is to pass


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


@pytest.fixture
def second() -> Iterator[Place]:
    with a_place() as place:
        yield place


def keys_of(num_tokens: int, seed: int = 0) -> list[bytes]:
    prompt = a_prompt(SPACE, num_tokens, seed)
    return [
        make_key(SPACE.digest, prompt.hash_at(chunk), 0, 0) for chunk in range(num_tokens // 16)
    ]


def put_below(cache: LocalCache, num_tokens: int, seed: int = 0) -> None:
    """A prompt that tiers have, and memory has not."""
    store(cache, a_prompt(SPACE, num_tokens, seed))
    forget(cache)


def fetched_keys(place: Place) -> list[bytes]:
    return [key for keys in place.asked.get("get", []) for key in keys]


class TestProbes:
    def test_one_for_all_chunks_of_a_prompt(self, place: Place) -> None:
        with a_cache_over(place.url(read_only="true")) as cache:
            prompt = a_prompt(HYBRID_SPACE, 1000)
            assert read(cache, prompt) == 0
            assert place.calls["probe"] == 1
            [asked] = place.asked["probe"]
            assert len(asked) == 3 * 63

    def test_one_a_tier_and_the_second_only_for_what_the_first_lacks(
        self, place: Place, second: Place
    ) -> None:
        with a_cache_over(place.url(), second.url()) as cache:
            put_below(cache, 64)
            keys = keys_of(64)
            for key in keys[2:]:
                del place.values[key]
            for each in (place, second):
                each.asked.clear()
            assert read(cache, a_prompt(SPACE, 64)) == 64
            assert place.asked["probe"][0] == keys
            assert second.asked["probe"][0] == keys[2:]
            assert sorted(fetched_keys(place)) == sorted(keys[:2])
            assert sorted(fetched_keys(second)) == sorted(keys[2:])

    def test_none_when_memory_has_all(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            store(cache, a_prompt(SPACE, 60))
            cache.flush()
            before = place.calls["probe"]
            assert read(cache, a_prompt(SPACE, 60)) == 60
            assert read(cache, a_prompt(SPACE, 48)) == 48
            assert place.calls["probe"] == before

    def test_one_that_hangs_makes_the_lookup_a_miss_in_time_and_what_memory_has_a_hit(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url(probe_timeout_s=0.02)) as cache:
            place.hold("probe")
            store(cache, a_prompt(SPACE, 32))
            assert read(cache, a_prompt(SPACE, 64)) == 32
            assert (
                tier_counter(
                    cache, "kvhold_tier_errors", tier="plugin", operation="probe", reason="timeout"
                )
                > 0
            )
            place.let_go("probe")


class TestReads:
    def test_in_batches_the_prompt_s_beginning_first(self, place: Place) -> None:
        with a_cache_over(place.url(batch_bytes=2 * CHUNK_BYTES, concurrent_calls=1)) as cache:
            put_below(cache, 160)
            place.asked.clear()
            assert read(cache, a_prompt(SPACE, 160)) == 160
            keys = keys_of(160)
            assert place.asked["get"] == [keys[at : at + 2] for at in range(0, 10, 2)]

    def test_no_more_at_once_than_the_tier_may_have(self, place: Place) -> None:
        with a_cache_over(place.url(batch_bytes=1, concurrent_calls=3)) as cache:
            put_below(cache, 160)
            place.hold("get")
            with cache.lookup(a_prompt(SPACE, 160).query(), wait_s=0) as hit:
                place.wait_for("get", 3)
                assert hit.arriving
                assert place.inside["get"] == 3
                place.let_go("get")
                eventually(lambda: has_arrived(hit))
                assert hit.num_tokens == 160

    def test_a_second_lookup_of_what_arrives_reads_nothing_twice(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache, ThreadPoolExecutor(4) as pool:
            put_below(cache, 160)
            place.asked.clear()
            place.hold("get")
            reads = [pool.submit(read, cache, a_prompt(SPACE, 160)) for _ in range(4)]
            place.wait_for("get")
            eventually(lambda: cache.status()["held"]["tickets"] == 4)
            place.let_go("get")
            assert [each.result(60) for each in reads] == [160] * 4
            assert sorted(fetched_keys(place)) == sorted(keys_of(160))

    def test_a_hit_grows_while_it_arrives_and_is_exact_when_it_is_claimed_early(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url(batch_bytes=1, concurrent_calls=1)) as cache:
            put_below(cache, 64)
            store(cache, a_prompt(SPACE, 32))
            cache.flush()
            place.hold("get")
            with cache.lookup(a_prompt(SPACE, 64).query(), wait_s=0) as hit:
                assert (hit.arriving, hit.num_tokens) == (True, 32)
                place.wait_for("get")
                lease = cache.claim(hit.ticket)
                assert lease is not None
                with lease:
                    check(lease, a_prompt(SPACE, 64), 32)
                    place.let_go("get")
            eventually(lambda: at_rest(cache))
            with cache.lookup(a_prompt(SPACE, 64).query(), wait_s=0) as hit:
                assert (hit.num_tokens, hit.arriving) == (64, False), (
                    "what was ordered came all the same"
                )

    def test_an_arriving_lookup_that_is_released_holds_nothing(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            for operation in ("probe", "get"):
                place.hold(operation)
                hit = cache.lookup(a_prompt(SPACE, 64).query(), wait_s=0)
                place.wait_for(operation)
                assert cache.status()["held"]["tickets"] == 1
                hit.close()
                assert cache.status()["held"] == NOTHING
                place.let_go(operation)
                eventually(lambda: at_rest(cache))
                forget(cache)

    def test_a_lookup_waits_until_its_deadline_and_takes_the_arrived_chunks(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            store(cache, a_prompt(SPACE, 32))
            cache.flush()
            place.hold("get")
            with cache.lookup(a_prompt(SPACE, 64).query(), wait_s=0.01) as hit:
                assert (hit.num_tokens, hit.arriving) == (32, False)
            place.let_go("get")

    def test_an_interrupted_wait_gives_its_ticket_back(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            place.hold("get")

            def interrupted(*_: object) -> bool:
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr(cache._lock, "wait_for", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    cache.lookup(a_prompt(SPACE, 64).query())
            assert cache.status()["held"] == NOTHING
            place.let_go("get")

    def test_a_prefetch_brings_it_into_memory_and_holds_nothing(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 160)
            cache.prefetch(a_prompt(SPACE, 160).query())
            assert cache.status()["held"] == NOTHING
            eventually(lambda: cache.status()["chunks"] == 10 and at_rest(cache))
            before = place.calls.copy()
            assert read(cache, a_prompt(SPACE, 160)) == 160
            assert place.calls == before
            assert cache.status()["pinned_chunks"] == 0

    def test_the_memory_of_a_hanging_read_stays_reserved_until_the_read_ends(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            place.deaf = True
            place.hold("get")
            set_deadlines(cache, get_timeout_s=SOON_S)
            assert read(cache, a_prompt(SPACE, 64)) == 0
            status = cache.status()
            assert (status["arriving_chunks"], status["used_bytes"]) == (4, 4 * CHUNK_BYTES)
            assert status["tiers"][0]["stuck_calls"] == 1
            cache.clear(deadline_s=5)
            assert cache.status()["used_bytes"] == 4 * CHUNK_BYTES, "not by a clear, either"
            assert status["counters"]["kvhold_withdrawn_chunks{reason=deadline}"] == 4
            place.let_go("get")
            eventually(lambda: cache.status()["used_bytes"] == 0)
            assert cache.status()["tiers"][0]["stuck_calls"] == 0

    def test_a_second_lookup_while_a_read_hangs_ends_and_a_third_after_it_finds_all(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            place.deaf = True
            place.hold("get")
            set_deadlines(cache, get_timeout_s=SOON_S)
            assert read(cache, a_prompt(SPACE, 64)) == 0
            assert read(cache, a_prompt(SPACE, 64)) == 0
            set_deadlines(cache, get_timeout_s=PATIENT_S)
            place.let_go("get")
            eventually(lambda: at_rest(cache))
            assert read(cache, a_prompt(SPACE, 64)) == 64

    def test_a_tier_that_fails_in_reads_makes_misses_and_its_breaker_opens(
        self, place: Place
    ) -> None:
        with a_cache_over(place.url(breaker_failures=2, breaker_pause_s=1000)) as cache:
            put_below(cache, 64)
            place.faults["get"] = TierUnavailable("memory", "get", "gone")
            assert read(cache, a_prompt(SPACE, 64)) == 0
            eventually(lambda: not cache.status()["tiers"][0]["available"])
            before = place.calls.copy()
            for _ in range(3):
                assert read(cache, a_prompt(SPACE, 64)) == 0
            store(cache, a_prompt(SPACE, 64, seed=1))
            assert cache.flush()
            assert place.calls == before, "it is not touched"
            assert (
                tier_counter(
                    cache, "kvhold_tier_dropped_chunks", tier="plugin", reason="unavailable"
                )
                == 4
            )

    def test_for_a_tier_that_is_left_alone_nothing_is_hashed(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        framed: list[object] = []
        monkeypatch.setattr(
            "kvhold.cache.transfer.framing.Framer.framed",
            lambda *arguments: framed.append(arguments),
        )
        with a_cache_over(place.url(breaker_failures=1, breaker_pause_s=1000)) as cache:
            place.faults["probe"] = TierUnavailable("memory", "probe", "gone")
            assert read(cache, a_prompt(SPACE, 64)) == 0
            store(cache, a_prompt(SPACE, 64))
            assert cache.flush()
            assert framed == []

    @pytest.mark.parametrize(
        "fault", [ValueError("x"), AssertionError(), TierFull("memory", "get", "x")], ids=repr
    )
    def test_whatever_a_tier_raises_lookups_and_stores_go_on(
        self, place: Place, fault: Exception
    ) -> None:
        with a_cache_over(place.url(breaker_failures=1000)) as cache:
            put_below(cache, 64)
            place.faults = dict.fromkeys(("probe", "get", "put", "delete", "scan"), fault)
            assert read(cache, a_prompt(SPACE, 64)) == 0
            store(cache, a_prompt(SPACE, 48, seed=1))
            assert cache.flush()
            assert read(cache, a_prompt(SPACE, 48, seed=1)) == 48
            cache.clear()
            place.faults = {}
            assert read(cache, a_prompt(SPACE, 64)) == 0, (
                "it could not be cleared there, and is not used"
            )

    def test_a_chunk_that_a_tier_cannot_read_is_found_in_the_next_tier(
        self, place: Place, second: Place
    ) -> None:
        with a_cache_over(place.url(), second.url()) as cache:
            put_below(cache, 64)
            place.unreadable = set(keys_of(64)[1:3])
            assert read(cache, a_prompt(SPACE, 64)) == 16, "the first time it is not known yet"
            assert read(cache, a_prompt(SPACE, 64)) == 64
            assert set(fetched_keys(second)) == place.unreadable

    def test_an_answer_of_the_wrong_length_is_a_miss(self, place: Place) -> None:
        with a_cache_over(place.url(breaker_failures=1000)) as cache:
            put_below(cache, 64)
            place.shorten = True
            assert read(cache, a_prompt(SPACE, 64)) == 0
            place.shorten = False
            assert read(cache, a_prompt(SPACE, 64)) == 64

    @pytest.mark.parametrize("step", ["of", "accept"])
    def test_an_unexpected_error_in_a_batch_is_a_miss_and_leaves_nothing(
        self,
        place: Place,
        step: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fails(*_: object, **__: object) -> None:
            raise MemoryError("no header")

        with a_cache_over(place.url()) as cache:
            put_below(cache, 64)
            with monkeypatch.context() as patched:
                patched.setattr(ReadBuffer, step, fails)
                assert read(cache, a_prompt(SPACE, 64)) == 0
            eventually(
                lambda: any(
                    record.message == "a task of the tiers failed" for record in caplog.records
                )
            )
            assert at_rest(cache)
            assert read(cache, a_prompt(SPACE, 64)) == 64


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


def test_of_more_than_there_is_room_for_the_beginning_arrives(place: Place) -> None:
    with a_cache_over(place.url(), ram_bytes="8MiB", write_behind_bytes="8MiB") as cache:
        prompt = a_prompt(SPACE, 2000)
        store(cache, prompt)
        forget(cache)
        with cache.reserve(HYBRID, a_prompt(HYBRID_SPACE, 2000).chunks()) as reservation:
            granted = len(reservation.granted)
            assert granted > 10
            found = read(cache, prompt)
            assert 0 < found < 2000
        assert read(cache, prompt) == 2000
