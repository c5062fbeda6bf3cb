"""Approximate KV is never exact KV: what a lossy codec has encoded is found only by those that
allow a loss, whatever the codec of the tier is, and wherever the tier is.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from kvhold.cache import LocalCache
from kvhold.codecs import frame_chunk, make_codec, read_header
from kvhold.core.config import RulesConfig
from kvhold.core.keys import Prompt, allows_loss
from kvhold.core.reasons import BAD_FRAME
from kvhold.core.rules import request_rules
from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import a_prompt
from tests.cache.below import PATIENT_S, bad_frames, eventually, forget
from tests.cache.wide import (
    LOSSY_SPACE,
    WIDE,
    WIDE_SPACE,
    codecs_of,
    store_values,
    values_of,
    wide_cache,
    worst_error,
)
from tests.tiers.memory import Place, a_place

LOSSY = "int8"
SEED = 7


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


class Engine:
    """What an integration does with its rules: they name the KV, and say how it is stored."""

    def __init__(self, cache: LocalCache, asked: dict[str, Any] | None = None, **rules: Any):
        self.cache = cache
        found = request_rules(asked, RulesConfig(**rules))
        self.namespace, self.store_options = (
            WIDE_SPACE.narrowed(tags=found.tags),
            (found.store_options),
        )
        cache.register(self.namespace)

    @property
    def prompt(self) -> Prompt:
        return a_prompt(self.namespace, 256, SEED)

    def store(self) -> None:
        store_values(self.cache, self.prompt, self.store_options)
        forget(self.cache)

    def num_found(self) -> int:
        with self.cache.lookup(self.prompt.query(), wait_s=PATIENT_S) as hit:
            return hit.num_tokens

    def error(self) -> float:
        return worst_error(self.cache, self.prompt)


def codecs_by_loss(place: Place) -> dict[bool, set[str]]:
    """The codecs of frames, by whether their names allow a loss."""
    found: dict[bool, set[str]] = {}
    for key, value in place.values.items():
        found.setdefault(allows_loss(key), set()).add(read_header(value).codec)
    return found


def test_engines_with_and_without_a_loss_on_one_cache_find_only_their_own(place: Place) -> None:
    with wide_cache(place.url(codec=LOSSY)) as cache:
        exact, lossy = Engine(cache), Engine(cache, max_error=1)
        exact.store()
        assert (exact.num_found(), lossy.num_found()) == (256, 0)
        assert exact.error() == 0
        lossy.store()
        assert codecs_by_loss(place) == {False: {"lossless"}, True: {LOSSY}}
        assert exact.error() == 0 < lossy.error() < make_codec(LOSSY).error_bound
        forget(cache)
        cache.clear(exact.namespace.digest)
        assert (exact.num_found(), lossy.num_found()) == (0, 256)
        assert bad_frames(cache) == {}


@pytest.mark.parametrize(
    ("asked", "rules", "codec"),
    [
        (None, {}, "lossless"),
        (None, {"max_error": 0}, "lossless"),
        (None, {"max_error": 0, "max_bits": 4}, "lossless"),
        ({"max_error": 0}, {"max_error": 1}, "lossless"),
        ({"max_error": 1}, {"max_error": 0}, "lossless"),
        (None, {"max_error": 1}, LOSSY),
        (None, {"max_bits": 64}, LOSSY),
        ({"max_error": 1}, {}, LOSSY),
        ({"max_bits": 64}, {}, LOSSY),
    ],
    ids=str,
)
def test_only_the_rules_of_an_engine_or_a_request_allow_a_loss(
    place: Place, asked: dict[str, Any] | None, rules: dict[str, Any], codec: str
) -> None:
    with wide_cache(place.url(codec=LOSSY)) as cache:
        engine, default = Engine(cache, asked, **rules), Engine(cache)
        engine.store()
        assert codecs_of(place) == {codec}
        assert (engine.error() == 0) == (codec == "lossless")
        forget(cache)
        assert default.num_found() == (256 if codec == "lossless" else 0)


def test_options_that_allow_a_loss_do_not_touch_an_exact_namespace(place: Place) -> None:
    with wide_cache(place.url(codec=LOSSY)) as cache:
        prompt = a_prompt(WIDE_SPACE, 256)
        store_values(cache, prompt, StoreOptions(max_error=1))
        forget(cache)
        assert codecs_of(place) == {"lossless"}
        assert worst_error(cache, prompt) == 0


def test_a_namespaces_budget_holds_for_options_without_one(place: Place) -> None:
    with wide_cache(place.url(codec=LOSSY)) as cache:
        space = WIDE_SPACE.allowing_loss(max_error=0.01)
        cache.register(space)
        prompt = a_prompt(space, 256)
        store_values(cache, prompt)
        forget(cache)
        assert 0 < worst_error(cache, prompt) <= 0.01


def test_hosts_that_share_a_tier_do_not_share_between_exact_and_approximate(place: Place) -> None:
    with wide_cache(place.url(codec=LOSSY)) as one, wide_cache(place.url(codec=LOSSY)) as other:
        Engine(one, max_error=1).store()
        exact = Engine(other)
        assert exact.num_found() == 0
        exact.store()
        assert Engine(one).error() == 0
        assert Engine(other, max_error=1).error() > 0
        assert Engine(other, max_error=0.5).num_found() == 0, "another budget, another name"


def test_exact_chunks_that_come_up_stay_exact_above_and_below(place: Place) -> None:
    with (
        a_place() as below,
        wide_cache(place.url(codec=LOSSY), below.url(codec=LOSSY, name="below")) as cache,
    ):
        exact = Engine(cache)
        exact.store()
        place.values.clear()
        assert exact.error() == 0
        forget(cache)
        assert codecs_of(place) == codecs_of(below) == {"lossless"}
        below.values.clear()
        assert exact.error() == 0


class TestOldFrames:
    """Of a writer that did not know of exact names."""

    def spoil(self, place: Place, prompt: Prompt, chunk: int) -> bytes:
        key = prompt.chunk_key(chunk)
        frame = frame_chunk(
            memoryview(values_of(prompt, chunk)),
            make_codec(LOSSY),
            key=key,
            layout=WIDE,
            num_tokens=64,
            first_token=64 * chunk,
        )
        place.values[key] = b"".join(frame.parts)
        return key

    def test_one_is_a_miss_is_told_and_is_removed(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        with wide_cache(place.url(codec=LOSSY)) as cache:
            exact = Engine(cache)
            exact.store()
            key = self.spoil(place, exact.prompt, 2)
            with (
                caplog.at_level(logging.WARNING),
                cache.lookup(exact.prompt.query(), wait_s=PATIENT_S) as hit,
            ):
                assert (hit.num_tokens, hit.reason) == (128, BAD_FRAME)
            assert bad_frames(cache) == {"lossy": 1}
            eventually(lambda: key not in place.values)
            assert any(
                key.hex() in line and f"codec '{LOSSY}' is lossy" in line
                for line in caplog.messages
            )
            forget(cache)
            exact.store()
            assert exact.error() == 0, "it is stored again"

    def test_a_read_only_tier_keeps_it(self, place: Place) -> None:
        with wide_cache(place.url(read_only="true")) as cache:
            exact = Engine(cache)
            key = self.spoil(place, exact.prompt, 0)
            assert exact.num_found() == 0
            assert bad_frames(cache) == {"lossy": 1}
            assert key in place.values

    @pytest.mark.parametrize("codec", ["raw", "lossless", LOSSY, "fp8"])
    def test_a_reencoding_removes_it_and_makes_nothing_exact_of_it(
        self, place: Place, codec: str
    ) -> None:
        with wide_cache(place.url()) as cache:
            exact = Engine(cache)
            exact.store()
            key = self.spoil(place, exact.prompt, 2)
            with cache.reencode("plugin", codec) as reencoding:
                assert reencoding.wait().bad == 1
            assert key not in place.values
            assert bad_frames(cache) == {"lossy": 1}
            assert exact.num_found() == 128


def test_a_lossy_reencoding_keeps_exact_chunks_lossless_and_counts_them(place: Place) -> None:
    with wide_cache(place.url()) as cache:
        exact, lossy = Engine(cache), Engine(cache, max_error=1)
        exact.store()
        lossy.store()
        with cache.reencode("plugin", LOSSY) as reencoding:
            progress = reencoding.wait()
        assert (progress.seen, progress.replaced, progress.over_budget) == (8, 8, 4)
        assert codecs_by_loss(place) == {False: {"lossless"}, True: {LOSSY}}
        assert exact.error() == 0 < lossy.error()


def test_a_budget_of_0_is_the_exact_namespace() -> None:
    assert WIDE_SPACE.allowing_loss(max_error=0) == WIDE_SPACE
    assert not allows_loss(WIDE_SPACE.digest)
    assert allows_loss(LOSSY_SPACE.digest)
    digests = {
        WIDE_SPACE.allowing_loss(max_error=error, max_bits=bits).digest
        for error in (None, 0.1, 1)
        for bits in (None, 4)
    }
    assert len(digests) == 6
    with pytest.raises(ValueError, match="max_error is 2"):
        WIDE_SPACE.allowing_loss(max_error=2)
