"""Device <-> host copies as an integration asks for them: out of an engine's blocks into a room, out of a loan into blocks.

    gather_blocks(view, block_ids, room.buffer, room.chunks(), threads=2)
    scatter_slots(view, slots, loan.buffer, loan.chunks(), threads=2)
    scatter_layer = plan_scatter(view, block_ids, loan.buffer, loan.chunks(), threads=2)   # planned once ...
    scatter_layer(0)                                                                        # ... and done a layer at a time

Ids and slots are those of all the chunks laid end to end; a chunk that is ABSENT (not granted, not needed) is left out together with its
ids, a negative id is skipped. One call moves all layers, but where it says otherwise. Raises ValueError for ids, slots or chunks out of
bounds, LayoutError where slots are given for an opaque packing. Any thread; `kvhold.kernels` does the work.

Checksums go along. A gather notes those of what it writes in `places.sums`, and `Room.commit` sends them. A scatter compares what it has
read with `places.sums`, layer by layer. It raises DamagedChunks when all is copied: what it wrote of the chunks that the error names is
of no use, and the others are whole. It compares whole chunks, also where some of their ids are negative, but not chunks without any id.
On a device a gather notes nothing, since its bytes are not there yet when it returns (the commit takes them), and a scatter hashes before
it copies.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ABSENT, ChunkBytes
from kvhold.core.checksums import Checksums
from kvhold.core.errors import LayoutError
from kvhold.kernels import Chunks, Plan, gather, plan_blocks, plan_slots, scatter, sum_layers, warm_up
from kvhold.memory.views import View

__all__ = ["gather_blocks", "gather_slots", "plan_gather", "plan_scatter", "scatter_blocks", "scatter_slots", "warm_up"]

Int64s = npt.NDArray[np.int64]
Buffer = npt.NDArray[np.uint8]


def gather_blocks(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy blocks into chunks. block_ids: [blocks of all chunks], whole blocks each but for a last tail's."""
    _of_blocks(view, block_ids, buffer, places).gather(range(view.layers), threads)


def scatter_blocks(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy chunks into blocks. Arguments as for `gather_blocks`. Raises DamagedChunks."""
    _of_blocks(view, block_ids, buffer, places).scatter(range(view.layers), threads)


def plan_scatter(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> Callable[[int], None]:
    """`scatter_blocks`, a layer at a time: what is returned copies the layer of that number. Arguments as for `gather_blocks`."""
    planned = _of_blocks(view, block_ids, buffer, places)
    return lambda layer: planned.scatter(range(layer, layer + 1), threads)


def plan_gather(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> Callable[[int], None]:
    """`gather_blocks`, a layer at a time: what is returned copies the layer of that number. Arguments as for `gather_blocks`."""
    planned = _of_blocks(view, block_ids, buffer, places)
    return lambda layer: planned.gather(range(layer, layer + 1), threads)


def gather_slots(view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy tokens into chunks. slots: [tokens of all chunks]."""
    _of_slots(view, slots, buffer, places).gather(range(view.layers), threads)


def scatter_slots(view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy chunks into tokens' places. slots: [tokens of all chunks], all different. Raises DamagedChunks."""
    _of_slots(view, slots, buffer, places).scatter(range(view.layers), threads)


@dataclass(frozen=True)
class _Planned:
    """A plan of the chunks that are present, and their checksums.

    numbers: [planned chunks], of each its number among `places`
    moved:   planned chunks of which there is something to copy
    """

    plan: Plan
    numbers: Int64s
    moved: Int64s
    sums: Checksums | None

    def gather(self, layers: range, threads: int) -> None:
        """Copy into the arena, and note the checksums."""
        if self.sums is None or not self._on_host:
            gather(self.plan, layers=layers, threads=threads)
            return
        found = self._empty()
        gather(self.plan, layers=layers, threads=threads, sums=found)
        self.sums.take(self.numbers[self.moved], layers, found[self.moved, layers.start : layers.stop])

    def scatter(self, layers: range, threads: int) -> None:
        """Copy out of the arena, and compare the checksums."""
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

    @property
    def _on_host(self) -> bool:
        return self.plan.view.device == "cpu"

    def _empty(self) -> npt.NDArray[np.uint64]:
        return np.zeros((self.numbers.size, self.plan.view.layers), np.uint64)

    def _compare(self, layers: range, found: npt.NDArray[np.uint64]) -> None:
        assert self.sums is not None
        self.sums.compare(self.numbers[self.moved], layers, found[self.moved, layers.start : layers.stop])


def _of_blocks(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes) -> _Planned:
    tokens_per_block = view.group.block_tokens or view.rows_per_block
    kept, chunks = _present(buffer, places)
    return _planned(plan_blocks(view, _of_chunks(block_ids, -(-places.num_tokens // tokens_per_block), kept), chunks), kept, places)


def _of_slots(view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes) -> _Planned:
    kept, chunks = _present(buffer, places)
    return _planned(plan_slots(view, _of_chunks(slots, places.num_tokens, kept), chunks), kept, places)


def _planned(plan: Plan, kept: npt.NDArray[np.bool_], places: ChunkBytes) -> _Planned:
    if places.sums is not None and kept.any() and places.sums.layers != plan.view.layers:
        raise LayoutError(f"the chunks have checksums of {places.sums.layers} layers, the view has {plan.view.layers}")
    return _Planned(plan, np.flatnonzero(kept), np.unique(plan.chunk), places.sums)


def _present(buffer: Buffer, places: ChunkBytes) -> tuple[npt.NDArray[np.bool_], Chunks]:
    kept = places.offsets != ABSENT
    return kept, Chunks(buffer, places.offsets[kept], places.num_tokens[kept])


def _of_chunks(rows: Int64s, per_chunk: Int64s, kept: npt.NDArray[np.bool_]) -> Int64s:
    if rows.size != int(per_chunk.sum()):
        raise ValueError(f"{rows.size} ids for chunks that take {int(per_chunk.sum())}")
    return rows if kept.all() else rows[np.repeat(kept, per_chunk)]
