"""The disk's index: compact, exact, and of use while a large folder is still being listed."""

import asyncio
import errno
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import TierIncomplete, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.disk import DiskConfig, DiskTier, columns, jobs, store
from kvhold.tiers.disk import rows as rows_module
from kvhold.tiers.disk.folder import Folder, FoundValue, value_name
from kvhold.tiers.disk.index import Index
from kvhold.tiers.disk.rows import NONE, Rows, Sorting
from kvhold.tiers.files.tree import FileTree

SMALL, LARGE = 2000, 20_000


def add(rows: Rows, number: int) -> int:
    return rows.add(
        make_key(number),
        nbytes=number,
        occupied_bytes=512 * number,
        written_ns=number,
        used_ns=number,
    )


def count_files(folder: Path) -> int:
    return len(list(folder.glob("[0-9a-f][0-9a-f]/*")))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "touch", "sort"]), st.integers(0, 40)),
        max_size=200,
    )
)
def test_rows_are_a_dictionary_in_order_of_use(steps: list[tuple[str, int]]) -> None:
    rows, model, clock = Rows(), dict[int, int](), 1000
    for what, number in steps:
        row = rows.find(make_key(number))
        assert (row != NONE) == (number in model)
        clock += 1
        if what == "add" and row == NONE:
            add(rows, number)
            rows.touch(rows.find(make_key(number)), clock)
            model[number] = clock
        elif what == "remove" and row != NONE:
            rows.remove(row)
            del model[number]
        elif what == "touch" and row != NONE:
            rows.touch(row, clock)
            del model[number]
            model[number] = clock
        elif what == "sort":
            rows.sort()
        assert [rows.nbytes(row) for row in rows.oldest()] == list(model)
        assert [rows.nbytes(row) for row in rows.newest()] == list(model)[::-1]
        assert rows.num == len(model)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "touch", "order"]), st.integers(0, 20)),
        max_size=200,
    )
)
def test_rows_that_come_go_and_are_used_while_others_are_put_in_order(
    steps: list[tuple[str, int]],
) -> None:
    rows, model, clock = Rows(), dict[int, int](), 1000
    for number in range(10):  # as a folder lists them: in no order
        add(rows, number)
        rows.touch(rows.find(make_key(number)), 900 - number * 7 % 10)
        model[number] = 900 - number * 7 % 10
    sorting = Sorting(rows)
    for _ in sorting.look():
        pass
    before = dict(model)
    sorting.sort()
    linking, most = sorting.link(), rows_module._MOST_ORDERED
    rows_module._MOST_ORDERED = 2
    try:
        for what, number in [*steps, *[("order", 0)] * 11]:
            row = rows.find(make_key(number))
            clock += 1
            if what == "add" and row == NONE:
                add(rows, number)
                rows.touch(rows.find(make_key(number)), clock)
                model[number] = clock
            elif what == "remove" and row != NONE:
                rows.remove(row)
                del model[number]
            elif what == "touch" and row != NONE:
                rows.touch(row, clock)
                model[number] = clock
            elif what == "order":
                next(linking, None)
            in_order = [rows.nbytes(row) for row in rows.oldest()]
            assert in_order == [rows.nbytes(row) for row in rows.newest()][::-1]
            assert sorted(in_order) == sorted(model)
            used = [number for number in in_order if before.get(number) != model[number]]
            assert used == sorted(used, key=model.__getitem__)
    finally:
        rows_module._MOST_ORDERED = most
    assert [rows.nbytes(row) for row in rows.oldest()] == sorted(model, key=model.__getitem__)


def test_rows_grow_beyond_their_reserved_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_RESERVED", 16)
    rows = Rows()
    for number in range(SMALL):
        add(rows, number)
    assert [rows.find(make_key(number)) for number in range(SMALL)] == list(range(SMALL))
    assert [rows.nbytes(row) for row in rows.oldest()] == list(range(SMALL))
    assert rows.index_bytes < 200 * SMALL


def test_rows_that_cannot_grow_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited(mmap.mmap):
        refuses = True

        def resize(self, newsize: int) -> None:
            if self.refuses and newsize == 32 * 8:  # the keys have grown already
                raise OSError(errno.ENOMEM, "no memory")
            super().resize(newsize)

    def reserve(nbytes: int) -> mmap.mmap:
        return Limited(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    monkeypatch.setattr(columns, "_RESERVED", 8)
    monkeypatch.setattr(columns, "_reserve", reserve)
    rows = Rows()
    for number in range(16):
        add(rows, number)
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            add(rows, 16)
    assert [rows.find(make_key(number)) for number in range(17)] == [*range(16), NONE]
    assert [rows.nbytes(row) for row in rows.oldest()] == list(range(16))
    Limited.refuses = False
    add(rows, 16)
    assert [rows.nbytes(row) for row in rows.oldest()] == list(range(17))


def test_an_index_works_where_a_process_may_have_few_addresses() -> None:
    code = f"""
import resource
from pathlib import Path
from kvhold.testing.tier import make_key
from kvhold.tiers.disk.rows import Rows

pages = int(Path("/proc/self/statm").read_text().split()[0])
most_bytes = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
rows = Rows()
for number in range({SMALL}):
    rows.add(make_key(number), nbytes=number, occupied_bytes=0, written_ns=0, used_ns=0)
assert all(rows.nbytes(rows.find(make_key(number))) == number for number in range({SMALL}))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_grow_and_shrink_and_find_all_keys_of_one_chunk() -> None:
    rows, numbers = Rows(), list(range(SMALL))
    keys = [
        make_key(number)[:-4] + suffix.to_bytes(4, "big")
        for number in numbers[:100]
        for suffix in range(20)
    ]
    for _ in range(3):
        for number, key in enumerate(keys):
            rows.add(key, nbytes=number, occupied_bytes=0, written_ns=0, used_ns=number)
        assert [rows.nbytes(rows.find(key)) for key in keys] == list(range(len(keys)))
        random.Random(0).shuffle(numbers)
        for key in keys:
            rows.remove(rows.find(key))
        assert [rows.find(key) for key in keys] == [NONE] * len(keys)


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_the_index_takes_at_most_150_bytes_a_value(policy: str) -> None:
    index = Index(policy, 1 << 40, 4096)
    for number in range(0, LARGE, 100):
        index.add_found(
            [FoundValue(make_key(n), "", 1, 4096, n, n) for n in range(number, number + 100)]
        )
    assert len(index) == LARGE
    assert index.index_bytes <= 150 * LARGE


@pytest.mark.parametrize("policy", ["lru", "fifo", "mru", "lfu", "s3fifo", "learned"])
def test_a_value_that_is_read_is_never_a_victim(policy: str) -> None:
    index = Index(policy, 10 * 4096, 4096)
    index.add_found(
        [FoundValue(make_key(n), value_name(make_key(n), 1, n), 1, 4096, n, n) for n in range(10)]
    )
    index.sort()
    held = [index.find(make_key(n)) for n in (0, 9)]
    for entry in held:
        assert entry is not None
        index.read(entry, 100)
    victims = index.evict(8 * 4096)
    assert victims is not None
    assert {victim.key for victim in victims} == {make_key(n) for n in range(1, 9)}
    assert index.evict(4096) is None


class TestLargeFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """With files in each of 20 folders, of which the first ones are enough to be served; the
        others are added one in a step.
        """
        monkeypatch.setattr(jobs, "SERVES_FROM", 5)
        monkeypatch.setattr(store, "_FOUND", 1)
        folder = tmp_path / "kv"
        folder.mkdir(mode=0o700)
        for number in range(60):
            self.write(folder, number, number + 1)
        return folder

    @staticmethod
    def write(folder: Path, number: int, stamp_ns: int) -> Path:
        path = folder / value_name(make_key(number), 3, stamp_ns)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"abc")
        os.utime(path, ns=(stamp_ns, stamp_ns))
        return path

    @pytest.fixture
    def held_up(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """The listing that goes on beside the calls waits for this."""
        go_on, run = threading.Event(), jobs.OpenMore.run

        def wait(job: jobs.OpenMore, stop: threading.Event) -> None:
            go_on.wait(60)
            run(job, stop)

        monkeypatch.setattr(jobs.OpenMore, "run", wait)
        yield go_on
        go_on.set()

    @staticmethod
    def tier(folder: Path) -> DiskTier:
        return DiskTier(DiskConfig(path=str(folder), max_bytes=1 << 30))

    async def test_is_served_before_it_is_listed_and_has_all_of_it_in_the_end(
        self, folder: Path, held_up: threading.Event
    ) -> None:
        tier, keys = self.tier(folder), [make_key(number) for number in range(60)]
        found = await tier.probe(keys)
        assert 5 <= sum(size == 3 for size in found) < 60
        held_up.set()
        assert sorted([key async for key in tier.scan(b"")]) == sorted(keys)
        assert await tier.probe(keys) == [3] * 60
        assert tier.used_bytes >= 60 * 512
        await tier.close()

    async def test_a_value_written_before_its_old_file_is_listed_replaces_it(
        self, folder: Path, held_up: threading.Event
    ) -> None:
        tier, keys = self.tier(folder), [make_key(number) for number in range(60)]
        missing = [
            key for key, size in zip(keys, await tier.probe(keys), strict=True) if size is None
        ]
        assert await tier.put([(key, [memoryview(b"wxyz")]) for key in missing]) == [None] * len(
            missing
        )
        held_up.set()
        assert sorted([key async for key in tier.scan(b"")]) == sorted(keys)
        assert await tier.probe(missing) == [4] * len(missing)
        await tier.close()
        assert count_files(folder) == 60

    async def test_files_from_a_clock_that_was_ahead_are_found(
        self, folder: Path, held_up: threading.Event
    ) -> None:
        ahead_ns = time.time_ns() + 3600 * 10**9
        numbers = range(100, 160)
        for number in numbers:
            self.write(folder, number, ahead_ns + number)
        tier, keys = self.tier(folder), [make_key(number) for number in numbers]
        assert None in await tier.probe(keys)
        held_up.set()
        assert len([key async for key in tier.scan(b"")]) == 120
        assert await tier.probe(keys) == [3] * 60
        await tier.close()

    async def test_values_written_while_the_clock_steps_back_stay(
        self, folder: Path, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier, keys = self.tier(folder), [make_key(number) for number in range(1000, 1060)]
        assert await tier.probe(keys) == [None] * 60
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() - 10 * 10**9)
        assert await tier.put([(key, [memoryview(b"wxyz")]) for key in keys]) == [None] * 60
        held_up.set()
        assert len([key async for key in tier.scan(b"")]) == 120
        assert await fetch(tier, keys, [4] * 60) == [b"wxyz"] * 60
        await tier.close()

    async def test_a_new_value_replaces_a_file_with_a_time_in_the_future(
        self, folder: Path, held_up: threading.Event
    ) -> None:
        ahead_ns = time.time_ns() + 3600 * 10**9
        tier, keys = self.tier(folder), [make_key(number) for number in range(100, 160)]
        await tier.probe(keys)
        assert await tier.put([(key, [memoryview(b"wxyz")]) for key in keys]) == [None] * 60
        for number in range(100, 160):
            self.write(folder, number, ahead_ns + number)
        held_up.set()
        assert len([key async for key in tier.scan(b"")]) == 120
        assert await fetch(tier, keys, [4] * 60) == [b"wxyz"] * 60
        await tier.close()

    def test_a_file_that_was_written_and_removed_during_the_listing_is_not_added(self) -> None:
        index, name = Index("lru", 1 << 30, 4096), value_name(make_key(1), 3, 5)
        found = FoundValue(make_key(1), name, 3, 4096, 5, 5)
        assert index.add_found([found], own={name}) == []
        assert len(index) == 0

    async def test_a_delete_holds_for_what_was_not_listed_yet(
        self, folder: Path, held_up: threading.Event
    ) -> None:
        tier, keys = self.tier(folder), [make_key(number) for number in range(60)]
        await tier.probe(keys)
        deleting = asyncio.create_task(tier.delete(keys))
        await asyncio.sleep(0)
        held_up.set()
        assert await deleting == [True] * 60
        assert [key async for key in tier.scan(b"")] == []
        await tier.close()
        again = self.tier(folder)
        assert await again.probe(keys) == [None] * 60
        await again.close()

    @pytest.mark.parametrize("operation", ["scan", "delete"])
    async def test_a_scan_and_a_delete_fail_if_the_folder_cannot_be_listed(
        self,
        folder: Path,
        held_up: threading.Event,
        monkeypatch: pytest.MonkeyPatch,
        operation: str,
    ) -> None:
        """Else a clear ends although the values that were not listed are there."""
        tier, keys = self.tier(folder), [make_key(number) for number in range(60)]

        async def call() -> list[bytes] | list[bool]:
            if operation == "delete":
                return await tier.delete(keys)
            return [key async for key in tier.scan(b"")]

        await tier.probe(keys)
        calling = asyncio.create_task(call())
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(FileTree, "names", too_many_files)
            held_up.set()
            with pytest.raises(TierUnavailable, match="could not be listed"):
                await calling
        assert len(await call()) == 60
        assert await tier.probe(keys) == [3 if operation == "scan" else None] * 60
        await tier.close()

    async def test_a_scan_fails_while_an_older_file_of_a_value_cannot_be_removed(
        self, folder: Path, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier, keys = self.tier(folder), [make_key(number) for number in range(60)]
        late = keys.index(max(keys, key=lambda key: key[NAMESPACE_BYTES]))
        older = self.write(folder, late, 0)
        await tier.probe(keys)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", too_many_files)
            held_up.set()
            with pytest.raises(TierIncomplete, match=older.name):
                [key async for key in tier.scan(b"")]
            with pytest.raises(TierIncomplete, match=older.name):
                await tier.delete([keys[late]])
        assert older.exists()
        assert tier.used_bytes == 60 * 4096 + 4096
        assert len([key async for key in tier.scan(b"")]) == 60
        assert not older.exists()
        assert tier.used_bytes == 60 * 4096
        await tier.close()

    async def test_values_go_in_the_order_of_their_use_though_folders_are_listed_in_another(
        self, folder: Path
    ) -> None:
        tier = DiskTier(DiskConfig(path=str(folder), max_bytes=60 * 4096))
        assert len([key async for key in tier.scan(b"")]) == 60
        assert (
            await tier.put(
                [(make_key(1000 + number), [memoryview(b"new")]) for number in range(20)]
            )
            == [None] * 20
        )
        found = await tier.probe([make_key(number) for number in range(60)])
        assert found == [None] * 20 + [3] * 40
        await tier.close()

    async def test_a_tier_closed_during_its_listing_releases_the_folder(self, folder: Path) -> None:
        for _ in range(3):
            tier = self.tier(folder)
            await tier.probe([make_key(1)])
            await tier.close()
        tier = self.tier(folder)
        assert len([key async for key in tier.scan(b"")]) == 60
        await tier.close()

    def test_two_files_of_one_key_are_one_value_the_newer_one(self, folder: Path) -> None:
        older, newer = self.write(folder, 7, 3), self.write(folder, 7, 1000)
        index = Index("lru", 1 << 30, 4096)
        opened = Folder.open(str(folder), direct="never", sync=False)
        names = [name for found in opened.batches() for name in index.add_found(found)]
        opened.close()
        entry = index.find(make_key(7))
        assert entry is not None and folder / entry.name == newer
        assert older.relative_to(folder).as_posix() in names
        assert len(index) == 60


def too_many_files(*_: object, **__: object) -> list[str]:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_delete_waits_for_the_old_file_of_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash brings back a value whose deletion was acknowledged."""
    may_write, deleted = threading.Event(), threading.Event()
    write, remove = jobs.FileWrite.run, jobs.Remove.run

    def held_write(job: jobs.FileWrite, stop: threading.Event) -> None:
        may_write.wait(10)
        write(job, stop)

    def slow_remove(job: jobs.Remove, stop: threading.Event) -> None:
        if job.entry.nbytes == 3:  # the old file: gives a delete the time to end before it
            deleted.wait(0.5)
        remove(job, stop)

    tier, key = DiskTier(DiskConfig(path=str(tmp_path), max_bytes=1 << 20)), make_key(0)

    async def files_after_delete() -> int:
        assert await tier.delete([key]) == [True]
        deleted.set()
        return count_files(tmp_path)

    try:
        assert await tier.put([(key, [memoryview(b"old")])]) == [None]
        monkeypatch.setattr(jobs.FileWrite, "run", held_write)
        monkeypatch.setattr(jobs.Remove, "run", slow_remove)
        replacing = asyncio.create_task(tier.replace([(key, [memoryview(b"newer")])]))
        deleting = asyncio.create_task(files_after_delete())
        for _ in range(100):
            await asyncio.sleep(0)
        may_write.set()
        assert await deleting == 0
        assert await replacing == [True]
    finally:
        may_write.set()
        await tier.close()


async def test_a_delete_and_a_scan_wait_for_files_that_are_being_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash brings back a value whose deletion was acknowledged."""
    may_go_on, write = threading.Event(), jobs.FileWrite.run

    def held(job: jobs.FileWrite, stop: threading.Event) -> None:
        may_go_on.wait(10)
        write(job, stop)

    def value() -> list[memoryview]:
        return [memoryview(bytearray(40_000))]

    async def scanned() -> set[bytes]:
        return {key async for key in tier.scan(b"")}

    tier = DiskTier(DiskConfig(path=str(tmp_path), max_bytes=64 << 10))
    try:
        assert await tier.put([(make_key(0), value())]) == [None]
        monkeypatch.setattr(jobs.FileWrite, "run", held)
        putting = asyncio.create_task(tier.put([(make_key(1), value())]))
        for _ in range(1000):
            if await tier.probe([make_key(0)]) == [None]:  # it is evicted, and its file is there
                break
        assert count_files(tmp_path) == 1
        deleting, scanning = (
            asyncio.create_task(tier.delete([make_key(0)])),
            asyncio.create_task(scanned()),
        )
        for _ in range(100):
            await asyncio.sleep(0)
        assert not deleting.done()
        assert not scanning.done()
        may_go_on.set()
        assert await deleting == [False]
        assert make_key(0) not in await scanning
        assert await putting == [None]
        assert count_files(tmp_path) == 1
    finally:
        may_go_on.set()
        await tier.close()
