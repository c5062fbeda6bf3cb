"""A copy to a peer that ends at once is reported all the same: its chunks are held until then."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvhold.cache.transfer.commands import PeerCopyCommand
from kvhold.cache.transfer.peer_copier import PeerCopier
from kvhold.cache.transfer.tasks import Tasks
from kvhold.core.errors import TierUnavailable

ENTRIES = cast(Any, [SimpleNamespace(key=b"1"), SimpleNamespace(key=b"2")])
COMMAND = PeerCopyCommand(7, "10.0.0.9:7711", cast(Any, None), ENTRIES)


class Tier:
    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault

    async def load_at(self, address: str, query: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        await asyncio.Event().wait()


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_cancelled_part_is_reported(turns: int) -> None:
    reports: list[Any] = []
    copier = PeerCopier(
        cast(Any, Tier(None)), Tasks(), report=lambda *report: reports.append(report)
    )
    copier.begin(COMMAND)
    for _ in range(turns):
        await asyncio.sleep(0)
    copier.end(7)
    for _ in range(5):
        await asyncio.sleep(0)
    assert reports == [(7, [False, False], "cancelled", None)]


async def test_a_fault_is_reported() -> None:
    reports: list[Any] = []
    tier = cast(Any, Tier(TierUnavailable("peers", "load", "gone")))
    copier = PeerCopier(tier, Tasks(), report=lambda *report: reports.append(report))
    copier.begin(COMMAND)
    for _ in range(5):
        await asyncio.sleep(0)
    assert reports == [(7, [False, False], "peers: load: gone", None)]
