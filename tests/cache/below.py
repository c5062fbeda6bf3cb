"""Caches over tiers for the tests of this folder, and the proof that they are back at their
baseline.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvhold.cache import LocalCache, open_cache
from kvhold.core.api import Cache, Hit
from kvhold.core.keys import Namespace
from kvhold.testing.cache import HYBRID, PLAIN
from tests.tiers.memory import PLUGIN

PATIENT_S = 60.0
SPACE = Namespace("model", PLAIN)
HYBRID_SPACE = Namespace("model", HYBRID)
CHUNK_BYTES = PLAIN.chunk_bytes(0, 16)
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}


def eventually(condition: Callable[[], Any]) -> Any:
    """The first true answer."""
    until = time.monotonic() + PATIENT_S
    while not (answer := condition()):
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.002)
    return answer


def on_disk(folder: Path, **options: object) -> str:
    """A disk's line for settings; without other options, of one that nobody gives up because the
    machine is busy.
    """
    patient = dict.fromkeys(("probe_timeout_s", "get_timeout_s", "put_timeout_s"), PATIENT_S)
    return f"disk://{folder}/kv?max_bytes=1GiB" + "".join(
        f"&{name}={value}" for name, value in (patient | options).items()
    )


def cache_over(*tiers: str, **settings: Any) -> LocalCache:
    """A cache of 16 MiB that knows both namespaces, and waits long for what arrives."""
    defaults = {
        "ram_bytes": "16MiB",
        "huge_pages": "never",
        "client": {"arrival_timeout_s": PATIENT_S},
    }
    cache = open_cache(**defaults | {"tiers": list(tiers), "plugins": [PLUGIN]} | settings)
    for space in (SPACE, HYBRID_SPACE):
        cache.register(space)
    return cache


@contextmanager
def a_cache_over(*tiers: str, **settings: Any) -> Iterator[LocalCache]:
    """The same; in the end nothing is held, and a clear leaves nothing."""
    with cache_over(*tiers, **settings) as cache:
        yield cache
        is_at_baseline(cache)


def is_at_baseline(cache: Cache) -> None:
    """Nothing is held, nothing is on its way, and a clear leaves nothing."""
    eventually(lambda: at_rest(cache))
    status = cache.status()
    assert status["held"] == NOTHING
    assert status["pinned_chunks"] == 0
    cache.clear()
    assert cache.status()["used_bytes"] == cache.status()["chunks"] == 0


def has_arrived(hit: Hit) -> bool:
    """Whether nothing of the hit is on its way any more, looked at now."""
    hit.refresh()
    return not hit.arriving


def set_deadlines(cache: LocalCache, **timeouts: Any) -> None:
    """Of all tiers, from now on: what is to hang is given up soon, and nothing else is."""
    assert cache.tier_worker is not None
    for guard in cache.tier_worker._stack.guards:
        guard.config = replace(guard.config, **timeouts)


def at_rest(cache: Cache) -> bool:
    """Whether nothing is being read or written below."""
    status = cache.status()
    return bool(
        status["arriving_chunks"] == 0 and status["write_behind"] == {"chunks": 0, "bytes": 0}
    )


def forget(cache: LocalCache) -> None:
    """Memory forgets all that nobody reads; tiers keep what they have."""
    assert cache.flush(deadline_s=PATIENT_S)
    eventually(lambda: at_rest(cache))
    with cache._lock:
        for entry in cache._state.ram.entries():
            cache._state.ram.remove(entry)


def tier_counter(cache: Cache, name: str, **labels: str) -> float:
    """A counter of the tiers."""
    pairs = ",".join(f"{k}={v}" for k, v in labels.items())
    return cache.status()["tier_counters"].get(f"{name}{{{pairs}}}", 0)


def bad_frames(cache: Cache) -> dict[str, float]:
    """How many frames failed which check."""
    counters = cache.status()["tier_counters"]
    return {
        name.partition("reason=")[2].rstrip("}"): value
        for name, value in counters.items()
        if name.startswith("kvhold_tier_bad_frames")
    }
