"""The InfiniStore tier up to the client's calls: its server needs an RDMA device, so a store of
blocks in memory answers them here.

What that store does is what the server does (0.2.35): it copies as many bytes as it is asked for,
overwrites, answers one code for a batch, completes in a thread of its own. That the real client has
these calls is tested where it is installed.
"""

import asyncio
import ctypes
import gc
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import pytest

from kvhold.core.errors import ConfigError, TierCannotList, TierFull, TierUnavailable
from kvhold.core.keys import KEY_BYTES
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.infinistore_blocks import HEAD_BYTES, BlockLayout, BlockTier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.base import free_port

MIB = 1 << 20
LAYOUT = BlockLayout(root="test/", block_bytes=4096, slot_bytes=32 * 4096, slots=2)


class Blocks:
    """The server and the client's connection to it."""

    def __init__(self, capacity: int = 64 * MIB) -> None:
        self.blocks: dict[str, bytes] = {}
        self.capacity = capacity
        self.registered = range(0)
        self.may_go_on = Event()
        self.may_go_on.set()
        self._device = ThreadPoolExecutor(2)
        self._one_at_a_time = Lock()

    def register_mr(self, pointer: int, size: int, /) -> int:
        self.registered = range(pointer, pointer + size)
        return 1

    def w_rdma_async(
        self,
        names: list[str],
        offsets: list[int],
        block: int,
        base: int,
        done: Callable[[int], None],
        /,
    ) -> int:
        return self._post(lambda: self._write(names, offsets, block, base), done)

    def r_rdma_async(
        self,
        names: list[str],
        offsets: list[int],
        block: int,
        base: int,
        done: Callable[[int], None],
        /,
    ) -> int:
        return self._post(lambda: self._read(names, offsets, block, base), done)

    def check_exist(self, name: str, /) -> int:
        return 0 if name in self.blocks else 1

    def delete_keys(self, names: list[str], /) -> int:
        with self._one_at_a_time:
            return sum(self.blocks.pop(name, None) is not None for name in names)

    def close(self) -> None:
        self._device.shutdown(wait=True)

    def _post(self, work: Callable[[], int], done: Callable[[int], None]) -> int:
        def run() -> None:
            self.may_go_on.wait()
            with self._one_at_a_time:
                code = work()
            done(code)

        self._device.submit(run)
        return 0

    def _write(self, names: list[str], offsets: list[int], block: int, base: int) -> int:
        if sum(map(len, self.blocks.values())) + len(names) * block > self.capacity:
            return 507
        for name, offset in zip(names, offsets, strict=True):
            assert self._is_registered(base + offset, block)
            self.blocks[name] = ctypes.string_at(base + offset, block)
        return 200

    def _read(self, names: list[str], offsets: list[int], block: int, base: int) -> int:
        if not all(name in self.blocks for name in names):
            return 404
        for name, offset in zip(names, offsets, strict=True):
            assert self._is_registered(base + offset, block)
            assert len(self.blocks[name]) == block, "the server would send what lies behind it"
            ctypes.memmove(base + offset, self.blocks[name], block)
        return 200

    def _is_registered(self, pointer: int, size: int) -> bool:
        return pointer in self.registered and pointer + size - 1 in self.registered


class ListedTier(BlockTier):
    """With a scan, which the real store cannot do: the contract's tests of other things look at
    what is there.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(LAYOUT, lambda: blocks, "memory")
        self.store = blocks

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        for name in list(self.store.blocks):
            if "." not in name and (
                key := bytes.fromhex(name.removeprefix(LAYOUT.root))
            ).startswith(prefix):
                assert len(key) == KEY_BYTES
                yield key


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    blocks = Blocks()
    yield blocks
    blocks.may_go_on.set()
    blocks.close()


@pytest.fixture
async def tier(blocks: Blocks) -> AsyncIterator[BlockTier]:
    tier = ListedTier(blocks)
    yield tier
    blocks.may_go_on.set()
    await tier.close()


class TestBlockTier(TierContract):
    too_large_bytes = 65 * MIB

    @pytest.fixture
    async def tier(self, tier: BlockTier) -> BlockTier:
        return tier


async def test_a_value_larger_than_all_registered_memory_travels(tier: BlockTier) -> None:
    """D34: values beyond 40 MiB were refused there, and each refusal lost one of 16 buffers."""
    value = make_value(1, 48 * MIB + 5)
    assert await store(tier, {make_key(1): value}) == [True]
    assert await fetch(tier, [make_key(1)], [len(value)]) == [value]


async def test_no_buffer_is_lost_by_refusals_and_misses(blocks: Blocks, tier: BlockTier) -> None:
    """D34, the other half: here there are two slots."""
    blocks.capacity = 200_000  # so the first request of a put finds room and the second does not
    for turn in range(20):
        [fault] = await tier.put([(make_key(turn), [memoryview(bytes(300_000))])])
        assert isinstance(fault, TierFull)
        assert await fetch(tier, [make_key(turn)], [10]) == [None]
    assert blocks.blocks == {}
    assert await store(tier, {make_key(1): b"x"}) == [True]


async def test_a_cancelled_call_ends_at_once_and_its_slot_stays_taken_until_the_device_is_done(
    blocks: Blocks, tier: BlockTier
) -> None:
    values = {make_key(i): make_value(i, 100_000) for i in range(3)}
    assert await store(tier, values) == [True] * 3
    blocks.may_go_on.clear()
    mine = [bytearray(100_000) for _ in values]
    call = asyncio.ensure_future(tier.get(list(values), [[memoryview(m)] for m in mine]))
    session = tier._opener.place
    assert session is not None
    while session.free.qsize():  # noqa: ASYNC110 - until both slots are the device's
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait((call,))
    assert session.free.qsize() == 0, "the device has not finished"
    del call  # whose traceback has the caller's memory in its frames
    gc.collect()
    for memory in mine:
        memory.append(0)  # a BufferError if anybody had a view of it
        assert not any(memory)
    blocks.may_go_on.set()
    assert await fetch(tier, list(values), [100_000] * 3) == list(values.values())


async def test_a_value_of_which_the_store_evicted_a_block_is_a_miss(
    blocks: Blocks, tier: BlockTier
) -> None:
    await store(tier, {make_key(1): make_value(1, 20_000), make_key(2): b"2"})
    del blocks.blocks[
        next(
            name
            for name in blocks.blocks
            if name.startswith(f"test/{make_key(1).hex()}") and name.endswith(".3")
        )
    ]
    assert await fetch(tier, [make_key(1), make_key(2)], [20_000, 1]) == [None, b"2"]
    assert await tier.delete([make_key(1)]) == [True]
    assert [name for name in blocks.blocks if make_key(1).hex() in name] == []


async def test_a_head_that_is_none_of_ours_is_a_miss(blocks: Blocks, tier: BlockTier) -> None:
    for head in (bytes(HEAD_BYTES), b"kvholdI1" + b"\xff" * 56, b"kvholdI1" + bytes(56)):
        blocks.blocks[f"test/{make_key(1).hex()}"] = head
        assert await fetch(tier, [make_key(1)], [100]) == [None]
        assert await tier.get([make_key(1)], [[memoryview(bytearray(100))]], starts=[50]) == [None]


async def test_what_a_head_claims_costs_nothing(blocks: Blocks, tier: BlockTier) -> None:
    blocks.blocks[f"test/{make_key(1).hex()}"] = struct.pack(
        "<8sQI16s28x", b"kvholdI1", (1 << 64) - 1, 1, bytes(16)
    )
    assert await tier.get([make_key(1)], [[memoryview(bytearray(100))]], starts=[1 << 60]) == [None]
    assert await tier.delete([make_key(1)]) == [True]
    assert blocks.blocks == {}


async def test_of_puts_at_the_same_moment_one_stays_whole_and_later_ones_leave_nothing(
    blocks: Blocks, tier: BlockTier
) -> None:
    values = [make_value(i, 10_000) for i in range(8)]
    await asyncio.gather(*(store(tier, {make_key(1): value}) for value in values))
    [won] = await fetch(tier, [make_key(1)], [10_000])
    assert won in values
    before = dict(blocks.blocks)
    await asyncio.gather(*(store(tier, {make_key(1): value}) for value in values))
    assert blocks.blocks == before


async def test_the_store_cannot_list_and_says_so(blocks: Blocks) -> None:
    tier = BlockTier(LAYOUT, lambda: blocks, "memory")
    with pytest.raises(TierCannotList, match="does not list"):
        await scanned(tier)


async def test_a_connection_that_fails_is_unavailable(blocks: Blocks, tier: BlockTier) -> None:
    await tier.check()
    blocks.check_exist = lambda name: -1  # type: ignore[method-assign]
    blocks.r_rdma_async = lambda *_: -1  # type: ignore[method-assign]
    with pytest.raises(TierUnavailable):
        await tier.check()
    with pytest.raises(TierUnavailable):
        await tier.probe([make_key(1)])
    got = await tier.get([make_key(1)], [[memoryview(bytearray(1))]])
    assert isinstance(got[0], TierUnavailable)


class TestLostSessions:
    @pytest.fixture
    def made(self) -> list[Blocks]:
        """The connections that were made."""
        return []

    @pytest.fixture
    async def tier(self, made: list[Blocks]) -> AsyncIterator[BlockTier]:
        def connect() -> Blocks:
            made.append(Blocks())
            return made[-1]

        tier = BlockTier(LAYOUT, connect, "memory")
        yield tier
        await tier.close()

    async def test_a_late_failure_of_a_lost_connection_keeps_the_new_one(
        self, made: list[Blocks], tier: BlockTier
    ) -> None:
        await tier.check()
        going_on = [Event(), Event()]
        turns = iter(going_on)

        def fails(name: str, /) -> int:
            next(turns).wait(60)
            return -1

        made[0].check_exist = fails  # type: ignore[method-assign]
        first, second = (asyncio.create_task(tier.check()) for _ in range(2))
        going_on[0].set()
        with pytest.raises(TierUnavailable):
            await first
        await tier.check()
        going_on[1].set()
        with pytest.raises(TierUnavailable):
            await second
        await tier.check()
        assert len(made) == 2

    async def test_requests_that_never_complete_lose_the_connection_and_not_the_slots(
        self, made: list[Blocks], tier: BlockTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.infinistore_blocks._LAST_MOVES_S", 0.01)
        await tier.check()
        monkeypatch.setattr(made[0], "r_rdma_async", lambda *_: 0)
        session = tier._opener.place
        assert session is not None
        calls = [asyncio.create_task(tier.probe([make_key(i)])) for i in range(LAYOUT.slots)]
        while session.free.qsize():  # noqa: ASYNC110 - until all slots are the device's
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        async with asyncio.timeout(60):
            while tier._opener.place is session:  # noqa: ASYNC110 - a timer ends it
                await asyncio.sleep(0.001)
            assert await tier.probe([make_key(1)]) == [None]
        assert len(made) == 2


class SlowBlocks(Blocks):
    """With a registration that takes until `may_register`, and a count of closes."""

    def __init__(self) -> None:
        super().__init__()
        self.may_register = Event()
        self.is_registering = Event()
        self.answer = 1
        self.num_closed = 0

    def register_mr(self, pointer: int, size: int, /) -> int:
        self.is_registering.set()
        self.may_register.wait(60)
        super().register_mr(pointer, size)
        return self.answer

    def close(self) -> None:
        self.num_closed += 1
        super().close()


class TestSetUp:
    @pytest.fixture
    def made(self) -> list[SlowBlocks]:
        """The connections that were made."""
        return []

    @pytest.fixture
    async def tier(self, made: list[SlowBlocks]) -> AsyncIterator[BlockTier]:
        def connect() -> SlowBlocks:
            made.append(SlowBlocks())
            return made[-1]

        tier = BlockTier(LAYOUT, connect, "memory")
        yield tier
        for blocks in made:
            blocks.may_register.set()
        await tier.close()

    @staticmethod
    async def cancel_during_set_up(tier: BlockTier, made: list[SlowBlocks]) -> None:
        checking = asyncio.create_task(tier.check())
        async with asyncio.timeout(60):
            while not made or not made[-1].is_registering.is_set():  # noqa: ASYNC110 - in a thread
                await asyncio.sleep(0.001)
        checking.cancel()
        made[-1].may_register.set()
        await asyncio.wait((checking,))

    async def test_one_longer_than_a_deadline_is_used_by_the_next_call(
        self, made: list[SlowBlocks], tier: BlockTier
    ) -> None:
        await self.cancel_during_set_up(tier, made)
        await tier.check()
        assert len(made) == 1
        await tier.close()
        assert made[0].num_closed == 1

    async def test_one_that_nobody_waits_for_is_closed_with_the_tier(
        self, made: list[SlowBlocks], tier: BlockTier
    ) -> None:
        await self.cancel_during_set_up(tier, made)
        await tier.close()
        assert [blocks.num_closed for blocks in made] == [1]

    async def test_one_that_fails_is_closed(
        self, made: list[SlowBlocks], tier: BlockTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SlowBlocks, "register_mr", lambda *_: -1)
        with pytest.raises(TierUnavailable, match="does not register"):
            await tier.check()
        assert [blocks.num_closed for blocks in made] == [1]

    async def test_a_lost_connection_is_closed_and_replaced(
        self, made: list[SlowBlocks], tier: BlockTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SlowBlocks, "register_mr", Blocks.register_mr)
        await tier.check()
        made[0].check_exist = lambda name: -1  # type: ignore[method-assign]
        with pytest.raises(TierUnavailable):
            await tier.check()
        await tier.check()
        assert [blocks.num_closed for blocks in made] == [1, 0]


@pytest.mark.server
class TestRealClient:
    """Where it is installed: its server is not, so nothing goes over a wire."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip(
            "infinistore",
            reason="infinistore is not installed here: pip install infinistore",
            exc_type=ImportError,
        )

    def test_it_has_the_calls_that_are_made(self) -> None:
        from infinistore import TYPE_RDMA, ClientConfig, InfinityConnection

        settings = ClientConfig(
            host_addr="h",
            service_port=1,
            dev_name="d",
            ib_port=1,
            link_type="IB",
            connection_type=TYPE_RDMA,
        )
        connection = InfinityConnection(settings).conn
        for name, arguments in {
            "init_connection": "arg0: infinistore._infinistore.ClientConfig) -> int",
            "setup_rdma": "arg0: infinistore._infinistore.ClientConfig) -> int",
            "register_mr": "arg0: int, arg1: int) -> int",
            "w_rdma_async": "arg0: list[str], arg1: list[int], arg2: int, arg3: int, "
            "arg4: Callable[[int], "
            "None]) -> int",
            "r_rdma_async": "arg0: list[str], arg1: list[int], arg2: int, arg3: int, "
            "arg4: Callable[[int], "
            "None]) -> int",
            "check_exist": "arg0: str) -> int",
            "delete_keys": "arg0: list[str]) -> int",
            "close": ") -> None",
        }.items():
            assert arguments in (getattr(connection, name).__doc__ or ""), name

    async def test_a_server_that_is_not_there_is_unavailable(self) -> None:
        from kvhold.tiers.infinistore import InfiniStoreTier

        port = free_port()
        tier = InfiniStoreTier.from_url(parse_url(f"infinistore://127.0.0.1:{port}"))
        with pytest.raises(TierUnavailable, match=str(port)):
            await tier.check()
        await tier.close()

    def test_what_cannot_work_is_refused_when_it_is_made(self) -> None:
        from kvhold.tiers.infinistore import InfiniStoreTier

        for text, message in {
            "infinistore://host": "host:port",
            "infinistore://a:1,b:2": "host:port",
            "infinistore://host:1/x": "no path",
            "infinistore://host:1?link_type=wire": "link_type",
            "infinistore://host:1?block_bytes=3KiB": "multiple",
        }.items():
            with pytest.raises(ConfigError, match=message):
                InfiniStoreTier.from_url(parse_url(text))

    def test_importing_it_does_not_change_how_many_threads_others_use(self) -> None:
        check = (
            "import os; before = dict(os.environ); import kvhold.tiers.infinistore; assert "
            "dict(os.environ) == before"
        )
        subprocess.run(
            [sys.executable, "-c", check], check=True, env=os.environ | {"MKL_NUM_THREADS": "7"}
        )
