"""Device <-> host copies as an integration asks for them: out of an engine's blocks into a room, out of a loan into blocks.

    gather_blocks(view, block_ids, room.buffer, room.chunks(), threads=2)
    scatter_slots(view, slots, loan.buffer, loan.chunks(), threads=2)
    scatter_layer = plan_scatter(view, block_ids, loan.buffer, loan.chunks(), threads=2)   # planned once ...
    scatter_layer(0)                                                                        # ... and done a layer at a time

Ids and slots are those of all the chunks laid end to end; a chunk that is ABSENT (not granted, not needed) is left out together with its
ids, a negative id is skipped. One call moves all layers, but where it says otherwise. Raises ValueError for ids, slots or chunks out of
bounds, LayoutError where slots are given for an opaque packing. Any thread; `kvhold.kernels` does the work.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ABSENT, ChunkBytes
from kvhold.kernels import Chunks, Plan, gather, plan_blocks, plan_slots, scatter, warm_up
from kvhold.memory.views import View

__all__ = ["gather_blocks", "gather_slots", "plan_gather", "plan_scatter", "scatter_blocks", "scatter_slots", "warm_up"]

Int64s = npt.NDArray[np.int64]
Buffer = npt.NDArray[np.uint8]


def gather_blocks(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy blocks into chunks. block_ids: [blocks of all chunks], whole blocks each but for a last tail's."""
    gather(_plan_blocks(view, block_ids, buffer, places), threads=threads)


def scatter_blocks(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy chunks into blocks. Arguments as for `gather_blocks`."""
    scatter(_plan_blocks(view, block_ids, buffer, places), threads=threads)


def plan_scatter(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> Callable[[int], None]:
    """`scatter_blocks`, a layer at a time: what is returned copies the layer of that number. Arguments as for `gather_blocks`."""
    plan = _plan_blocks(view, block_ids, buffer, places)
    return lambda layer: scatter(plan, layers=range(layer, layer + 1), threads=threads)


def plan_gather(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> Callable[[int], None]:
    """`gather_blocks`, a layer at a time: what is returned copies the layer of that number. Arguments as for `gather_blocks`."""
    plan = _plan_blocks(view, block_ids, buffer, places)
    return lambda layer: gather(plan, layers=range(layer, layer + 1), threads=threads)


def gather_slots(view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy tokens into chunks. slots: [tokens of all chunks]."""
    gather(_plan_slots(view, slots, buffer, places), threads=threads)


def scatter_slots(view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes, *, threads: int = 1) -> None:
    """Copy chunks into tokens' places. slots: [tokens of all chunks], all different."""
    scatter(_plan_slots(view, slots, buffer, places), threads=threads)


def _plan_blocks(view: View, block_ids: Int64s, buffer: Buffer, places: ChunkBytes) -> Plan:
    tokens_per_block = view.group.block_tokens or view.rows_per_block
    kept, chunks = _present(buffer, places)
    return plan_blocks(view, _of_chunks(block_ids, -(-places.num_tokens // tokens_per_block), kept), chunks)


def _plan_slots(view: View, slots: Int64s, buffer: Buffer, places: ChunkBytes) -> Plan:
    kept, chunks = _present(buffer, places)
    return plan_slots(view, _of_chunks(slots, places.num_tokens, kept), chunks)


def _present(buffer: Buffer, places: ChunkBytes) -> tuple[npt.NDArray[np.bool_], Chunks]:
    kept = places.offsets != ABSENT
    return kept, Chunks(buffer, places.offsets[kept], places.num_tokens[kept])


def _of_chunks(rows: Int64s, per_chunk: Int64s, kept: npt.NDArray[np.bool_]) -> Int64s:
    if rows.size != int(per_chunk.sum()):
        raise ValueError(f"{rows.size} ids for chunks that take {int(per_chunk.sum())}")
    return rows if kept.all() else rows[np.repeat(kept, per_chunk)]
