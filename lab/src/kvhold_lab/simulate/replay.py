"""Replay a trace on a real, scaled-down cache.

Each request is looked up in a `LocalCache`, and its missing chunks are committed. Chunks have one
token and 4 KiB, never written. All else is real.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvhold.cache.local import LocalCache
from kvhold.core.config import load_config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.tiers.policies import TIER_POLICIES
from kvhold_lab.simulate.trace import Cut

POLICIES = TIER_POLICIES  # the learned one depends on the time, too

_CHUNK_BYTES = 4096
_FRAME_BYTES = 2 * _CHUNK_BYTES  # with a header page
_ARENA_BYTES = 2 << 20
_PATIENT_S = 60.0

_LAYOUT = Layout(
    (Group(layers=1, planes=1, heads=1, head_dim=_CHUNK_BYTES, dtype="uint8"),),
    tokens_per_chunk=1,
    tail_tokens=0,
)
_SPACE = Namespace("trace", _LAYOUT)


def as_lower(num_chunks: int) -> int:
    return _rounded(num_chunks * _FRAME_BYTES) // _FRAME_BYTES


def serve(
    cut: Cut,
    *,
    policy: str,
    ram_chunks: int,
    lower_chunks: int = 0,
    on_request: Callable[[int], None] | None = None,
) -> npt.NDArray[np.int32]:
    """Return chunks found in memory and below, by request: [requests, 2].

    lower_chunks: from `as_lower`; 0: no lower tier

    Raises CapacityError; KVHoldError: the tier does not keep up.
    """
    assert policy in POLICIES and ram_chunks >= 1 and lower_chunks == as_lower(lower_chunks)
    settings = {
        "ram_bytes": _rounded(ram_chunks * _CHUNK_BYTES),
        "namespace_quota_bytes": ram_chunks * _CHUNK_BYTES,  # exact; the arena is rounded
        "policy": policy,
        "huge_pages": "never",
        "write_behind_bytes": 1 << 50,
        "tiers": [f"memory://?max_bytes={lower_chunks * _FRAME_BYTES}&policy={policy}"]
        if lower_chunks
        else [],
        "client": {"arrival_timeout_s": _PATIENT_S},
    }
    found = np.zeros((cut.starts.size - 1, 2), np.int32)
    with LocalCache(load_config(settings, environ={})) as cache:
        cache.register(_SPACE)
        for request in range(found.shape[0]):
            prompt = _SPACE.prompt(cut.chunks[cut.starts[request] : cut.starts[request + 1]])
            with cache.lookup(prompt.query()) as hit:
                here, num_tokens = hit.sources.get("ram", 0), hit.num_tokens
            found[request] = here, num_tokens - here
            with cache.reserve(_LAYOUT, prompt.chunks(first=num_tokens)) as reservation:
                mark = reservation.commit()
            if lower_chunks and not cache.flush(mark, deadline_s=_PATIENT_S):
                raise KVHoldError(
                    f"the tier below has not written request {request + 1} within {_PATIENT_S:g} s"
                )
            if on_request is not None:
                on_request(request)
    return found


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ARENA_BYTES) * _ARENA_BYTES
