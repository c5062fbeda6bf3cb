"""The disk tier when a disk misbehaves, or one of several."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EIO
from functools import partial
from pathlib import Path

import pytest

from kvhold.core.errors import TierDenied, TierError, TierFull, TierIncomplete, TierUnavailable
from kvhold.testing.tier import fetch, make_key, make_value, partly_scanned, scanned, store
from tests.tiers.disks import (
    KIB,
    MIB,
    disk,
    failing,
    fill,
    leftovers,
    occupied,
    present,
    value_files,
)


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


def is_below(folder: Path, fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(folder)


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
