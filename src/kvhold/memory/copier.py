"""Copies between an engine's blocks and the arena that may end after the call: at once on the host, on a device when its streams get there.

    copier = HostCopier(threads=2)
    mark = copier.mark()                                # what the engine has given its own stream so far
    transfer = copier.gather(pieces, after=mark)        # out of the engine's blocks; `scatter`: into them
    copier.fence([transfer])                            # the engine's later work begins after it
    transfer.wait()                                     # the bytes are there

Who copies keeps three rules, which hold for every device:

- A copy is given the mark of the work that it must come after: what wrote the blocks that it reads, and what read or
  zeroed the blocks that it writes.
- Blocks may be written again after a `fence`. That holds up the device, not the calling thread.
- A room is committed and a loan is closed after `wait`. Until then the device reads or writes the arena.

`mark` and `fence` are called by the engine's thread, whose stream they concern; the others by any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ChunkBytes
from kvhold.core.errors import DamagedChunks
from kvhold.memory.copy import gather_blocks, scatter_blocks
from kvhold.memory.views import View


@dataclass(frozen=True)
class Piece:
    """What one copy moves: arguments of `gather_blocks` and `scatter_blocks` (`memory/copy.py`).

    view:   of the engine's blocks
    blocks: int64 [blocks of all chunks]; a negative one is skipped
    buffer: uint8 [arena bytes]
    places: of the chunks in the buffer
    """

    view: View
    blocks: npt.NDArray[np.int64]
    buffer: npt.NDArray[np.uint8]
    places: ChunkBytes


class Mark(Protocol):
    """A point in the engine's own stream."""


class Transfer(Protocol):
    """Copies that were submitted together."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> list[DamagedChunks | None]:
        """Wait for their end. Returns for each piece what was damaged; its other chunks are whole. Raises what else went wrong."""


class Copier(Protocol):
    """Of one device."""

    def mark(self) -> Mark | None:
        """What the engine has given its own stream so far; None: a call has ended when it returns."""

    def gather(self, pieces: Sequence[Piece], after: Mark | None) -> Transfer:
        """Copy blocks into chunks. Raises ValueError for places that are out of bounds."""

    def scatter(self, pieces: Sequence[Piece], after: Mark | None) -> Transfer:
        """Copy chunks into blocks, and compare checksums. Raises ValueError for places that are out of bounds."""

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """Have the engine's later work begin after these."""


@dataclass(frozen=True)
class Ended:
    """A transfer that had ended when it was made."""

    damage: list[DamagedChunks | None]

    def done(self) -> bool:
        """See `Transfer`."""
        return True

    def wait(self) -> list[DamagedChunks | None]:
        """See `Transfer`."""
        return self.damage


class HostCopier:
    """Blocks in host memory. A copy is done by the calling thread, and has ended when its call returns."""

    def __init__(self, threads: int = 1) -> None:
        """threads: that share the work of one copy, the calling one included."""
        self._threads = threads

    def mark(self) -> None:
        """See `Copier`."""

    def gather(self, pieces: Sequence[Piece], after: Mark | None) -> Ended:
        """See `Copier`."""
        for piece in pieces:
            gather_blocks(piece.view, piece.blocks, piece.buffer, piece.places, threads=self._threads)
        return Ended([None] * len(pieces))

    def scatter(self, pieces: Sequence[Piece], after: Mark | None) -> Ended:
        """See `Copier`."""
        return Ended([self._scatter(piece) for piece in pieces])

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """See `Copier`. There is nothing to hold up."""

    def _scatter(self, piece: Piece) -> DamagedChunks | None:
        try:
            scatter_blocks(piece.view, piece.blocks, piece.buffer, piece.places, threads=self._threads)
        except DamagedChunks as error:
            return error
        return None
