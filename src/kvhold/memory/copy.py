"""Copy an engine's blocks into a reservation, and a lease into blocks. Any thread.

Arrays hold the ids, or slots, of all chunks, end to end. Negative ones are skipped, and those of
ABSENT chunks. A gather on the host writes checksums to `places.sums`; on a device `Transfer.wait`
does. A scatter copies all chunks before it raises DamagedChunks.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.checksums import Checksums
from kvhold.core.errors import DamagedChunks, LayoutError
from kvhold.core.holdings import ABSENT, ChunkBytes
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
    "PlannedCopy",
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
    """block_ids: [blocks of all chunks]; a tail's last block may be filled in part"""
    plan_copy(view, block_ids, buffer, places).gather(threads=threads)


def scatter_blocks(
    view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """Raises DamagedChunks."""
    plan_copy(view, block_ids, buffer, places).scatter(threads=threads)


def gather_slots(
    view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """slots: [tokens of all chunks]."""
    plan_copy(view, slots, buffer, places, unit="slots").gather(threads=threads)


def scatter_slots(
    view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1
) -> None:
    """slots: of all chunks, which must differ. Raises DamagedChunks."""
    plan_copy(view, slots, buffer, places, unit="slots").scatter(threads=threads)


def plan_copy(
    view: View, ids: Int64s, buffer: Buffer, places: ChunkBytes, *, unit: Unit = "blocks"
) -> "PlannedCopy":
    """To run it later, or layer by layer.

    Raises ValueError if something is out of bounds, LayoutError for slots of opaque packings.
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
    return PlannedCopy(plan, np.flatnonzero(kept), np.unique(plan.chunk), places.sums)


@dataclass(frozen=True)
class PlannedCopy:
    plan: Plan
    numbers: Int64s
    moved: Int64s
    sums: Checksums | None

    def gather(self, layers: range | None = None, *, threads: int = 1) -> None:
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
        """Raises DamagedChunks."""
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

    def take_sums(self, layers: range, chunks: Int64s, *, threads: int = 1) -> None:
        """Keep checksums of a device's write. The chunks must be complete in these layers."""
        if self.sums is not None:
            self.keep_sums(layers, chunks, self._sums_of(layers, chunks, threads))

    def keep_sums(self, layers: range, chunks: Int64s, found: npt.NDArray[np.uint64]) -> None:
        """found: [chunks, layers]"""
        if self.sums is not None:
            self.sums.take(self.numbers[chunks], layers, found)

    def verify(self, layers: range, chunks: Int64s, *, threads: int = 1) -> DamagedChunks | None:
        if self.sums is None:
            return None
        return self.compare_sums(layers, chunks, self._sums_of(layers, chunks, threads))

    def compare_sums(
        self, layers: range, chunks: Int64s, found: npt.NDArray[np.uint64]
    ) -> DamagedChunks | None:
        """found: [chunks, layers]"""
        if self.sums is None:
            return None
        try:
            self.sums.compare(self.numbers[chunks], layers, found)
        except DamagedChunks as error:
            return error
        return None

    def _sums_of(self, layers: range, chunks: Int64s, threads: int) -> npt.NDArray[np.uint64]:
        found = self._empty()
        sum_layers(self.plan, layers, found, chunks, threads=threads)
        return found[chunks, layers.start : layers.stop]

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
        raise ValueError(f"{rows.size} ids for chunks that need {int(per_chunk.sum())}")
    return rows if kept.all() else rows[np.repeat(kept, per_chunk)]
