"""The tier worker probes and reads a tier that is slow, hangs, fails or lies: nothing waits for it,
nothing is lost.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvhold.cache.transfer.read_buffer import ReadBuffer
from kvhold.core.errors import TierFull, TierUnavailable
from kvhold.testing.cache import HYBRID, a_prompt, check, read, store
from tests.cache.below import (
    CHUNK_BYTES,
    HYBRID_SPACE,
    NOTHING,
    PATIENT_S,
    SPACE,
    a_cache_over,
    at_rest,
    eventually,
    forget,
    has_arrived,
    set_deadlines,
    tier_counter,
)
from tests.cache.places import place
from tests.cache.working import SOON_S, fetched_keys, keys_of, put_below, second
from tests.tiers.memory import Place

__all__ = ["place", "second"]


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
