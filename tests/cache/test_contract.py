"""The cache in this process keeps the contract of a cache."""

from collections.abc import Iterator

import pytest

from kvhold.cache import LocalCache, open_cache
from kvhold.testing import CacheContract
from kvhold.testing.cache import MakeCache


class TestLocalCache(CacheContract):
    @pytest.fixture
    def make_cache(self) -> Iterator[MakeCache]:
        opened: list[LocalCache] = []

        def make() -> LocalCache:
            opened.append(open_cache(ram_bytes="16MiB", huge_pages="never"))
            return opened[-1]

        yield make
        for cache in opened:
            cache.close()
