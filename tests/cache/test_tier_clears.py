"""A clear of one tier, or of memory alone, leaves the others alone."""

from pathlib import Path

import pytest

from kvhold.cache import LocalCache
from kvhold.core.errors import ConfigError
from kvhold.testing.cache import a_prompt, read, store
from kvhold.tiers.journal import ClearsJournal
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    cache_over,
    eventually,
    forget,
    on_disk,
)
from tests.cache.clearing import DOWN, PLUGINS, PROMPT, chunks, settle
from tests.cache.places import place
from tests.tiers.memory import Place

__all__ = ["place"]

TIER = "plugin"
OTHER = a_prompt(HYBRID_SPACE, 64)


def url_of(place: Place, *, shared: bool, **options: object) -> str:
    return place.shared_url(**options) if shared else place.url(**options)


def fill(cache: LocalCache) -> None:
    for prompt in (PROMPT, OTHER):
        store(cache, prompt)
    settle(cache)


def pending(cache: LocalCache) -> int:
    return sum(tier["pending_clears"] for tier in cache.status()["tiers"])


@pytest.mark.parametrize("of_namespace", [True, False])
def test_memory_alone_is_cleared(place: Place, of_namespace: bool) -> None:
    with a_cache_over(place.url()) as cache:
        fill(cache)
        num_below, num_all = chunks(place), cache.status()["chunks"]
        removed = cache.clear(SPACE.digest if of_namespace else None, tier="ram")
        assert removed == (4 if of_namespace else num_all)
        assert chunks(place) == num_below
        with cache.lookup(OTHER.query(), wait_s=0) as hit:
            assert (hit.num_tokens == 64) == of_namespace
        assert (read(cache, PROMPT), read(cache, OTHER)) == (64, 64)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("of_namespace", [True, False])
def test_one_tier_is_cleared_and_memory_and_the_others_keep_theirs(
    place: Place, tmp_path: Path, shared: bool, of_namespace: bool
) -> None:
    tiers = on_disk(tmp_path), url_of(place, shared=shared)
    with a_cache_over(*tiers, plugins=PLUGINS) as cache:
        fill(cache)
        total = cache.status()["chunks"]
        assert cache.clear(SPACE.digest if of_namespace else None, tier=TIER) == 0
        settle(cache)
        assert chunks(place) == (total - 4 if of_namespace else 0)
        assert (cache.status()["chunks"], pending(cache)) == (total, 0)
        forget(cache)
        assert (read(cache, PROMPT), read(cache, OTHER)) == (64, 64), "from the disk"
        cache.clear(tier="disk")
        settle(cache)
        forget(cache)
        assert read(cache, PROMPT) == 0
        assert (read(cache, OTHER) == 64) == of_namespace
        store(cache, PROMPT)
        settle(cache)
        forget(cache)
        assert read(cache, PROMPT) == 64, "later chunks are kept"


@pytest.mark.parametrize("alone", [True, False])
def test_other_hosts_keep_their_copies_of_a_shared_tiers_chunks(
    place: Place, tmp_path: Path, alone: bool
) -> None:
    url = place.shared_url(clears_check_s=0.01)
    with (
        cache_over(url, plugins=PLUGINS) as cache,
        cache_over(on_disk(tmp_path), url, plugins=PLUGINS) as elsewhere,
    ):
        fill(cache)
        assert read(elsewhere, PROMPT) == 64
        settle(elsewhere)
        cache.clear(tier=TIER if alone else "")
        settle(cache)
        place.calls.clear()
        eventually(lambda: place.calls["probe"] > 3)  # it looks for clears
        settle(elsewhere)
        num_chunks = elsewhere.status()["chunks"]
        forget(elsewhere)
        assert (read(elsewhere, PROMPT), num_chunks) == ((64, 4) if alone else (0, 0))


@pytest.mark.parametrize("shared", [True, False])
def test_it_goes_on_after_the_process_was_killed(
    place: Place, tmp_path: Path, shared: bool
) -> None:
    options = {"clears_file": str(tmp_path / "clears"), "plugins": PLUGINS, "drain_timeout_s": 0}
    url = url_of(place, shared=shared, breaker_pause_s=0.01)
    with cache_over(url, **options) as cache:
        fill(cache)
        place.hold("delete")
        cache.clear(tier=TIER, deadline_s=0)
        place.wait_for("delete")
    assert chunks(place) > 0
    place.let_go("delete")
    with cache_over(url, **options) as cache:
        eventually(lambda: not chunks(place) and not pending(cache))
        store(cache, PROMPT)
        settle(cache)
    with cache_over(url, **options) as cache:
        assert read(cache, PROMPT) == 64, "it has ended"


@pytest.mark.parametrize("shared", [True, False])
def test_a_tier_that_is_away_forgets_when_it_is_back(place: Place, shared: bool) -> None:
    url = url_of(place, shared=shared, breaker_pause_s=0.01)
    with a_cache_over(url, plugins=PLUGINS) as cache:
        fill(cache)
        place.faults = dict(DOWN)
        cache.clear(SPACE.digest, tier=TIER)
        assert pending(cache) == 2, "one is of its spans"
        place.faults = {}
        eventually(lambda: not pending(cache))
        forget(cache)
        assert (read(cache, PROMPT), read(cache, OTHER)) == (0, 64)


@pytest.mark.parametrize("shared", [True, False])
def test_chunks_on_their_way_to_the_tier_do_not_arrive(place: Place, shared: bool) -> None:
    url = url_of(place, shared=shared, concurrent_calls=1, batch_bytes=1)
    with a_cache_over(url, plugins=PLUGINS) as cache:
        place.hold("put")
        store(cache, PROMPT)
        place.wait_for("put")
        cache.clear(tier=TIER, deadline_s=0)
        place.let_go("put")
        settle(cache)
        assert (chunks(place), cache.status()["chunks"]) == (0, 4)


def test_only_a_tier_that_can_remove_its_chunks_is_cleared(place: Place, tmp_path: Path) -> None:
    with cache_over(place.url(read_only=True), on_disk(tmp_path)) as cache:
        for tier, told in ((TIER, "nothing is written"), ("dusk", "did you mean 'disk'")):
            with pytest.raises(ConfigError, match=told):
                cache.clear(tier=tier)
        cache.clear(deadline_s=PATIENT_S)
    peers = "peers://127.0.0.1:1"
    with cache_over(peers) as cache, pytest.raises(ConfigError, match="nothing is written"):
        cache.clear(tier="peers")


async def test_the_journal_keeps_removals_of_its_tiers(tmp_path: Path) -> None:
    journal = ClearsJournal(tmp_path / "clears")
    journal.begin(["s3", "redis"])
    for tier, prefix in (("s3", SPACE.digest), ("s3", b""), ("redis", b"")):
        await journal.add_removal(tier, prefix)
    await journal.remove_removal("s3", b"")
    journal = ClearsJournal(tmp_path / "clears")
    journal.begin(["s3"])
    assert (journal.removals("s3"), journal.removals("redis")) == ([SPACE.digest], [])
    assert journal.pending("s3") == [], "no clear, which other hosts would follow"
