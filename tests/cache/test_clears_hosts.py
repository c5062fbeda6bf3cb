"""A clear lasts for every host that shares a tier, and beside writes and other disks."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from kvhold.cache import LocalCache
from kvhold.cache.transfer.write_behind import WriteBehind
from kvhold.core.errors import TierCannotList, TierError
from kvhold.core.metrics import Metrics
from kvhold.testing.cache import a_prompt, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers.generations import ALL, is_marker, marker_key
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold_lab.servers.redis import RedisServer
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    cache_over,
    eventually,
    forget,
    on_disk,
    set_deadlines,
)
from tests.cache.clearing import (
    AWAY,
    DOWN,
    NAMESPACE,
    NAMESPACE_OF_KEYS,
    PLUGINS,
    PROMPT,
    chunks,
    redis,
    settle,
)
from tests.cache.places import place
from tests.tiers.memory import Place, SharedMemoryTier

__all__ = ["place", "redis"]


class TestOtherHosts:
    def test_what_another_host_has_in_memory_is_not_used_once_it_hears_of_the_clear(
        self, place: Place
    ) -> None:
        url = place.shared_url(clears_check_s=0.01)
        with a_cache_over(url, plugins=PLUGINS) as one, a_cache_over(url, plugins=PLUGINS) as other:
            span = a_prompt(SPACE.of_spans, 32)
            for cache in (one, other):
                store(cache, PROMPT)
                cache.register(span.namespace)
                store(cache, span)
                store(cache, a_prompt(HYBRID_SPACE, 64))
                settle(cache)
            one.clear(NAMESPACE)
            eventually(lambda: read(other, PROMPT) == 0)
            eventually(lambda: read(other, span) == 0)
            settle(other)
            assert read(one, PROMPT) == 0
            assert read(other, a_prompt(HYBRID_SPACE, 64)) == 64
            store(one, PROMPT)  # what is stored from here on is shared again
            settle(one)
            assert read(other, PROMPT) == 64

    @pytest.mark.parametrize("prefix", [NAMESPACE_OF_KEYS, b""])
    async def test_a_clear_of_a_tier_that_cannot_list_is_done_at_once(
        self, place: Place, caplog: pytest.LogCaptureFixture, prefix: bytes
    ) -> None:
        place.faults = {"scan": TierCannotList("memory", "scan", "no list")}
        one, other = (
            Guard(SharedMemoryTier(place), GuardConfig(), name="tier", metrics=Metrics())
            for _ in range(2)
        )
        for guard in (one, other):
            guard.share(lambda prefix: None)
        key = make_key(1)
        await one.probe([key])
        await one.put([(key, [memoryview(b"old")])])
        with caplog.at_level(logging.INFO, logger="kvhold.tiers.clears"):
            assert await one.clear(prefix) == 0
        [record] = caplog.records
        assert (record.levelno, "cannot list" in record.message) == (logging.INFO, True)
        assert (one.status()["pending_clears"], one.clears.garbage) == (0, {})
        assert place.calls["scan"] == 1, "nothing is tried again"
        for guard in (one, other):
            assert await guard.probe([key]) == [None]
            await guard.close()

    @pytest.mark.parametrize("space", [NAMESPACE, ALL])
    def test_a_clear_between_a_hosts_first_store_and_its_first_contact_is_learned(
        self, place: Place, space: bytes
    ) -> None:
        with cache_over(place.shared_url(clears_check_s=1000), plugins=PLUGINS) as other:
            place.hold("probe")
            store(other, PROMPT)
            place.wait_for("probe")
            place.values[marker_key(space, 1)] = b"another host's"
            place.let_go("probe")
            eventually(lambda: read(other, PROMPT) == 0)
            settle(other)
            assert chunks(place) == 0

    def test_a_host_that_writes_nothing_to_the_tier_still_learns_of_clears(
        self, place: Place
    ) -> None:
        url = place.shared_url(clears_check_s=0.01)
        with (
            cache_over(url, plugins=PLUGINS) as one,
            cache_over(url, plugins=PLUGINS, write_behind_bytes=1) as other,
        ):
            store(other, PROMPT)
            assert read(other, PROMPT) == 64
            one.clear(NAMESPACE)
            eventually(lambda: read(other, PROMPT) == 0)
            assert chunks(place) == 0

    @pytest.mark.parametrize("failing", ["scan", "delete"])
    @pytest.mark.parametrize("space", [NAMESPACE, None])
    def test_values_that_cannot_be_removed_are_suppressed_and_removed_later(
        self, place: Place, failing: str, space: bytes | None
    ) -> None:
        with cache_over(
            place.shared_url(clears_check_s=1000, breaker_pause_s=0.01, breaker_failures=1000),
            plugins=PLUGINS,
        ) as cache:
            store(cache, PROMPT)
            settle(cache)
            old = {name for name in place.values if not is_marker(name)}
            place.faults = {failing: TierError("memory", failing, "not now")}
            cache.clear(space)
            assert cache.status()["tiers"][0]["pending_clears"] == 0
            store(cache, PROMPT)
            settle(cache)
            forget(cache)
            before = place.calls[failing]
            eventually(lambda: place.calls[failing] > before + 2)
            assert read(cache, PROMPT) == 64, (
                "what was stored since is found, however often it is tried again"
            )
            assert old < set(place.values)
            place.faults = {}
            eventually(lambda: not old & set(place.values))
            assert sum(is_marker(name) for name in place.values) == (2 if space else 1)
            assert chunks(place) == 4

    def test_memory_of_another_host_is_not_written_back(self, place: Place) -> None:
        url = place.shared_url(clears_check_s=1000)
        with cache_over(url, plugins=PLUGINS) as one, cache_over(url, plugins=PLUGINS) as other:
            store(one, PROMPT)
            settle(one)
            assert read(other, PROMPT) == 64
            one.clear()
            assert chunks(place) == 0
            # the other has its beginning in memory, and stores the rest
            longer = a_prompt(SPACE, 128)
            store(other, longer)
            settle(other)
            forget(one)
            assert read(one, PROMPT) == 0
            assert read(one, longer) in (0, 128)

    def test_a_namespace_can_be_cleared_often_and_by_both(self, place: Place) -> None:
        url = place.shared_url(clears_check_s=0.01)
        with a_cache_over(url, plugins=PLUGINS) as one, a_cache_over(url, plugins=PLUGINS) as other:
            for number in range(20):
                writer, reader = (one, other) if number % 2 else (other, one)
                store(writer, PROMPT)
                settle(writer)
                (reader if number % 3 else writer).clear(NAMESPACE if number % 5 else None)

                def both_are_empty(
                    reader: LocalCache = reader, writer: LocalCache = writer
                ) -> bool:
                    return read(reader, PROMPT) == read(writer, PROMPT) == 0

                eventually(both_are_empty)
                settle(one)
                settle(other)

    def test_over_a_real_redis(self, redis: RedisServer) -> None:
        url = f"{redis.url}{'&' if '?' in redis.url else '?'}clears_check_s=0.01"
        with a_cache_over(url) as one, a_cache_over(url) as other:
            store(one, PROMPT)
            settle(one)
            assert read(other, PROMPT) == 64
            one.clear(NAMESPACE)
            eventually(lambda: read(other, PROMPT) == 0)
            settle(other)
            store(other, PROMPT)
            settle(other)
            forget(other)
            assert read(one, PROMPT) == read(other, PROMPT) == 64


class TestDisksBesideASharedTier:
    """Host B has a disk of its own; host A clears the tier that both share."""

    @pytest.mark.parametrize("namespace", [NAMESPACE, None])
    @pytest.mark.parametrize("when", ["up", "down", "up, before anything is used"])
    @pytest.mark.parametrize("remembers", [False, True])
    def test_what_a_disk_holds_from_before_the_clear_is_not_used(
        self, place: Place, tmp_path: Path, namespace: bytes | None, when: str, remembers: bool
    ) -> None:
        url, disk = place.shared_url(clears_check_s=0.01), on_disk(tmp_path)
        options = {"plugins": PLUGINS} | (
            {"clears_file": str(tmp_path / "clears")} if remembers else {}
        )

        def clear() -> None:
            with cache_over(url, plugins=PLUGINS) as one:
                one.clear(namespace)

        with cache_over(disk, url, **options) as other:
            store(other, PROMPT)
        if when == "down":
            clear()
        with cache_over(disk, url, **options) as other:
            if when == "up":
                assert read(other, PROMPT) == 64
            if when != "down":
                clear()
            eventually(lambda: read(other, PROMPT) == 0)
            settle(other)
            assert read(other, PROMPT) == 0
            store(other, PROMPT)  # what comes later stays, through a restart too
            settle(other)
            forget(other)
            assert read(other, PROMPT) == 64
            if remembers:
                eventually(lambda: "\t1\n" in (tmp_path / "clears").read_text())
        with cache_over(disk, url, **options) as other:
            # whoever does not remember drops it once more
            assert read(other, PROMPT) == 64 or not remembers

    def test_a_clear_during_which_the_shared_tier_was_away_is_learned_when_it_is_back(
        self, place: Place, tmp_path: Path
    ) -> None:
        url = place.shared_url(clears_check_s=0.01, breaker_pause_s=0.01)
        with cache_over(on_disk(tmp_path), url, plugins=PLUGINS) as other:
            store(other, PROMPT)
        with cache_over(url, plugins=PLUGINS) as one:
            one.clear()
        place.faults = dict(DOWN)
        with cache_over(on_disk(tmp_path), url, plugins=PLUGINS) as other:
            assert read(other, PROMPT) == 64  # nobody can know
            place.faults = {}
            eventually(lambda: read(other, PROMPT) == 0)


class TestWritesBesideAClear:
    def test_a_value_whose_write_outlasts_its_deadline_and_the_clear_does_not_return(
        self, place: Place, tmp_path: Path
    ) -> None:
        file = tmp_path / "clears"
        place.deaf = True  # as a thread in a system call
        with a_cache_over(place.url(), clears_file=str(file)) as cache:
            set_deadlines(cache, put_timeout_s=0.05)
            place.hold("put")
            store(cache, PROMPT)
            eventually(lambda: cache.status()["tiers"][0]["stuck_calls"])
            cache.clear(NAMESPACE)
            assert cache.status()["tiers"][0]["pending_clears"] == 2, "one is of spans"
            assert NAMESPACE.hex() in file.read_text(), "a restart is to know of it"
            place.faults["delete"] = AWAY
            place.let_go("put")
            eventually(lambda: place.values and not cache.status()["tiers"][0]["stuck_calls"])
            assert read(cache, PROMPT) == 0
            place.faults.clear()
            eventually(lambda: not cache.status()["tiers"][0]["pending_clears"])
            assert not place.values
            assert NAMESPACE.hex() not in file.read_text()

    def test_a_write_whose_frame_is_ready_only_after_the_clear_is_dropped(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its frame takes until then, as on a busy machine."""
        make_frame = WriteBehind._make_frame
        framing, go_on = threading.Event(), threading.Event()

        def slow(write_behind: WriteBehind, *arguments: Any) -> Any:
            framing.set()
            go_on.wait(PATIENT_S)
            return make_frame(write_behind, *arguments)

        monkeypatch.setattr(WriteBehind, "_make_frame", slow)
        place.deaf = True
        with a_cache_over(place.url(), clears_file=str(tmp_path / "clears")) as cache:
            set_deadlines(cache, put_timeout_s=0.05)
            place.hold("put")
            store(cache, PROMPT)
            framing.wait(PATIENT_S)
            clearing = threading.Thread(target=cache.clear, args=(NAMESPACE,))
            clearing.start()
            eventually(lambda: cache.status()["tiers"][0]["pending_clears"])
            go_on.set()
            clearing.join()
            place.let_go("put")
            eventually(lambda: not cache.status()["tiers"][0]["stuck_calls"])
            assert not place.values
            assert read(cache, PROMPT) == 0

    def test_what_is_stored_right_after_a_clear_is_written(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            assert cache.tier_worker is not None
            busy = threading.Event()
            cache.tier_worker._loop.call_soon_threadsafe(busy.wait, 60)
            cache.clear(NAMESPACE, deadline_s=0)
            store(cache, PROMPT)
            busy.set()
            assert cache.flush()
            assert len(place.values) == 4
