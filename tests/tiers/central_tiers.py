"""Tiers on a real `kvhold serve --listen`, for tests."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvhold.testing.tier import scanned
from kvhold.tiers.central import CentralTier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.central import CentralServer
from tests.tiers.conftest import opened

MIB = 1 << 20


def a_tier(url: str) -> CentralTier:
    return opened(CentralTier.from_url(parse_url(url)))


@pytest.fixture(scope="module")
def server() -> Iterator[CentralServer]:
    with CentralServer(ram_bytes="32MiB") as server:
        yield server


@pytest.fixture
async def tier(server: CentralServer) -> AsyncIterator[CentralTier]:
    tier = a_tier(server.url)
    yield tier
    await empty(tier)


async def empty(tier: CentralTier) -> None:
    again = opened(CentralTier(tier._config))
    await again.delete(await scanned(again))
    await again.close()
