"""What tests of the tier worker share: keys, and prompts that only tiers have."""

from collections.abc import Iterator

import pytest

from kvhold.cache import LocalCache
from kvhold.core.keys import make_key
from kvhold.testing.cache import a_prompt, store
from tests.cache.below import SPACE, forget
from tests.tiers.memory import Place, a_place

SOON_S = 0.03  # a deadline that is to pass


@pytest.fixture
def second() -> Iterator[Place]:
    with a_place() as place:
        yield place


def keys_of(num_tokens: int, seed: int = 0) -> list[bytes]:
    prompt = a_prompt(SPACE, num_tokens, seed)
    return [
        make_key(SPACE.digest, prompt.hash_at(chunk), 0, 0) for chunk in range(num_tokens // 16)
    ]


def put_below(cache: LocalCache, num_tokens: int, seed: int = 0) -> None:
    """A prompt that tiers have, and memory has not."""
    store(cache, a_prompt(SPACE, num_tokens, seed))
    forget(cache)


def fetched_keys(place: Place) -> list[bytes]:
    return [key for keys in place.asked.get("get", []) for key in keys]
