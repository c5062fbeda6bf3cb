"""Copies for integrations: from an engine's blocks into a room, and from a loan into blocks.

    gather_blocks(view, block_ids, room.buffer, room.chunks(), threads=2)
    scatter_slots(view, slots, loan.buffer, loan.chunks(), threads=2)
    planned = plan_copy(view, block_ids, loan.buffer, loan.chunks())    # plan once,
    planned.scatter(range(0, 1), threads=2)                             # then copy layer by layer

Ids and slots are those of all chunks, end to end. A chunk that is ABSENT (not granted, or not
needed) is left out together with its ids. A negative id is skipped. A call copies all layers unless
it is given a range. Raises ValueError if ids, slots or chunks are out of bounds, and LayoutError
for slots of an opaque packing. Any thread; `kvhold.kernels` does the work.

Checksums are taken during the copy:

- A gather on the host writes them to `places.sums`, and `Room.commit` sends them. On a device the
  bytes have not arrived when a gather returns, so the commit takes the checksums.
- A scatter compares the bytes that it read with `places.sums`, layer by layer. It raises
  DamagedChunks after all is copied: the blocks of the chunks in the error must not be used, and the
  others are right. It compares whole chunks, even if some of their ids are negative, but no chunk
  without ids. For blocks on a device a scatter hashes before it copies.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ABSENT, ChunkBytes
from kvhold.core.checksums import Checksums
from kvhold.core.errors import DamagedChunks, LayoutError
from kvhold.kernels import (
    Chunks,
    Plan,
    gather,
    plan_blocks,
    plan_slots,
    scatter,
    sum_layers,
    warm_up,
)
from kvhold.memory.views import View

__all__ = [
    "Planned",
    "Unit",
    "gather_blocks",
    "gather_slots",
    "plan_copy",
    "scatter_blocks",
    "scatter_slots",
    "warm_up",
]

Unit: TypeAlias = Literal["blocks", "slots"]
Int64s = npt.NDArray[np.int64]
Buffer = npt.NDArray[np.uint8]


def gather_blocks(
    view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """Copy blocks into chunks.

    block_ids: [blocks of all chunks]; only the last block of a tail may be filled in part
    """
    plan_copy(view, block_ids, buffer, places).gather(threads=threads)


def scatter_blocks(
    view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """Copy chunks into blocks. Arguments as for `gather_blocks`. Raises DamagedChunks."""
    plan_copy(view, block_ids, buffer, places).scatter(threads=threads)


def gather_slots(
    view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """Copy tokens into chunks.

    slots: [tokens of all chunks]
    """
    plan_copy(view, slots, buffer, places, unit="slots").gather(threads=threads)


def scatter_slots(
    view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """Copy chunks into the slots of their tokens. Raises DamagedChunks.

    slots: [tokens of all chunks], all different
    """
    plan_copy(view, slots, buffer, places, unit="slots").scatter(threads=threads)


def plan_copy(
    view: View, ids: Int64s, buffer: Buffer, places: ChunkBytes, *, unit: Unit = "blocks"
) -> "Planned":
    """Plan a copy, to run it later or layer by layer.

    ids:  as for `gather_blocks` or `gather_slots`
    unit: which of these
    """
    kept = places.offsets != ABSENT
    chunks = Chunks(buffer, places.offsets[kept], places.num_tokens[kept])
    if unit == "slots":
        plan = plan_slots(view, _of_chunks(ids, places.num_tokens, kept), chunks)
    else:
        tokens_per_block = view.group.block_tokens or view.rows_per_block
        plan = plan_blocks(
            view, _of_chunks(ids, -(-places.num_tokens // tokens_per_block), kept), chunks
        )
    if places.sums is not None and kept.any() and places.sums.layers != view.layers:
        raise LayoutError(
            f"the chunks have checksums of {places.sums.layers} layers, the view has {view.layers}"
        )
    return Planned(plan, np.flatnonzero(kept), np.unique(plan.chunk), places.sums)


@dataclass(frozen=True)
class Planned:
    """A plan of the chunks that are present, and their checksums.

    numbers: [planned chunks], the number of each among `places`
    moved:   the planned chunks that have rows to copy
    """

    plan: Plan
    numbers: Int64s
    moved: Int64s
    sums: Checksums | None

    def gather(self, layers: range | None = None, *, threads: int = 1) -> None:
        """Copy `layers` (all by default) into the arena, and write the checksums to `sums`."""
        layers = range(self.plan.view.layers) if layers is None else layers
        if self.sums is None or not self._on_host:
            gather(self.plan, layers=layers, threads=threads)
            return
        found = self._empty()
        gather(self.plan, layers=layers, threads=threads, sums=found)
        self.sums.take(
            self.numbers[self.moved], layers, found[self.moved, layers.start : layers.stop]
        )

    def scatter(self, layers: range | None = None, *, threads: int = 1) -> None:
        """Copy `layers` (all by default) out of the arena, and compare the checksums.

        Raises DamagedChunks.
        """
        layers = range(self.plan.view.layers) if layers is None else layers
        if self.sums is None:
            scatter(self.plan, layers=layers, threads=threads)
            return
        found = self._empty()
        if self._on_host:
            scatter(self.plan, layers=layers, threads=threads, sums=found)
        else:
            sum_layers(self.plan, layers, found)
            scatter(self.plan, layers=layers, threads=threads)
        self._compare(layers, found)

    def verify(self, layers: range, chunks: Int64s) -> DamagedChunks | None:
        """Compare the checksums of planned chunks that a device has read.

        Returns the damaged ones, by their numbers among `places`; None: all are whole.
        """
        if self.sums is None:
            return None
        found = self._empty()
        sum_layers(self.plan, layers, found, chunks)
        try:
            self.sums.compare(
                self.numbers[chunks], layers, found[chunks, layers.start : layers.stop]
            )
        except DamagedChunks as error:
            return error
        return None

    @property
    def _on_host(self) -> bool:
        return self.plan.view.device == "cpu"

    def _empty(self) -> npt.NDArray[np.uint64]:
        return np.zeros((self.numbers.size, self.plan.view.layers), np.uint64)

    def _compare(self, layers: range, found: npt.NDArray[np.uint64]) -> None:
        assert self.sums is not None
        self.sums.compare(
            self.numbers[self.moved], layers, found[self.moved, layers.start : layers.stop]
        )


def _of_chunks(rows: Int64s, per_chunk: Int64s, kept: npt.NDArray[np.bool_]) -> Int64s:
    if rows.size != int(per_chunk.sum()):
        raise ValueError(f"{rows.size} ids for chunks that take {int(per_chunk.sum())}")
    return rows if kept.all() else rows[np.repeat(kept, per_chunk)]
