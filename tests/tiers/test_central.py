"""The central cache as a tier: the contract against a real `kvhold serve --listen`, and what it
survives.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import Config, ListenConfig
from kvhold.core.errors import TierError, TierFull, TierIncomplete, TierUnavailable
from kvhold.core.store_options import MAX_TTL_S
from kvhold.net import central as c
from kvhold.net.wire import LENGTH_BYTES, body_length, encode
from kvhold.node.central import Central
from kvhold.node.central_store import CentralStore
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.central import CentralTier
from kvhold.tiers.ram import Entry
from kvhold_lab.servers.central import CentralServer
from tests.tiers.central_tiers import MIB, a_tier, empty, server, tier
from tests.tiers.memory import PLUGIN, a_place

__all__ = ["server", "tier"]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


async def within_a_minute(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it looks at says nothing by itself
            await asyncio.sleep(0.005)


@asynccontextmanager
async def tier_of(server: CentralServer) -> AsyncIterator[CentralTier]:
    tier = a_tier(server.url)
    try:
        yield tier
    finally:
        await tier.close()


class TestCentralTier(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture
    async def tier(self, server: CentralServer) -> AsyncIterator[CentralTier]:
        tier = a_tier(server.url)
        yield tier
        await empty(tier)


class TestFaults:
    async def test_a_dead_server_is_unavailable_and_used_again_when_it_is_back(self) -> None:
        with CentralServer() as server:
            async with tier_of(server) as tier:
                assert await store(tier, {make_key(1): b"x"}) == [True]
                server.kill()
                for call in (
                    tier.check(),
                    tier.probe([make_key(1)]),
                    tier.delete([make_key(1)]),
                    fetch(tier, [make_key(1)], [1]),
                ):
                    with pytest.raises(TierUnavailable):
                        await call
                server.start()
                assert await fetch(tier, [make_key(1)], [1]) == [None]
                assert await store(tier, {make_key(1): b"y"}) == [True]
                assert await fetch(tier, [make_key(1)], [1]) == [b"y"]

    async def test_a_kill_during_a_put_leaves_no_partial_value(self) -> None:
        with CentralServer(ram_bytes="256MiB") as server:
            async with tier_of(server) as tier:
                values = {make_key(i): make_value(i, 8 * MIB) for i in range(16)}
                call = asyncio.ensure_future(store(tier, values))
                # this loop does the sending: it has begun, and is far from its end
                await asyncio.sleep(0.005)
                server.kill()
                try:
                    stored = await call
                except TierUnavailable:
                    stored = [False] * 16
                assert not all(stored)
                server.start()
                assert await tier.probe(list(values)) == [None] * 16
                assert await store(tier, values) == [True] * 16
                assert await fetch(tier, list(values), [8 * MIB] * 16) == list(values.values())

    async def test_below_it_a_disk_outlives_it(self, tmp_path: Path) -> None:
        with CentralServer(
            "--tier", f"disk://{tmp_path}/d?probe_timeout_s=60&get_timeout_s=60&put_timeout_s=60"
        ) as server:
            values = {make_key(i): make_value(i, 100_000 + i) for i in range(10)}
            async with tier_of(server) as tier:
                assert await store(tier, values) == [True] * 10
            server.stop()  # it writes what waits before it ends
            server.start()
            async with tier_of(server) as tier:
                assert await tier.probe([*values, make_key(99)]) == [
                    *(100_000 + i for i in range(10)),
                    None,
                ]
                assert await fetch(tier, list(values), [200_000] * 10) == list(values.values())
                buffer = bytearray(1000)
                assert await tier.get([make_key(3)], [[memoryview(buffer)]], starts=[500]) == [1000]
                assert bytes(buffer) == values[make_key(3)][500:1500]
                assert await scanned(tier) == sorted(values)
                assert await tier.delete(list(values)) == [True] * 10
                assert await tier.probe(list(values)) == [None] * 10

    async def test_a_too_large_value_is_tier_full_and_the_others_are_stored(
        self, tier: CentralTier
    ) -> None:
        items = [
            (make_key(i), [memoryview(bytes(size))]) for i, size in enumerate((10, 40 * MIB, 10))
        ]
        faults = await tier.put(items)
        assert [type(fault) for fault in faults] == [type(None), TierFull, type(None)]


async def all_pages(central_store: CentralStore, most: int) -> list[bytes]:
    page = await central_store.scans.page(b"", b"", most)
    found = list(page.keys)
    while page.more:
        page = await central_store.scans.page(b"", found[-1], most)
        assert 0 < len(page.keys) <= most
        found += page.keys
    assert page.whole
    return found


async def test_a_scan_of_many_pages_lists_what_is_there_once(tmp_path: Path) -> None:
    tiers = (f"disk://{tmp_path / 'kv'}?max_bytes=1MiB",)
    central_store = CentralStore(Config(ram_bytes=16 << 20, huge_pages="never", tiers=tiers))
    try:
        keys = sorted(make_key(number) for number in range(100))
        assert (
            await central_store.ram.put([(key, [memoryview(b"x")]) for key in keys[:70]])
            == [None] * 70
        )
        put = await central_store._stack.guards[0].put(
            [(key, [memoryview(b"x")]) for key in keys[40:]]
        )
        assert put.items == [True] * 60
        for most in (1, 7, 99, 100, 1000):
            found = await all_pages(central_store, most)
            assert sorted(found) == keys, "those that are in both places once"
        assert len(central_store.scans) == 0
        for key in keys:  # scans that nobody goes on with are forgotten
            await central_store.scans.page(b"", key, 1)
            assert await central_store.scans.page(key, b"", 1) == ([key], False, True)
        assert len(central_store.scans) <= 64
    finally:
        await central_store.close()


async def test_probe_and_delete_report_a_tier_below_that_did_not_answer() -> None:
    with a_place() as below:
        settings: dict[str, Any] = {
            "ram_bytes": 16 << 20,
            "huge_pages": "never",
            "listen": ListenConfig(address="127.0.0.1:0"),
        }
        server = Central(
            Config(tiers=(below.url(breaker_failures=1000),), plugins=(PLUGIN,), **settings)
        )
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(on_ready=lambda _: ready.set()))
        await ready.wait()
        tier = a_tier(f"kvhold://127.0.0.1:{server.port}")
        try:
            key = make_key(1)
            assert await tier.put([(key, [memoryview(b"x")])]) == [None]
            await within_a_minute(lambda: key in below.values)
            below.faults = {
                name: TierError("memory", name, "not now") for name in ("probe", "scan", "delete")
            }
            in_memory, unknown = await tier.probe([key, make_key(2)])
            assert (in_memory, type(unknown)) == (1, TierIncomplete)
            with pytest.raises(TierError, match="a tier below the central cache did not answer"):
                [found async for found in tier.scan(b"")]
            with pytest.raises(TierError, match="a tier below the central cache did not answer"):
                await tier.delete([key])
            below.faults = {}
            assert await tier.probe([key, make_key(2)]) == [1, None]
            assert [found async for found in tier.scan(b"")] == [key]
            assert await tier.delete([key]) == [True]
            assert not below.values
        finally:
            await tier.close()
            server.stop()
            await serving


async def test_a_value_deleted_during_its_write_below_does_not_stay_there() -> None:
    with a_place() as below:
        central_store = CentralStore(
            Config(ram_bytes=16 << 20, huge_pages="never", tiers=(below.url(),), plugins=(PLUGIN,))
        )
        await central_store.start()
        try:
            below.hold("put")
            room = central_store.reserve(make_key(1), 10, None)
            assert isinstance(room, Entry)
            central_store.commit(room)
            await within_a_minute(lambda: below.inside["put"] > 0)
            assert await central_store.delete([make_key(1)], set()) == [True]
            below.let_go("put")
            await within_a_minute(lambda: not central_store._writes and not central_store._tasks)
            assert not below.values
        finally:
            await central_store.close()


@pytest.mark.parametrize(
    ("ttl_s", "below"), [(None, None), (math.inf, math.inf), (50.0, pytest.approx(50, abs=10))]
)
async def test_a_tier_below_keeps_a_value_as_long_as_the_client_says(
    server: CentralServer, ttl_s: float | None, below: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float | None] = []

    async def put(
        tier: Any, items: Sequence[tuple[bytes, Any]], *, ttl_s: float | None = None
    ) -> list[None]:
        written.append(ttl_s)
        return [None] * len(items)

    monkeypatch.setattr("tests.tiers.memory.MemoryTier.put", put)
    with a_place() as place:
        central_store = CentralStore(
            Config(ram_bytes=16 << 20, huge_pages="never", tiers=(place.url(),), plugins=(PLUGIN,))
        )
        await central_store.start()
        try:
            room = central_store.reserve(make_key(1), 10, ttl_s)
            assert isinstance(room, Entry)
            central_store.commit(room)
            await within_a_minute(lambda: not central_store._writes and not central_store._tasks)
            assert written == [below]
        finally:
            await central_store.close()
    tier = a_tier(server.url)
    assert await tier.put([(make_key(1), [memoryview(b"x")])], ttl_s=ttl_s) == [None]
    await tier.close()


@pytest.mark.parametrize("ttl_s", [MAX_TTL_S, math.ceil(MAX_TTL_S + 0.5), 1e300])
async def test_the_longest_time_to_live_is_no_fault(ttl_s: float) -> None:
    listen = ListenConfig(address="127.0.0.1:0")
    server = Central(Config(ram_bytes=16 << 20, huge_pages="never", listen=listen))
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(on_ready=lambda _: ready.set()))
    await ready.wait()
    tier = a_tier(f"kvhold://127.0.0.1:{server.port}")
    try:
        assert await tier.put([(make_key(1), [memoryview(b"x")])], ttl_s=ttl_s) == [None]
        assert await tier.probe([make_key(1)]) == [1]
        async with asyncio.timeout(60):
            stream = await tier._open()  # another client may send more
            await stream.send([encode(c.Put(make_key(2), [1], ttl_s)), b"x"])
            await stream.read(body_length(await stream.read(LENGTH_BYTES), MIB))
            stream.close()
        assert await tier.probe([make_key(2)]) == [1]
    finally:
        await tier.close()
        server.stop()
        await serving


async def test_a_scan_of_many_keys_looks_at_few_of_them_in_one_step() -> None:
    central_store = CentralStore(Config(ram_bytes=64 << 20, huge_pages="never"))
    try:
        num_keys = 10_000
        for begin in range(0, num_keys, 500):
            await central_store.ram.put(
                [(make_key(number), [memoryview(b"x")]) for number in range(begin, begin + 500)]
            )
        steps = 0

        async def count_steps() -> None:
            nonlocal steps
            while True:
                steps += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_steps())
        found = await all_pages(central_store, 5000)
        counting.cancel()
        assert len(set(found)) == len(found) == num_keys
        assert steps >= num_keys // 500
    finally:
        await central_store.close()
