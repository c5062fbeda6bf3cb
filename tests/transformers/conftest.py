"""What the tests with transformers share: models made once, and a cache that must be as empty after
a test as before it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch in this environment")
pytest.importorskip("transformers", reason="no transformers in this environment")

import torch

from kvhold.cache import LocalCache, open_cache
from tests.transformers.models import CONFIGS, make_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For models this small, torch's threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models() -> Callable[[str], Any]:
    """Models by their names in CONFIGS. Tests that change one make their own."""
    return functools.cache(make_model)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def any_model(request: pytest.FixtureRequest, models: Callable[[str], Any]) -> Any:
    return models(request.param)


@pytest.fixture(scope="session")
def llama(models: Callable[[str], Any]) -> Any:
    return models("llama")


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with open_cache(ram_bytes="16MiB") as cache:
        yield cache
        status = cache.status()
        assert status["held"] == {"tickets": 0, "leases": 0, "reservations": 0}
        assert status["pinned_chunks"] == 0
        cache.clear()
        assert cache.status()["used_bytes"] == 0
