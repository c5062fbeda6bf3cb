"""The Mooncake tier against a real master, with memory that the tier itself lends.

Skipped where the client is not installed.
"""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import ClassVar

import pytest

from kvhold.core.errors import ConfigError, TierError, TierUnavailable
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.mooncake import MooncakeMaster
from tests.tiers.conftest import opened, start_or_skip

pytest.importorskip(
    "mooncake.store", reason="pip install mooncake-transfer-engine-non-cuda", exc_type=ImportError
)
from mooncake.store import MooncakeDistributedStore

from kvhold.tiers.mooncake import MooncakeConfig, MooncakeTier

# a client takes a second to close
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_open")]

MIB = 1 << 20
LENT_BYTES = 256 * MIB
_numbers = count()


def at(url: str) -> MooncakeTier:
    return opened(MooncakeTier.from_url(parse_url(url)))


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    yield from start_or_skip(MooncakeMaster)


@pytest.fixture
def own_master() -> Iterator[MooncakeMaster]:
    """One that a test may hurt."""
    yield from start_or_skip(MooncakeMaster)


@pytest.fixture(scope="module")
def lender(master: MooncakeMaster) -> Iterator[None]:
    """Another client, whose memory the store uses. (One that lends takes 2 s to close.)"""
    client = MooncakeDistributedStore()
    assert (
        client.setup(
            "127.0.0.1", "P2PHANDSHAKE", LENT_BYTES, 16 * MIB, "tcp", "", f"127.0.0.1:{master.port}"
        )
        == 0
    )
    yield
    client.close()


@pytest.fixture
async def tier(master: MooncakeMaster, lender: None) -> AsyncIterator[MooncakeTier]:
    tier = at(master.url(prefix=f"test-{next(_numbers)}"))
    yield tier
    await tier.close()


class TestMooncakeTier(TierContract):
    too_large_bytes = LENT_BYTES + MIB

    @pytest.fixture
    async def tier(self, tier: MooncakeTier) -> MooncakeTier:
        return tier


async def test_tiers_with_different_prefixes_do_not_see_each_other(
    master: MooncakeMaster, tier: MooncakeTier
) -> None:
    other = at(master.url(prefix="another"))
    assert await store(tier, {make_key(1): b"mine"}) == [True]
    assert await other.probe([make_key(1)]) == [None]
    assert await store(other, {make_key(1): b"theirs", make_key(2): b"2"}) == [True, True]
    assert await fetch(tier, [make_key(1), make_key(2)], [10, 10]) == [b"mine", None]
    assert await fetch(other, [make_key(1)], [10]) == [b"theirs"]
    assert await scanned(other) == sorted([make_key(1), make_key(2)])
    assert await other.delete([make_key(1), make_key(2)]) == [True, True]
    assert await scanned(tier) == [make_key(1)]
    await other.close()


async def test_a_delete_waits_for_a_readers_lease_and_reports_one_that_does_not_end(
    master: MooncakeMaster, tier: MooncakeTier
) -> None:
    hasty = at(master.url(prefix=tier._config.prefix, delete_wait_s=0))
    await hasty.check()
    refused = ""
    # on a busy machine the lease may end before the delete
    while not refused:
        await store(tier, {make_key(1): b"x"})
        assert await fetch(tier, [make_key(1)], [1]) == [b"x"]
        try:
            await hasty.delete([make_key(1)])
        except TierError as error:
            refused = str(error)
    assert "leased" in refused
    assert await tier.delete([make_key(1)]) == [True]
    await hasty.close()


async def test_a_cancelled_get_leaves_no_thread_that_writes(tier: MooncakeTier) -> None:
    """D35: a time-out there left the thread writing into memory that had been given back."""
    values = {make_key(i): make_value(i, 4 * MIB) for i in range(4)}
    assert await store(tier, values) == [True] * 4
    for turns in range(6):
        memory = [bytearray(4 * MIB) for _ in values]
        call = asyncio.ensure_future(tier.get(list(values), [[memoryview(m)] for m in memory]))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait((call,))
        del call  # whose traceback has the caller's memory in its frames
        gc.collect()
        for one in memory:
            one.append(0)  # a BufferError if a thread still had it


class SlowClient:
    """A client whose set-up takes until `may_go_on`, and returns `code`."""

    made: ClassVar[list["SlowClient"]] = []
    may_go_on = threading.Event()
    code = 0

    def __init__(self) -> None:
        self.num_closed = 0
        self.made.append(self)

    def setup(self, *_: object) -> int:
        self.may_go_on.wait(60)
        return self.code

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [0] * len(names)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
async def slow_tier(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MooncakeTier]:
    """A tier with such clients, beside a master that only accepts connections."""
    monkeypatch.setattr(SlowClient, "made", [])
    monkeypatch.setattr(SlowClient, "may_go_on", threading.Event())
    monkeypatch.setattr("kvhold.tiers.mooncake.MooncakeDistributedStore", SlowClient)
    master = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = master.sockets[0].getsockname()[1]
    tier = at(f"mooncake://127.0.0.1:{port}?allow_all_interfaces=true")
    yield tier
    SlowClient.may_go_on.set()
    await tier.close()
    master.close()


async def begin_set_up(tier: MooncakeTier) -> "asyncio.Task[list[int | None]]":
    """Return a probe that waits for the set-up of a client."""
    probing = asyncio.create_task(tier.probe([make_key(1)]))
    async with asyncio.timeout(60):
        while not SlowClient.made:  # noqa: ASYNC110 - a thread makes it
            await asyncio.sleep(0.001)
    return probing


async def test_a_set_up_longer_than_a_deadline_is_used_by_the_next_call(
    slow_tier: MooncakeTier,
) -> None:
    for _ in range(3):
        probing = await begin_set_up(slow_tier)
        for _ in range(10):
            await asyncio.sleep(0)
        probing.cancel()
        SlowClient.may_go_on.set()
        await asyncio.wait((probing,))
    assert await slow_tier.probe([make_key(1)]) == [None]
    assert len(SlowClient.made) == 1
    await slow_tier.close()
    assert [client.num_closed for client in SlowClient.made] == [1]


async def test_a_client_that_nobody_waits_for_is_closed_with_the_tier(
    slow_tier: MooncakeTier,
) -> None:
    probing = await begin_set_up(slow_tier)
    probing.cancel()
    SlowClient.may_go_on.set()
    await slow_tier.close()
    assert [client.num_closed for client in SlowClient.made] == [1]


async def test_a_client_whose_set_up_fails_is_closed(
    slow_tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowClient.may_go_on.set()
    monkeypatch.setattr(SlowClient, "code", -900)
    with pytest.raises(TierUnavailable):
        await slow_tier.check()
    assert [client.num_closed for client in SlowClient.made] == [1]


async def test_without_lent_memory_the_store_is_full(own_master: MooncakeMaster) -> None:
    tier = at(own_master.url())
    faults = await tier.put([(make_key(1), [memoryview(b"x")])])
    assert [getattr(fault, "reason", None) for fault in faults] == ["full"]
    await tier.close()


async def test_a_dead_master_is_unavailable_and_no_miss(own_master: MooncakeMaster) -> None:
    tier = at(own_master.url(segment_bytes="16MiB"))
    assert await store(tier, {make_key(1): b"x"}) == [True]
    own_master.kill()
    for call in (
        tier.check,
        lambda: tier.probe([make_key(1)]),
        lambda: fetch(tier, [make_key(1)], [1]),
        lambda: store(tier, {make_key(2): b"x"}),
        lambda: tier.delete([make_key(1)]),
        lambda: scanned(tier),
    ):
        with pytest.raises(TierUnavailable):
            await call()
    await tier.close()


async def test_a_master_that_was_never_there_is_named(own_master: MooncakeMaster) -> None:
    own_master.kill()
    tier = at(own_master.url())
    with pytest.raises(TierUnavailable, match=f"127.0.0.1:{own_master.port}"):
        await tier.probe([make_key(1)])
    own_master.start()
    assert await tier.probe([make_key(1)]) == [None]
    await tier.close()


async def test_a_scan_without_the_masters_http_port_says_what_to_set(
    master: MooncakeMaster,
) -> None:
    tier = at(master.url(admin=""))
    with pytest.raises(TierError, match="admin"):
        await scanned(tier)
    await tier.close()


def test_what_cannot_work_is_refused_when_it_is_made() -> None:
    for text, message in {
        "mooncake://host:1": "allow_all_interfaces",
        "mooncake://host?allow_all_interfaces=true": "host:port",
        "mooncake://host:1/path?allow_all_interfaces=true": "no path",
        "mooncake://me:secret@host:1?allow_all_interfaces=true": "credentials",
        "mooncake://host:1?allow_all_interfaces=true&prefix=a/b": "prefix",
        "mooncake://host:1?allow_all_interfaces=true&protocol=udp": "protocol",
    }.items():
        with pytest.raises(ConfigError, match=message):
            at(text)
    assert MooncakeConfig().allow_all_interfaces is False
