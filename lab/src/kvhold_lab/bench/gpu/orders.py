from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvhold.core.errors import LayoutError
from kvhold.core.holdings import ChunkBytes
from kvhold.core.layout import Group
from kvhold.memory.copier import Piece, Stage
from kvhold.memory.copy import warm_up
from kvhold.memory.selftest import check_orders
from kvhold.memory.views import opaque_blocks
from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Target

PART = "orders"
_LAYERS, _BLOCKS, _BYTES = 4, 8, 64 << 10


def rows(target: Target) -> Iterator[GpuRow]:
    times = 5 if target.small else 20
    tensors = [
        torch.zeros(_BLOCKS, _BYTES, dtype=torch.uint8, device=target.device)
        for _ in range(_LAYERS)
    ]
    group = Group(
        layers=_LAYERS,
        planes=2,
        heads=1,
        head_dim=8,
        dtype="int8",
        packing="bench",
        block_tokens=16,
        block_bytes=_BYTES,
    )
    view = opaque_blocks(group, tensors, block_axis=0)
    warm_up(view.device, [view])
    ids, tokens = np.array([5, 2, 7]), np.array([48])
    arena = target.arena(4096)
    copier = target.copier(arena, arena)
    said = ""
    for _ in range(times):
        with copier.scratch(_LAYERS * ids.size * _BYTES) as buffer:
            try:
                check_orders(
                    copier,
                    Piece(view, ids, buffer, ChunkBytes(np.zeros(1, np.int64), tokens)),
                    _Blocks(tensors, ids),
                )
            except LayoutError as error:
                said = str(error)
    copier.close()
    yield check(
        PART, said or "copies come after marks, the engine's work after fences", not said, times
    )


class _Blocks:
    def __init__(self, tensors: list[torch.Tensor], ids: npt.NDArray[np.int64]) -> None:
        self._tensors, self._ids = tensors, ids.tolist()

    def write(self, stage: Stage, version: int) -> None:
        def kernel() -> None:
            for tensor in self._tensors:
                for block in self._ids:
                    tensor[block].fill_(version)

        stage.compute(kernel)

    def read(self, stage: Stage) -> Callable[[], npt.NDArray[np.uint8]]:
        seen: list[torch.Tensor] = []
        stage.compute(
            lambda: seen.append(
                torch.cat([tensor[block] for tensor in self._tensors for block in self._ids])
            )
        )
        return lambda: np.asarray(seen[0].cpu().numpy())

    def bytes_of(self, version: int) -> npt.NDArray[np.uint8]:
        return np.full(len(self._tensors) * len(self._ids) * _BYTES, version, np.uint8)
