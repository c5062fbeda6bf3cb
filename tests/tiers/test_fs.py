"""The shared file system tier: the contract, several hosts at once, and what is left when one of
them dies.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from errno import EIO, EOPNOTSUPP
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
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, partly_scanned, scanned, store
from kvhold.tiers.files.names import temporary_name
from kvhold.tiers.files.tree import FileTree
from kvhold.tiers.fs import SharedFilesConfig, SharedFilesTier
from kvhold.tiers.url import parse_url


class TestSharedFilesTier(TierContract):
    @pytest.fixture(params=["auto", "never"])
    async def tier(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> AsyncIterator[SharedFilesTier]:
        async with shared(tmp_path, direct=request.param, sync=request.param == "never") as tier:
            yield tier


class TestSharedFilesTierWithoutLinks(TierContract):
    @pytest.fixture
    async def tier(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[SharedFilesTier]:
        monkeypatch.setattr(os, "link", failing(EOPNOTSUPP))
        async with shared(tmp_path, io_threads=1) as tier:
            yield tier


@asynccontextmanager
async def shared(path: Path, **settings: Any) -> AsyncIterator[SharedFilesTier]:
    tier = SharedFilesTier(SharedFilesConfig(path=str(path), **settings))
    try:
        yield tier
    finally:
        await tier.close()


def failing(errno: int) -> Callable[..., Any]:
    def fails(*args: Any, **names: Any) -> Any:
        raise OSError(errno, os.strerror(errno))

    return fails


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("fs://mnt/shared", "fs:///path, with three slashes"),
            ("fs://", "absolute"),
            ("fs:///a?max_bytes=1", "max_bytes"),
            ("fs:///a?stale_s=1", "60"),
        ],
    )
    def test_what_cannot_be_is_refused(self, url: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            SharedFilesTier.from_url(parse_url(url))

    def test_it_is_shared(self) -> None:
        assert SharedFilesTier.from_url(
            parse_url("fs:///a?direct=never&io_threads=3")
        ).traits.shared


class TestManyHosts:
    async def test_what_one_stores_all_find_and_may_delete(self, tmp_path: Path) -> None:
        async with shared(tmp_path) as one, shared(tmp_path) as other:
            assert await store(one, {make_key(1): make_value(1, 5000)}) == [True]
            assert await fetch(other, [make_key(1)], [5000]) == [make_value(1, 5000)]
            assert await other.delete([make_key(1)]) == [True]
            assert (await one.probe([make_key(1)]), await one.delete([make_key(1)])) == (
                [None],
                [False],
            )

    async def test_d36_many_writers_of_one_key_never_meet_in_one_temporary_file(
        self, tmp_path: Path
    ) -> None:
        tiers = [SharedFilesTier(SharedFilesConfig(path=str(tmp_path))) for _ in range(4)]
        values = [make_value(n, 300_000 + n) for n in range(16)]
        answers = await asyncio.gather(
            *(store(tiers[n % 4], {make_key(1): value}) for n, value in enumerate(values))
        )
        assert answers == [[True]] * 16
        (first,) = await fetch(tiers[0], [make_key(1)], [400_000])
        assert first in values
        assert await store(tiers[1], {make_key(1): b"later"}) == [True]
        assert await fetch(tiers[2], [make_key(1)], [400_000]) == [first]
        assert files(tmp_path) == [f"{make_key(1)[16:17].hex()}/{make_key(1).hex()}"]
        for tier in tiers:
            await tier.close()

    async def test_a_value_removed_by_another_while_it_is_read_arrives_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner, loop, reached, gate = (
            os.preadv,
            asyncio.get_running_loop(),
            asyncio.Event(),
            threading.Event(),
        )

        def held(*args: Any) -> int:
            loop.call_soon_threadsafe(reached.set)
            assert gate.wait(60)
            return inner(*args)

        async with shared(tmp_path) as one, shared(tmp_path) as other:
            await store(one, {make_key(1): make_value(1, 5000)})
            monkeypatch.setattr(os, "preadv", held)
            reading = asyncio.ensure_future(fetch(one, [make_key(1)], [5000]))
            await reached.wait()
            assert await other.delete([make_key(1)]) == [True]
            gate.set()
            assert await reading == [make_value(1, 5000)]

    async def test_the_start_removes_files_of_dead_writers_and_keeps_those_of_living_ones(
        self, tmp_path: Path
    ) -> None:
        child = subprocess.Popen(["true"])  # noqa: ASYNC220 - ends at once
        child.wait()
        mine = temporary_name()
        host, _, *rest = mine.split(".")
        dead, other, old = (
            ".".join([name, pid, *rest])
            for name, pid in ((host, str(child.pid)), ("other", "1"), ("old", "1"))
        )
        for name in (mine, dead, other, old, "notes.txt"):
            path = tmp_path / "new" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"half")
        os.utime(tmp_path / "new" / old, (0, 0))
        async with shared(tmp_path) as tier:
            await tier.check()
            assert files(tmp_path) == sorted(f"new/{name}" for name in (mine, other, "notes.txt"))
            assert await scanned(tier) == []


class TestFaults:
    async def test_d36_a_read_that_ends_early_is_a_miss(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with shared(tmp_path) as tier:
            await store(tier, {make_key(1): make_value(1, 5000)})
            monkeypatch.setattr(os, "preadv", lambda fd, pieces, at: 0 if at else 100)
            assert await fetch(tier, [make_key(1)], [5000]) == [None]

    async def test_d36_a_write_that_fails_is_told_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with shared(tmp_path) as tier:
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", failing(EIO))
                assert isinstance(
                    (await tier.put([(make_key(1), [memoryview(b"x")])]))[0], TierError
                )
                assert files(tmp_path) == []
                patch.setattr(os, "pwritev", lambda *_: 0)
                assert isinstance(
                    (await tier.put([(make_key(1), [memoryview(b"x")])]))[0], TierError
                )
            assert files(tmp_path) == []
            assert await store(tier, {make_key(1): b"x"}) == [True]

    async def test_files_of_others_are_no_values(self, tmp_path: Path) -> None:
        async with shared(tmp_path) as tier:
            await store(tier, {make_key(1): b"x"})
            name = make_key(2).hex()
            (tmp_path / "00").mkdir(exist_ok=True)
            for foreign in ("notes", name[:-1], name.upper(), "z" * 80, name + ".tmp", name):
                (tmp_path / "00" / foreign).write_bytes(b"foreign")
            assert await scanned(tier) == [make_key(1)]
            assert await tier.probe([make_key(2)]) == [None]
            await tier.delete([make_key(1)])
            os.mkfifo(tmp_path / make_key(1)[16:17].hex() / make_key(1).hex())
            assert await tier.probe([make_key(1)]) == [None]
            assert await fetch(tier, [make_key(1)], [100]) == [None]

    @pytest.mark.parametrize("sync", [False, True])
    async def test_with_sync_a_delete_is_durable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
    ) -> None:
        synced, fsync = list[str](), os.fsync

        def note(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").resolve()
            if path.is_dir() and not list(path.iterdir()):
                synced.append(path.name)
            fsync(fd)

        async with shared(tmp_path, sync=sync) as tier:
            keys = [make_key(i) for i in range(8)]
            await store(tier, dict.fromkeys(keys, b"x"))
            monkeypatch.setattr(os, "fsync", note)
            assert await tier.delete(keys) == [True] * 8
            assert sorted(synced) == sorted({key[16:17].hex() for key in keys if sync})
            if sync:
                monkeypatch.setattr(os, "fsync", failing(EIO))
                with pytest.raises(TierError):
                    await tier.delete(keys)

    async def test_a_folder_that_cannot_be_listed_is_a_fault_after_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a clear would end while cleared values are there."""
        keys = [make_key(i) for i in range(20)]
        broken, names = keys[0][16:17].hex(), FileTree.names

        def list_names(tree: FileTree, shard: str) -> list[str]:
            if shard == broken:
                raise OSError(EIO, os.strerror(EIO))
            return names(tree, shard)

        async with shared(tmp_path) as tier:
            await store(tier, dict.fromkeys(keys, b"x"))
            monkeypatch.setattr(FileTree, "names", list_names)
            seen = await partly_scanned(tier)
            assert sorted(seen) == sorted(key for key in keys if key[16:17].hex() != broken)

    async def test_a_file_that_cannot_be_removed_is_a_fault_after_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [make_key(i) for i in range(20)]
        remove = FileTree.remove

        def remove_one(tree: FileTree, name: str) -> bool:
            if keys[3].hex() in name:
                raise OSError(EIO, os.strerror(EIO))
            return remove(tree, name)

        async with shared(tmp_path) as tier:
            await store(tier, dict.fromkeys(keys, b"x"))
            monkeypatch.setattr(FileTree, "remove", remove_one)
            with pytest.raises(TierIncomplete):
                await tier.delete(keys)
            assert await tier.probe(keys) == [1 if key == keys[3] else None for key in keys]

    async def test_a_failed_opening_keeps_no_descriptor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def descriptors() -> int:
            return sum(
                link.resolve() == tmp_path.resolve() for link in Path("/proc/self/fd").iterdir()
            )

        async with shared(tmp_path) as tier:
            with monkeypatch.context() as patch:
                patch.setattr(FileTree, "names", failing(EIO))
                for _ in range(3):
                    with pytest.raises(TierError):
                        await tier.check()
            assert descriptors() == 0
            await tier.check()
            assert descriptors() == 1

    async def test_a_folder_that_was_removed_is_made_anew(self, tmp_path: Path) -> None:
        async with shared(tmp_path / "values") as tier:
            await store(tier, {make_key(1): b"x"})
            shutil.rmtree(tmp_path / "values")
            assert await tier.probe([make_key(1)]) == [None]
            assert isinstance(
                (await tier.put([(make_key(1), [memoryview(b"x")])]))[0], TierUnavailable
            )
            assert await store(tier, {make_key(1): b"x"}) == [True]
            shutil.rmtree(tmp_path / "values")
            with pytest.raises(TierUnavailable, match="is it mounted"):
                await tier.check()
            await tier.check()

    async def test_a_place_that_cannot_be_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        async with shared(tmp_path / "file" / "values") as tier:
            for call in (
                tier.check(),
                tier.probe([make_key(1)]),
                tier.put([(make_key(1), [memoryview(b"x")])]),
                scanned(tier),
            ):
                with pytest.raises(TierUnavailable, match="is it mounted"):
                    await call

    async def test_missing_rights_are_denied_and_what_may_be_read_is_read(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("giving up rights and getting them back takes root")
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)  # noqa: PTH101 - ruff takes Path.chmod in a coroutine for slow
            async with shared(Path(folder, "values")) as tier:
                await store(tier, {make_key(1): b"x"})
                os.seteuid(65534)
                try:
                    assert isinstance(
                        (await tier.put([(make_key(2), [memoryview(b"x")])]))[0], TierDenied
                    )
                    with pytest.raises(TierDenied):
                        await tier.delete([make_key(1)])
                finally:
                    os.seteuid(0)
                assert await fetch(tier, [make_key(1)], [1]) == [b"x"]

    async def test_a_full_disk_is_told_and_a_read_only_one_still_gives(
        self, tmp_path: Path
    ) -> None:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "kvhold-test", str(tmp_path)]
        if (
            os.geteuid() != 0
            or (await asyncio.to_thread(subprocess.run, mount, check=False)).returncode
        ):
            pytest.skip("mounting a small file system takes root")
        try:
            async with shared(tmp_path) as tier:
                faults = await tier.put(
                    [(make_key(n), [memoryview(make_value(n, 256 << 10))]) for n in range(8)]
                )
                assert {type(fault) for fault in faults} == {type(None), TierFull}
                assert len(files(tmp_path)) == len(await scanned(tier)) == faults.count(None)
                stored = [make_key(n) for n, fault in enumerate(faults) if fault is None]
                await asyncio.to_thread(
                    subprocess.run, ["mount", "-o", "remount,ro", str(tmp_path)], check=True
                )
                await tier.check()
                assert None not in await fetch(tier, stored, [256 << 10] * len(stored))
                assert isinstance(
                    (await tier.put([(make_key(99), [memoryview(b"x")])]))[0], TierDenied
                )
        finally:
            await asyncio.to_thread(subprocess.run, ["umount", "--lazy", str(tmp_path)], check=True)
