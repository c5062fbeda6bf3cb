"""Copies between an engine's blocks and the arena. On a device, the caller keeps four rules:

- Give each copy the mark of the work that computed or last used its blocks.
- Write the blocks again only after a `fence`, which delays the device.
- Gather a chunk whole, or in parts: a device takes the checksum of a whole copy.
- Commit a reservation, and close a lease, after `wait`; after a DeviceError never.

The engine's thread calls `mark` and `fence`, any thread the other methods.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DamagedChunks, DeviceError
from kvhold.core.holdings import ChunkBytes
from kvhold.memory.copy import PlannedCopy, Unit, plan_copy
from kvhold.memory.views import View


@dataclass(frozen=True)
class Piece:
    view: View
    ids: npt.NDArray[np.int64]
    buffer: npt.NDArray[np.uint8]
    places: ChunkBytes
    unit: Unit = "blocks"

    @cached_property
    def planned(self) -> PlannedCopy:
        return plan_copy(self.view, self.ids, self.buffer, self.places, unit=self.unit)


class Mark(Protocol):
    """A point in the engine's stream."""


class Transfer(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> list[DamagedChunks | None]:
        """The damaged chunks of each piece. Raises other faults, after all copies have ended."""


class Stage(Protocol):
    def delay(self, seconds: float) -> None: ...

    def late_mark(self, seconds: float) -> Mark:
        """In another, busy stream."""

    def drain(self) -> None:
        """Wait until the engine's stream is empty."""

    def compute(self, work: Callable[[], None]) -> None: ...


class Copier(Protocol):
    def stages(self) -> Iterator[Stage]:
        """A stage for each path of copies, used by all copies until the next item."""

    def mark(self) -> Mark | None:
        """None: copies end in their call."""

    def gather(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Transfer:
        """Raises the errors of `plan_copy`."""

    def scatter(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Transfer:
        """Compares checksums. Raises the errors of `plan_copy`."""

    @property
    def stores_block(self) -> bool:
        """A store ends in its call: a device may refuse to pin host memory."""

    def fence(self, transfers: Sequence[Transfer]) -> None:
        """The engine's later work runs after the transfers."""

    def prepare(self) -> None: ...

    def close(self) -> None:
        """Before the arena is unmapped, after all transfers."""

    def scratch(self, nbytes: int) -> AbstractContextManager[npt.NDArray[np.uint8]]:
        """Zeros, uint8 [nbytes], copied like the arena. Transfers must end in the block."""


@dataclass(frozen=True)
class Ended:
    damage: list[DamagedChunks | None]

    def done(self) -> bool:
        return True

    def wait(self) -> list[DamagedChunks | None]:
        return self.damage


def wait_for(transfers: Sequence[Transfer]) -> None:
    """Raise a DeviceError if there was one, else the first fault."""
    faults: list[Exception] = []
    for transfer in transfers:
        try:
            faults += [damage for damage in transfer.wait() if damage is not None]
        except Exception as error:  # noqa: BLE001
            faults.append(error)
    if faults:
        raise next((fault for fault in faults if isinstance(fault, DeviceError)), faults[0])


class HostCopier:
    """In the calling thread. Raises ValueError for blocks that are not in host memory."""

    stores_block = True

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def mark(self) -> None: ...

    def gather(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Ended:
        _check_on_host(pieces)
        for piece in pieces:
            piece.planned.gather(layers, threads=self._threads)
        return Ended([None] * len(pieces))

    def scatter(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> Ended:
        _check_on_host(pieces)
        return Ended([self._scatter(piece, layers) for piece in pieces])

    def fence(self, transfers: Sequence[Transfer]) -> None: ...

    def prepare(self) -> None: ...

    def close(self) -> None: ...

    def stages(self) -> Iterator[Stage]:
        return iter(())

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
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
