"""A clear lasts through a tier's absence and a restart."""

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhold.cache.transfer.tier_worker import TierWorker
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.testing.cache import a_prompt, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers.base import FolderMet
from kvhold.tiers.disk import DiskConfig, DiskTier
from kvhold.tiers.generations import is_marker
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.memory import MemoryConfig, MemoryTier
from tests.cache.below import HYBRID_SPACE, PATIENT_S, SPACE, cache_over, eventually, forget
from tests.cache.clearing import (
    AWAY,
    DOWN,
    NAMESPACE,
    NAMESPACE_OF_KEYS,
    PLUGINS,
    PROMPT,
    chunks,
    settle,
)
from tests.cache.places import place
from tests.tiers import memory
from tests.tiers.memory import Place, SharedMemoryTier, a_place

__all__ = ["place"]


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
        span = a_prompt(SPACE.of_spans, 32)
        with cache_over(url, plugins=PLUGINS, **options) as cache:
            store(cache, PROMPT)
            cache.register(span.namespace)
            store(cache, span)
            settle(cache)
            place.faults = dict(DOWN)
            cache.clear(namespace)
            assert cache.status()["tiers"][0]["pending_clears"] == (2 if namespace else 1)
        assert chunks(place) == 6
        with cache_over(url, plugins=PLUGINS, **options) as cache:
            cache.register(span.namespace)
            assert (read(cache, PROMPT), read(cache, span)) == (0, 0)
            place.faults = {}
            assert (read(cache, PROMPT), read(cache, span)) == (0, 0)
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
                assert [tier["pending_clears"] for tier in cache.status()["tiers"]] == [0, 2]
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
            assert cache.status()["tiers"][0]["pending_clears"] == 2, "one is of spans"
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
