"""Memory and disks by tenant and age: exact, bounded, and a tenant sees its own."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from kvhold.cache.chores import finish
from kvhold.cache.held_ages import ages_turns
from kvhold.cache.local import LocalCache
from kvhold.core.config import load_config
from kvhold.core.keys import Namespace
from kvhold.core.store_options import StoreOptions
from kvhold.core.usage import AGES_S
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, fill
from kvhold.tiers.bytes_by_age import OLD, SLOT_S, BytesByAge
from kvhold.tiers.disk import DiskConfig, DiskTier
from tests.browsing import Page, browser
from tests.control.running import running_control
from tests.node.nodes import PATIENT_S, RunningNode

__all__ = ["browser"]

ACME = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),))
GLOBEX = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),))
SPACE = bytes(16)
DAY_S = 86_400


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def total(held: BytesByAge) -> int:
    return sum(held.by_slot().values())


def test_bytes_are_in_the_half_hour_of_their_storing_until_they_go() -> None:
    clock = Clock()
    held = BytesByAge(clock)
    slots = []
    for _ in range(3):
        slots.append(held.slot())
        held.add(SPACE + b"key", slots[-1], 10)
        clock.now_s += SLOT_S
    assert held.by_slot() == {(SPACE, slot): 10 for slot in slots}
    held.add(SPACE + b"key", slots[1], -10)
    assert held.by_slot() == {(SPACE, slot): 10 for slot in (slots[0], slots[2])}


def test_a_year_takes_the_memory_of_nine_days() -> None:
    clock = Clock()
    held = BytesByAge(clock)
    stored: list[tuple[bytes, int]] = []
    draw = Random(1)
    for number in range(365 * 24):
        clock.now_s += 3600
        stored.append((SPACE + bytes([number % 200]), held.slot()))
        held.add(*stored[-1], 1)
        if draw.random() < 0.5:
            held.add(*stored.pop(draw.randrange(len(stored))), -1)
        assert len(held.by_slot()) <= 9 * 48 + 1
        assert total(held) == len(stored)
    assert held.by_slot()[SPACE, OLD] > 1000
    for entry in stored:
        held.add(*entry, -1)
    assert held.by_slot() == {}


def test_rows_are_by_tenant_place_and_age() -> None:
    clock = Clock()
    memory, disk = BytesByAge(clock), BytesByAge(clock)
    now = memory.slot()
    spaces = {bytes([number]) * 16: name for number, name in enumerate(("acme", "acme", None))}
    for space in spaces:
        for hours, nbytes in ((0, 1), (2, 2), (7, 4), (30, 8), (24 * 8, 16)):
            memory.add(space, now - hours * 2, nbytes)
    disk.add(bytes(16), now, 100)
    rows = finish(ages_turns({"ram": [memory], "nvme": [disk, disk]}, spaces.get, now))
    assert len(AGES_S) == 4
    assert {(row.tenant, row.place): row.by_age for row in rows} == {
        ("acme", "nvme"): [200, 0, 0, 0, 0],
        ("acme", "ram"): [2, 4, 8, 16, 32],
        ("", "ram"): [1, 2, 4, 8, 16],
    }
    assert [sum(row.by_age) for row in rows] == [200, 62, 31]


def test_memory_adds_up_after_evictions_and_clears() -> None:
    settings = {"ram_bytes": "16MiB", "huge_pages": "never"}
    with LocalCache(load_config(settings, environ={})) as cache:
        for space in (ACME, GLOBEX):
            cache.register(space)
        draw = Random(2)
        for number in range(150):
            keep(cache, draw.choice((ACME, GLOBEX)), seed=draw.randrange(100), num_tokens=640)
            if number % 40 == 39:
                cache.clear(draw.choice((ACME, GLOBEX)).digest)
            state = cache._state
            assert total(state.held) == state.ram.used_bytes
        places, tenant_of = {"ram": [state.held]}, state.reencodings.tenant_of
        rows = finish(ages_turns(places, tenant_of, state.held.slot()))
        assert {row.tenant for row in rows} == {"acme", "globex"}
        cache.clear()
        assert cache._state.held.by_slot() == {}


async def test_a_disk_adds_up_also_after_a_restart(tmp_path: Path) -> None:
    config = DiskConfig(path=f"{tmp_path}/a,{tmp_path}/b", max_bytes=400_000)
    keys = [bytes([number % 3]) * 16 + bytes([number]) * 24 for number in range(60)]
    disk = DiskTier(config)
    await disk.put([(key, (memoryview(bytes(5000)),)) for key in keys])
    await disk.delete(keys[::2])
    await disk.replace([(keys[1], (memoryview(bytes(9000)),))])
    assert sum(map(total, disk.held)) == disk.used_bytes > 0
    before = _by_place(disk)
    await disk.close()
    again = DiskTier(config)
    assert [key async for key in again.scan(b"")]
    assert _by_place(again) == before
    assert sum(map(total, again.held)) == again.used_bytes
    await again.close()


def _by_place(disk: DiskTier) -> list[dict[tuple[bytes, int], int]]:
    return [held.by_slot() for held in disk.held]


def keep(cache: Any, space: Namespace, *, seed: int = 0, num_tokens: int = 64) -> None:
    names = a_prompt(space, num_tokens, seed).chunks()
    options = StoreOptions(tenant=space.tenant)
    with cache.reserve(PLAIN, names, store_options=options) as reservation:
        fill(reservation, PLAIN, names)
        reservation.commit()


def stored_on_disk(tmp_path: Path, start_node: Callable[..., RunningNode]) -> NodeClient:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB&name=nvme"]\n')
    client = start_node("--config", str(settings)).client()
    for number, space in enumerate((ACME, GLOBEX)):
        client.register(space)
        for seed in range(1 + number):
            keep(client, space, seed=seed)
    assert client.flush(deadline_s=PATIENT_S)
    return client


async def test_a_tenants_token_sees_its_own_bytes(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    client = await asyncio.to_thread(stored_on_disk, tmp_path, start_node)
    file = tmp_path / "acme"
    file.write_text("t-acme")
    file.chmod(0o600)
    tokens = {"tenant_read_token_files": {"acme": str(file)}}
    async with running_control(client.path, **tokens) as control:
        _, found = await control.own("GET", "/v1/held")
        held = {(row["tenant"], row["place"]): row["by_age"] for row in found["rows"]}
        assert held.keys() == {(t, p) for t in ("acme", "globex") for p in ("ram", "nvme")}
        assert all(by_age[0] == sum(by_age) > 0 for by_age in held.values())
        assert held["globex", "ram"][0] == 2 * held["acme", "ram"][0]
        status = client.status()
        assert held["acme", "ram"][0] == status["namespaces"][ACME.digest.hex()]
        on_disk = sum(by_age[0] for (_, place), by_age in held.items() if place == "nvme")
        assert on_disk == status["tiers"][0]["used_bytes"]
        mine = {"Authorization": "Bearer t-acme"}
        _, found = await control.ask("GET", "/v1/held", headers=mine)
        assert {row["tenant"] for row in found["rows"]} == {"acme"} and len(found["rows"]) == 2


async def test_the_page_shows_who_holds_memory_and_disks(
    tmp_path: Path, start_node: Callable[..., RunningNode], browser: Any
) -> None:
    client = await asyncio.to_thread(stored_on_disk, tmp_path, start_node)
    page = Page(browser)
    async with running_control(client.path, history_interval_s=0.05) as control:
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.until, "#held", "acme", "globex", "ram", "nvme", "KiB")
        assert "older" in page.text("#ages")
        assert page.count("#held .bar") == 4
        assert page.errors == []
