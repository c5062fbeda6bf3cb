import logging
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from kvhold.core.holdings import ChunkBytes
from kvhold.core.layout import Group
from kvhold.core.sizes import format_size
from kvhold.memory.copier import Copier, Piece
from kvhold.memory.copy import warm_up
from kvhold.memory.views import opaque_blocks

SIZES = tuple(1 << power for power in range(12, 19))
NEVER = 1 << 62
_BYTES = 8 << 20
_LAYERS, _ROUNDS = 8, 5

log = logging.getLogger(__name__)


def direct_bytes(
    copier: Copier,
    device: str,
    *,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> int:
    """The least size at which direct loads are never slower than the ring, or NEVER."""
    seconds_of = seconds_of or _median_seconds
    found = NEVER
    for nbytes in reversed(SIZES):
        seconds = _seconds_of_ways(copier, device, nbytes, seconds_of)
        if len(seconds) < 2 or seconds[1] > seconds[0]:
            break
        found = nbytes
    log.info(
        "kvhold: pieces are loaded directly %s",
        "never" if found == NEVER else f"from {format_size(found)} on",
    )
    return found


def _seconds_of_ways(
    copier: Copier, device: str, nbytes: int, seconds_of: Callable[[Callable[[], object]], float]
) -> list[float]:
    import torch

    blocks = _BYTES // _LAYERS // nbytes
    tensors = [torch.zeros(blocks, nbytes, dtype=torch.int8, device=device) for _ in range(_LAYERS)]
    group = Group(
        layers=_LAYERS,
        planes=2,
        heads=1,
        head_dim=1,
        dtype="int8",
        packing="trial",
        block_tokens=1,
        block_bytes=nbytes,
    )
    view = opaque_blocks(group, tensors, block_axis=0)
    warm_up(device, [view])
    ids = np.random.default_rng(0).permutation(blocks)
    with copier.scratch(_BYTES) as buffer:
        piece = Piece(view, ids, buffer, ChunkBytes(np.zeros(1, np.int64), np.array([blocks])))
        return [
            seconds_of(lambda: copier.scatter([piece], after=copier.mark()).wait())
            for _ in copier.stages()
        ]


def _median_seconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + _ROUNDS):
        began_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began_s)
    return median(taken[1:])
