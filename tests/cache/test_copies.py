"""A prompt's chunks are copied or moved from memory to a tier."""

from pathlib import Path
from typing import Any

import pytest

from kvhold.cache.transfer import copies
from kvhold.core.api import CopyProgress
from kvhold.core.errors import ConfigError
from kvhold.testing.cache import a_prompt, read, store
from tests.cache.below import (
    CHUNK_BYTES,
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    cache_over,
    eventually,
    forget,
    on_disk,
)
from tests.cache.clearing import DOWN, chunks, settle
from tests.cache.places import place
from tests.tiers.memory import Place

__all__ = ["place"]

TIER = "plugin"
PROMPT = a_prompt(SPACE, 72)
OTHER = a_prompt(SPACE, 64, seed=7)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_PART_CHUNKS", 2)


def in_memory(cache: Any) -> int:
    return int(cache.status()["chunks"])


@pytest.mark.parametrize("space", [SPACE, HYBRID_SPACE])
@pytest.mark.parametrize("drop", [False, True])
def test_a_prompt_goes_to_a_tier_that_had_lost_it(place: Place, space: Any, drop: bool) -> None:
    prompt, other = a_prompt(space, 72), a_prompt(space, 64, seed=7)
    with a_cache_over(place.url()) as cache:
        store(cache, prompt)
        num_chunks = in_memory(cache)
        store(cache, other)
        settle(cache)
        total = in_memory(cache)
        place.values.clear()
        with cache.copy(TIER, prompt.query(), drop=drop) as copying:
            done = copying.wait()
        assert (done.done, done.stopped, done.failed) == (True, "", 0)
        assert (done.copied, done.dropped) == (num_chunks, num_chunks if drop else 0)
        assert chunks(place) == num_chunks
        assert in_memory(cache) == total - done.dropped
        forget(cache)
        assert (read(cache, prompt), read(cache, other)) == (72, 0)


def test_chunks_that_are_in_use_or_not_there_stay(place: Place) -> None:
    with a_cache_over(place.url()) as cache:
        store(cache, PROMPT)
        settle(cache)
        with cache.lookup(PROMPT.until(32).query()) as hit:
            assert hit.num_tokens == 32
            with cache.copy(TIER, PROMPT.query(), drop=True) as copying:
                done = copying.wait()
        assert done == CopyProgress(
            done=True, copied=5, dropped=3, bytes=4 * CHUNK_BYTES + CHUNK_BYTES // 2
        )
        assert in_memory(cache) == 2
        with cache.copy(TIER, OTHER.query()) as copying:
            assert copying.wait() == CopyProgress(done=True)


def test_a_tier_that_is_down_ends_it_and_memory_keeps_all(place: Place) -> None:
    with a_cache_over(place.url(breaker_pause_s=0.01)) as cache:
        store(cache, PROMPT)
        settle(cache)
        place.faults = dict(DOWN)
        with cache.copy(TIER, PROMPT.query(), drop=True) as copying:
            done = copying.wait()
        assert "tier plugin failed" in done.stopped and done.dropped == done.copied == 0
        assert in_memory(cache) == 5
        place.faults = {}


def test_what_is_closed_early_goes_no_further_and_frees_its_memory(place: Place) -> None:
    with a_cache_over(place.url()) as cache:
        store(cache, PROMPT)
        settle(cache)
        place.values.clear()
        place.hold("put")
        with cache.copy(TIER, PROMPT.query(), drop=True):
            place.wait_for("put")
        assert cache.status()["pinned_chunks"] == 2, "the tier still reads them"
        place.let_go("put")
        eventually(lambda: not cache.status()["pinned_chunks"])
        assert chunks(place) == 2


@pytest.mark.parametrize("of_prompt", [False, True])
def test_a_clear_during_it_leaves_nothing(place: Place, of_prompt: bool) -> None:
    with a_cache_over(place.url()) as cache:
        store(cache, PROMPT)
        settle(cache)
        place.values.clear()
        place.hold("put")
        with cache.copy(TIER, PROMPT.query()) as copying:
            place.wait_for("put")
            if of_prompt:
                cache.clear_prompt(PROMPT.query(), deadline_s=0)
            else:
                cache.clear(SPACE.digest, deadline_s=0)
            place.let_go("put")
            copying.wait()
        settle(cache)
        assert (chunks(place), read(cache, PROMPT)) == (0, 0)


def test_only_a_tier_that_is_written_is_a_place_to_go(place: Place, tmp_path: Path) -> None:
    with cache_over(place.url(read_only=True), on_disk(tmp_path)) as cache:
        for tier, told in ((TIER, "nothing is written"), ("dusk", "did you mean 'disk'")):
            with pytest.raises(ConfigError, match=told):
                cache.copy(tier, PROMPT.query())
        cache.clear(deadline_s=PATIENT_S)
