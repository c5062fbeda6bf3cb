"""What the central store does with memory that a tier below may still write to."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kvhold.core.config import load_config
from kvhold.node.shelf import Shelf
from kvhold.testing.tier import make_key
from kvhold.tiers import guard as guard_module
from kvhold.tiers.base import Parts
from kvhold.tiers.memory import MemoryTier
from kvhold.tiers.ram import Entry

MIB = 1 << 20
VALUE = 512 << 10


class HungTier(MemoryTier):
    """A tier whose reads hang in a thread until `release`, cancelled or not, and then write what
    they were asked for.
    """

    def __init__(self, inner: MemoryTier) -> None:
        self.__dict__.update(inner.__dict__)
        self.entered, self.ended = asyncio.Event(), asyncio.Event()
        self.release = threading.Event()

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[Any]:
        def late() -> None:
            assert self.release.wait(60)
            for parts in into:
                parts[0][:] = b"L" * len(parts[0])

        self.entered.set()
        read = asyncio.get_running_loop().run_in_executor(None, late)
        while not read.done():
            try:
                await asyncio.shield(read)
            except asyncio.CancelledError:
                continue
        self.ended.set()
        return [VALUE] * len(keys)


@pytest.fixture
async def shelf(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shelf]:
    """A store of 4 MiB above a tier that holds one value and hangs."""
    monkeypatch.setattr(guard_module, "_LEAVE_S", 0.01)
    shelf = Shelf(
        load_config({"ram_bytes": "4MiB", "tiers": ["memory://?max_bytes=16MiB"]}, environ={})
    )
    (guard,) = shelf._stack.guards
    await guard.put([(make_key(1), [memoryview(bytes(VALUE))])])
    tier = guard._tier = HungTier(guard._tier)  # type: ignore[arg-type]
    yield shelf
    tier.release.set()
    await shelf.close()


def put(shelf: Shelf, key: bytes) -> Entry | None:
    """Another host's value; None where there is no room for it."""
    entry = shelf.reserve(key, VALUE, None)
    if not isinstance(entry, Entry):
        assert entry == "full"
        return None
    shelf.ram.view(entry)[:] = b"P" * VALUE
    return entry


async def fill(shelf: Shelf) -> list[Entry]:
    """All the memory that there is, taken by other hosts' puts."""
    return [entry for n in range(100, 116) if (entry := put(shelf, make_key(n))) is not None]


@pytest.mark.parametrize("given_up_by", ["its deadline", "its caller"])
async def test_memory_of_a_read_that_was_given_up_goes_to_nobody_until_the_read_has_ended(
    shelf: Shelf, given_up_by: str
) -> None:
    (guard,) = shelf._stack.guards
    tier = guard._tier
    assert isinstance(tier, HungTier)
    if given_up_by == "its deadline":
        guard.config = guard_module.GuardConfig(get_timeout_s=0.05)
        await shelf.bring([make_key(1)])
    else:
        caller = asyncio.create_task(shelf.bring([make_key(1)]))
        await tier.entered.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    puts = await fill(shelf)
    assert len(puts) == 4 * MIB // VALUE - 1, "all but the memory of the late read"
    tier.release.set()
    await tier.ended.wait()
    assert all(bytes(shelf.ram.view(entry)) == b"P" * VALUE for entry in puts), (
        "the late read has written over nobody's value"
    )


async def test_memory_of_a_read_that_was_given_up_is_free_when_the_read_has_ended(
    shelf: Shelf,
) -> None:
    (guard,) = shelf._stack.guards
    guard.config = guard_module.GuardConfig(get_timeout_s=0.05)
    await shelf.bring([make_key(1)])
    assert shelf.ram.used_bytes > 0
    assert isinstance(guard._tier, HungTier)
    guard._tier.release.set()
    await asyncio.wait(guard._stuck)
    await asyncio.sleep(0)
    assert shelf.ram.used_bytes == 0
    assert (await shelf.probe([make_key(1)])) == [VALUE]


async def test_whoever_waits_for_a_read_gets_it_though_the_one_who_began_it_has_left(
    shelf: Shelf,
) -> None:
    (guard,) = shelf._stack.guards
    assert isinstance(guard._tier, HungTier)
    first = asyncio.create_task(shelf.bring([make_key(1)]))
    await guard._tier.entered.wait()
    second = asyncio.create_task(shelf.bring([make_key(1)]))
    await asyncio.sleep(0)
    first.cancel()
    guard._tier.release.set()
    await second
    assert shelf.ram.find(make_key(1)) is not None
