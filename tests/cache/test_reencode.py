"""A tier's chunks are re-encoded with another codec: which ones, in their budgets, and encrypted
if they were.
"""

from dataclasses import replace

import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from kvhold.cache import LocalCache
from kvhold.codecs import read_header
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.testing.cache import HYBRID, a_prompt, read, store
from tests.cache.below import HYBRID_SPACE, SPACE, a_cache_over, bad_frames, forget, is_at_baseline
from tests.cache.places import place
from tests.cache.reencoding import filled, line, only, reencoded
from tests.cache.wide import LOSSY_SPACE, WIDE, WIDE_SPACE, codecs_of, wide_cache, worst_error
from tests.tiers.memory import Place

__all__ = ["line", "place"]


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


def test_a_budget_is_read_from_a_namespaces_tags_alone_where_they_say_one() -> None:
    from kvhold.core.rules import store_options_of
    from kvhold.core.tags import tag_digest

    assert store_options_of(()) == DEFAULT_OPTIONS
    assert store_options_of((("kvhold.max_error", "0.02"), ("tenant", "a"))) == replace(
        DEFAULT_OPTIONS, max_error=0.02, tenant="a", tags=tag_digest("tenant", "a")
    )
    for bad in ("much", "2", "nan", "-1"):
        assert store_options_of((("kvhold.max_error", bad),)) is None
