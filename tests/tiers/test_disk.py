"""The disk tier: the contract, what it evicts and counts, and what it does when files, folders and
disks misbehave.
"""

import asyncio
import gc
import logging
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from errno import EIO
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.errors import (
    ConfigError,
    TierDenied,
    TierError,
    TierFull,
    TierIncomplete,
    TierUnavailable,
)
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, partly_scanned, scanned, store
from kvhold.tiers.audit import AuditTier
from kvhold.tiers.base import HasFolders, replace
from kvhold.tiers.disk import DiskConfig, DiskTier
from kvhold.tiers.disk.folder import Folder, FoundValue
from kvhold.tiers.faults import FaultTier
from kvhold.tiers.files.tree import FileTree
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.policies import POLICIES
from kvhold.tiers.table import KEYS_A_PART
from kvhold.tiers.url import parse_url

KIB, MIB = 1 << 10, 1 << 20


class TestDiskTier(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture(params=POLICIES)
    async def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DiskTier]:
        async with disk(tmp_path, max_bytes=32 * MIB, policy=request.param) as tier:
            yield tier


class TestDiskTierThroughThePageCache(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[DiskTier]:
        async with disk(
            tmp_path, max_bytes=32 * MIB, direct="never", sync=True, io_threads=1
        ) as tier:
            yield tier


class TestThreeDisks(TierContract):
    async def lose_a_part(self, tier: DiskTier) -> None:
        await tier._stores[1].close()

    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[DiskTier]:
        async with disk(tmp_path / "a", tmp_path / "b", tmp_path / "c", max_bytes=96 * MIB) as tier:
            yield tier


async def test_a_scan_that_is_cancelled_at_once_leaves_nothing_unawaited(tmp_path: Path) -> None:
    async with disk(tmp_path / "a", tmp_path / "b") as tier:
        scanning = asyncio.ensure_future(anext(tier.scan(b"")))
        await asyncio.sleep(0)  # its calls to the disks are scheduled, and have not begun
        scanning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scanning
        gc.collect()


@asynccontextmanager
async def disk(*paths: Path, max_bytes: int = 4 * MIB, **settings: Any) -> AsyncIterator[DiskTier]:
    """A tier that must have an exact account when it is closed."""
    tier = DiskTier(DiskConfig(path=",".join(map(str, paths)), max_bytes=max_bytes, **settings))
    try:
        yield tier
        assert tier.used_bytes <= max(tier.limit_bytes, 0)
    finally:
        await tier.close()


def value_files(folder: Path) -> list[Path]:
    """Every value's file, those of other people not."""
    return sorted(path for path in folder.glob("[0-9a-f][0-9a-f]/*-*-*") if path.is_file())


def occupied(folder: Path) -> int:
    """What the file system says that they take."""
    return sum(path.stat().st_blocks * 512 for path in value_files(folder))


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("new/*"))


def aligned(nbytes: int) -> memoryview:
    """Memory at a page's start, as an arena gives it."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


async def fill(tier: DiskTier, numbers: range, nbytes: int = 4096) -> None:
    for number in numbers:
        assert await store(tier, {make_key(number): make_value(number, nbytes)}) == [True]


async def present(tier: DiskTier, numbers: range) -> list[int]:
    sizes = await tier.probe([make_key(number) for number in numbers])
    return [number for number, nbytes in zip(numbers, sizes, strict=True) if nbytes is not None]


class Gate:
    """Holds the threads that call one of os's functions, until it is opened.

    when: of the arguments; other calls pass
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        when: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self._open = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        inner = getattr(os, name)

        def held(*args: Any, **names: Any) -> Any:
            if when(*args):
                self._loop.call_soon_threadsafe(self.reached.set)
                assert self._open.wait(60)  # not for ever: a test that fails has to end
            return inner(*args, **names)

        monkeypatch.setattr(os, name, held)

    def open(self) -> None:
        self._open.set()


class TestSettings:
    def test_a_url_names_folder_and_settings(self) -> None:
        DiskTier.from_url(
            parse_url(
                "disk:///var/cache/kvhold?max_bytes=100GiB&policy=lfu&direct=never&sync=true&io_threads=2"
            )
        )
        DiskTier.from_url(parse_url("disk:///a,/b,/c?max_bytes=1TiB"))

    def test_batches_out_of_the_page_cache_are_larger(self) -> None:
        past_it, through_it = (
            DiskTier.from_url(parse_url(f"disk:///a{options}")) for options in ("", "?direct=never")
        )
        assert through_it.traits.batch_bytes == 2 * past_it.traits.batch_bytes == 16 * MIB

    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("disk://var/cache", r"disk:///path, with three slashes"),
            ("disk://", r"absolute"),
            ("disk:///a,b", r"absolute"),
            ("disk:///a,/a/", r"each once"),
            ("disk:///a?max_byte=1", r"max_bytes"),
            ("disk:///a?policy=lur", r"lru"),
            ("disk:///a?direct=maybe", r"auto"),
            ("disk:///a?io_threads=0", r"at least 1"),
            ("disk:///a,/b?max_bytes=1", r"each path"),
        ],
    )
    def test_what_cannot_be_is_refused(self, url: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            DiskTier.from_url(parse_url(url))

    async def test_making_a_tier_touches_nothing(self, tmp_path: Path) -> None:
        async with disk(tmp_path / "new"):
            assert everything(tmp_path) == []

    async def test_without_a_limit_it_takes_what_is_free_less_a_reserve(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path, max_bytes=0, reserve_bytes=1 << 62) as tier:
            assert isinstance((await tier.put([(make_key(1), [memoryview(b"x")])]))[0], TierFull)
            assert tier.limit_bytes == 0
        async with disk(tmp_path, max_bytes=0, reserve_bytes=0) as tier:
            await fill(tier, range(1))
            assert 0 < tier.limit_bytes < shutil.disk_usage(tmp_path).total

    async def test_a_folder_is_for_its_owner_alone(self, tmp_path: Path) -> None:
        async with disk(tmp_path / "values") as tier:
            await fill(tier, range(1))
            assert {oct(path.stat().st_mode & 0o077) for path in everything(tmp_path)} == {"0o0"}


class TestAlignedMemory:
    """What an arena gives: a header of a page, then a payload at a page's start."""

    @pytest.mark.parametrize("direct", ["auto", "always", "never"])
    @pytest.mark.parametrize("tail", [0, 1, 511, 512, 4095])
    @pytest.mark.parametrize("head", [4096, 64, 0])
    async def test_values_come_back(
        self, tmp_path: Path, direct: str, tail: int, head: int
    ) -> None:
        value = make_value(1, head + 300 * KIB + tail)
        async with disk(tmp_path, direct=direct) as tier:
            for number, parts in enumerate(
                (split(value, [0, head, len(value)]), split(value, [0, len(value)]))
            ):
                key = make_key(number)
                assert await tier.put([(key, parts)]) == [None]
                whole, cut = (
                    aligned(len(value) + 5000),
                    split(bytes(len(value)), [0, head, len(value)]),
                )
                assert await tier.get([key, key], [[whole], cut]) == [len(value)] * 2
                assert bytes(whole) == value + bytes(5000)
                assert b"".join(cut) == value
            assert tier.used_bytes == occupied(tmp_path)

    @pytest.mark.parametrize("direct", ["auto", "never"])
    async def test_layers_are_read_as_ranges(self, tmp_path: Path, direct: str) -> None:
        value = make_value(1, 4096 + 4 * 256 * KIB + 100)
        async with disk(tmp_path, direct=direct) as tier:
            assert await tier.put([(make_key(1), split(value, [0, len(value)]))]) == [None]
            for start, nbytes in (
                (4096, 256 * KIB),
                (4096 + 512 * KIB, 512 * KIB),
                (4097, 256 * KIB),
                (0, len(value)),
                (8192, 1 << 20),
            ):
                buffer = aligned(nbytes)
                wanted = nbytes if start + nbytes <= len(value) else None
                assert await tier.get([make_key(1)], [[buffer]], starts=[start]) == [wanted]
                assert wanted is None or bytes(buffer) == value[start : start + nbytes]

    async def test_large_aligned_values_do_pass_the_page_cache_by(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        carried: list[tuple[bool, int]] = []
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, noting_direct(getattr(os, name), carried))
        value = make_value(1, 4096 + 300 * KIB + 10)
        async with disk(tmp_path, direct="always") as tier:
            parts = split(value, [0, 4096, len(value)])
            await tier.put([(make_key(1), parts)])
            await tier.get([make_key(1)], [parts])
        assert carried == [(True, 4096 + 300 * KIB), (False, 10)] * 2

    async def test_thousands_of_parts_are_one_value(self, tmp_path: Path) -> None:
        value = make_value(1, 3000 * 100)
        async with disk(tmp_path) as tier:
            assert await tier.put(
                [(make_key(1), split(value, list(range(0, len(value) + 1, 100))))]
            ) == [None]
            parts = [memoryview(bytearray(75)) for _ in range(4000)]
            assert await tier.get([make_key(1)], [parts]) == [len(value)]
            assert b"".join(parts) == value

    @pytest.mark.parametrize("step", [1, 4096, 5000, 200 * KIB])
    async def test_d18_short_transfers_go_on_where_they_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
    ) -> None:
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, at_most(step, getattr(os, name)))
        value = make_value(1, 4096 + (300 * KIB if step > 1 else 0) + 17)
        async with disk(tmp_path) as tier:
            parts = split(value, [0, 4096, len(value)])
            assert await tier.put([(make_key(1), parts)]) == [None]
            (file,) = value_files(tmp_path)
            assert file.read_bytes() == value
            buffer = aligned(len(value))
            assert await tier.get([make_key(1)], [[buffer]]) == [len(value)]
            assert bytes(buffer) == value


class TestEviction:
    @pytest.mark.parametrize("policy", POLICIES)
    async def test_d21_any_policy_keeps_the_limit_while_values_come_go_and_come_back(
        self, tmp_path: Path, policy: str
    ) -> None:
        chance = random.Random(1)
        async with disk(tmp_path, max_bytes=256 * KIB, policy=policy) as tier:
            for _ in range(300):
                number = chance.randrange(40)
                match chance.randrange(4):
                    case 0 | 1:
                        assert await store(
                            tier, {make_key(number): make_value(number, 1 + number * 700)}
                        ) == [True]
                    case 2:
                        assert (await fetch(tier, [make_key(number)], [40_000]))[0] in (
                            make_value(number, 1 + number * 700),
                            None,
                        )
                    case 3:
                        await tier.delete([make_key(number)])
                assert tier.used_bytes == occupied(tmp_path) <= 256 * KIB

    async def test_the_value_used_least_recently_goes_first(self, tmp_path: Path) -> None:
        async with disk(tmp_path, max_bytes=16 * KIB) as tier:
            await fill(tier, range(4))
            await fetch(tier, [make_key(0)], [4096])
            await tier.probe([make_key(1)])
            await fill(tier, range(4, 5))
            assert await present(tier, range(5)) == [0, 2, 3, 4]

    async def test_the_order_of_use_survives_a_restart(self, tmp_path: Path) -> None:
        async with disk(tmp_path, max_bytes=64 * KIB) as tier:
            await fill(tier, range(16))
            for number in (3, 9, 0):
                await fetch(tier, [make_key(number)], [4096])
            await fetch(tier, [make_key(5)], [4096])
        for _ in range(2):
            async with disk(tmp_path, max_bytes=16 * KIB) as tier:
                assert await present(tier, range(16)) == [0, 3, 5, 9]
                assert tier.used_bytes == occupied(tmp_path) == 16 * KIB
        async with disk(tmp_path, max_bytes=16 * KIB) as tier:
            await fill(tier, range(20, 21))
            assert await present(tier, range(16)) == [0, 5, 9]

    async def test_a_value_that_is_too_large_evicts_nothing(self, tmp_path: Path) -> None:
        async with disk(tmp_path, max_bytes=16 * KIB) as tier:
            await fill(tier, range(4))
            assert isinstance(
                (await tier.put([(make_key(9), [memoryview(bytes(16 * KIB + 1))])]))[0], TierFull
            )
            assert await present(tier, range(4)) == [0, 1, 2, 3]

    async def test_a_victims_file_is_written_over_and_no_reader_of_it_is_disturbed(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path, max_bytes=16 * KIB) as tier:
            await fill(tier, range(4))
            before = {path.stat().st_ino for path in value_files(tmp_path)}
            for number, nbytes in ((4, 4096), (5, 100), (6, 4000)):
                await fill(tier, range(number, number + 1), nbytes)
                assert await fetch(tier, [make_key(number)], [4096]) == [make_value(number, nbytes)]
            assert {path.stat().st_ino for path in value_files(tmp_path)} == before
            assert tier.used_bytes == occupied(tmp_path)

    async def test_what_is_being_read_is_not_evicted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path, max_bytes=8 * KIB) as tier:
            await fill(tier, range(2))
            gate = Gate(monkeypatch, "preadv")
            reading = asyncio.ensure_future(fetch(tier, [make_key(0)], [4096]))
            await gate.reached.wait()
            await fill(tier, range(2, 3))
            assert await present(tier, range(3)) == [0, 2]
            assert await store(tier, {make_key(3): bytes(8 * KIB)}) == [False]
            gate.open()
            assert await reading == [make_value(0, 4096)]
            assert await store(tier, {make_key(3): bytes(8 * KIB)}) == [True]

    async def test_what_is_being_written_is_not_evicted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path, max_bytes=8 * KIB) as tier:
            await tier.check()
            gate = Gate(monkeypatch, "pwritev")
            writing = asyncio.ensure_future(store(tier, {make_key(0): make_value(0, 8 * KIB)}))
            await gate.reached.wait()
            assert await tier.probe([make_key(0)]) == [None]
            assert await store(tier, {make_key(1): b"x"}) == [False]
            gate.open()
            assert await writing == [True]
            assert await fetch(tier, [make_key(0)], [8 * KIB]) == [make_value(0, 8 * KIB)]

    async def test_a_victim_that_cannot_be_removed_stays_and_is_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path, max_bytes=16 * KIB) as tier:
            await fill(tier, range(4))
            with monkeypatch.context() as patch:
                patch.setattr(os, "unlink", failing(os.unlink, EIO))
                faults = await tier.put([(make_key(9), [memoryview(bytes(8 * KIB))])])
            assert isinstance(faults[0], TierError)
            assert await present(tier, range(4)) == [0, 1, 2, 3]
            assert tier.used_bytes == occupied(tmp_path) == 16 * KIB


class TestAccount:
    async def test_d20_a_deleted_value_gives_its_bytes_back(self, tmp_path: Path) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(10), 5000)
            assert tier.used_bytes == occupied(tmp_path) == 10 * 8192
            assert await tier.delete([make_key(n) for n in range(10)]) == [True] * 10
            assert (tier.used_bytes, value_files(tmp_path), leftovers(tmp_path)) == (0, [], [])

    async def test_d20_a_value_put_twice_is_counted_once(self, tmp_path: Path) -> None:
        async with disk(tmp_path) as tier:
            for _ in range(3):
                await fill(tier, range(1))
            await asyncio.gather(
                *(store(tier, {make_key(1): make_value(n, 5000)}) for n in range(5))
            )
            assert tier.used_bytes == occupied(tmp_path) == 4096 + 8192

    async def test_d20_after_a_restart_old_files_are_found_and_counted(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(10), 5000)
        async with disk(tmp_path) as tier:
            await tier.check()
            assert tier.used_bytes == occupied(tmp_path) == 10 * 8192
            assert await fetch(tier, [make_key(n) for n in range(10)], [5000] * 10) == [
                make_value(n, 5000) for n in range(10)
            ]

    async def test_a_value_deleted_while_it_is_read_arrives_whole_and_occupies_its_place_until_then(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            gate = Gate(monkeypatch, "preadv")
            reading = asyncio.ensure_future(fetch(tier, [make_key(0)], [4096]))
            await gate.reached.wait()
            assert await tier.delete([make_key(0)]) == [True]
            assert (await tier.probe([make_key(0)]), value_files(tmp_path), tier.used_bytes) == (
                [None],
                [],
                4096,
            )
            await fill(tier, range(1))
            assert tier.used_bytes == 8192
            gate.open()
            assert await reading == [make_value(0, 4096)]
            assert tier.used_bytes == occupied(tmp_path) == 4096

    @pytest.mark.parametrize("turns", range(12))
    async def test_a_cancelled_call_leaves_the_account_exact(
        self, tmp_path: Path, turns: int
    ) -> None:
        async with disk(tmp_path, max_bytes=512 * KIB) as tier:
            await fill(tier, range(16), 32 * KIB)
            values = {make_key(n): make_value(n, 64 * KIB) for n in range(100, 104)}
            calls: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(store(tier, values)),
                asyncio.ensure_future(tier.delete([make_key(n) for n in range(3)])),
            ]
            calls.append(
                asyncio.ensure_future(
                    fetch(tier, [make_key(n) for n in range(16)], [32 * KIB] * 16)
                )
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            assert tier.used_bytes == occupied(tmp_path) <= 512 * KIB
            assert leftovers(tmp_path) == []
            assert await store(tier, values) == [True] * 4
            assert await fetch(tier, list(values), [64 * KIB] * 4) == list(values.values())

    async def test_a_file_that_occupies_more_than_its_size_is_counted_in_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path, max_bytes=64 * KIB) as tier:
            await fill(tier, range(15))
            monkeypatch.setattr(
                os, "posix_fallocate", lambda fd, at, nbytes: keep_more(fd, 8 * KIB)
            )
            await fill(tier, range(20, 22))
            assert tier.used_bytes == occupied(tmp_path) <= 64 * KIB


class TestReplacing:
    async def test_a_full_disk_evicts_no_more_than_one_value_needs_for_a_moment(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path, max_bytes=160 * KIB) as tier:
            await fill(tier, range(10), 16 * KIB)
            for number in range(10):
                await replace(tier, [(make_key(number), [memoryview(make_value(number, 4 * KIB))])])
            assert (
                sum(size is not None for size in await tier.probe([make_key(n) for n in range(10)]))
                == 9
            )
            assert tier.used_bytes == occupied(tmp_path) == 9 * 4 * KIB

    async def test_of_two_files_of_one_value_the_newer_is_found_after_a_restart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(2))
            with monkeypatch.context() as patch:
                patch.setattr(os, "unlink", broken)
                assert await replace(tier, [(make_key(1), [memoryview(make_value(9, 5000))])]) == [
                    True
                ]
            assert await fetch(tier, [make_key(1)], [5000]) == [make_value(9, 5000)]
            assert len(value_files(tmp_path)) == 3
            assert tier.used_bytes == occupied(tmp_path)
        async with disk(tmp_path) as tier:
            assert await fetch(tier, [make_key(0), make_key(1)], [5000] * 2) == [
                make_value(0, 4096),
                make_value(9, 5000),
            ]
            assert len(value_files(tmp_path)) == 2
            assert tier.used_bytes == occupied(tmp_path)

    async def test_a_disk_that_cannot_write_keeps_the_old_value(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            monkeypatch.setattr(os, "rename", broken)
            [fault] = await replace(tier, [(make_key(0), [memoryview(make_value(9, 5000))])])
            monkeypatch.undo()
            assert isinstance(fault, TierError)
            assert await fetch(tier, [make_key(0)], [5000]) == [make_value(0, 4096)]
            assert (tier.used_bytes, leftovers(tmp_path)) == (4096, [])

    async def test_a_delete_waits_for_a_replacement_or_a_crash_could_bring_the_value_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            gate = Gate(monkeypatch, "pwritev")
            replacing = asyncio.ensure_future(
                replace(tier, [(make_key(0), [memoryview(make_value(9, 5000))])])
            )
            await gate.reached.wait()
            deleting = asyncio.ensure_future(tier.delete([make_key(0)]))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not deleting.done()
            gate.open()
            assert (await replacing, await deleting) == ([True], [True])
            assert (value_files(tmp_path), tier.used_bytes) == ([], 0)

    async def test_a_file_removed_during_its_replacement_is_not_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            gate = Gate(monkeypatch, "pwritev")
            replacing = asyncio.ensure_future(
                replace(tier, [(make_key(0), [memoryview(make_value(9, 5000))])])
            )
            await gate.reached.wait()
            value_files(tmp_path)[0].unlink()
            assert await fetch(tier, [make_key(0)], [5000]) == [None]
            gate.open()
            assert await replacing == [False]
            assert (await tier.probe([make_key(0)]), value_files(tmp_path), tier.used_bytes) == (
                [None],
                [],
                0,
            )


def broken(*_: object, **__: object) -> None:
    raise OSError(EIO, "I/O error")


class TestThreads:
    async def test_d19_d20_nobody_waits_for_a_slow_read_or_write_but_who_asked_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path, io_threads=1) as tier:
            await fill(tier, range(2))
            with monkeypatch.context() as patch:
                gate = Gate(patch, "pwritev")
                writes = [
                    asyncio.ensure_future(store(tier, {make_key(n): b"slow"}))
                    for n in range(10, 14)
                ]
                await gate.reached.wait()
                assert await tier.probe([make_key(0), make_key(10)]) == [4096, None]
                assert await fetch(tier, [make_key(0)], [4096]) == [make_value(0, 4096)]
                gate.open()
                assert await asyncio.gather(*writes) == [[True]] * 4

    async def test_a_large_batch_does_not_keep_a_small_one_waiting(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.files.threads._TURN_S", 0)
        async with disk(tmp_path, io_threads=1, max_bytes=64 * MIB) as tier:
            await fill(tier, range(100))
            done: list[str] = []
            large = asyncio.ensure_future(
                fetch(tier, [make_key(n) for n in range(100)], [4096] * 100)
            )
            large.add_done_callback(lambda _: done.append("large"))
            await asyncio.sleep(0)
            await fetch(tier, [make_key(0)], [4096])
            done.append("small")
            await large
            assert done == ["small", "large"]

    async def test_closing_waits_for_calls_under_way_and_refuses_later_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            gate = Gate(monkeypatch, "preadv")
            reading = asyncio.ensure_future(fetch(tier, [make_key(0)], [4096]))
            await gate.reached.wait()
            closing = asyncio.ensure_future(tier.close())
            for _ in range(5):
                await asyncio.sleep(0)
            with pytest.raises(TierUnavailable, match="closed"):
                await tier.probe([make_key(0)])
            assert not closing.done()
            gate.open()
            assert await reading == [make_value(0, 4096)]
            await closing

    async def test_no_thread_and_no_descriptor_is_left_behind(self, tmp_path: Path) -> None:
        def held() -> tuple[int, list[str]]:
            names = [
                thread.name
                for thread in threading.enumerate()
                if thread.name.startswith("kvhold-disk")
            ]
            return len(list(Path("/proc/self/fd").iterdir())), names

        before = held()
        async with disk(tmp_path) as tier:
            await fill(tier, range(20))
            await fetch(tier, [make_key(n) for n in range(30)], [4096] * 30)
            shutil.rmtree(tmp_path)
            await store(tier, {make_key(99): b"lost"})
            await fill(tier, range(20))
        assert held() == before

    async def test_callers_that_arrive_while_the_folder_is_opened_all_get_in(
        self, tmp_path: Path
    ) -> None:
        for turn in range(20):
            async with disk(tmp_path) as tier:
                calls: list[asyncio.Future[list[int | TierError | None]]] = []
                while not calls or not calls[0].done():
                    calls.append(asyncio.ensure_future(tier.probe([make_key(turn)])))
                    await asyncio.sleep(0)
                assert await asyncio.gather(*calls) == [[None]] * len(calls)

    async def test_a_caller_who_is_cancelled_while_the_folder_is_opened_does_not_lock_it_for_ever(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path) as tier:
            call = asyncio.ensure_future(tier.probe([make_key(1)]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait((call,))
            await fill(tier, range(1))
        async with disk(tmp_path) as tier:
            assert await present(tier, range(1)) == [0]


class TestOwner:
    async def test_a_folder_has_one_owner_whose_pid_is_told(self, tmp_path: Path) -> None:
        async with disk(tmp_path) as tier, disk(tmp_path) as other:
            await tier.check()
            with pytest.raises(
                TierUnavailable, match=rf"{tmp_path} belongs to process {os.getpid()};"
            ):
                await other.probe([make_key(1)])
            code = (
                "import asyncio; from kvhold.tiers.disk import *\n"
                f"asyncio.run(DiskTier(DiskConfig(path={str(tmp_path)!r}, max_bytes=4096)).check())"
            )
            run = partial(
                subprocess.run,
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=False,
            )
            child = await asyncio.to_thread(run)
            assert (
                f"TierUnavailable: disk: open: {tmp_path} belongs to process {os.getpid()};"
                in child.stderr
            )
            await fill(tier, range(1))

    async def test_it_goes_to_the_next_one_when_the_owner_has_gone(self, tmp_path: Path) -> None:
        async with disk(tmp_path) as other:
            async with disk(tmp_path) as tier:
                await fill(tier, range(1))
                with pytest.raises(TierUnavailable):
                    await other.check()
            assert await present(other, range(1)) == [0]


class TestIdentity:
    @pytest.mark.parametrize("wrap", [lambda tier: tier, AuditTier, FaultTier])
    async def test_a_folder_keeps_its_identity_wherever_it_is(
        self, tmp_path: Path, wrap: Callable[[DiskTier], Any]
    ) -> None:
        met: list[tuple[str, str]] = []

        async def meet(path: str, identity: str) -> None:
            met.append((path, identity))

        for name, other in (("a", "b"), ("a", "b"), ("c", "d")):
            async with disk(tmp_path / name, tmp_path / other) as tier:
                wrapped = wrap(tier)
                assert isinstance(wrapped, HasFolders)
                wrapped.watch_folders(meet)
                await tier.check()
            for path in ("a", "b"):
                if len(met) == 4:
                    (tmp_path / path).rename(tmp_path / {"a": "c", "b": "d"}[path])
        paths, identities = zip(*sorted(met), strict=True)
        assert paths == tuple(str(tmp_path / name) for name in "aabbcd")
        a, same_a, b, same_b, c, d = identities
        assert (a, b) == (same_a, same_b) == (c, d)
        assert a != b

    async def test_a_damaged_identity_is_made_again(self, tmp_path: Path) -> None:
        names = list[str]()
        for _ in range(3):
            async with disk(tmp_path) as tier:
                await tier.check()
            names.append((tmp_path / "kvhold.identity").read_text())
            if len(names) == 1:
                (tmp_path / "kvhold.identity").write_text("\0" * 33)
        assert len(names[0]) == len(names[1]) == 33
        assert names[0] != names[1] == names[2]

    async def test_no_value_is_found_before_the_watcher_of_folders_has_answered(
        self, tmp_path: Path
    ) -> None:
        may_go_on = asyncio.Event()

        async def meet(path: str, identity: str) -> None:
            await may_go_on.wait()
            raise TierError("disk", "open", "not now")

        async with disk(tmp_path) as tier:
            tier.watch_folders(meet)
            probing = asyncio.ensure_future(tier.probe([make_key(0)]))
            assert not (await asyncio.wait((probing,), timeout=0.05))[0]
            may_go_on.set()
            with pytest.raises(TierError, match="not now"):
                await probing
            async with disk(tmp_path) as other:
                await other.check()


class TestFilesOfOthers:
    async def test_a_file_that_was_removed_is_a_miss_and_no_longer_counted(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(2))
            value_files(tmp_path)[0].unlink()
            found = await fetch(tier, [make_key(0), make_key(1)], [4096] * 2)
            assert sorted(found, key=bool) == [None, *filter(None, found)]
            assert len(await present(tier, range(2))) == 1
            assert tier.used_bytes == occupied(tmp_path) == 4096
            await fill(tier, range(2))

    @pytest.mark.parametrize("size", [0, 1, 4095, 4097, 9000])
    async def test_d18_a_file_cut_short_or_grown_is_a_miss_and_goes(
        self, tmp_path: Path, size: int
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            os.truncate(value_files(tmp_path)[0], size)
            assert await fetch(tier, [make_key(0)], [10_000]) == [None]
            assert (await present(tier, range(1)), tier.used_bytes, value_files(tmp_path)) == (
                [],
                0,
                [],
            )
            await fill(tier, range(1))
            assert await fetch(tier, [make_key(0)], [4096]) == [make_value(0, 4096)]

    async def test_d18_a_file_cut_short_while_it_is_read_is_a_miss(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1), 400 * KIB)
            gate = Gate(monkeypatch, "preadv")
            buffer = aligned(400 * KIB)
            reading = asyncio.ensure_future(tier.get([make_key(0)], [[buffer]]))
            await gate.reached.wait()
            os.truncate(value_files(tmp_path)[0], 5000)
            gate.open()
            assert await reading == [None]
            assert tier.used_bytes == occupied(tmp_path) == 0

    async def test_a_range_of_a_truncated_file_is_a_miss_even_if_its_bytes_are_there(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            os.truncate(value_files(tmp_path)[0], 2000)
            assert await tier.get([make_key(0)], [[memoryview(bytearray(100))]], starts=[0]) == [
                None
            ]

    async def test_at_the_start_torn_files_go_and_those_of_others_stay(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(3))
            names = [path.relative_to(tmp_path) for path in value_files(tmp_path)]
        torn, moved, whole = (tmp_path / name for name in names)
        os.truncate(torn, 100)
        left = tmp_path / "new" / "host-1.99999.0.0123456789abcdef"
        left.write_bytes(b"half")
        wrong = tmp_path / ("00" if names[1].parts[0] != "00" else "01") / names[1].name
        wrong.parent.mkdir(exist_ok=True)
        moved.rename(wrong)
        first, second = [digit for digit in "012" if digit != whole.name[-1]][:2]
        pipe = whole.with_name(whole.name[:-1] + first)
        os.mkfifo(pipe)
        link = whole.with_name(whole.name[:-1] + second)
        link.symlink_to(whole)
        foreign = [
            tmp_path / "notes.txt",
            tmp_path / "new" / "notes.txt",
            whole.with_name("x"),
            whole.with_suffix(".tmp"),
            wrong,
            pipe,
        ]
        for path in foreign[:4]:
            path.write_bytes(b"mine")
        async with disk(tmp_path) as tier:
            keys = await scanned(tier)
            assert [key.hex() for key in keys] == [whole.name.partition("-")[0]]
            assert tier.used_bytes == whole.stat().st_blocks * 512
        assert all(path.exists() for path in (*foreign, link))
        assert not torn.exists()
        assert not left.exists()

    async def test_times_beyond_what_the_index_can_hold_keep_no_folder_closed(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(3))
        late, renamed, large = value_files(tmp_path)
        os.utime(late, (2**34, 2**34))  # after the year 2262
        stem, size, written = renamed.name.split("-")
        beyond = renamed.rename(renamed.with_name(f"{stem}-{size}-{1 << 63:x}"))
        stem, _, written = large.name.split("-")
        huge = large.with_name(f"{stem}-{10**15}-{written}")
        large.rename(huge)
        with suppress(OSError):  # a sparse file, where there can be one of that size
            os.truncate(huge, 10**15)
        async with disk(tmp_path) as tier:
            assert [key.hex() for key in await scanned(tier)] == [late.name.partition("-")[0]]
        assert beyond.exists()

    async def test_a_folder_whose_opening_fails_is_given_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(folder: Folder) -> Iterator[list[FoundValue]]:
            raise RuntimeError("a fault in the listing")

        async with disk(tmp_path) as tier:
            with monkeypatch.context() as patch:
                patch.setattr(Folder, "batches", fail)
                with pytest.raises(RuntimeError, match="a fault in the listing"):
                    await tier.check()
            await fill(tier, range(1))

    async def test_of_two_files_of_one_key_the_older_goes(self, tmp_path: Path) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
        (file,) = value_files(tmp_path)
        stem, size, written = file.name.split("-")
        for stamp in (int(written, 16) - 1, int(written, 16) + 1):
            file.with_name(f"{stem}-{size}-{stamp:x}").write_bytes(make_value(stamp, int(size)))
        async with disk(tmp_path) as tier:
            assert await fetch(tier, [make_key(0)], [4096]) == [
                make_value(int(written, 16) + 1, 4096)
            ]
            assert tier.used_bytes == occupied(tmp_path) == 4096

    async def test_a_folder_that_was_removed_is_made_anew(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with disk(tmp_path / "values") as tier:
            await fill(tier, range(3))
            shutil.rmtree(tmp_path / "values")
            assert await fetch(tier, [make_key(0)], [4096]) == [None]
            with caplog.at_level(logging.WARNING):
                assert isinstance(
                    (await tier.put([(make_key(9), [memoryview(b"x")])]))[0], TierUnavailable
                )
            assert "was lost" in caplog.text
            assert await present(tier, range(3)) == []
            await fill(tier, range(3))
            assert tier.used_bytes == occupied(tmp_path / "values") == 3 * 4096

    async def test_the_check_reports_a_folder_that_is_no_longer_at_its_path(
        self, tmp_path: Path
    ) -> None:
        async with disk(tmp_path / "values") as tier:
            await fill(tier, range(3))
            (tmp_path / "values").rename(tmp_path / "elsewhere")
            with pytest.raises(TierUnavailable, match="removed, or something was mounted"):
                await tier.check()
            await tier.check()
            assert await present(tier, range(3)) == []

    async def test_a_scan_fails_if_the_folder_is_lost_before_its_end(self, tmp_path: Path) -> None:
        """The folder that is now at the path was not read."""
        async with disk(tmp_path / "values") as tier:
            await fill(tier, range(3))
            scan = tier.scan(b"")
            await anext(scan)
            (tmp_path / "values").rename(tmp_path / "elsewhere")
            with pytest.raises(TierUnavailable, match="removed, or something was mounted"):
                await tier.check()
            await tier.check()
            with pytest.raises(TierUnavailable, match="lost during the call"):
                [key async for key in scan]

    async def test_a_delete_fails_if_the_folder_is_lost_before_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path / "values", io_threads=2) as tier:
            await fill(tier, range(1))
            name = value_files(tmp_path / "values")[0].name
            with monkeypatch.context() as patch:
                gate = Gate(patch, "unlink", when=lambda path: name in path)
                deleting = asyncio.ensure_future(tier.delete([make_key(0)]))
                await gate.reached.wait()
                (tmp_path / "values").rename(tmp_path / "elsewhere")
                with pytest.raises(TierUnavailable, match="removed, or something was mounted"):
                    await tier.check()
                gate.open()
                with pytest.raises(TierUnavailable, match="lost during the call"):
                    await deleting

    async def test_folders_inside_may_go_and_come_back(self, tmp_path: Path) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(3))
            for folder in {file.parent for file in value_files(tmp_path)} | {tmp_path / "new"}:
                shutil.rmtree(folder)
            assert await fetch(tier, [make_key(0)], [4096]) == [None]
            await fill(tier, range(1))
            assert await fetch(tier, [make_key(0)], [4096]) == [make_value(0, 4096)]


class TestFaults:
    async def test_d18_a_failed_write_loses_itself_alone_and_leaks_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            with monkeypatch.context() as patch:
                patch.setattr(
                    os,
                    "pwritev",
                    failing(os.pwritev, EIO, lambda fd, pieces, at: len(pieces[0]) == 5000),
                )
                values = [make_value(n, nbytes) for n, nbytes in ((1, 4096), (2, 5000), (3, 1))]
                faults = await tier.put(
                    [(make_key(n), [memoryview(value)]) for n, value in enumerate(values, start=1)]
                )
            assert [type(fault) for fault in faults] == [type(None), TierError, type(None)]
            assert await present(tier, range(4)) == [0, 1, 3]
            assert tier.used_bytes == occupied(tmp_path) == 3 * 4096
            assert leftovers(tmp_path) == []
            await fill(tier, range(4))

    async def test_a_bad_sector_is_an_error_of_its_item_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(3))
            bad = make_key(1).hex()
            monkeypatch.setattr(
                os,
                "preadv",
                failing(
                    os.preadv,
                    EIO,
                    lambda fd, *_: bad in str(Path(f"/proc/self/fd/{fd}").readlink()),
                ),
            )
            buffers = [bytearray(4096) for _ in range(3)]
            got = await tier.get(
                [make_key(n) for n in range(3)], [[memoryview(buffer)] for buffer in buffers]
            )
            assert (got[0], got[2]) == (4096, 4096)
            assert isinstance(got[1], TierError)
            assert bad in str(got[1])

    async def test_a_full_disk_is_reported_and_leaves_no_part_of_the_value(
        self, small_disk: Path
    ) -> None:
        async with disk(small_disk / "values", max_bytes=64 * MIB) as tier:
            values = {make_key(n): make_value(n, 256 * KIB) for n in range(8)}
            faults = await tier.put([(key, [memoryview(value)]) for key, value in values.items()])
            stored = [key for key, fault in zip(values, faults, strict=True) if fault is None]
            assert 0 < len(stored) < 8
            assert {type(fault) for fault in faults} == {type(None), TierFull}
            assert tier.used_bytes == occupied(small_disk / "values")
            assert leftovers(small_disk / "values") == []
            assert await fetch(tier, stored, [256 * KIB] * len(stored)) == [
                values[key] for key in stored
            ]
            await tier.delete(stored)
            assert await store(tier, {make_key(9): make_value(9, 256 * KIB)}) == [True]

    async def test_without_a_limit_a_small_disk_is_used_and_never_overrun(
        self, small_disk: Path
    ) -> None:
        async with disk(small_disk / "values", max_bytes=0, reserve_bytes=256 * KIB) as tier:
            await fill(tier, range(40), 64 * KIB)
            assert (
                tier.used_bytes == occupied(small_disk / "values") <= tier.limit_bytes <= 768 * KIB
            )

    async def test_a_disk_that_can_only_be_read_is_denied(self, small_disk: Path) -> None:
        async with disk(small_disk / "values") as tier:
            await fill(tier, range(1))
        await asyncio.to_thread(
            lambda: subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        )
        async with disk(small_disk / "values") as tier:
            with pytest.raises(TierDenied, match="mount it writable"):
                await tier.check()

    async def test_missing_rights_are_denied_and_told(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)  # noqa: PTH101 - ruff takes Path.chmod in a loop for slow
            async with disk(Path(folder, "values")) as tier:
                await fill(tier, range(1))
                with as_nobody():
                    assert isinstance(
                        (await tier.put([(make_key(1), [memoryview(b"x")])]))[0], TierDenied
                    )
                    buffer = memoryview(bytearray(4096))
                    assert isinstance((await tier.get([make_key(0)], [[buffer]]))[0], TierDenied)
                    assert await tier.delete([make_key(0)]) == [False]
                    with pytest.raises(TierDenied, match="user id 65534"):
                        await tier.check()
                assert await fetch(tier, [make_key(0)], [4096]) == [make_value(0, 4096)]
                assert tier.used_bytes == occupied(Path(folder, "values")) == 4096

    async def test_a_file_in_the_place_of_the_folder_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        async with disk(tmp_path / "file") as tier:
            with pytest.raises(TierError, match=str(tmp_path / "file")):
                await tier.check()
        async with disk(tmp_path / "file" / "values") as tier:
            with pytest.raises(TierUnavailable, match="is it mounted"):
                await tier.put([(make_key(1), [memoryview(b"x")])])


class TestFilesThatCannotBeRemoved:
    """A delete or a scan fails while such a file of its keys may come back at the next start."""

    async def test_the_old_file_of_a_replacement_goes_with_its_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(2))
            with monkeypatch.context() as patch:
                patch.setattr(os, "unlink", broken)
                assert await replace(tier, [(make_key(1), [memoryview(b"new")])]) == [True]
            assert len(value_files(tmp_path)) == 3
            assert await tier.delete([make_key(1)]) == [True]
            assert len(value_files(tmp_path)) == 1
            assert tier.used_bytes == occupied(tmp_path)

    async def test_a_delete_and_a_scan_fail_while_an_old_file_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(2))
            (old,) = (file for file in value_files(tmp_path) if make_key(1).hex() in file.name)
            with monkeypatch.context() as patch:
                patch.setattr(
                    os, "unlink", failing(os.unlink, EIO, lambda name: name.endswith(old.name))
                )
                assert await replace(tier, [(make_key(1), [memoryview(b"new")])]) == [True]
                with pytest.raises(TierIncomplete, match=old.name):
                    await tier.delete([make_key(0), make_key(1)])
                assert value_files(tmp_path) == [old]
                assert await tier.probe([make_key(0), make_key(1)]) == [None, None]
                with pytest.raises(TierIncomplete, match=old.name):
                    await scanned(tier, make_key(1)[:NAMESPACE_BYTES])
                assert await tier.delete([make_key(2)]) == [False]
                assert await scanned(tier, b"another namespace") == []
                assert tier.used_bytes == occupied(tmp_path) == 4096
            assert await scanned(tier) == []
            assert (value_files(tmp_path), tier.used_bytes) == ([], 0)

    @pytest.mark.parametrize("write_ends_first", [False, True])
    async def test_a_delete_that_fails_during_a_put_of_its_key_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_ends_first: bool
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            with monkeypatch.context() as patch:
                patch.setattr(os, "unlink", broken)
                removal, write = Gate(patch, "unlink"), Gate(patch, "pwritev")
                deleting = asyncio.ensure_future(tier.delete([make_key(0)]))
                await removal.reached.wait()
                putting = asyncio.ensure_future(store(tier, {make_key(0): make_value(9, 5000)}))
                await write.reached.wait()
                if write_ends_first:
                    write.open()
                    assert await putting == [True]
                removal.open()
                with pytest.raises(TierIncomplete, match="could not be removed"):
                    await deleting
                write.open()
                assert await putting == [True]
            assert await fetch(tier, [make_key(0)], [5000]) == [make_value(9, 5000)]
            assert tier.used_bytes == occupied(tmp_path) == 4096 + 8192
            assert await tier.delete([make_key(0)]) == [True]
            assert (value_files(tmp_path), tier.used_bytes) == ([], 0)

    @pytest.mark.parametrize("replaces", [False, True])
    async def test_a_write_whose_folder_cannot_be_synced_leaves_no_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
    ) -> None:
        async with disk(tmp_path, sync=True) as tier:
            await fill(tier, range(1))
            if not replaces:
                assert await tier.delete([make_key(0)]) == [True]
            before, item = value_files(tmp_path), (make_key(0), [memoryview(b"new")])
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing(os.fsync, EIO, is_folder_of_values))
                [fault] = await (replace(tier, [item]) if replaces else tier.put([item]))
            assert isinstance(fault, TierError)
            assert value_files(tmp_path) == before
            assert tier.used_bytes == occupied(tmp_path)

    async def test_a_file_that_a_failed_write_leaves_is_counted_and_removed_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk(tmp_path, sync=True) as tier:
            await fill(tier, range(1))
            assert await tier.delete([make_key(0)]) == [True]
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing(os.fsync, EIO, is_folder_of_values))
                patch.setattr(os, "unlink", broken)
                [fault] = await tier.put([(make_key(0), [memoryview(b"new")])])
                assert isinstance(fault, TierError)
                assert tier.used_bytes == occupied(tmp_path) == 4096
            assert await scanned(tier) == []
            assert (value_files(tmp_path), tier.used_bytes) == ([], 0)

    async def test_a_scan_fails_if_removals_keep_failing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A value whose removal fails is found again, perhaps after the scan has passed it."""

        async def scan_while_values_are_evicted() -> None:
            async for _ in tier.scan(b""):
                await tier.put([(make_key(9), [memoryview(bytes(8 * KIB))])])

        async with disk(tmp_path, max_bytes=8 * KIB) as tier:
            await fill(tier, range(2))
            with monkeypatch.context() as patch:
                patch.setattr(os, "unlink", broken)
                with pytest.raises(TierIncomplete, match="again and again"):
                    await scan_while_values_are_evicted()
            assert len(await scanned(tier)) == 2


async def test_a_scan_waits_for_writes_whose_callers_have_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a clear ends before the value is found."""
    async with disk(tmp_path) as tier:
        await tier.check()
        gate = Gate(monkeypatch, "pwritev")
        writing = asyncio.ensure_future(store(tier, {make_key(0): b"late"}))
        await gate.reached.wait()
        writing.cancel()
        scanning = asyncio.ensure_future(scanned(tier, make_key(0)[:NAMESPACE_BYTES]))
        assert await scanned(tier, b"another namespace") == []
        assert not scanning.done()
        gate.open()
        assert await scanning == [make_key(0)]
        await asyncio.wait((writing,))


def is_below(folder: Path, fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(folder)


def is_folder_of_values(fd: int) -> bool:
    return len(Path(f"/proc/self/fd/{fd}").readlink().name) == 2


class TestRemovalsAreDurable:
    """A clear is forgotten after its scan and its deletes: a power cut must not undo them."""

    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the subfolders that were synced, without values in them."""
        names, fsync = list[str](), os.fsync

        def sync(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").resolve()
            if path.is_dir() and not list(path.glob("*-*-*")):
                names.append(path.name)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", sync)
        return names

    @pytest.mark.parametrize("sync", [False, True])
    async def test_a_delete_syncs_each_folder_once(
        self, tmp_path: Path, synced: list[str], sync: bool
    ) -> None:
        async with disk(tmp_path, sync=sync) as tier:
            await fill(tier, range(8))
            shards = {file.parent.name for file in value_files(tmp_path)}
            synced.clear()
            assert await tier.delete([make_key(i) for i in range(8)]) == [True] * 8
            assert sorted(synced) == sorted(shards)
            synced.clear()
            assert await tier.delete([make_key(i) for i in range(8)]) == [False] * 8
            assert await scanned(tier) == []
            assert synced == []

    async def test_a_clear_of_many_values_syncs_each_folder_once_or_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_synced, sync_folder = [0], FileTree.sync_folder

        def sync(tree: FileTree, name: str) -> None:
            num_synced[0] += 1
            sync_folder(tree, name)

        monkeypatch.setattr(FileTree, "sync_folder", sync)
        async with disk(tmp_path) as tier:
            keys = [make_key(number) for number in range(600)]
            assert await tier.put([(key, [memoryview(b"x")]) for key in keys]) == [None] * 600
            shards = {file.parent.name for file in value_files(tmp_path)}
            guard = Guard(tier, GuardConfig(), name="disk", metrics=Metrics())
            assert await guard.clear(b"") == 600
            assert len(shards) <= num_synced[0] <= len(shards) + 600 // KEYS_A_PART + 1

    async def test_a_scan_syncs_the_folders_of_evicted_values(
        self, tmp_path: Path, synced: list[str]
    ) -> None:
        async with disk(tmp_path, max_bytes=2 * 4096) as tier:
            await fill(tier, range(2))
            shards = {file.parent.name for file in value_files(tmp_path)}
            await fill(tier, range(1000, 1002))  # in the files of the first two
            shards -= {file.parent.name for file in value_files(tmp_path)}
            assert shards
            synced.clear()
            await scanned(tier)
            assert shards <= set(synced)

    async def test_a_delete_that_cannot_sync_fails_until_one_can(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
            (shard,) = {file.parent.name for file in value_files(tmp_path)}
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing(os.fsync, EIO))
                for _ in range(2):
                    with pytest.raises(TierError):
                        await tier.delete([make_key(0)])
                with pytest.raises(TierError):
                    await scanned(tier)
            synced.clear()
            assert await tier.delete([make_key(0)]) == [False]
            assert synced == [shard]

    async def test_removals_of_an_earlier_run_are_synced(
        self, tmp_path: Path, synced: list[str]
    ) -> None:
        async with disk(tmp_path) as tier:
            await fill(tier, range(1))
        (file,) = value_files(tmp_path)
        file.unlink()
        async with disk(tmp_path) as tier:
            assert await scanned(tier) == []
        assert file.parent.name in synced


class TestSeveralDisks:
    async def test_a_key_stays_on_its_disk_and_each_gets_its_share(self, tmp_path: Path) -> None:
        paths = [tmp_path / name for name in "abc"]
        async with disk(*paths) as tier:
            await fill(tier, range(60), 10)
            shares = [len(value_files(path)) for path in paths]
        assert sum(shares) == 60
        assert min(shares) > 5
        async with disk(*reversed(paths)) as tier:
            assert await present(tier, range(60)) == list(range(60))
        async with disk(*paths, tmp_path / "d") as tier:
            assert len(await present(tier, range(60))) > 30

    async def test_a_dead_disk_loses_its_own_keys_alone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        paths = [tmp_path / "a", tmp_path / "dead" / "b", tmp_path / "c"]
        async with disk(*paths) as tier:
            await fill(tier, range(60), 10)
            lost = {path.name.partition("-")[0] for path in value_files(paths[1])}
        shutil.rmtree(tmp_path / "dead")
        (tmp_path / "dead").write_bytes(b"")
        async with disk(*paths) as tier:
            await tier.check()
            assert "one disk of several" in caplog.text
            keys = [make_key(n) for n in range(60)]
            alive = [key.hex() not in lost for key in keys]
            sizes = await tier.probe(keys)
            assert [size == 10 for size in sizes] == alive
            assert [not isinstance(size, TierUnavailable) for size in sizes] == alive
            assert [value is not None for value in await fetch(tier, keys, [10] * 60)] == alive
            assert len(await partly_scanned(tier)) == sum(alive)
            fresh = [make_key(n) for n in range(100, 130)]
            faults = await tier.put([(key, [memoryview(b"x")]) for key in fresh])
            assert {type(fault) for fault in faults} == {type(None), TierUnavailable}
            assert [
                None if isinstance(size, TierUnavailable) else size
                for size in await tier.probe(fresh)
            ] == [1 if fault is None else None for fault in faults]
            good = [key for key, is_alive in zip(keys, alive, strict=True) if is_alive]
            assert await tier.delete(good[:1]) == [True]
            with pytest.raises(TierIncomplete, match="one disk of several"):
                await tier.delete(keys)
            assert await tier.delete(good) == [False] * len(good)
            (tmp_path / "dead").unlink()
            assert await store(tier, dict.fromkeys(fresh, b"x")) == [True] * 30

    async def test_a_disk_that_fails_during_a_scan_hides_no_keys_of_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        async with disk(*paths) as tier:
            await fill(tier, range(40), 10)
        async with disk(*paths) as tier:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing(os.fsync, EIO))
                with pytest.raises(TierError) as raised:
                    await scanned(tier)
                assert not isinstance(raised.value, TierIncomplete)
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing(os.fsync, EIO, partial(is_below, paths[0])))
                assert len(await partly_scanned(tier)) == 40
            assert len(await scanned(tier)) == 40

    async def test_when_all_are_dead_so_is_the_tier(self, tmp_path: Path) -> None:
        (tmp_path / "dead").write_bytes(b"")
        async with disk(tmp_path / "dead" / "a", tmp_path / "dead" / "b") as tier:
            keys = [make_key(n) for n in range(20)]
            with pytest.raises(TierUnavailable):
                await tier.check()
            with pytest.raises(TierUnavailable):
                await tier.probe(keys)
            with pytest.raises(TierUnavailable):
                await fetch(tier, keys, [1] * 20)
            with pytest.raises(TierUnavailable):
                await scanned(tier)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "kvhold-test", folder], check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system takes root")
    yield folder
    # a test that fails may have left a file open
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def as_nobody() -> Iterator[None]:
    """All threads without root's rights."""
    if os.geteuid() != 0:
        pytest.skip("giving up rights and getting them back takes root")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def split(value: bytes, cuts: Sequence[int]) -> list[memoryview]:
    """The value in parts that begin at pages' starts, like a frame's header and payload."""
    parts = [aligned(b - a) for a, b in pairwise(cuts)]
    for part, (a, b) in zip(parts, pairwise(cuts), strict=True):
        part[:] = value[a:b]
    return parts


def at_most(step: int, call: Callable[..., int]) -> Callable[..., int]:
    """`preadv` or `pwritev` that moves at most `step` bytes, as a signal or a full queue may have
    it. By the page cache, as O_DIRECT would not take an odd number.
    """

    def short(fd: int, pieces: Sequence[memoryview], at: int) -> int:
        return call(fd, [pieces[0][:step]], at)

    return short


def failing(
    call: Callable[..., Any], errno: int, when: Callable[..., bool] = lambda *_: True
) -> Callable[..., Any]:
    """`call`, but an OSError where `when` says so."""

    def fails(*args: Any, **names: Any) -> Any:
        if when(*args):
            raise OSError(errno, os.strerror(errno))
        return call(*args, **names)

    return fails


def noting_direct(call: Callable[..., int], carried: list[tuple[bool, int]]) -> Callable[..., int]:
    """`call`, with a note of whether each went by O_DIRECT and how many bytes it moved."""

    def noted(fd: int, pieces: Sequence[memoryview], at: int) -> int:
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
        moved = call(fd, pieces, at)
        carried.append((bool(int(flags, 8) & os.O_DIRECT), moved))
        return moved

    return noted


def keep_more(fd: int, nbytes: int) -> None:
    """Space beyond the file's end, as file systems may take it."""
    subprocess.run(
        ["fallocate", "--keep-size", "--length", str(nbytes), f"/proc/{os.getpid()}/fd/{fd}"],
        check=True,
    )
