"""A node, as its clients see it, keeps the contract of a cache."""

from collections.abc import Iterator

import pytest

from kvhold.node import NodeClient
from kvhold.testing import CacheContract
from kvhold.testing.cache import MakeCache
from tests.node.nodes import RunningNode


class TestNodeClient(CacheContract):
    @pytest.fixture
    def make_cache(self, shared_node: RunningNode) -> Iterator[MakeCache]:
        made: list[NodeClient] = []

        def make() -> NodeClient:
            made.append(shared_node.client())
            return made[-1]

        yield make
        for client in made:
            client.close()
