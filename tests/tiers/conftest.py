"""Servers for the tests of tiers: the real ones, started once a module; a visible skip where the program is not installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import pytest

from kvhold.testing.servers.base import NotInstalled, ServerProcess

Server = TypeVar("Server", bound=ServerProcess)


def start_or_skip(make: Callable[[], Server]) -> Iterator[Server]:
    """Yield a running server; what a fixture delegates to."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(make())
        except NotInstalled as error:
            pytest.skip(str(error))
        yield server
