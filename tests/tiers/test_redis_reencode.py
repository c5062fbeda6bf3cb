"""A real Redis's values are re-encoded while they are read: in strings and in parts, with the time
that it had left.
"""

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("kvhold.kernels.numba_rans", reason="no numba in this environment")

from kvhold.core.store_options import StoreOptions
from kvhold.testing.cache import a_prompt
from kvhold_lab.servers.redis import RedisServer
from tests.cache.below import PATIENT_S, bad_frames, forget
from tests.cache.wide import WIDE_SPACE, store_values, wide_cache, worst_error
from tests.tiers.conftest import start_or_skip

PATIENT = f"probe_timeout_s={PATIENT_S}&get_timeout_s={PATIENT_S}&put_timeout_s={PATIENT_S}"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    yield from start_or_skip(RedisServer)


@pytest.mark.parametrize("options", ["", "&max_value_bytes=30000"], ids=["strings", "in parts"])
def test_chunks_there_and_back_with_their_times(server: RedisServer, options: str) -> None:
    server.call("FLUSHALL")
    with wide_cache(f"{server.url}?{PATIENT}&batch_bytes=64KiB{options}") as cache:
        lasting, passing = a_prompt(WIDE_SPACE, 256, seed=1), a_prompt(WIDE_SPACE, 256, seed=2)
        store_values(cache, lasting)
        store_values(cache, passing, StoreOptions(ttl_s=5000))
        forget(cache)
        for codec in ("lossless", "raw", "lossless"):
            with cache.reencode("redis", codec) as reencoding:
                while not reencoding.refresh().done:
                    assert worst_error(cache, lasting) == worst_error(cache, passing) == 0
                    forget(cache)
                counts = reencoding.wait(time.monotonic() + PATIENT_S)
            assert (counts.replaced, counts.seen) == (8, 8), counts
        assert bad_frames(cache) == {}
        assert worst_error(cache, lasting) == worst_error(cache, passing) == 0
        values = list(server.call("KEYS", "kvhold:*}"))
        left_ms = [server.call("PTTL", name) for name in values]
        assert len(left_ms) == 8
        assert left_ms.count(-1) == 4
        assert all(0 < left <= 5_001_000 for left in left_ms if left != -1)
        old_parts = set(server.call("KEYS", "*")) - set(values)
        for_ever = sum(server.call("PTTL", name) == -1 for name in old_parts)
        assert for_ever == (4 * 2 if options else 0), (
            "but for the parts of what lasts, all that is left goes by itself"
        )
