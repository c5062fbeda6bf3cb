"""What tests of re-encoding share: tiers, a whole re-encoding, and its counts."""

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from kvhold.cache import LocalCache
from kvhold.core.api import ReencodeProgress
from kvhold.core.keys import Prompt
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from tests.cache.below import PATIENT_S, eventually, forget, on_disk, tier_counter
from tests.cache.wide import store_values

RESULTS = ("replaced", "same", "kept_lossy", "missing", "bad", "unknown", "failed")


@pytest.fixture(params=["memory", "disk", "fs"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier's, for settings."""
    patient = f"probe_timeout_s={PATIENT_S}&get_timeout_s={PATIENT_S}&put_timeout_s={PATIENT_S}"
    lines = {
        "memory": f"memory://?max_bytes=16MiB&name=below&{patient}",
        "disk": on_disk(tmp_path, name="below"),
        "fs": f"fs://{tmp_path}/shared?name=below&{patient}",
    }
    return lines[request.param]


def reencoded(cache: LocalCache, codec: str, tier: str = "plugin", **of: Any) -> ReencodeProgress:
    """To its end; the counts add up."""
    with cache.reencode(tier, codec, **of) as reencoding:
        counts = reencoding.wait(time.monotonic() + PATIENT_S)
    assert counts.done
    assert counts.seen == sum(getattr(counts, name) for name in RESULTS)
    for name in RESULTS:
        assert tier_counter(cache, "kvhold_reencoded_chunks", tier=tier, result=name) >= getattr(
            counts, name
        )
    eventually(lambda: cache.status()["reencodings"] == 0)
    return counts


def only(counts: ReencodeProgress) -> dict[str, Any]:
    """What is not nothing."""
    return {
        name: value
        for name, value in asdict(counts).items()
        if value and not name.startswith("bytes_")
    }


def filled(
    cache: LocalCache, prompt: Prompt, store_options: StoreOptions = DEFAULT_OPTIONS
) -> Prompt:
    store_values(cache, prompt, store_options)
    forget(cache)
    return prompt
