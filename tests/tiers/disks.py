"""Disk tiers and their folders, for tests."""

import asyncio
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from errno import EIO
from pathlib import Path
from typing import Any

import pytest

from kvhold.testing.tier import make_key, make_value, store
from kvhold.tiers.disk import DiskConfig, DiskTier

KIB, MIB = 1 << 10, 1 << 20


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


def broken(*_: object, **__: object) -> None:
    raise OSError(EIO, "I/O error")


def failing(
    call: Callable[..., Any], errno: int, when: Callable[..., bool] = lambda *_: True
) -> Callable[..., Any]:
    """`call`, but an OSError where `when` says so."""

    def fails(*args: Any, **names: Any) -> Any:
        if when(*args):
            raise OSError(errno, os.strerror(errno))
        return call(*args, **names)

    return fails
