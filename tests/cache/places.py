"""A tier's place in memory, as a fixture of tests of caches."""

from collections.abc import Iterator

import pytest

from tests.tiers.memory import Place, a_place


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place
