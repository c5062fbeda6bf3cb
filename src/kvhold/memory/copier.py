"""Copies between an engine's blocks and the arena.

On the host a copy ends in its call. On a device it ends later, in order of the device's streams.

    copier = HostCopier(threads=2)
    mark = copier.mark()                                # the engine's stream, up to here
    transfer = copier.gather(pieces, after=mark)  # out of the engine's blocks; `scatter`: into them
    copier.fence([transfer])                            # the engine's later work runs after it
    transfer.wait()                                     # all bytes are copied

A piece is planned at its first copy, and only once if it is copied a layer at a time (`layers`).

The caller keeps three rules, on every device:

- Give each copy the mark of the work that must run before it. A gather waits for the work that
  computed its blocks. A scatter waits for the work that last read or zeroed its blocks.
- Blocks may be written again after a `fence`. It delays the device, not the calling thread.
- Commit a room, and close a loan, after `wait`. Until then the device reads or writes the arena.
  After a DeviceError the end of a copy is unknown: the caller keeps its rooms and loans, and they
  are freed when the process has ended.

The engine's thread calls `mark` and `fence`, because they concern its stream. Any thread may call
the other methods.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ChunkBytes
from kvhold.core.errors import DamagedChunks, DeviceError
from kvhold.memory.copy import Planned, Unit, plan_copy
from kvhold.memory.views import View


@dataclass(frozen=True)
class Piece:
    """The chunks and blocks of one copy: the arguments of `plan_copy` (`memory/copy.py`).

    view:   the engine's blocks
    ids:    int64 [blocks, or slots, of all chunks]; a negative id is skipped
    buffer: uint8 [arena bytes]
    places: where the chunks lie in the buffer
    unit:   whether the ids are of blocks or of slots
    """

    view: View
    ids: npt.NDArray[np.int64]
    buffer: npt.NDArray[np.uint8]
    places: ChunkBytes
    unit: Unit = "blocks"

    @cached_property
    def planned(self) -> Planned:
        """The plan of the copy.

        Raises ValueError if ids or places are out of bounds, and LayoutError for slots of an
        opaque packing.
        """
        return plan_copy(self.view, self.ids, self.buffer, self.places, unit=self.unit)


class Mark(Protocol):
    """A point in the engine's own stream."""


class Transfer(Protocol):
    """Copies that were submitted together."""

    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self) -> list[DamagedChunks | None]:
        """Wait until all copies have ended. Returns the damaged chunks of each piece.

        The other chunks of a piece are whole. Raises every other fault.
        """


class Stage(Protocol):
    """A device whose streams can be delayed, for the check of orders (`selftest.py`)."""

    def delay(self, seconds: float) -> None:
        """Keep the engine's stream busy for about `seconds`."""

    def late_mark(self, seconds: float) -> Mark:
        """Return a mark in another stream, which is busy for about `seconds`."""

    def drain(self) -> None:
        """Wait until the engine's stream is empty."""

    def compute(self, work: Callable[[], None]) -> None:
        """Put work on the engine's stream."""


class Copier(Protocol):
    """Copies of one device."""

    def stages(self) -> Iterator[Stage]:
        """Yield the device once for each path that a copy can take.

        Until the next item all copies take that path. Yields nothing if copies end in their call,
        so that there is no order to keep.
        """

    def mark(self) -> Mark | None:
        """Return the current end of the engine's stream. None: copies end in their call."""

    def gather(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Transfer:
        """Copy blocks into chunks. Raises the errors of `Piece.planned`.

        layers: consecutive layers; all by default
        """

    def scatter(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Transfer:
        """Copy chunks into blocks, and compare checksums. Raises the errors of `Piece.planned`.

        layers: consecutive layers; all by default
        """

    @property
    def stores_block(self) -> bool:
        """Whether a store ends in its call. On a device: because it refuses to pin host memory."""

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """Make the engine's later work run after these transfers."""

    def prepare(self) -> None:
        """Start slow preparations before the first copy."""

    def close(self) -> None:
        """Release the arena, before it is unmapped. All transfers must have ended."""

    def scratch(self, nbytes: int) -> AbstractContextManager[npt.NDArray[np.uint8]]:
        """Return temporary memory, uint8 [nbytes] of zeros, that is copied as the arena is.

        All its transfers must end before the `with` block does.
        """


@dataclass(frozen=True)
class Ended:
    """A transfer that has already ended."""

    damage: list[DamagedChunks | None]

    def done(self) -> bool:
        """See `Transfer`."""
        return True

    def wait(self) -> list[DamagedChunks | None]:
        """See `Transfer`."""
        return self.damage


def wait_for(transfers: Sequence[Transfer]) -> None:
    """Wait for all transfers, even after a fault.

    Raises a DeviceError if there was one, else the first fault (DamagedChunks or another).
    """
    faults: list[Exception] = []
    for transfer in transfers:
        try:
            faults += [damage for damage in transfer.wait() if damage is not None]
        except Exception as error:  # noqa: BLE001 - raised below, when all transfers have ended
            faults.append(error)
    if faults:
        raise next((fault for fault in faults if isinstance(fault, DeviceError)), faults[0])


class HostCopier:
    """Copies blocks in host memory, in the calling thread. A copy ends in its call.

    Raises ValueError for blocks on a device, because there a copy would not end in its call.
    """

    stores_block = True

    def __init__(self, threads: int = 1) -> None:
        """Make a copier.

        threads: how many share the work of one copy, including the calling thread
        """
        self._threads = threads

    def mark(self) -> None:
        """See `Copier`."""

    def gather(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Ended:
        """See `Copier`."""
        _check_on_host(pieces)
        for piece in pieces:
            piece.planned.gather(layers, threads=self._threads)
        return Ended([None] * len(pieces))

    def scatter(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Ended:
        """See `Copier`."""
        _check_on_host(pieces)
        return Ended([self._scatter(piece, layers) for piece in pieces])

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """See `Copier`. Does nothing."""

    def prepare(self) -> None:
        """See `Copier`."""

    def close(self) -> None:
        """See `Copier`."""

    def stages(self) -> Iterator[Stage]:
        """See `Copier`. Yields nothing: copies end in their call."""
        return iter(())

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """See `Copier`."""
        yield np.zeros(nbytes, np.uint8)

    def _scatter(self, piece: Piece, layers: range | None) -> DamagedChunks | None:
        try:
            piece.planned.scatter(layers, threads=self._threads)
        except DamagedChunks as error:
            return error
        return None


def _check_on_host(pieces: Sequence[Piece]) -> None:
    elsewhere = {piece.view.device for piece in pieces} - {"cpu"}
    if elsewhere:
        raise ValueError(f"blocks on {', '.join(sorted(elsewhere))} need a copier of that device")
