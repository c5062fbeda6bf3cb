"""A chunk has one token and 4 KiB. A tier below memory is a disk."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhold.cache.local import LocalCache
from kvhold.core.config import Config, load_config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.tiers.policies import POLICIES
from kvhold_lab.simulate.policy_replay import Arrivals, learned_policy
from kvhold_lab.simulate.prefill_cost import PrefillCost
from kvhold_lab.simulate.trace import Cut

_CHUNK_BYTES = 4096
_FRAME_BYTES = _CHUNK_BYTES + 4096
_ARENA_BYTES = 2 << 20
_PATIENT_S = 60.0

_LAYOUT = Layout(
    (Group(layers=1, planes=1, heads=1, head_dim=_CHUNK_BYTES, dtype="uint8"),),
    tokens_per_chunk=1,
    tail_tokens=0,
)
_SPACE = Namespace("trace", _LAYOUT)


def serve(
    cut: Cut,
    *,
    policy: str,
    ram_chunks: int,
    lower_chunks: int = 0,
    policy_for: str = "tokens",
    cost: PrefillCost | None = None,
    on_request: Callable[[int], None] | None = None,
) -> npt.NDArray[np.int32]:
    """Return chunks found in memory and below, by request: [requests, 2].

    lower_chunks: of a disk below memory; 0: no disk

    Raises CapacityError; ConfigError: `learned` lacks times; KVHoldError: a slow disk.
    """
    with tempfile.TemporaryDirectory(prefix="kvhold-simulate-") as folder:
        settings = _settings(Path(folder), policy, policy_for, ram_chunks, lower_chunks)
        return _serve(cut, settings, cost, on_request)


def _settings(
    folder: Path, policy: str, policy_for: str, ram_chunks: int, lower_chunks: int
) -> Config:
    assert policy in POLICIES and ram_chunks >= 1
    settings = {
        "ram_bytes": _rounded(ram_chunks * _CHUNK_BYTES, _ARENA_BYTES),
        "namespace_quota_bytes": ram_chunks * _CHUNK_BYTES,
        "policy": policy,
        "policy_for": policy_for,
        "huge_pages": "never",
        "write_behind_bytes": 1 << 50,
        "tiers": [_disk(folder, policy, lower_chunks)] if lower_chunks else [],
        "client": {"arrival_timeout_s": _PATIENT_S},
    }
    return load_config(settings, environ={})


def _serve(
    cut: Cut,
    config: Config,
    cost: PrefillCost | None,
    on_request: Callable[[int], None] | None,
) -> npt.NDArray[np.int32]:
    arrivals = Arrivals(cut.times_s)
    found = np.zeros((cut.starts.size - 1, 2), np.int32)
    with LocalCache(
        config, policy=learned_policy(arrivals) if config.policy == "learned" else None
    ) as cache:
        cache.register(_SPACE)
        if cost is not None:
            cache.lookup(_SPACE.prompt([]).query(), cost=cost.compute_cost(cut.tokens_per_chunk))
        for request in range(found.shape[0]):
            arrivals.reach(request)
            prompt = _SPACE.prompt(cut.chunks[cut.starts[request] : cut.starts[request + 1]])
            with cache.lookup(prompt.query()) as hit:
                here, num_tokens = hit.sources.get("ram", 0), hit.num_tokens
            found[request] = here, num_tokens - here
            with cache.reserve(_LAYOUT, prompt.chunks(first=num_tokens)) as reservation:
                mark = reservation.commit()
            if config.tiers and not cache.flush(mark, deadline_s=_PATIENT_S):
                raise KVHoldError(
                    f"the tier below has not written request {request + 1} within {_PATIENT_S:g} s"
                )
            if on_request is not None:
                on_request(request)
    return found


def _disk(folder: Path, policy: str, num_chunks: int) -> str:
    file_bytes = _rounded(_FRAME_BYTES, os.statvfs(folder).f_frsize)
    return (
        f"disk://{folder}?max_bytes={num_chunks * file_bytes}&policy={policy}"
        "&direct=never&io_threads=1"
    )


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
