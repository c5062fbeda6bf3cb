"""A delayed stream shows whether copies are ordered with the engine's work."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import LayoutError
from kvhold.memory.copier import Copier, Piece, Stage

_TIMES = 3  # a wrong order may be right by chance
_DELAYS_S = (0.002, 0.02, 0.2)


class Blocks(Protocol):
    def write(self, stage: Stage, version: int) -> None: ...

    def read(self, stage: Stage) -> Callable[[], npt.NDArray[np.uint8]]:
        """Copy the blocks' bytes. The result returns them after the copy."""

    def bytes_of(self, version: int) -> npt.NDArray[np.uint8]:
        """In the buffer's order."""


def check_orders(copier: Copier, piece: Piece, blocks: Blocks) -> None:
    """Raise LayoutError unless copies run after marks, and the engine's work after fences.

    Overwrites the blocks and the buffer, which the piece's chunks must fill.
    """
    for stage in copier.stages():
        for check in (
            _gather_after_mark,
            _scatter_after_mark,
            _write_after_gather,
            _read_after_scatter,
        ):
            if check is not _write_after_gather or not copier.stores_block:
                _check(check, copier, stage, piece, blocks)


_Check = Callable[[Copier, Stage, Piece, Blocks, float, bool], bool]


def _check(check: _Check, copier: Copier, stage: Stage, piece: Piece, blocks: Blocks) -> None:
    what = check.__name__.strip("_").replace("_", " ")
    for delay_s in _DELAYS_S:
        if not all(check(copier, stage, piece, blocks, delay_s, True) for _ in range(_TIMES)):
            raise LayoutError(f"copies on this device are out of order: {what} gave wrong bytes")
        if not check(copier, stage, piece, blocks, delay_s, False):
            return
    raise LayoutError(
        f"the order of copies on this device cannot be checked: {what} was right without "
        "the wait, too"
    )


def _gather_after_mark(
    copier: Copier, stage: Stage, piece: Piece, blocks: Blocks, delay_s: float, keeps_order: bool
) -> bool:
    blocks.write(stage, 1)
    stage.drain()
    stage.delay(delay_s)
    blocks.write(stage, 2)
    mark = copier.mark()
    copier.gather([piece], after=mark if keeps_order else None).wait()
    is_right = np.array_equal(piece.buffer, blocks.bytes_of(2))
    stage.drain()
    return is_right


def _scatter_after_mark(
    copier: Copier, stage: Stage, piece: Piece, blocks: Blocks, delay_s: float, keeps_order: bool
) -> bool:
    stage.drain()
    piece.buffer[:] = blocks.bytes_of(3)
    stage.delay(delay_s)
    blocks.write(stage, 1)
    mark = copier.mark()
    copier.scatter([piece], after=mark if keeps_order else None).wait()
    return _has(stage, blocks, 3)


def _write_after_gather(
    copier: Copier, stage: Stage, piece: Piece, blocks: Blocks, delay_s: float, keeps_order: bool
) -> bool:
    blocks.write(stage, 1)
    stage.drain()
    transfer = copier.gather([piece], after=stage.late_mark(delay_s))
    if keeps_order:
        copier.fence([transfer])
    blocks.write(stage, 2)
    stage.drain()
    transfer.wait()
    return np.array_equal(piece.buffer, blocks.bytes_of(1))


def _read_after_scatter(
    copier: Copier, stage: Stage, piece: Piece, blocks: Blocks, delay_s: float, keeps_order: bool
) -> bool:
    blocks.write(stage, 1)
    stage.drain()
    piece.buffer[:] = blocks.bytes_of(4)
    transfer = copier.scatter([piece], after=stage.late_mark(delay_s))
    if keeps_order:
        copier.fence([transfer])
    seen = blocks.read(stage)
    stage.drain()
    transfer.wait()
    return np.array_equal(seen(), blocks.bytes_of(4))


def _has(stage: Stage, blocks: Blocks, version: int) -> bool:
    seen = blocks.read(stage)
    stage.drain()
    return np.array_equal(seen(), blocks.bytes_of(version))
