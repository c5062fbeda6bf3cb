"""What the disk tier evicts, replaces and counts."""

import asyncio
import os
import random
import subprocess
from errno import EIO
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.errors import TierError, TierFull
from kvhold.testing.tier import fetch, make_key, make_value, store
from kvhold.tiers.base import replace
from kvhold.tiers.policies import POLICIES
from tests.tiers.disks import (
    KIB,
    Gate,
    broken,
    disk,
    failing,
    fill,
    leftovers,
    occupied,
    present,
    value_files,
)


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


def keep_more(fd: int, nbytes: int) -> None:
    """Space beyond the file's end, as file systems may take it."""
    subprocess.run(
        ["fallocate", "--keep-size", "--length", str(nbytes), f"/proc/{os.getpid()}/fd/{fd}"],
        check=True,
    )
