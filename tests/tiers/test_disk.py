"""The disk tier: the contract, its settings, and what it reads and writes by O_DIRECT."""

import asyncio
import gc
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.errors import ConfigError, TierError, TierFull
from kvhold.testing import TierContract
from kvhold.testing.tier import make_key, make_value
from kvhold.tiers.audit import AuditTier
from kvhold.tiers.base import HasFolders
from kvhold.tiers.disk import DiskTier
from kvhold.tiers.faults import FaultTier
from kvhold.tiers.policies import POLICIES
from kvhold.tiers.url import parse_url
from tests.tiers.disks import KIB, MIB, aligned, disk, fill, occupied, value_files


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


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


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


def noting_direct(call: Callable[..., int], carried: list[tuple[bool, int]]) -> Callable[..., int]:
    """`call`, with a note of whether each went by O_DIRECT and how many bytes it moved."""

    def noted(fd: int, pieces: Sequence[memoryview], at: int) -> int:
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
        moved = call(fd, pieces, at)
        carried.append((bool(int(flags, 8) & os.O_DIRECT), moved))
        return moved

    return noted
