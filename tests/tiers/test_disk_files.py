"""Files of others in the disk tier's folders, and files that cannot be removed or come back."""

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from errno import EIO
from pathlib import Path

import pytest

from kvhold.core.errors import TierError, TierIncomplete, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.base import replace
from kvhold.tiers.disk.folder import Folder, FoundValue
from kvhold.tiers.files.tree import FileTree
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.table import KEYS_A_PART
from tests.tiers.disks import (
    KIB,
    Gate,
    aligned,
    broken,
    disk,
    failing,
    fill,
    occupied,
    present,
    value_files,
)


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
