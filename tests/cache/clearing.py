"""What tests of clears share: prompts, tiers that are away, and ways to look below."""

from collections.abc import Iterator

import pytest

from kvhold.cache import LocalCache
from kvhold.core.errors import TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.testing.cache import a_prompt
from kvhold.testing.tier import make_key
from kvhold.tiers.generations import is_marker
from kvhold_lab.servers.redis import RedisServer
from tests.cache.below import PATIENT_S, SPACE
from tests.tiers.conftest import start_or_skip
from tests.tiers.memory import PLUGIN, SHARED_PLUGIN, Place

PROMPT = a_prompt(SPACE, 64)
NAMESPACE = SPACE.digest
NAMESPACE_OF_KEYS = make_key(0)[:NAMESPACE_BYTES]
PLUGINS = [PLUGIN, SHARED_PLUGIN]
AWAY = TierUnavailable("memory", "scan", "away")
DOWN = dict.fromkeys(("check", "probe", "get", "put", "delete", "scan"), AWAY)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    yield from start_or_skip(lambda: RedisServer(unix=True))


def chunks(place: Place) -> int:
    return sum(not is_marker(key) for key in place.values)


def settle(cache: LocalCache) -> None:
    assert cache.flush(deadline_s=PATIENT_S)
