"""What the central store does with memory that a tier below may still write to."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kvhold.core.config import load_config
from kvhold.node.central_store import CentralStore
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
async def central_store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CentralStore]:
    """A store of 4 MiB above a tier that holds one value and hangs."""
    monkeypatch.setattr(guard_module, "_LEAVE_S", 0.01)
    central_store = CentralStore(
        load_config({"ram_bytes": "4MiB", "tiers": ["memory://?max_bytes=16MiB"]}, environ={})
    )
    (guard,) = central_store._stack.guards
    await guard.put([(make_key(1), [memoryview(bytes(VALUE))])])
    tier = guard._tier = HungTier(guard._tier)  # type: ignore[arg-type]
    yield central_store
    tier.release.set()
    await central_store.close()


def put(central_store: CentralStore, key: bytes) -> Entry | None:
    """Another host's value; None where there is no room for it."""
    entry = central_store.reserve(key, VALUE, None)
    if not isinstance(entry, Entry):
        assert entry == "full"
        return None
    central_store.ram.view(entry)[:] = b"P" * VALUE
    return entry


async def fill(central_store: CentralStore) -> list[Entry]:
    """All the memory that there is, taken by other hosts' puts."""
    return [
        entry for n in range(100, 116) if (entry := put(central_store, make_key(n))) is not None
    ]


@pytest.mark.parametrize("given_up_by", ["its deadline", "its caller"])
async def test_memory_of_a_read_that_was_given_up_goes_to_nobody_until_the_read_has_ended(
    central_store: CentralStore, given_up_by: str
) -> None:
    (guard,) = central_store._stack.guards
    tier = guard._tier
    assert isinstance(tier, HungTier)
    if given_up_by == "its deadline":
        guard.config = type(guard.config)(get_timeout_s=0.05)
        await central_store.bring([make_key(1)])
    else:
        caller = asyncio.create_task(central_store.bring([make_key(1)]))
        await tier.entered.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    puts = await fill(central_store)
    assert len(puts) == 4 * MIB // VALUE - 1, "all but the memory of the late read"
    tier.release.set()
    await tier.ended.wait()
    assert all(bytes(central_store.ram.view(entry)) == b"P" * VALUE for entry in puts), (
        "the late read has written over nobody's value"
    )


async def test_memory_of_a_read_that_was_given_up_is_free_when_the_read_has_ended(
    central_store: CentralStore,
) -> None:
    (guard,) = central_store._stack.guards
    guard.config = type(guard.config)(get_timeout_s=0.05)
    await central_store.bring([make_key(1)])
    assert central_store.ram.used_bytes > 0
    assert isinstance(guard._tier, HungTier)
    guard._tier.release.set()
    await asyncio.wait(guard._stuck)
    await asyncio.sleep(0)
    assert central_store.ram.used_bytes == 0
    assert (await central_store.probe([make_key(1)])) == [VALUE]


async def test_two_calls_that_load_a_value_at_the_same_time_both_get_it(
    central_store: CentralStore,
) -> None:
    (guard,) = central_store._stack.guards
    assert isinstance(guard._tier, HungTier)
    calls = [asyncio.create_task(central_store.bring([make_key(1)])) for _ in range(2)]
    await guard._tier.entered.wait()
    await asyncio.sleep(0.01)
    assert not any(call.done() for call in calls)
    guard._tier.release.set()
    await asyncio.gather(*calls)
    assert central_store.ram.find(make_key(1)) is not None


async def test_whoever_waits_for_a_read_gets_it_though_the_one_who_began_it_has_left(
    central_store: CentralStore,
) -> None:
    (guard,) = central_store._stack.guards
    assert isinstance(guard._tier, HungTier)
    first = asyncio.create_task(central_store.bring([make_key(1)]))
    await guard._tier.entered.wait()
    second = asyncio.create_task(central_store.bring([make_key(1)]))
    await asyncio.sleep(0)
    first.cancel()
    guard._tier.release.set()
    await second
    assert central_store.ram.find(make_key(1)) is not None


class HeldTier(MemoryTier):
    """A tier whose reads end, and whose writes begin, when they are let go."""

    def __init__(self, inner: MemoryTier) -> None:
        self.__dict__.update(inner.__dict__)
        self.entered, self.let_go = asyncio.Event(), asyncio.Event()

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[Any]:
        sizes = await super().get(keys, into, starts=starts)
        self.entered.set()
        await self.let_go.wait()
        return sizes

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[Any]:
        self.entered.set()
        await self.let_go.wait()
        return await super().put(items, ttl_s=ttl_s)


@pytest.fixture
async def held_store() -> AsyncIterator[tuple[CentralStore, HeldTier]]:
    central_store = CentralStore(
        load_config({"ram_bytes": "4MiB", "tiers": ["memory://?max_bytes=16MiB"]}, environ={})
    )
    await central_store.start()
    (guard,) = central_store._stack.guards
    tier = guard._tier = HeldTier(guard._tier)  # type: ignore[arg-type]
    yield central_store, tier
    tier.let_go.set()
    await central_store.close()


def store(central_store: CentralStore, value: bytes) -> None:
    entry = central_store.reserve(make_key(1), len(value), None)
    assert isinstance(entry, Entry)
    central_store.ram.view(entry)[:] = value
    central_store.commit(entry)


async def at_rest(central_store: CentralStore) -> None:
    async with asyncio.timeout(60):
        while (  # noqa: ASYNC110 - it tells nobody
            central_store._writes or central_store._tasks or central_store._bringing
        ):
            await asyncio.sleep(0.001)


async def test_a_value_that_is_deleted_while_it_is_read_from_below_does_not_return(
    held_store: tuple[CentralStore, HeldTier],
) -> None:
    central_store, tier = held_store
    await MemoryTier.put(tier, [(make_key(1), [memoryview(b"value")])])
    bringing = asyncio.create_task(central_store.bring([make_key(1)]))
    await tier.entered.wait()
    assert await central_store.delete([make_key(1)], set()) == [True]
    store(central_store, b"a new value")
    tier.let_go.set()
    await bringing
    await at_rest(central_store)
    entry = central_store.ram.find(make_key(1))
    assert entry is not None and bytes(central_store.ram.view(entry)) == b"a new value"
    assert central_store.ram.num_chunks == 1


async def test_a_value_that_is_deleted_while_it_is_written_below_is_not_kept_for_the_next_one(
    held_store: tuple[CentralStore, HeldTier],
) -> None:
    central_store, tier = held_store
    store(central_store, b"A")
    await tier.entered.wait()
    silent: set[str] = set()
    assert await central_store.delete([make_key(1)], silent) == [True]
    assert silent == {"memory"}, "the caller is told that the value may appear there"
    store(central_store, b"BB")
    tier.let_go.set()
    await at_rest(central_store)
    assert await tier.probe([make_key(1)]) == [2]
    entry = central_store.ram.find(make_key(1))
    assert entry is not None
    central_store.ram.remove(entry)
    silent.clear()
    assert await central_store.delete([make_key(1)], silent) == [True]
    assert not silent and await central_store.probe([make_key(1)]) == [None]


async def test_a_value_that_is_put_during_a_delete_of_its_key_is_written_below(
    held_store: tuple[CentralStore, HeldTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    central_store, tier = held_store
    tier.let_go.set()
    store(central_store, b"A")
    await at_rest(central_store)
    deleting, go_on = asyncio.Event(), asyncio.Event()

    async def late(keys: Sequence[bytes]) -> list[bool]:
        deleting.set()
        await go_on.wait()
        return await MemoryTier.delete(tier, keys)

    monkeypatch.setattr(tier, "delete", late)
    removing = asyncio.create_task(central_store.delete([make_key(1)], set()))
    await deleting.wait()
    store(central_store, b"BB")
    await at_rest(central_store)  # it has found the value A there
    go_on.set()
    assert await removing == [True]
    await at_rest(central_store)
    assert await tier.probe([make_key(1)]) == [2]


async def test_a_value_is_not_read_from_below_during_a_delete_of_its_key(
    held_store: tuple[CentralStore, HeldTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    central_store, tier = held_store
    tier.let_go.set()
    await MemoryTier.put(tier, [(make_key(1), [memoryview(b"value")])])
    deleting, go_on = asyncio.Event(), asyncio.Event()

    async def late(keys: Sequence[bytes]) -> list[bool]:
        deleting.set()
        await go_on.wait()
        return await MemoryTier.delete(tier, keys)

    monkeypatch.setattr(tier, "delete", late)
    removing = asyncio.create_task(central_store.delete([make_key(1)], set()))
    await deleting.wait()
    await central_store.bring([make_key(1)])
    go_on.set()
    assert await removing == [True]
    assert await central_store.probe([make_key(1)]) == [None]
    assert not central_store._deleting
