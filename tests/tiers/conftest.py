"""Servers for the tests of tiers: the real ones, started once a module; a visible skip where the
program is not installed.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import pytest

from kvhold.tiers.base import Tier
from kvhold_lab.servers.base import NotInstalled

_WITH_SERVERS = (
    "central",
    "redis",
    "memcached",
    "s3",
    "mooncake",
    "layerwise",
    "peers_etcd",
    "peers_bus",
)

Server = TypeVar("Server")
AnyTier = TypeVar("AnyTier", bound=Tier)

_opened: list[Tier] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules whose tests start real servers; `make unit` leaves them to `make tiers`."""
    for item in items:
        if "tests/tiers/" in item.nodeid and any(
            item.path.name.startswith(f"test_{name}") for name in _WITH_SERVERS
        ):
            item.add_marker("server")


def start_or_skip(make: Callable[[], AbstractContextManager[Server]]) -> Iterator[Server]:
    """Yield a running server; for fixtures."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(make())
        except NotInstalled as error:
            pytest.skip(str(error))
        yield server


@contextmanager
def server_or_skip(make: Callable[[], AbstractContextManager[Server]]) -> Iterator[Server]:
    """Run a server in a `with`; for tests that need one of their own."""
    yield from start_or_skip(make)


def opened(tier: AnyTier) -> AnyTier:
    """The tier, which is closed after the test however that ends, if it uses
    `nothing_stays_open`.
    """
    _opened.append(tier)
    return tier


@pytest.fixture
async def nothing_stays_open() -> AsyncIterator[None]:
    """A test that fails leaves no connection to the next one, where it would be found as a resource
    that nobody closed.
    """
    yield
    while _opened:
        await _opened.pop().close()
