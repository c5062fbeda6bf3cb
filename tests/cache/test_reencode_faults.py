"""Re-encoding that goes wrong, is refused or runs beside requests: nothing is lost twice, nothing
is torn.
"""

import threading
import time

import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from kvhold.cache.transfer.reencodings import ReencodableTier, ReencodeRequest, Reencodings
from kvhold.codecs import read_header
from kvhold.core.api import ReencodeProgress
from kvhold.core.errors import ConfigError, KVHoldError, LayoutError, ProtocolError, TierUnavailable
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.testing.cache import PLAIN, a_prompt
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    bad_frames,
    eventually,
    forget,
    is_at_baseline,
)
from tests.cache.places import place
from tests.cache.reencoding import filled, line, only, reencoded
from tests.cache.wide import (
    LOSSY_SPACE,
    WIDE_SPACE,
    codecs_of,
    store_values,
    wide_cache,
    worst_error,
)
from tests.tiers.memory import Place

__all__ = ["line", "place"]


class TestWhatGoesWrong:
    def test_a_bad_frame_is_removed_and_counted(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 256))
            one, other, *_ = sorted(place.values)
            place.values[one] = place.values[one][:-1] + bytes([place.values[one][-1] ^ 1])
            place.values[other] = b"no frame"
            assert only(reencoded(cache, "lossless")) == {
                "done": True,
                "seen": 4,
                "replaced": 2,
                "bad": 2,
            }
            assert bad_frames(cache) == {"checksum": 1, "length": 1}
            assert set(place.values).isdisjoint({one, other})

    def test_a_bad_frame_that_needs_no_rewriting_is_found_too(self, place: Place) -> None:
        with wide_cache(place.url(codec="int8")) as cache:
            filled(cache, a_prompt(LOSSY_SPACE, 256))
            for key, codec in zip(sorted(place.values), ("int8", "fp8"), strict=False):
                place.values[key] = place.values[key][:-1] + bytes([place.values[key][-1] ^ 1])
                assert reencoded(cache, codec).bad == 1
            assert len(place.values) == 2

    def test_what_has_expired_is_removed(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 128, seed=1), StoreOptions(ttl_s=1000))
            lasting = filled(cache, a_prompt(WIDE_SPACE, 128, seed=2))
            assert reencoded(cache, "lossless").replaced == 4
            expiring = {read_header(value).expires_at > 0 for value in place.values.values()}
            assert expiring == {True, False}, "a frame keeps its time"
            cache._state.ram._clock = lambda: time.time() + 2000
            assert only(reencoded(cache, "raw")) == {
                "done": True,
                "seen": 4,
                "replaced": 2,
                "missing": 2,
            }
            assert len(place.values) == 2
            assert worst_error(cache, lasting) == 0

    def test_what_is_removed_meanwhile_does_not_come_back(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 256))
            place.hold("replace")
            with cache.reencode("plugin", "lossless") as reencoding:
                place.wait_for("replace")
                release_owner = sorted(place.values)[:2]
                for key in release_owner:
                    del place.values[key]
                place.let_go("replace")
                assert only(reencoding.wait()) == {
                    "done": True,
                    "seen": 4,
                    "replaced": 2,
                    "missing": 2,
                }
            assert set(place.values).isdisjoint(release_owner)

    def test_a_tier_that_dies_in_the_middle_keeps_the_rest_as_it_was(self, place: Place) -> None:
        with wide_cache(
            place.url(batch_bytes="64KiB", breaker_failures=1, breaker_pause_s=0.01)
        ) as cache:
            prompt = filled(cache, a_prompt(WIDE_SPACE, 512))
            place.hold("replace")
            with cache.reencode("plugin", "lossless") as reencoding:
                place.wait_for("replace")
                place.faults["get"] = TierUnavailable("memory", "get", "pulled out")
                place.let_go("replace")
                counts = reencoding.wait()
            assert counts.stopped == "tier plugin failed: memory: get: pulled out"
            assert 0 < counts.replaced < 8
            assert counts.replaced + counts.failed == counts.seen
            assert codecs_of(place) == {"raw", "lossless"}
            place.faults.clear()
            eventually(lambda: cache.status()["tiers"][0]["available"])
            assert worst_error(cache, prompt) == 0
            forget(cache)
            assert reencoded(cache, "lossless").replaced == 8 - counts.replaced

    def test_an_answer_that_never_came_counts_as_failed(self, place: Place) -> None:
        with wide_cache(place.url(breaker_failures=1)) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 128))
            place.faults["replace"] = TierUnavailable("memory", "replace", "pulled out")
            counts = reencoded(cache, "lossless")
            assert (counts.failed, counts.stopped) == (
                2,
                "tier plugin failed: memory: replace: pulled out",
            )
            assert codecs_of(place) == {"raw"}

    def test_a_scan_that_fails_is_said(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 128))
            place.faults["scan"] = TierUnavailable("memory", "scan", "pulled out")
            assert (
                reencoded(cache, "lossless").stopped
                == "tier plugin failed: memory: scan: pulled out"
            )

    def test_one_that_is_closed_stops_and_the_next_one_begins(self, place: Place) -> None:
        with wide_cache(place.url(batch_bytes="64KiB")) as cache:
            prompt = filled(cache, a_prompt(WIDE_SPACE, 512))
            place.hold("replace")
            with cache.reencode("plugin", "lossless"):
                place.wait_for("replace")
                waiting = cache.reencode("plugin", "int8")
            waiting.close()
            eventually(lambda: cache.status()["reencodings"] == 0)
            place.let_go("replace")
            assert worst_error(cache, prompt) == 0
            forget(cache)
            assert reencoded(cache, "lossless").seen == 8

    def test_an_ending_cache_does_not_wait_for_it(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 128))
            place.hold("replace")
            reencoding = cache.reencode("plugin", "lossless")
            place.wait_for("replace")
        with pytest.raises(KVHoldError, match="closed"):
            reencoding.wait()


class TestRefusals:
    @pytest.mark.parametrize(
        ("tier", "codec", "told"),
        [
            (
                "plugni",
                "lossless",
                r"tier 'plugni' is unknown; known are plugin, shelf, hole; did you mean 'plugin'",
            ),
            ("plugin", "los1ess", r"codec 'los1ess' is unknown.*did you mean 'lossless'"),
            ("shelf", "lossless", r"tier shelf: it is read_only"),
            (
                "hole",
                "lossless",
                r"tier hole: null cannot replace a value in one step",
            ),
        ],
    )
    def test_what_cannot_be_is_said_at_once(
        self, place: Place, tier: str, codec: str, told: str
    ) -> None:
        with a_cache_over(
            place.url(), place.url(name="shelf", read_only="true"), "null://?name=hole"
        ) as cache:
            with pytest.raises(ConfigError, match=told):
                cache.reencode(tier, codec)
            assert cache.status()["reencodings"] == 0

    def test_what_came_up_from_a_tier_with_a_loss_loses_no_more(self, place: Place) -> None:
        with a_cache_over(
            place.url(), place.url(name="below", codec="int8"), "null://?name=hole"
        ) as cache:
            with pytest.raises(ConfigError, match="may come from tier below, whose codec"):
                cache.reencode("plugin", "fp8")
            assert reencoded(cache, "lossless").done
            assert reencoded(cache, "fp8", "below").done

    def test_a_tier_above_a_lossily_reencoded_one_refuses_lossy_codecs(self, place: Place) -> None:
        with a_cache_over(place.url(), place.url(name="below")) as cache:
            assert reencoded(cache, "fp8").done
            assert reencoded(cache, "fp8", "below").done
            with pytest.raises(ConfigError, match="may come from tier below"):
                cache.reencode("plugin", "fp8")

    def test_a_cache_without_tiers_says_so(self) -> None:
        with (
            a_cache_over() as cache,
            pytest.raises(ConfigError, match="this cache has only memory"),
        ):
            cache.reencode("disk", "lossless")

    def test_names_of_impossible_sizes_and_layouts_that_are_not_there(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            with pytest.raises(ProtocolError, match="has 3 bytes"):
                cache.reencode("plugin", "lossless", namespace=b"abc")
            with pytest.raises(ProtocolError, match="differs from the query's namespace"):
                cache.reencode(
                    "plugin",
                    "lossless",
                    namespace=HYBRID_SPACE.digest,
                    query=a_prompt(SPACE, 32).query(),
                )
            with pytest.raises(LayoutError, match="was not registered"):
                cache.reencode("plugin", "lossless", query=a_prompt(WIDE_SPACE, 64).query())

    def test_namespaces_and_reencodings_are_bounded(self) -> None:
        commands: list[object] = []
        reencodings = Reencodings(commands.append)
        reencodings.tiers = {"disk": ReencodableTier(0)}
        for number in range(70_000):
            reencodings.learn(number.to_bytes(16, "big"), PLAIN, DEFAULT_OPTIONS)
        reencodings.begin(1, "me", ReencodeRequest("disk", "raw"), {})
        assert len(commands[0].spaces) == 1 << 16  # type: ignore[attr-defined]
        reencodings = Reencodings(commands.append)
        reencodings.tiers = {"disk": ReencodableTier(0)}
        for number in range(1, 65):
            reencodings.begin(number, "me", ReencodeRequest("disk", "raw"), {})
        with pytest.raises(ConfigError, match="64 re-encodings"):
            reencodings.begin(65, "me", ReencodeRequest("disk", "raw"), {})
        reencodings.drop_all("me")
        assert len(reencodings) == 0


class TestBesideRequests:
    def test_hits_are_exact_while_it_goes_on(self, line: str) -> None:
        with wide_cache(line + "&batch_bytes=64KiB") as cache:
            prompts = [filled(cache, a_prompt(WIDE_SPACE, 256, seed)) for seed in range(4)]
            over = threading.Event()
            turns: list[ReencodeProgress] = []

            def back_and_forth() -> None:
                while not over.is_set():
                    turns.extend(reencoded(cache, codec, "below") for codec in ("lossless", "raw"))

            reencoder = threading.Thread(target=back_and_forth)
            reencoder.start()
            try:
                for turn in range(24):
                    assert worst_error(cache, prompts[turn % 4]) == 0
                    forget(cache)
            finally:
                over.set()
                reencoder.join()
            assert sum(counts.replaced for counts in turns) > 0
            assert all(counts.missing == counts.bad == counts.failed == 0 for counts in turns)
            assert bad_frames(cache) == {}
            is_at_baseline(cache)

    @pytest.mark.parametrize("smaller", [True, False])
    def test_a_hit_whose_frames_change_their_size_on_the_way_is_whole(
        self, place: Place, smaller: bool
    ) -> None:
        with wide_cache(place.url()) as cache:
            prompt = filled(cache, a_prompt(WIDE_SPACE, 256))
            raw = dict(place.values)
            reencoded(cache, "lossless")
            small = dict(place.values)
            place.values = dict(raw if smaller else small)
            place.hold("get")
            with cache.lookup(prompt.query(), wait_s=0) as hit:
                place.wait_for("get")
                place.values = dict(small if smaller else raw)
                place.let_go("get")
                hit.wait(time.monotonic() + PATIENT_S)
                assert hit.num_tokens == 256
            assert worst_error(cache, prompt) == 0
            assert bad_frames(cache) == {}

    def test_a_request_goes_before_it(self, place: Place) -> None:
        with wide_cache(place.url(concurrent_calls=2, batch_bytes="64KiB")) as cache:
            prompt = filled(cache, a_prompt(WIDE_SPACE, 512))
            place.hold("replace")
            with cache.reencode("plugin", "lossless") as reencoding:
                place.wait_for("replace")
                assert worst_error(cache, prompt) == 0, "while a replacement hangs in the tier"
                store_values(cache, a_prompt(WIDE_SPACE, 64, seed=2))
                place.let_go("replace")
                assert reencoding.wait().replaced >= 8
            eventually(lambda: len(place.values) == 9)

    def test_it_does_not_change_what_is_stored_later(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 128, seed=1))
            assert reencoded(cache, "lossless").replaced == 2
            filled(cache, a_prompt(WIDE_SPACE, 128, seed=2))
            assert codecs_of(place) == {"raw", "lossless"}
