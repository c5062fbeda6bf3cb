"""Tiers with a codec and encrypted ones: what comes back, what is refused, and whose budget and key
decide.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from kvhold.codecs import read_header
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace, make_key
from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import HYBRID, a_prompt, read, store
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    bad_frames,
    cache_over,
    eventually,
    forget,
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


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


@pytest.fixture
def second() -> Iterator[Place]:
    with a_place() as place:
        yield place


class TestCodecs:
    @pytest.mark.parametrize("space", [SPACE, HYBRID_SPACE], ids=["one group", "hybrid"])
    def test_lossless_gives_every_byte_back_from_a_disk(
        self, tmp_path: Path, space: Namespace
    ) -> None:
        with a_cache_over(on_disk(tmp_path, codec="lossless")) as cache:
            store(cache, a_prompt(space, 150))
            forget(cache)
            assert read(cache, a_prompt(space, 150)) == 150
            assert tier_counter(
                cache, "kvhold_encoded_chunks", tier="disk", codec="lossless"
            ) == 10 * len(space.layout.groups)

    @pytest.mark.parametrize("codec", ["int8", "fp8"])
    def test_a_lossy_codec_keeps_its_error_bound_and_takes_half_the_bytes(
        self, place: Place, codec: str
    ) -> None:
        with wide_cache(place.url(codec=codec)) as cache:
            prompt = a_prompt(LOSSY_SPACE, 256)
            store_values(cache, prompt)
            forget(cache)
            assert codecs_of(place) == {codec}
            assert 0 < worst_error(cache, prompt) < 0.05
            labels = {"tier": "plugin", "codec": codec}
            plain = tier_counter(cache, "kvhold_encoded_plain_bytes", **labels)
            assert 0.4 < tier_counter(cache, "kvhold_encoded_bytes", **labels) / plain < 0.65

    def test_states_are_never_written_with_a_loss(self, place: Place) -> None:
        with a_cache_over(place.url(codec="fp8")) as cache:
            store(cache, a_prompt(HYBRID_SPACE.allowing_loss(max_error=1), 64))
            forget(cache)
            by_group = {
                int.from_bytes(key[-4:-2], "little"): read_header(value).codec
                for key, value in place.values.items()
            }
            assert (
                by_group[
                    HYBRID.groups.index(next(g for g in HYBRID.groups if g.attention == "state"))
                ]
                == "lossless"
            )
            assert "fp8" in by_group.values()

    def test_each_tier_has_its_own(self, place: Place, second: Place) -> None:
        with wide_cache(
            place.url(codec="int8"), second.url(codec="lossless", name="below")
        ) as cache:
            prompt = a_prompt(LOSSY_SPACE, 256)
            store_values(cache, prompt)
            forget(cache)
            assert (codecs_of(place), codecs_of(second)) == ({"int8"}, {"lossless"})
            place.values.clear()
            assert worst_error(cache, prompt) == 0

    def test_what_moves_up_loses_nothing_more(self, place: Place, second: Place) -> None:
        with wide_cache(place.url(codec="fp8"), second.url(codec="int8", name="below")) as cache:
            prompt = a_prompt(LOSSY_SPACE, 256)
            store_values(cache, prompt)
            forget(cache)
            place.values.clear()
            error = worst_error(cache, prompt)
            forget(cache)
            assert codecs_of(place) == {"lossless"}
            second.values.clear()
            assert worst_error(cache, prompt) == error > 0

    def test_a_frame_of_any_codec_is_read_whatever_the_tier_is_set_to(self, place: Place) -> None:
        prompt = a_prompt(LOSSY_SPACE, 256)
        with wide_cache(place.url(codec="int8")) as cache:
            store_values(cache, prompt)
            cache.flush()
        with wide_cache(place.url()) as cache:
            assert 0 < worst_error(cache, prompt) < 0.01

    def test_a_damaged_frame_is_a_miss(self, place: Place) -> None:
        with wide_cache(place.url(codec="int8")) as cache:
            prompt = a_prompt(LOSSY_SPACE, 256)
            store_values(cache, prompt)
            forget(cache)
            key = make_key(LOSSY_SPACE.digest, prompt.hash_at(1), 0, 0)
            damaged = bytearray(place.values[key])
            damaged[-5] ^= 1
            place.values[key] = bytes(damaged)
            with cache.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
                assert hit.num_tokens == 64
            assert bad_frames(cache) == {"checksum": 1}
            eventually(lambda: key not in place.values)

    def test_an_unknown_codec_is_an_error_at_the_start(self, place: Place) -> None:
        with pytest.raises(
            ConfigError,
            match=r"tier plugin: codec 'los1ess' is unknown; .* did you mean 'lossless'",
        ):
            cache_over(place.url(codec="los1ess"))


class TestBudgets:
    @pytest.mark.parametrize(
        ("codec", "store_options", "used"),
        [
            ("fp8", StoreOptions(), "fp8"),
            ("fp8", StoreOptions(max_error=0.04), "fp8"),
            ("fp8", StoreOptions(max_error=0.015), "int8"),
            ("cachegen", StoreOptions(max_error=0.2), "cachegen"),
            ("cachegen", StoreOptions(max_error=0.1), "cachegen-fine"),
            ("cachegen-small", StoreOptions(max_error=0.03), "int8"),
            ("cachegen-fine", StoreOptions(max_bits=2.8), "cachegen"),
            ("fp8", StoreOptions(max_error=0.001), "lossless"),
            ("int8", StoreOptions(max_error=0), "lossless"),
            ("int8", StoreOptions(max_bits=8.4), "cachegen-fine"),
            ("int8", StoreOptions(max_bits=8.4, max_error=0.01), "int8"),
            ("raw", StoreOptions(max_error=0), "raw"),
        ],
        ids=str,
    )
    def test_the_next_better_codec_is_taken_where_one_loses_too_much(
        self, place: Place, codec: str, store_options: StoreOptions, used: str
    ) -> None:
        with wide_cache(place.url(codec=codec)) as cache:
            prompt = a_prompt(LOSSY_SPACE, 128)
            store_values(cache, prompt, store_options)
            forget(cache)
            assert codecs_of(place) == {used}
            assert worst_error(cache, prompt) <= (
                1 if store_options.max_error is None else store_options.max_error
            )


class TestEncryption:
    KEYS = ("=env:COMMON", "a=env:KEY_A", "b=env:KEY_B")

    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for number, name in enumerate(("COMMON", "KEY_A", "KEY_B", "NEW_A")):
            monkeypatch.setenv(name, bytes([number + 1] * 32).hex())

    def test_nothing_below_memory_can_be_read_and_all_comes_back(self, tmp_path: Path) -> None:
        with a_cache_over(
            on_disk(tmp_path, encrypt="true"), encryption={"keys": self.KEYS}
        ) as cache:
            store(cache, a_prompt(SPACE, 150))
            forget(cache)
            files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
            assert any(b"\x89kvseal\n" in data for data in files)
            assert not any(b"\x89kvhold\n" in data for data in files)
            assert read(cache, a_prompt(SPACE, 150)) == 150

    @pytest.mark.parametrize("codec", ["lossless", "int8"])
    def test_after_the_codec(self, place: Place, codec: str) -> None:
        with wide_cache(
            place.url(codec=codec, encrypt="true"), encryption={"keys": self.KEYS}
        ) as cache:
            prompt = a_prompt(LOSSY_SPACE, 256)
            store_values(cache, prompt)
            forget(cache)
            assert (worst_error(cache, prompt) == 0) == (codec == "lossless")

    def spoiled(self, place: Place, change: str) -> None:
        first, other = sorted(place.values)[:2]
        value = bytearray(place.values[first])
        if change == "flipped bit":
            value[len(value) // 2] ^= 16
        elif change == "cut short":
            del value[-1:]
        elif change == "another chunk's":
            value[:] = place.values[other]
        place.values[first] = bytes(value)

    @pytest.mark.parametrize("change", ["flipped bit", "cut short", "another chunk's"])
    def test_what_was_altered_or_swapped_is_a_miss_and_counted(
        self, place: Place, change: str
    ) -> None:
        with a_cache_over(place.url(encrypt="true"), encryption={"keys": self.KEYS}) as cache:
            store(cache, a_prompt(SPACE, 160))
            forget(cache)
            self.spoiled(place, change)
            assert read(cache, a_prompt(SPACE, 160)) < 160
            assert bad_frames(cache) == {"sealed": 1}

    def test_another_key_reads_nothing(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        with cache_over(place.url(encrypt="true"), encryption={"keys": self.KEYS}) as cache:
            store(cache, a_prompt(SPACE, 16))
            cache.flush()
        monkeypatch.setenv("COMMON", bytes(range(32)).hex())
        with cache_over(place.url(encrypt="true"), encryption={"keys": self.KEYS}) as cache:
            assert read(cache, a_prompt(SPACE, 16)) == 0
            assert bad_frames(cache) == {"sealed": 1}

    def test_a_frame_in_the_clear_is_refused(self, place: Place) -> None:
        """Whoever can write to the tier could make one."""
        with cache_over(place.url()) as cache:
            store(cache, a_prompt(SPACE, 16))
            cache.flush()
        with cache_over(place.url(encrypt="true"), encryption={"keys": self.KEYS}) as cache:
            assert read(cache, a_prompt(SPACE, 16)) == 0
            assert bad_frames(cache) == {"sealed": 1}

    def test_tenants_have_keys_of_their_own(self, place: Place) -> None:
        ours, theirs = (Namespace("wide", WIDE, tags=(("tenant", name),)) for name in "ab")
        with wide_cache(place.url(encrypt="true"), encryption={"keys": self.KEYS}) as cache:
            prompt, other = a_prompt(ours, 64), a_prompt(theirs, 64)
            store_values(cache, prompt, StoreOptions(tenant="a"))
            store_values(cache, other, StoreOptions(tenant="b"))
            forget(cache)
            assert worst_error(cache, prompt) == 0
            forget(cache)
            mine, yours = (
                make_key(space.digest, one.hash_at(0), 0, 0)
                for space, one in ((ours, prompt), (theirs, other))
            )
            place.values[mine] = place.values[yours]
            with cache.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
                assert hit.num_tokens == 0
            assert bad_frames(cache) == {"sealed": 1}

    def test_a_key_is_changed_without_losing_what_the_old_one_sealed(self, place: Place) -> None:
        space = Namespace("wide", WIDE, tags=(("tenant", "a"),))
        old, new = a_prompt(space, 64, seed=1), a_prompt(space, 64, seed=2)
        with wide_cache(place.url(encrypt="true"), encryption={"keys": ["a=env:KEY_A"]}) as cache:
            store_values(cache, old, StoreOptions(tenant="a"))
            cache.flush()
        with wide_cache(
            place.url(encrypt="true"), encryption={"keys": ["a=env:NEW_A", "a=env:KEY_A"]}
        ) as cache:
            assert worst_error(cache, old) == 0
            store_values(cache, new, StoreOptions(tenant="a"))
            cache.flush()
        with wide_cache(place.url(encrypt="true"), encryption={"keys": ["a=env:NEW_A"]}) as cache:
            assert worst_error(cache, new) == 0
            with cache.lookup(old.query(), wait_s=PATIENT_S) as hit:
                assert hit.num_tokens == 0

    def test_a_tenant_without_a_key_is_not_written_and_counted(self, place: Place) -> None:
        with wide_cache(place.url(encrypt="true"), encryption={"keys": ["a=env:KEY_A"]}) as cache:
            store_values(cache, a_prompt(WIDE_SPACE, 64), StoreOptions(tenant="c"))
            cache.flush()
            assert place.values == {}
            assert (
                tier_counter(cache, "kvhold_tier_dropped_chunks", tier="plugin", reason="no key")
                == 1
            )

    def test_a_key_that_goes_up_goes_with_its_tenant(self, place: Place, second: Place) -> None:
        space = Namespace("wide", WIDE, tags=(("tenant", "a"),))
        prompt = a_prompt(space, 64)
        tiers = place.url(encrypt="true"), second.url(encrypt="true", name="below")
        with wide_cache(*tiers, encryption={"keys": self.KEYS}) as cache:
            store_values(cache, prompt, StoreOptions(tenant="a"))
            forget(cache)
            place.values.clear()
            assert worst_error(cache, prompt) == 0
            forget(cache)
            second.values.clear()
            assert worst_error(cache, prompt) == 0

    @pytest.mark.parametrize(
        ("keys", "told"),
        [
            ((), "tier plugin: encrypt is set, but encryption.keys is empty"),
            (("=env:NOWHERE",), "env:NOWHERE is not set"),
            (("secret",), "'secret' needs =file:PATH or =env:NAME after it"),
            (("a=file:/nowhere/key",), "file:/nowhere/key: No such file"),
            (("=env:SHORT",), "env:SHORT is not a key: 32 bytes"),
        ],
    )
    def test_a_bad_key_is_an_error_at_the_start_and_is_not_shown(
        self, place: Place, keys: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHORT", "0123456789abcdef" * 2)
        with pytest.raises(ConfigError, match=told) as caught:
            cache_over(place.url(encrypt="true"), encryption={"keys": keys})
        assert "0123456789abcdef" not in str(caught.value)
