"""A clear lasts: through a tier's absence and a restart, and for every host that shares a tier."""

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from hashlib import blake2b
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhold.cache import LocalCache
from kvhold.cache.transfer.tier_worker import TierWorker
from kvhold.cache.transfer.write_behind import WriteBehind
from kvhold.core.errors import ConfigError, TierCannotList, TierError, TierFull, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.testing import TierContract
from kvhold.testing.cache import a_prompt, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers.base import FolderMet
from kvhold.tiers.disk import DiskConfig, DiskTier
from kvhold.tiers.generations import ALL, GenerationTier, _leading, is_marker, marker_key
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.memcached import _expiry
from kvhold.tiers.memory import MemoryConfig, MemoryTier
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.url import parse_url
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
from tests.tiers import memory
from tests.tiers.conftest import start_or_skip
from tests.tiers.memory import PLUGIN, SHARED_PLUGIN, Place, SharedMemoryTier, a_place

PROMPT = a_prompt(SPACE, 64)
NAMESPACE = SPACE.digest
NAMESPACE_OF_KEYS = make_key(0)[:NAMESPACE_BYTES]
PLUGINS = [PLUGIN, SHARED_PLUGIN]
AWAY = TierUnavailable("memory", "scan", "away")
DOWN = dict.fromkeys(("check", "probe", "get", "put", "delete", "scan"), AWAY)


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    yield from start_or_skip(lambda: RedisServer(unix=True))


def chunks(place: Place) -> int:
    return sum(not is_marker(key) for key in place.values)


def settle(cache: LocalCache) -> None:
    assert cache.flush(deadline_s=PATIENT_S)


class TestRestarts:
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("namespace", [NAMESPACE, None])
    def test_a_tier_that_was_down_is_cleared_when_it_is_back_after_a_restart(
        self, place: Place, tmp_path: Path, shared: bool, namespace: bytes | None
    ) -> None:
        url, options = (
            (place.shared_url if shared else place.url)(breaker_pause_s=0.01),
            {"clears_file": str(tmp_path / "clears")},
        )
        with cache_over(url, plugins=PLUGINS, **options) as cache:
            store(cache, PROMPT)
            settle(cache)
            place.faults = dict(DOWN)
            cache.clear(namespace)
            assert cache.status()["tiers"][0]["pending_clears"] == 1
        assert chunks(place) == 4
        with cache_over(url, plugins=PLUGINS, **options) as cache:
            assert read(cache, PROMPT) == 0
            place.faults = {}
            eventually(lambda: not chunks(place))
            eventually(lambda: cache.status()["tiers"][0]["pending_clears"] == 0)
            store(cache, PROMPT)
            forget(cache)
            assert read(cache, PROMPT) == 64
        with cache_over(url, plugins=PLUGINS, **options) as cache:
            assert cache.status()["tiers"][0]["pending_clears"] == 0
            assert read(cache, PROMPT) == 64

    def test_a_clear_that_was_interrupted_goes_on_after_a_restart(
        self, place: Place, tmp_path: Path
    ) -> None:
        options = {"clears_file": str(tmp_path / "clears")}
        with cache_over(place.url(), drain_timeout_s=0, **options) as cache:
            store(cache, PROMPT)
            settle(cache)
            place.hold("delete")
            cache.clear(deadline_s=0)
            place.wait_for("delete")
        place.let_go("delete")
        with cache_over(place.url(), **options) as cache:
            eventually(lambda: not place.values)
            assert read(cache, PROMPT) == 0

    async def test_a_clear_waits_for_a_disk_that_is_away(self, tmp_path: Path) -> None:
        keys = [make_key(n) for n in range(40)]
        journal = ClearsJournal(tmp_path / "clears")
        lock = -1
        for run in range(2):
            tier = DiskTier(DiskConfig(path=f"{tmp_path}/a,{tmp_path}/b", max_bytes=1 << 20))
            guard = Guard(tier, GuardConfig(breaker_pause_s=0.01), name="disk", metrics=Metrics())
            guard.resume_clears(journal)
            if run == 0:
                await guard.put([(key, [memoryview(b"old")]) for key in keys])
                await guard.close()
                lock = os.open(tmp_path / "b" / "kvhold.lock", os.O_RDWR)
                fcntl.flock(lock, fcntl.LOCK_EX)  # as if another process had the folder
                continue
            found = sum(size is not None for size in await guard.probe(keys))
            assert 0 < found < len(keys)
            assert await guard.clear(NAMESPACE_OF_KEYS) == found
            assert (guard.available, journal.pending("disk")) == (True, [NAMESPACE_OF_KEYS])
            os.close(lock)
            assert await guard.probe(keys) == [None] * len(keys)
            async with asyncio.timeout(PATIENT_S):
                while journal.pending("disk"):  # noqa: ASYNC110 - the journal tells nobody
                    await asyncio.sleep(0.01)
            assert await guard.probe(keys) == [None] * len(keys)
            assert [key async for key in tier.scan(b"")] == []
            await guard.close()

    @pytest.mark.parametrize("is_mounted_in_use", [False, True])
    async def test_a_disk_that_was_not_mounted_at_a_clear_is_cleared_when_it_is_back(
        self, tmp_path: Path, is_mounted_in_use: bool
    ) -> None:
        """The folder below its mount point was cleared instead. Renames play the mounts."""
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

        guarded, journal = guard()
        await put(keys)
        await guarded.close()
        mount.rename(disk)
        guarded, journal = guard()
        await put(keys[:1])
        assert await guarded.clear(NAMESPACE_OF_KEYS) == 1
        assert (guarded.status()["pending_clears"], journal.pending("disk")) == (0, [])
        if not is_mounted_in_use:
            await guarded.close()
        mount.rename(tmp_path / "below")
        disk.rename(mount)
        if is_mounted_in_use:
            assert await guarded.check() is not None
        else:
            guarded, journal = guard()
        assert await guarded.probe(keys) == [None] * 3
        async with asyncio.timeout(PATIENT_S):
            while guarded.status()["pending_clears"]:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
        assert journal.pending("disk") == []
        assert [key async for key in guarded.tier.scan(b"")] == []
        await put(keys)
        await guarded.close()
        guarded, journal = guard()
        assert await guarded.probe(keys) == [3] * 3, "it is not cleared again"
        await guarded.close()

    async def test_a_clear_during_which_another_disk_is_mounted_reads_that_one_too(
        self, tmp_path: Path
    ) -> None:
        class Mounted(MemoryTier):
            scans = 0

            def watch_folders(self, met: FolderMet) -> None:
                self.met = met

            async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
                self.scans += 1
                async for key in super().scan(prefix):
                    yield key
                if self.scans == 1:
                    await self.met("/mnt", "the other disk")

        tier = Mounted(MemoryConfig(max_bytes=1 << 20))
        guard = Guard(tier, GuardConfig(breaker_pause_s=0.01), name="disk", metrics=Metrics())
        journal = ClearsJournal(tmp_path / "clears")
        guard.resume_clears(journal)
        await tier.met("/mnt", "a disk")
        await guard.clear(NAMESPACE)
        async with asyncio.timeout(PATIENT_S):
            while guard.status()["pending_clears"]:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
        assert tier.scans >= 2
        assert journal.pending("disk") == []
        await guard.close()

    async def test_a_journal_of_folders_is_kept_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.journal._MOST_MISSED", 10)
        monkeypatch.setattr("kvhold.tiers.journal._MOST_FOLDERS", 16)
        path = tmp_path / "clears"
        journal = ClearsJournal(path)
        journal.begin(["disk"])
        for number in range(40):
            assert await journal.meet("disk", "/mnt", f"disk {number}") == []
        for number in range(3):
            await journal.remove("disk", number.to_bytes(NAMESPACE_BYTES, "big"))
        journal = ClearsJournal(path)
        journal.begin(["disk"])
        missed = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(3)]
        assert await journal.meet("disk", "/mnt", "disk 0") == []
        assert await journal.meet("disk", "/mnt", "disk 38") == missed
        assert journal.pending("disk") == missed
        assert await journal.meet("disk", "/mnt", "disk 39") == [], "it was there"
        for number in range(20):
            await journal.remove("disk", number.to_bytes(NAMESPACE_BYTES, "big"))
        assert len(path.read_text().splitlines()) < 17 * (1 + 10)
        journal = ClearsJournal(path)
        journal.begin(["disk, with another option"])
        assert "\tdisk\n" not in path.read_text(), "its folders are those of the new place"
        assert await journal.meet("disk, with another option", "/mnt", "disk 30") == [b""]
        path.write_text("@disk 30\tdisk\tnonsense\n")
        journal = ClearsJournal(path)
        journal.begin(["disk"])
        assert journal.pending("disk") == [b""]

    async def test_a_tier_may_have_more_folders_than_are_kept_of_those_that_are_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.journal._MOST_FOLDERS", 4)
        journal = ClearsJournal(tmp_path / "clears")
        journal.begin(["disk"])
        for number in range(10):
            await journal.meet("disk", f"/mnt/{number}", f"disk {number}")
        await journal.meet("disk", "/mnt/0", "the folder below")
        await journal.remove("disk", NAMESPACE)
        assert await journal.meet("disk", "/mnt/0", "disk 0") == [NAMESPACE]

    async def test_a_journal_is_kept_bounded_and_follows_no_link(self, tmp_path: Path) -> None:
        path = tmp_path / "clears"
        journal = ClearsJournal(path)
        await journal.add("disk", NAMESPACE)
        await journal.add("redis", b"")
        assert (ClearsJournal(path).pending("disk"), ClearsJournal(path).pending("redis")) == (
            [NAMESPACE],
            [b""],
        )
        await journal.remove("disk", NAMESPACE)
        assert ClearsJournal(path).pending("disk") == []
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_text("nonsense\n")
        journal = ClearsJournal(path)
        journal.begin(["disk", "redis"])
        assert (journal.pending("disk"), journal.pending("redis")) == ([b""], [b""])
        # one clear has ended, the other is pending, after a restart too
        await journal.remove("disk", b"")
        assert (ClearsJournal(path).pending("disk"), ClearsJournal(path).pending("redis")) == (
            [],
            [b""],
        )
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="cannot be read"):
            ClearsJournal(path)

    def test_a_clear_is_remembered_though_a_write_hangs(self, place: Place, tmp_path: Path) -> None:
        file = tmp_path / "clears"
        with cache_over(place.url(), drain_timeout_s=0, clears_file=str(file)) as cache:
            store(cache, PROMPT)
            settle(cache)
            place.hold("put")
            store(cache, a_prompt(SPACE, 128))
            place.wait_for("put")
            cache.clear(deadline_s=0)
            eventually(lambda: file.exists() and file.read_text())
        place.let_go("put")
        with cache_over(place.url(), clears_file=str(file)) as cache:
            assert read(cache, PROMPT) == 0
            eventually(lambda: not place.values)

    def test_a_clear_waits_for_its_write_though_a_burst_of_clears_became_one_clear_of_everything(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.clears._MOST_PENDING", 5)
        with cache_over(place.url()) as cache:
            place.hold("put")
            store(cache, PROMPT)
            place.wait_for("put")
            for space in [NAMESPACE, *(bytes([n]) * NAMESPACE_BYTES for n in range(8))]:
                cache.clear(space, deadline_s=0)
            eventually(lambda: cache.status()["tiers"][0]["pending_clears"] == 1)
            place.let_go("put")
            settle(cache)
            eventually(lambda: not cache.status()["tiers"][0]["pending_clears"])
            assert read(cache, PROMPT) == 0 and not place.values

    def test_a_tier_keeps_its_pending_clears_when_another_tier_gets_its_name(
        self, tmp_path: Path
    ) -> None:
        file = str(tmp_path / "clears")
        with a_place() as first, a_place() as second:
            urls = [place.url(breaker_pause_s=0.01) for place in (first, second)]
            with cache_over(*urls, clears_file=file) as cache:
                store(cache, PROMPT)
                settle(cache)
                second.faults = dict(DOWN)
                cache.clear(NAMESPACE)
                assert [tier["pending_clears"] for tier in cache.status()["tiers"]] == [0, 1]
            second.faults = {}
            with cache_over(urls[1], clears_file=file) as cache:
                assert read(cache, PROMPT) == 0
                eventually(lambda: not second.values)

    @pytest.mark.parametrize("back", [False, True])
    def test_a_store_whose_url_is_written_otherwise_keeps_its_pending_clears(
        self, place: Place, tmp_path: Path, back: bool
    ) -> None:
        options = {"clears_file": str(tmp_path / "clears")}
        url = place.url(breaker_pause_s=0.01)
        audited = url.replace("plugin://", "audit+plugin://")
        first, second = (audited, url) if back else (url, audited)
        if back:
            cache_over(url, **options).close()
        with cache_over(first, **options) as cache:
            store(cache, PROMPT)
            settle(cache)
            place.faults = dict(DOWN)
            cache.clear(NAMESPACE)
        place.faults = {}
        with cache_over(second, **options) as cache:
            assert read(cache, PROMPT) == 0
            eventually(lambda: not cache.status()["tiers"][0]["pending_clears"])
            assert not place.values
            store(cache, PROMPT)
            settle(cache)
        with cache_over(second, **options) as cache:
            assert read(cache, PROMPT) == 64, "what is cleared once is not cleared again"

    async def test_a_closed_journal_leaves_the_file_to_the_next_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fsync, writing, go_on = os.fsync, threading.Event(), threading.Event()

        def slow(file: int) -> None:
            writing.set()
            go_on.wait(PATIENT_S)
            fsync(file)

        monkeypatch.setattr("kvhold.tiers.journal.os.fsync", slow)
        file = tmp_path / "clears"
        first = ClearsJournal(file)
        adding = asyncio.create_task(first.add("disk", NAMESPACE))
        await asyncio.to_thread(writing.wait, PATIENT_S)
        closing = asyncio.create_task(first.close(PATIENT_S))
        await asyncio.sleep(0.01)
        assert not closing.done(), "it waits for the write"
        go_on.set()
        await asyncio.gather(adding, closing)
        assert NAMESPACE.hex() in file.read_text()

        go_on.clear()
        writing.clear()
        hung = ClearsJournal(file)
        removing = asyncio.create_task(hung.remove("disk", NAMESPACE))
        await asyncio.to_thread(writing.wait, PATIENT_S)
        await hung.close(0.01)
        go_on.set()
        await removing
        await hung.remove("disk", NAMESPACE)
        assert NAMESPACE.hex() in file.read_text(), "the next node has the file now"

    def test_a_journal_by_names_holds_for_every_tier(self, place: Place, tmp_path: Path) -> None:
        file = tmp_path / "clears"
        with cache_over(place.url()) as cache:
            store(cache, PROMPT)
            settle(cache)
        file.write_text(f"disk\t{NAMESPACE.hex()}\n")
        file.chmod(0o600)
        with cache_over(place.url(), clears_file=str(file)) as cache:
            assert read(cache, PROMPT) == 0
            eventually(lambda: not place.values)

    def test_more_clears_of_gone_tiers_than_are_kept_become_one_of_everything(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "clears"
        file.write_text("".join(f"gone\t{n:02x}{'0' * 30}\n" for n in range(5)))
        file.chmod(0o600)
        for most, pending in ((5, 5), (4, 1)):
            monkeypatch.setattr("kvhold.tiers.journal._MOST_JOURNALED", most)
            journal = ClearsJournal(file)
            journal.begin([f"new {most}"])
            assert len(journal.pending(f"new {most}")) == pending
        assert journal.pending("new 4") == [b""]

    def test_a_journal_that_is_too_long_is_not_read_in_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.journal._MOST_BYTES", 70)
        file = tmp_path / "clears"
        file.write_text("".join(f"disk\t{n:02x}{'0' * 30}\n" for n in range(2)))
        file.chmod(0o600)
        journal = ClearsJournal(file)
        journal.begin(["disk"])
        assert journal.pending("disk") == [b""]

    def test_clears_that_are_not_in_the_journal_yet_are_not_forgotten_by_a_cache_that_closes(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write_slowly(journal: ClearsJournal) -> None:
            time.sleep(0.2)
            write(journal)

        write, prompts, file = (
            ClearsJournal._write,
            [PROMPT, a_prompt(HYBRID_SPACE, 64)],
            str(tmp_path / "clears"),
        )
        monkeypatch.setattr(ClearsJournal, "_write", write_slowly)
        with cache_over(place.url(), clears_file=file, drain_timeout_s=0.0) as cache:
            for prompt in prompts:
                store(cache, prompt)
            settle(cache)
            for prompt in prompts:  # the second waits for the first
                cache.clear(prompt.namespace.digest, deadline_s=0)
        with cache_over(place.url(), clears_file=file) as cache:
            assert [read(cache, prompt) for prompt in prompts] == [0, 0]

    def test_a_second_clear_is_not_ended_by_the_first(self, place: Place, tmp_path: Path) -> None:
        later = SPACE.prompt(np.arange(64, dtype=np.int32) + 5000)
        with cache_over(
            place.url(breaker_pause_s=0.01), clears_file=str(tmp_path / "clears")
        ) as cache:
            store(cache, PROMPT)
            settle(cache)
            place.hold("delete")
            cache.clear(NAMESPACE, deadline_s=0)
            place.wait_for("delete")
            store(cache, later)
            eventually(lambda: chunks(place) == 8)
            cache.clear(NAMESPACE, deadline_s=0)
            place.faults = {"scan": AWAY}
            place.let_go("delete")
            settle(cache)
            assert cache.status()["tiers"][0]["pending_clears"] == 1
            assert read(cache, later) == 0
            place.faults = {}
            eventually(
                lambda: not place.values and not cache.status()["tiers"][0]["pending_clears"]
            )

    def test_a_clear_of_a_shared_tier_is_known_after_a_restart_though_its_marker_is_lost(
        self, place: Place, tmp_path: Path
    ) -> None:
        """What was cleared is still there: the node ended before it could be removed."""
        url, options = (
            place.shared_url(),
            {"plugins": PLUGINS, "clears_file": str(tmp_path / "clears"), "drain_timeout_s": 0.0},
        )
        with cache_over(url, **options) as cache:
            store(cache, PROMPT)
            settle(cache)
            place.hold("scan")
            cache.clear(NAMESPACE, deadline_s=0)
            place.wait_for("scan")
        for name in [name for name in place.values if is_marker(name)]:
            del place.values[name]
        assert chunks(place) == 4
        place.let_go("scan")
        with cache_over(url, **options) as cache:
            assert read(cache, PROMPT) == 0

    async def test_of_two_concurrent_journal_writes_the_older_numbers_are_not_written_last(
        self, tmp_path: Path
    ) -> None:
        """One that began earlier, of a refresh, has other tiers' clears to write down first."""

        class SlowGuard:
            place, generations = "tier", dict[bytes, int]()

            async def remember(self) -> None:
                began.set()
                if not self.generations:
                    await go.wait()

        began, go, guard = asyncio.Event(), asyncio.Event(), SlowGuard()
        journal = ClearsJournal(tmp_path / "clears")
        tier_worker: Any = SimpleNamespace(
            _journal=journal,
            _shared=[guard],
            _stack=SimpleNamespace(guards=[guard]),
            _remembering=asyncio.Lock(),
        )
        refresh = asyncio.ensure_future(TierWorker._remember(tier_worker))
        await began.wait()
        guard.generations = {NAMESPACE: 1}
        clear = asyncio.ensure_future(TierWorker._remember(tier_worker))
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.gather(refresh, clear)
        assert ClearsJournal(tmp_path / "clears").reached("tier") == {NAMESPACE: 1}

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_read_only_tier_is_not_used_after_a_clear(
        self, place: Place, tmp_path: Path, shared: bool
    ) -> None:
        url = place.shared_url if shared else place.url
        with cache_over(url(), plugins=PLUGINS) as cache:
            store(cache, PROMPT)
        for restarted in (False, True):  # a restart does not change it
            with cache_over(
                url(read_only=True), plugins=PLUGINS, clears_file=str(tmp_path / "clears")
            ) as cache:
                assert read(cache, PROMPT) == (0 if restarted else 64)
                cache.clear(NAMESPACE)
                assert read(cache, PROMPT) == 0
        assert chunks(place) == 4

    async def test_a_clear_that_is_done_is_not_done_again_after_a_restart(
        self, place: Place, tmp_path: Path
    ) -> None:
        class Watched(ClearsJournal):
            async def remove(self, tier: str, prefix: bytes) -> None:
                seen.append(guard.status()["pending_clears"])
                await super().remove(tier, prefix)

        seen: list[int] = []
        guard = Guard(memory.MemoryTier(place), GuardConfig(), name="tier", metrics=Metrics())
        guard.resume_clears(Watched(tmp_path / "clears"))
        await guard.clear(NAMESPACE)
        # when no clear is pending, the journal says so, too
        assert (seen, guard.status()["pending_clears"]) == ([1], 0)

    @pytest.mark.parametrize("shared", [False, True])
    async def test_very_many_pending_clears_end_and_a_shared_tiers_become_no_clear_of_everything(
        self, place: Place, tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.clears._MOST_PENDING", 5)
        spaces = [bytes([number]) * NAMESPACE_BYTES for number in range(9)]
        tier = (SharedMemoryTier if shared else memory.MemoryTier)(place)
        path = tmp_path / "clears"
        guard = Guard(tier, GuardConfig(), name="tier", metrics=Metrics())
        guard.share(lambda prefix: None)
        guard.resume_clears(ClearsJournal(path))
        pending_clears = [await guard.begin_clear(space) for space in spaces]
        assert (b"" in ClearsJournal(path).pending("tier")) != shared
        for pending_clear in pending_clears:
            await guard.end_clear(pending_clear)
        assert guard.status()["pending_clears"] == 0
        assert ClearsJournal(path).pending("tier") == []


class TestOtherHosts:
    def test_what_another_host_has_in_memory_is_not_used_once_it_hears_of_the_clear(
        self, place: Place
    ) -> None:
        url = place.shared_url(clears_check_s=0.01)
        with a_cache_over(url, plugins=PLUGINS) as one, a_cache_over(url, plugins=PLUGINS) as other:
            for cache in (one, other):
                store(cache, PROMPT)
                store(cache, a_prompt(HYBRID_SPACE, 64))
                settle(cache)
            one.clear(NAMESPACE)
            eventually(lambda: read(other, PROMPT) == 0)
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
            assert sum(is_marker(name) for name in place.values) == 1
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
            assert cache.status()["tiers"][0]["pending_clears"] == 1
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


class TestGenerations:
    @staticmethod
    def tiers(place: Place, count: int = 2) -> list[GenerationTier]:
        return [GenerationTier(SharedMemoryTier(place), lambda prefix: None) for _ in range(count)]

    async def test_a_write_in_progress_during_another_hosts_clear_is_not_found(
        self, place: Place
    ) -> None:
        one, other = self.tiers(place)
        key = make_key(1)
        await one.probe([key])
        write = one.putting([(key, [memoryview(b"old")])])
        await other.advance(key[:NAMESPACE_BYTES])
        assert await one.probe([key]) == [None]
        await write()
        assert (
            await one.probe([key])
            == await other.probe([key])
            == await self.tiers(place)[0].probe([key])
            == [None]
        )

    async def test_a_later_host_finds_the_latest_of_many_generations(self, place: Place) -> None:
        one, other = self.tiers(place)
        key = make_key(1)
        for _ in range(40):
            await one.advance(key[:NAMESPACE_BYTES])
        await one.put([(key, [memoryview(b"new")])])
        assert await other.probe([key]) == [3]
        assert [found async for found in other.scan(key[:NAMESPACE_BYTES])] == [key]

    async def test_a_scan_of_everything_gives_keys_of_namespaces_that_only_others_have_cleared(
        self, place: Place
    ) -> None:
        one, other = self.tiers(place)
        keys = [make_key(number, bytes([65 + number]) * NAMESPACE_BYTES) for number in range(3)]
        for key in keys[:2]:
            await one.advance(key[:NAMESPACE_BYTES])
        await one.put([(key, [memoryview(b"new")]) for key in keys])
        assert sorted([found async for found in other.scan(b"")]) == keys

    async def test_a_marker_that_was_evicted_is_put_again(self, place: Place) -> None:
        [one, other] = self.tiers(place)
        key = make_key(1)
        await one.put([(key, [memoryview(b"old")])])
        await one.advance(key[:NAMESPACE_BYTES])
        del place.values[marker_key(key[:NAMESPACE_BYTES], 1)]
        await one.refresh()
        assert await other.probe([key]) == [None]

    async def test_no_value_is_found_while_a_marker_has_no_answer(self, place: Place) -> None:
        key, space = make_key(1), make_key(1)[:NAMESPACE_BYTES]
        [one] = self.tiers(place, 1)
        await one.put([(key, [memoryview(b"old")])])
        await one.advance(space)
        for number in (1, 4):
            [later] = self.tiers(place, 1)
            place.unanswered = {marker_key(space, number)}
            for _ in range(2):
                with pytest.raises(TierUnavailable):
                    await later.probe([key])
            place.unanswered = set()
            assert await later.probe([key]) == [None]
        place.unanswered = {marker_key(space, 2)}
        with pytest.raises(TierUnavailable):
            await one.probe([key])

    async def test_a_fault_of_one_marker_does_not_keep_a_host_from_learning_others(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        first, second, third = (bytes([65 + n]) * NAMESPACE_BYTES for n in range(3))
        [other] = self.tiers(place, 1)
        one = GenerationTier(SharedMemoryTier(place), told.append)
        for space in (first, second, third):
            one.use(space)
        await one.advance(first)
        await one.refresh()
        await other.advance(second)
        place.unanswered = {marker_key(third, 1)}
        with pytest.raises(TierUnavailable):
            await one.refresh()
        assert told == [second]
        del place.values[marker_key(first, 1)]
        place.unanswered = set()
        await other.advance(third)

        class Full(SharedMemoryTier):
            async def put(self, items: Any, **options: Any) -> Any:
                return [TierFull("memory", "put", "no room")] * len(items)

        one._tier = Full(place)
        with pytest.raises(TierFull):
            await one.refresh()
        assert told == [second, third]

    async def test_a_host_that_starts_later_finds_the_generation_though_old_markers_expired(
        self, place: Place
    ) -> None:
        one, other = self.tiers(place)
        space = make_key(1)[:NAMESPACE_BYTES]
        for number in range(1, 40):
            await one.advance(space)
            for old in range(number):
                place.values.pop(marker_key(space, old), None)
            await one.refresh()
            if number % 8 == 7:
                [later] = self.tiers(place, 1)
                await later.meet([space])
                assert later.numbers == {space: number}
        await other.probe([make_key(1)])
        assert other.numbers == one.numbers == {space: 39}

    async def test_a_host_does_not_take_its_own_clear_for_another_ones(self, place: Place) -> None:
        told: list[bytes] = []
        key, stored, go_on = make_key(1), asyncio.Event(), asyncio.Event()

        class LateAnswer(SharedMemoryTier):
            async def put(self, *args: Any, **options: Any) -> Any:
                answer = await super().put(*args, **options)
                stored.set()
                await go_on.wait()
                return answer

        one = GenerationTier(LateAnswer(place), told.append)
        await one.probe([key])
        clear = asyncio.ensure_future(one.advance(key[:NAMESPACE_BYTES]))
        await stored.wait()
        await one.probe([key])
        go_on.set()
        await clear
        assert (told, one.numbers) == ([], {key[:NAMESPACE_BYTES]: 1})

    async def test_of_two_clears_at_once_each_host_learns_of_the_other_ones(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        space = make_key(1)[:NAMESPACE_BYTES]
        [other] = self.tiers(place, 1)

        class OtherIsFaster(SharedMemoryTier):
            async def put(self, *args: Any, **options: Any) -> Any:
                if not other.numbers:
                    await other.advance(space)
                return await super().put(*args, **options)

        one = GenerationTier(OtherIsFaster(place), told.append)
        await one.advance(space)
        assert (told, one.numbers) == ([space], {space: 2})
        await other.refresh()
        assert other.numbers == {space: 2}  # what it stored between the two clears goes

    async def test_no_name_of_a_generation_is_used_until_it_is_known_whose_clear_began_it(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        key, stored, go_on = make_key(1), asyncio.Event(), asyncio.Event()
        [other] = self.tiers(place, 1)

        class OtherIsFasterAndTheAnswerIsLate(SharedMemoryTier):
            async def put(self, *args: Any, **options: Any) -> Any:
                if not other.numbers:
                    await other.advance(key[:NAMESPACE_BYTES])
                answer = await super().put(*args, **options)
                stored.set()
                await go_on.wait()
                return answer

        one = GenerationTier(OtherIsFasterAndTheAnswerIsLate(place), told.append)
        clear = asyncio.ensure_future(one.advance(key[:NAMESPACE_BYTES]))
        await stored.wait()
        await one.probe([key])
        await one.refresh()
        # what memory holds may be older than the other clear
        assert (told, one.name_of(key)) == ([], key)
        go_on.set()
        await clear
        assert told == [key[:NAMESPACE_BYTES]]
        await other.refresh()
        assert one.name_of(key) == other.name_of(key) != key

    async def test_what_another_host_stores_after_a_clear_is_no_garbage(self, place: Place) -> None:
        one, other = self.tiers(place)
        old, new = make_key(1), make_key(2)
        await other.advance(old[:NAMESPACE_BYTES])
        await other.put([(old, [memoryview(b"old")])])
        assert await one.advance(b"") == b""
        await other.refresh()
        await other.put([(new, [memoryview(b"new")])])
        garbage = await one.names_of(b"")
        assert len(garbage) == 1
        await one.remove_names(*garbage.taken())
        assert await other.probe([old, new]) == [None, 3]

    async def test_a_clear_of_everything_leaves_the_values_that_others_stored_since(
        self, place: Place
    ) -> None:
        """In namespaces that the clearing host does not know, and after further clears."""
        one, other = self.tiers(place)
        old, new, newest = (make_key(n, bytes([65 + n]) * NAMESPACE_BYTES) for n in range(3))
        await one.put([(old, [memoryview(b"old")])])
        await other.advance(newest[:NAMESPACE_BYTES])
        await other.put([(newest, [memoryview(b"old")])])
        await one.advance(b"")
        await other.probe([new])
        await other.put([(new, [memoryview(b"new")])])
        garbage = [name for part in (await one.names_of(b"")).taken() for name in part]
        assert sorted(place.values[name] for name in garbage) == [b"old", b"old"]
        await other.advance(b"")  # which the first host has not learned of
        await other.put([(newest, [memoryview(b"newest")])])
        await one.remove_names(
            [name for part in (await one.names_of(b"")).taken() for name in part]
        )
        assert await other.probe([newest]) == [6]
        await other.remove_names(
            [name for part in (await other.names_of(b"")).taken() for name in part]
        )
        assert [value for name, value in place.values.items() if not is_marker(name)] == [b"newest"]

    async def test_removing_again_later_leaves_the_values_that_others_stored_since(
        self, place: Place
    ) -> None:
        def host() -> Guard:
            guard = Guard(
                SharedMemoryTier(place),
                GuardConfig(breaker_pause_s=0.01),
                name="tier",
                metrics=Metrics(),
            )
            guard.share(lambda prefix: None)
            return guard

        one, other = host(), host()
        old, new = (make_key(n, bytes([65 + n]) * NAMESPACE_BYTES) for n in range(2))
        await one.put([(old, [memoryview(b"old")])])
        place.faults["scan"] = AWAY
        await one.clear(b"")
        await other.probe([new])
        await other.put([(new, [memoryview(b"new")])])
        place.faults.clear()
        async with asyncio.timeout(PATIENT_S):
            while b"old" in place.values.values():  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
        assert await other.probe([new]) == [3]
        await one.close()
        await other.close()

    async def test_names_follow_the_documented_format(self, place: Place) -> None:
        """docs/format.md"""
        [one] = self.tiers(place, 1)
        key = make_key(1)
        space = key[:NAMESPACE_BYTES]
        for prefix in (b"", b"", space):
            await one.advance(prefix)
        counts = (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
        digest = blake2b(space + counts, digest_size=12, person=b"kvhold-gen").digest()
        assert one.name_of(key) == digest + bytes([2, 0, 0, 0]) + key[NAMESPACE_BYTES:]

    async def test_a_marker_never_expires_by_itself(self, place: Place) -> None:
        [one] = self.tiers(place, 1)
        await one.advance(b"")
        assert list(place.ttls.values()) == [inf]
        redis = RedisTier.from_url(parse_url("redis://127.0.0.1:1/0?ttl_s=86400"))
        assert (redis._ttl_ms(None), redis._ttl_ms(inf)) == (86_400_000, None)
        assert (_expiry(60), _expiry(inf)) == (60, 0)

    async def test_a_clear_of_everything_is_learned_by_a_host_of_very_many_namespaces(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        one = self.tiers(place, 1)[0]
        other = GenerationTier(SharedMemoryTier(place), told.append, holds=lambda space: True)
        for number in range(4200):
            other.use(number.to_bytes(NAMESPACE_BYTES, "big"))
        await other.refresh()
        await one.advance(b"")
        await other.refresh()
        assert told == [b""]
        await one.advance((7).to_bytes(NAMESPACE_BYTES, "big"))
        for _ in range(2):  # each has its turn
            await other.refresh()
        assert told == [b"", (7).to_bytes(NAMESPACE_BYTES, "big")]

    async def test_a_search_of_many_namespaces_asks_for_a_few_at_once_and_goes_on_after_a_fault(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        spaces = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(1, 401)]
        [other] = self.tiers(place, 1)
        one = GenerationTier(SharedMemoryTier(place), told.append)
        for space in spaces:
            one.use(space)
        for slow in (spaces[0], spaces[200]):
            place.unanswered = {marker_key(slow, 1)}
            with pytest.raises(TierUnavailable):
                await one.refresh()
        assert sum(one.has_met([space]) for space in spaces) >= 128, "met before the faults"
        place.unanswered = set()
        await one.refresh()
        assert one.has_met(spaces)
        assert max(map(len, place.asked["probe"])) < 100 * 16
        for space in (spaces[0], spaces[-1]):
            await other.advance(space)
        await one.refresh()
        assert sorted(told) == [spaces[0], spaces[-1]]

    async def test_a_slow_search_is_no_fault_of_the_tier(self, place: Place) -> None:
        class Slow(SharedMemoryTier):
            async def probe(self, keys: Any) -> Any:
                await asyncio.sleep(0.03)
                return await super().probe(keys)

        told: list[bytes] = []
        guard = Guard(
            Slow(place), GuardConfig(probe_timeout_s=0.01), name="tier", metrics=Metrics()
        )
        guard.share(told.append)
        [other] = self.tiers(place, 1)
        spaces = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(1, 201)]
        for space in spaces:
            guard.use(space)
        await guard.refresh()
        await other.advance(spaces[150])
        await guard.refresh()
        assert told == [spaces[150]]
        place.faults = dict(DOWN)
        for _ in range(10):
            await guard.refresh()
        assert guard.available, "only what requests wait for counts"

    async def test_a_frame_read_before_a_clear_replaces_no_value_stored_after_it(
        self, place: Place
    ) -> None:
        guard = Guard(SharedMemoryTier(place), GuardConfig(), name="tier", metrics=Metrics())
        guard.share(lambda prefix: None)
        key = make_key(1)
        await guard.put([(key, [memoryview(b"old")])])
        names = guard.names([key])
        await guard.clear(key[:NAMESPACE_BYTES])
        await guard.put([(key, [memoryview(b"new")])])
        assert (
            await guard.replace([(key, [memoryview(b"old, reencoded")])], names=names)
        ).items == [False]
        assert b"old, reencoded" not in place.values.values()

    async def test_the_owner_of_memory_is_told_before_a_key_has_a_new_name(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        key = make_key(1)
        one = GenerationTier(SharedMemoryTier(place), lambda prefix: told.append(one.name_of(key)))
        await one.probe([key])
        await self.tiers(place)[0].advance(key[:NAMESPACE_BYTES])
        await one.probe([key])
        assert told == [key]
        assert one.name_of(key) != key


class TestForgottenNamespaces:
    """Requests make namespaces without limit (a salt, a tag), so a host forgets some."""

    @pytest.fixture
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One namespace is in use at once."""
        monkeypatch.setattr("kvhold.tiers.generations._MOST_USED", 1)
        monkeypatch.setattr("kvhold.tiers.generations._MOST_NUMBERS", 1)

    @staticmethod
    async def use_others(tier: GenerationTier, place: Place, numbers: range = range(20)) -> None:
        """Use namespaces that another host has cleared."""
        for number in numbers:
            space = (1 << 64 | number).to_bytes(NAMESPACE_BYTES, "big")
            place.values.setdefault(marker_key(space, 1), b"another host's")
            await tier.probe([make_key(0, space)])

    async def test_a_host_refreshes_a_bounded_number_of_namespaces(self, place: Place) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda prefix: None)
        spaces = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(1, 20_000)]
        for space in spaces:
            one.use(space)
        for _ in range(3):
            place.asked.clear()
            await one.refresh()
        asked = {key[:NAMESPACE_BYTES] for keys in place.asked["probe"] for key in keys}
        assert asked == {ALL, *spaces[-64 * 64 :]}
        assert one.has_met(spaces[-100:]) and not one.has_met(spaces[:1])

    async def test_namespaces_of_memory_and_those_used_lately_are_not_forgotten(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.generations._MOST_USED", 10)
        told: list[bytes] = []
        held, lately, other = (bytes([65 + n]) * NAMESPACE_BYTES for n in range(3))
        in_memory = {held}
        one = GenerationTier(
            SharedMemoryTier(place), told.append, holds=lambda space: space in in_memory
        )
        for space in (held, other):
            await one.probe([make_key(0, space)])
        for number in range(0, 20, 4):
            await one.probe([make_key(0, lately)])
            await self.use_others(one, place, range(number, number + 4))
            assert one.has_met([held]) and one.has_met([lately])
        assert not one.has_met([other])
        await GenerationTier(SharedMemoryTier(place), told.append).advance(held)
        told.clear()
        await one.refresh()
        assert told == [held]
        in_memory.clear()
        await one.refresh()
        await self.use_others(one, place)
        assert not one.has_met([held])

    @pytest.mark.usefixtures("few")
    async def test_old_values_of_a_forgotten_namespace_are_not_found(self, place: Place) -> None:
        """Those from before its own clear, and from before another host's."""
        one, other = (GenerationTier(SharedMemoryTier(place), lambda space: None) for _ in "12")
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        for number in range(1, 4):
            await one.put([(key, [memoryview(bytes(number))])])
            assert await one.probe([key]) == [number]
            await (one if number % 2 else other).advance(key[:NAMESPACE_BYTES])
            await self.use_others(one, place)
            assert not one.has_met([key[:NAMESPACE_BYTES]])
            assert key[:NAMESPACE_BYTES] not in one.numbers
            if number == 1:  # probed, and then forgotten: read by an old name it would be found
                assert await one.get([key], [[memoryview(bytearray(9))]]) == [None]
            assert await one.probe([key]) == [None]
        assert len(place.values) > 3, "the old values are still there"

    @pytest.mark.usefixtures("few")
    async def test_a_value_put_under_the_name_of_a_forgotten_generation_is_not_found(
        self, place: Place
    ) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None)
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        await one.advance(key[:NAMESPACE_BYTES])
        await self.use_others(one, place)
        await one.put([(key, [memoryview(b"late")])])
        assert await one.get([key], [[memoryview(bytearray(9))]]) == [None]
        assert await one.probe([key]) == [None]

    @pytest.mark.usefixtures("few")
    async def test_a_search_that_began_before_a_namespace_was_forgotten_does_not_meet_it(
        self, place: Place
    ) -> None:
        asked, answer = asyncio.Event(), asyncio.Event()
        answer.set()

        class Slow(SharedMemoryTier):
            async def probe(self, keys: Any) -> Any:
                sizes = await super().probe(keys)
                if any(key.startswith(b"s" * NAMESPACE_BYTES) for key in keys):
                    asked.set()
                    await answer.wait()
                return sizes

        one = GenerationTier(Slow(place), lambda space: None)
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        await one.put([(key, [memoryview(b"old")])])
        asked.clear()
        answer.clear()
        meeting = asyncio.ensure_future(one.meet([key[:NAMESPACE_BYTES]]))
        await asked.wait()
        await self.use_others(one, place)
        place.values[marker_key(key[:NAMESPACE_BYTES], 1)] = b"another host's"
        one.use(key[:NAMESPACE_BYTES])
        answer.set()
        await meeting
        assert await one.get([key], [[memoryview(bytearray(9))]]) == [None]

    @pytest.mark.usefixtures("few")
    async def test_a_clear_of_a_forgotten_namespace_begins_the_generation_after_the_latest(
        self, place: Place
    ) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None)
        space = b"s" * NAMESPACE_BYTES
        for number in range(1, 20):
            await one.advance(space)
            assert one.numbers[space] == number
            await self.use_others(one, place)
            assert space not in one.numbers
            for old in range(1, number):
                if number >= 8 and old != 8:  # expired; a search finds the latest without them
                    place.values.pop(marker_key(space, old), None)
            place.values.update((marker_key(space, one), b"restored") for one in _leading(number))

    @pytest.mark.usefixtures("few")
    async def test_a_namespace_that_is_forgotten_as_its_clear_begins_is_searched_again(
        self, place: Place
    ) -> None:
        space = b"s" * NAMESPACE_BYTES

        class Slow(SharedMemoryTier):
            async def probe(self, keys: Any) -> Any:
                sizes = await super().probe(keys)
                if any(key.startswith(space) for key in keys) and not others:
                    others.append(True)
                    await TestForgottenNamespaces.use_others(one, place)
                return sizes

        others: list[bool] = []
        one = GenerationTier(Slow(place), lambda space: None, numbers={space: 9})
        place.values.update((marker_key(space, number), b"restored") for number in (8, 9))
        await one.advance(space)
        assert others and one.numbers[space] == 10

    @pytest.mark.usefixtures("few")
    async def test_no_number_of_a_namespace_in_use_is_forgotten(self, place: Place) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None, holds=lambda space: True)
        keys = [make_key(1, bytes([65 + number]) * NAMESPACE_BYTES) for number in range(9)]
        for key in keys:
            await one.advance(key[:NAMESPACE_BYTES])
            await one.put([(key, [memoryview(b"new")])])
        assert len(one.numbers) == 9
        buffers = [[memoryview(bytearray(3))] for _ in keys]
        assert await one.get(keys, buffers) == [3] * 9

    @pytest.mark.usefixtures("few")
    async def test_a_scan_finds_the_keys_of_forgotten_namespaces(self, place: Place) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None)
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        await one.advance(key[:NAMESPACE_BYTES])
        await one.put([(key, [memoryview(b"new")])])
        await self.use_others(one, place)
        assert [found async for found in one.scan(key[:NAMESPACE_BYTES])] == [key]

    @pytest.mark.usefixtures("few")
    def test_chunks_in_memory_are_not_used_after_the_clear_of_another_host(
        self, place: Place
    ) -> None:
        """They were stored, and neither probed nor written."""
        url = place.shared_url(clears_check_s=0.01)
        prompts = [PROMPT, a_prompt(HYBRID_SPACE, 64)]
        with (
            cache_over(url, plugins=PLUGINS) as one,
            cache_over(url, plugins=PLUGINS, write_behind_bytes=1) as other,
        ):
            for prompt in prompts:
                store(other, prompt)
            assert [read(other, prompt) for prompt in prompts] == [64, 64]
            one.clear(NAMESPACE)
            eventually(lambda: read(other, PROMPT) == 0)
            assert read(other, prompts[1]) == 64
            assert other.tier_worker is not None
            assert not other.tier_worker._new_spaces, "taken by each check"

    def test_new_namespaces_of_memory_do_not_wait_for_the_next_check(self, place: Place) -> None:
        with cache_over(place.shared_url(clears_check_s=1000), plugins=PLUGINS) as cache:
            store(cache, PROMPT)
            settle(cache)
            assert cache.tier_worker is not None
            assert not cache.tier_worker._new_spaces
            [guard] = cache.tier_worker._shared
            assert isinstance(guard.tier, GenerationTier) and guard.tier.has_met([NAMESPACE])

    @pytest.mark.usefixtures("few")
    def test_chunks_on_a_disk_are_not_used_after_the_clear_of_another_host(
        self, place: Place, tmp_path: Path
    ) -> None:
        url = place.shared_url(clears_check_s=1000)
        with (
            cache_over(url, plugins=PLUGINS) as one,
            cache_over(
                on_disk(tmp_path), url, plugins=PLUGINS, clears_file=str(tmp_path / "clears")
            ) as other,
        ):
            for number in range(3):
                store(other, PROMPT)
                settle(other)
                forget(other)
                assert read(other, PROMPT) == 64
                forget(other)
                for shift in range(5):
                    read(other, a_prompt(replace(SPACE, cache_salt=f"{number}{shift}"), 64))
                one.clear(NAMESPACE)
                assert read(other, PROMPT) == 0
                settle(other)
                assert read(other, PROMPT) == 0


class TestTierOfALaterGeneration(TierContract):
    too_large_bytes = (32 << 20) + 1

    @pytest.fixture
    async def tier(self) -> AsyncIterator[GenerationTier]:
        tier = GenerationTier(MemoryTier(MemoryConfig(max_bytes=32 << 20)), lambda prefix: None)
        await tier.advance(b"")
        for number in range(3):
            await tier.advance(make_key(number)[:NAMESPACE_BYTES])
        yield tier
        await tier.close()
