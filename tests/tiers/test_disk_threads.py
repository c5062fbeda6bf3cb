"""The threads of the disk tier, calls that were cancelled, and the owner of a folder."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from kvhold.core.errors import TierError, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from tests.tiers.disks import MIB, Gate, disk, fill, present


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
