"""A prompt's clear: in memory and in every tier, also through a tier's absence and a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvhold.cache import LocalCache
from kvhold.core.api import Cache
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Prompt
from kvhold.core.metrics import Metrics
from kvhold.testing.cache import a_prompt, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers import chunk_clears
from kvhold.tiers.disk import DiskConfig, DiskTier
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
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
from tests.cache.clearing import DOWN, PLUGINS, chunks, settle
from tests.cache.places import place
from tests.tiers.memory import Place, a_place

__all__ = ["place"]

PROMPT = a_prompt(SPACE, 64)
OTHER = a_prompt(SPACE, 64, seed=7)
LONGER = PROMPT.until(32).followed_by(range(500, 564))


def found(cache: Cache, prompt: Prompt) -> int:
    with cache.lookup(prompt.query()) as hit:
        return hit.num_tokens


def pending(cache: LocalCache) -> int:
    return cache.status()["tiers"][0]["pending_clears"]


@pytest.fixture(autouse=True)
def no_late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_clears, "_LATE_S", 0.0)


@pytest.mark.parametrize("space", [SPACE, HYBRID_SPACE])
def test_a_prompt_is_gone_from_memory_and_disk_and_others_stay(tmp_path: Path, space: Any) -> None:
    prompt, other = a_prompt(space, 72), a_prompt(space, 64, seed=7)
    with a_cache_over(on_disk(tmp_path)) as cache:
        for one in (prompt, other):
            store(cache, one)
        settle(cache)
        removed = cache.status()["chunks"]
        assert cache.clear_prompt(prompt.query()) == removed - cache.status()["chunks"] > 0
        assert (found(cache, prompt), found(cache, other)) == (0, 64)
        forget(cache)
        assert (found(cache, prompt), read(cache, other)) == (0, 64)
        eventually(lambda: not pending(cache))
        store(cache, prompt)
        settle(cache)
        forget(cache)
        assert read(cache, prompt) == 72


def test_it_is_gone_after_a_restart_that_found_the_disk_s_values(tmp_path: Path) -> None:
    options = {"clears_file": str(tmp_path / "clears")}
    with cache_over(on_disk(tmp_path), **options) as cache:
        for one in (PROMPT, OTHER):
            store(cache, one)
        settle(cache)
        cache.clear_prompt(PROMPT.query())
    with cache_over(on_disk(tmp_path), **options) as cache:
        assert (found(cache, PROMPT), read(cache, OTHER)) == (0, 64)


@pytest.mark.parametrize("shared", [False, True])
def test_a_tier_that_is_down_finds_it_neither_then_nor_after_a_restart(
    place: Place, tmp_path: Path, shared: bool
) -> None:
    url = (place.shared_url if shared else place.url)(breaker_pause_s=0.01)
    options: dict[str, Any] = {"plugins": PLUGINS, "clears_file": str(tmp_path / "clears")}
    with cache_over(url, **options) as cache:
        for one in (PROMPT, OTHER):
            store(cache, one)
        settle(cache)
        place.faults = dict(DOWN)
        assert cache.clear_prompt(PROMPT.query()) == 4
        assert pending(cache) == 4
        place.faults = {"delete": DOWN["delete"]}
        eventually(lambda: cache.status()["tiers"][0]["available"])
        assert found(cache, PROMPT) == 0
    assert chunks(place) == 8
    with cache_over(url, **options) as cache:
        assert (found(cache, PROMPT), read(cache, OTHER)) == (0, 64)
        place.faults = {}
        eventually(lambda: chunks(place) == 4 and not pending(cache))
        store(cache, PROMPT)
        settle(cache)
        forget(cache)
        assert read(cache, PROMPT) == 64
    with cache_over(url, **options) as cache:
        assert (pending(cache), read(cache, PROMPT)) == (0, 64)


def test_a_tier_that_is_only_read_hides_it_also_after_a_restart(
    place: Place, tmp_path: Path
) -> None:
    with cache_over(place.url()) as cache:
        store(cache, PROMPT)
        settle(cache)
    options = {"clears_file": str(tmp_path / "clears")}
    for _ in range(2):
        with cache_over(place.url(read_only=True), **options) as cache:
            cache.clear_prompt(PROMPT.query())
            assert (found(cache, PROMPT), chunks(place), pending(cache)) == (0, 4, 0)


def test_a_shared_tier_is_deleted_from_until_no_late_write_can_come(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_clears, "_LATE_S", 3600.0)
    url = place.shared_url(breaker_pause_s=0.01)
    with cache_over(url, plugins=PLUGINS, client={"arrival_timeout_s": 0.5}) as cache:
        place.faults = {"put": DOWN["put"]}
        store(cache, PROMPT)
        settle(cache)
        place.faults = {}
        eventually(lambda: cache.status()["tiers"][0]["available"])
        cache.clear_prompt(PROMPT.query())
        store(cache, PROMPT)
        settle(cache)
        eventually(lambda: not chunks(place))
        assert pending(cache) == 4


def test_of_too_many_hidden_chunks_the_namespace_is_cleared(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_clears, "_MOST_CHUNKS", 3)
    with cache_over(place.url()) as cache:
        for one in (PROMPT, OTHER):
            store(cache, one)
        settle(cache)
        cache.clear_prompt(PROMPT.query())
        eventually(lambda: not pending(cache))
        assert (chunks(place), found(cache, PROMPT), found(cache, OTHER)) == (0, 0, 64)


def test_a_later_clear_of_the_namespace_ends_it(place: Place) -> None:
    with cache_over(place.shared_url(breaker_pause_s=0.01), plugins=PLUGINS) as cache:
        store(cache, PROMPT)
        settle(cache)
        place.faults = {"delete": DOWN["delete"]}
        cache.clear_prompt(PROMPT.query())
        assert pending(cache) == 4
        cache.clear(SPACE.digest)
        eventually(lambda: not pending(cache))
        eventually(lambda: cache.status()["tiers"][0]["available"])
        store(cache, PROMPT)
        settle(cache)
        forget(cache)
        assert read(cache, PROMPT) == 64


def test_a_chunk_that_is_being_written_to_a_tier_does_not_come_back(place: Place) -> None:
    with a_cache_over(place.url()) as cache:
        place.hold("put")
        store(cache, PROMPT)
        place.wait_for("put")
        cache.clear_prompt(PROMPT.query(), deadline_s=0)
        place.let_go("put")
        settle(cache)
        assert (found(cache, PROMPT), chunks(place)) == (0, 0)


def test_a_write_that_is_late_is_removed_when_it_comes(place: Place) -> None:
    place.deaf = True
    with a_cache_over(place.url(put_timeout_s=0.05, breaker_pause_s=0.01)) as cache:
        place.hold("put")
        store(cache, PROMPT)
        place.wait_for("put")
        eventually(lambda: cache.status()["tiers"][0]["stuck_calls"])
        cache.clear_prompt(PROMPT.query())
        place.let_go("put")
        eventually(lambda: not pending(cache))
        assert (found(cache, PROMPT), chunks(place)) == (0, 0)


def test_a_chunk_that_is_being_read_from_a_tier_does_not_come_back(place: Place) -> None:
    with a_cache_over(place.url()) as cache:
        store(cache, PROMPT)
        settle(cache)
        forget(cache)
        place.hold("get")
        with cache.lookup(PROMPT.query(), wait_s=0) as hit:
            place.wait_for("get")
            cache.clear_prompt(PROMPT.query())
            place.let_go("get")
            hit.wait(until_s=float("inf"))
            assert hit.num_tokens == 0
        assert (found(cache, PROMPT), cache.status()["chunks"]) == (0, 0)


def test_what_a_probe_found_before_is_not_read_after(place: Place) -> None:
    """The second tier answers after the clear, and the first one keeps its values."""
    with cache_over(place.url()) as cache:
        store(cache, PROMPT)
        settle(cache)
    with a_place() as slow, a_cache_over(place.url(read_only=True), slow.url()) as cache:
        slow.hold("probe")
        with cache.lookup(a_prompt(SPACE, 80).query(), wait_s=0) as hit:
            slow.wait_for("probe")
            cache.clear_prompt(PROMPT.query(), deadline_s=0)
            eventually(lambda: cache._state._searches.may_begin(PROMPT.query()))
            slow.let_go("probe")
            hit.wait(until_s=float("inf"))
            assert hit.num_tokens == 0
        assert (found(cache, PROMPT), cache.status()["chunks"], chunks(place)) == (0, 0, 4)


async def test_a_folder_that_was_away_is_cleared_when_it_is_back(tmp_path: Path) -> None:
    """Renames play the mounts."""
    keys, mount, disk = [make_key(n) for n in range(3)], tmp_path / "mnt", tmp_path / "disk"

    def guard() -> tuple[Guard, ClearsJournal]:
        journal = ClearsJournal(tmp_path / "clears")
        journal.begin(["disk"])
        tier = DiskTier(DiskConfig(path=f"{mount}/kv", max_bytes=1 << 20))
        guard = Guard(tier, GuardConfig(breaker_pause_s=0.01), name="disk", metrics=Metrics())
        guard.resume_clears(journal)
        return guard, journal

    async def put(keys: list[bytes]) -> None:
        assert all((await guarded.put([(key, [memoryview(b"old")]) for key in keys])).items)

    async def there() -> list[bool]:
        return [size is not None for size in await guarded.probe(keys)]

    guarded, journal = guard()
    await put(keys)
    await guarded.close()
    mount.rename(disk)
    guarded, journal = guard()
    await put(keys[:1])
    clears = guarded.chunk_clears
    number = clears.begin(keys[:2])
    await clears.remember(number)
    assert len(journal.pending_chunks("disk")) == 2
    await clears.end(number)
    assert (journal.pending_chunks("disk"), await guarded.probe(keys)) == ([], [None] * 3)
    await guarded.close()
    mount.rename(tmp_path / "below")
    disk.rename(mount)
    guarded, journal = guard()
    async with asyncio.timeout(PATIENT_S):
        while await there() != [False, False, True]:  # noqa: ASYNC110 - the folder is met by a probe
            await asyncio.sleep(0.01)
        while journal.pending_chunks("disk"):  # noqa: ASYNC110 - the journal tells nobody
            await asyncio.sleep(0.01)
    assert await there() == [False, False, True]
    await guarded.close()


def test_the_end_goes_and_what_another_prompt_continues_stays(tmp_path: Path) -> None:
    with a_cache_over(on_disk(tmp_path)) as cache:
        for one in (PROMPT, LONGER):
            store(cache, one)
        assert cache.clear_prompt(PROMPT.query(), only_end=True) == 2
        assert (found(cache, PROMPT), found(cache, LONGER)) == (32, 96)
        assert cache.clear_prompt(LONGER.query(), only_end=True) == 6
        assert (found(cache, PROMPT), found(cache, LONGER)) == (0, 0)


def test_a_prompt_of_too_many_chunks_is_refused() -> None:
    with a_cache_over() as cache:
        store(cache, PROMPT)
        with pytest.raises(ConfigError, match="clear a shorter prompt"):
            cache.clear_prompt(SPACE.prompt(range(16 * (1 << 15) + 16)).query())
        assert found(cache, PROMPT) == 64
