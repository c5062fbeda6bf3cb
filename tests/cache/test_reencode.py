"""A tier's chunks are re-encoded with another codec while they are read: nothing is lost twice, no
budget is broken, nothing is torn.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from msgspec.structs import asdict

from kvhold.cache import LocalCache
from kvhold.cache.transfer.reencodings import ReencodableTier, ReencodeRequest, Reencodings
from kvhold.codecs import read_header
from kvhold.core.api import ReencodeProgress
from kvhold.core.errors import ConfigError, KVHoldError, LayoutError, ProtocolError, TierUnavailable
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.testing.cache import HYBRID, PLAIN, a_prompt, read, store
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    bad_frames,
    eventually,
    forget,
    is_at_baseline,
    on_disk,
    tier_counter,
)
from tests.cache.wide import (
    LOSSY_SPACE,
    WIDE,
    WIDE_SPACE,
    codecs_of,
    store_values,
    wide_cache,
    worst_error,
)
from tests.tiers.memory import Place, a_place

RESULTS = ("replaced", "same", "kept_lossy", "missing", "bad", "unknown", "failed")


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


@pytest.fixture(params=["memory", "disk", "fs"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier's, for settings."""
    patient = f"probe_timeout_s={PATIENT_S}&get_timeout_s={PATIENT_S}&put_timeout_s={PATIENT_S}"
    lines = {
        "memory": f"memory://?max_bytes=16MiB&name=below&{patient}",
        "disk": on_disk(tmp_path, name="below"),
        "fs": f"fs://{tmp_path}/shared?name=below&{patient}",
    }
    return lines[request.param]


def reencoded(cache: LocalCache, codec: str, tier: str = "plugin", **of: Any) -> ReencodeProgress:
    """To its end; the counts add up."""
    with cache.reencode(tier, codec, **of) as reencoding:
        counts = reencoding.wait(time.monotonic() + PATIENT_S)
    assert counts.done
    assert counts.seen == sum(getattr(counts, name) for name in RESULTS)
    for name in RESULTS:
        assert tier_counter(cache, "kvhold_reencoded_chunks", tier=tier, result=name) >= getattr(
            counts, name
        )
    eventually(lambda: cache.status()["reencodings"] == 0)
    return counts


def only(counts: ReencodeProgress) -> dict[str, Any]:
    """What is not nothing."""
    return {
        name: value
        for name, value in asdict(counts).items()
        if value and not name.startswith("bytes_")
    }


def filled(
    cache: LocalCache, prompt: Prompt, store_options: StoreOptions = DEFAULT_OPTIONS
) -> Prompt:
    store_values(cache, prompt, store_options)
    forget(cache)
    return prompt


class TestThereAndBack:
    def test_without_a_loss_every_byte_comes_back(self, line: str) -> None:
        with wide_cache(line) as cache:
            prompt = filled(cache, a_prompt(WIDE_SPACE, 256))
            counts = reencoded(cache, "lossless", "below")
            assert only(counts) == {"done": True, "seen": 4, "replaced": 4}
            assert 0 < counts.bytes_after < 0.8 * counts.bytes_before
            assert worst_error(cache, prompt) == 0
            assert only(reencoded(cache, "lossless", "below")) == {
                "done": True,
                "seen": 4,
                "same": 4,
            }
            back = reencoded(cache, "raw", "below")
            assert (back.replaced, back.bytes_before, back.bytes_after) == (
                4,
                counts.bytes_after,
                counts.bytes_before,
            )
            forget(cache)
            assert worst_error(cache, prompt) == 0
            assert bad_frames(cache) == {}
            is_at_baseline(cache)

    def test_what_was_lost_is_lost_once(self, line: str) -> None:
        with wide_cache(line) as cache:
            prompt = filled(cache, a_prompt(LOSSY_SPACE, 256))
            assert reencoded(cache, "fp8", "below").replaced == 4
            error = worst_error(cache, prompt)
            assert 0 < error < 0.05
            assert only(reencoded(cache, "int8", "below")) == {
                "done": True,
                "seen": 4,
                "kept_lossy": 4,
            }
            for codec in ("lossless", "raw"):
                assert reencoded(cache, codec, "below").replaced == 4
                forget(cache)
                assert worst_error(cache, prompt) == error

    def test_every_group_and_tail_of_a_hybrid_model(self, line: str) -> None:
        with a_cache_over(line) as cache:
            prompts = [
                a_prompt(space, 150, seed) for space in (SPACE, HYBRID_SPACE) for seed in range(3)
            ]
            for prompt in prompts:
                store(cache, prompt)
            forget(cache)
            for codec in ("lossless", "raw"):
                counts = reencoded(cache, codec, "below")
                assert only(counts) == {"done": True, "seen": 120, "replaced": 120}
            assert [read(cache, prompt) for prompt in prompts] == [150] * 6

    def test_what_a_codec_does_not_accept_is_written_by_lossless(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            store(cache, a_prompt(HYBRID_SPACE.allowing_loss(max_error=1), 64))
            forget(cache)
            assert only(reencoded(cache, "int8")) == {"done": True, "seen": 12, "replaced": 12}
            states = {
                read_header(value).codec
                for key, value in place.values.items()
                if HYBRID.groups[key[-4]].attention == "state"
            }
            assert states == {"lossless"}
            assert reencoded(cache, "int8").same == 12


class TestWhich:
    def test_one_namespace_alone(self, place: Place) -> None:
        other = Namespace("other", WIDE)
        with wide_cache(place.url()) as cache:
            cache.register(other)
            for space in (WIDE_SPACE, other):
                filled(cache, a_prompt(space, 128))
            assert reencoded(cache, "lossless", namespace=other.digest).seen == 2
            by_space = {key[:16]: read_header(value).codec for key, value in place.values.items()}
            assert by_space == {WIDE_SPACE.digest: "raw", other.digest: "lossless"}
            assert only(reencoded(cache, "lossless")) == {
                "done": True,
                "seen": 4,
                "replaced": 2,
                "same": 2,
            }

    def test_one_prompt_alone(self, place: Place) -> None:
        with wide_cache(place.url()) as cache:
            mine, other = a_prompt(WIDE_SPACE, 256, seed=1), a_prompt(WIDE_SPACE, 256, seed=2)
            filled(cache, mine)
            filled(cache, other)
            query = a_prompt(WIDE_SPACE, 192, seed=1).query()
            assert only(reencoded(cache, "lossless", query=query)) == {
                "done": True,
                "seen": 3,
                "replaced": 3,
            }
            assert (
                sorted(read_header(value).codec for value in place.values.values())
                == ["lossless"] * 3 + ["raw"] * 5
            )
            assert (
                reencoded(cache, "lossless", query=a_prompt(WIDE_SPACE, 256, seed=9).query()).seen
                == 0
            )

    def test_a_namespace_that_is_not_known_may_only_be_written_without_a_loss(
        self, place: Place
    ) -> None:
        hidden = Namespace("hidden", WIDE, tags=(("kvhold.max_error", "0.0"),))
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(hidden, 128))
        with wide_cache(place.url()) as cache:
            with pytest.raises(
                ConfigError,
                match=rf"namespace {hidden.digest.hex()} is not known here",
            ):
                cache.reencode("plugin", "int8", namespace=hidden.digest)
            assert reencoded(cache, "int8").seen == 0, "all that are known"
            assert reencoded(cache, "lossless", namespace=hidden.digest).replaced == 2
            assert worst_error(cache, a_prompt(hidden, 128)) == 0

    def test_frames_of_a_layout_that_nobody_has_registered_stay_as_they_are(
        self, place: Place
    ) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(WIDE_SPACE, 128))
        before = dict(place.values)
        with a_cache_over(place.url()) as cache:
            assert only(reencoded(cache, "lossless", namespace=WIDE_SPACE.digest)) == {
                "done": True,
                "seen": 2,
                "unknown": 2,
            }
            assert place.values == before

    def test_frames_of_a_codec_that_is_not_there_stay_as_they_are(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with wide_cache(place.url(codec="int8")) as cache:
            filled(cache, a_prompt(LOSSY_SPACE, 128))
            before = dict(place.values)
            monkeypatch.setattr("kvhold.cache.transfer.reencoder.find_codec", lambda name: None)
            assert only(reencoded(cache, "raw")) == {"done": True, "seen": 2, "unknown": 2}
            assert place.values == before


class TestBudgets:
    @pytest.mark.parametrize(
        ("tags", "codec", "used"),
        [
            ({}, "fp8", "lossless"),
            ({"kvhold.max_error": "1.0"}, "fp8", "fp8"),
            ({"kvhold.max_error": "0.04"}, "fp8", "fp8"),
            ({"kvhold.max_error": "0.015"}, "fp8", "int8"),
            ({"kvhold.max_error": "0.0"}, "int8", "lossless"),
            ({"kvhold.max_bits": "3.0"}, "cachegen-fine", "cachegen"),
        ],
    )
    def test_a_namespaces_budget_is_kept(
        self, place: Place, tags: dict[str, str], codec: str, used: str
    ) -> None:
        space = Namespace("wide", WIDE, tags=tuple(tags.items()))
        with wide_cache(place.url()) as cache:
            prompt = filled(cache, a_prompt(space, 128))
        with wide_cache(place.url()) as cache:
            cache.register(space)
            counts = reencoded(cache, codec, namespace=space.digest)
            assert codecs_of(place) == {used}
            assert (counts.replaced, counts.over_budget) == (2, 0 if used == codec else 2)
            most = float(tags.get("kvhold.max_error", 1 if tags else 0))
            assert worst_error(cache, prompt) <= most
            assert reencoded(cache, codec, namespace=space.digest).replaced == 0

    def test_of_the_budgets_that_a_namespace_was_named_with_the_strictest_holds(
        self, place: Place
    ) -> None:
        with wide_cache(place.url()) as cache:
            filled(cache, a_prompt(LOSSY_SPACE, 128, seed=1), StoreOptions(max_error=0.001))
            filled(cache, a_prompt(LOSSY_SPACE, 128, seed=2))
            assert only(reencoded(cache, "int8")) == {
                "done": True,
                "seen": 4,
                "replaced": 4,
                "over_budget": 4,
            }
            assert codecs_of(place) == {"lossless"}


class TestEncryption:
    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for number, name in enumerate(("COMMON", "KEY_A")):
            monkeypatch.setenv(name, bytes([number + 1] * 32).hex())

    def cache(self, place: Place) -> LocalCache:
        return wide_cache(
            place.url(encrypt="true"), encryption={"keys": ("=env:COMMON", "a=env:KEY_A")}
        )

    @pytest.mark.parametrize("tags", [(), (("tenant", "a"),)], ids=["common key", "a tenant's"])
    def test_what_was_sealed_stays_sealed(
        self, place: Place, tags: tuple[tuple[str, str], ...]
    ) -> None:
        space = Namespace("wide", WIDE, tags=tags)
        with self.cache(place) as cache:
            cache.register(space)
            prompt = filled(cache, a_prompt(space, 128), StoreOptions(tenant=space.tenant))
            counts = reencoded(cache, "lossless")
            assert counts.replaced == 2
            assert counts.bytes_after < 0.8 * counts.bytes_before
            assert all(value.startswith(b"\x89kvseal\n") for value in place.values.values())
            assert worst_error(cache, prompt) == 0

    def test_a_namespace_whose_tenant_is_not_known_is_not_taken_for_damaged(
        self, place: Place
    ) -> None:
        space = Namespace("wide", WIDE, tags=(("tenant", "a"),))
        with self.cache(place) as cache:
            prompt = filled(cache, a_prompt(space, 128), StoreOptions(tenant="a"))
        before = dict(place.values)
        with self.cache(place) as cache:
            with pytest.raises(ConfigError, match="whose key encrypts namespace"):
                cache.reencode("plugin", "lossless", namespace=space.digest)
            assert reencoded(cache, "lossless").seen == 0
            assert place.values == before
            assert reencoded(cache, "lossless", query=prompt.query()).replaced == 2, (
                "a prompt names its tenant"
            )
            assert worst_error(cache, prompt) == 0

    def test_a_namespace_of_several_tenants_is_left_alone(self, place: Place) -> None:
        with self.cache(place) as cache:
            for seed, tenant in enumerate(("a", "")):
                filled(cache, a_prompt(WIDE_SPACE, 128, seed), StoreOptions(tenant=tenant))
            before = dict(place.values)
            assert reencoded(cache, "lossless").seen == 0
            assert place.values == before


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


def test_a_budget_is_read_from_a_namespaces_tags_alone_where_they_say_one() -> None:
    from kvhold.core.rules import store_options_of

    assert store_options_of(()) == DEFAULT_OPTIONS
    assert store_options_of((("kvhold.max_error", "0.02"), ("tenant", "a"))) == replace(
        DEFAULT_OPTIONS, max_error=0.02, tenant="a"
    )
    for bad in ("much", "2", "nan", "-1"):
        assert store_options_of((("kvhold.max_error", bad),)) is None
