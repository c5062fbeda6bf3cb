"""Batches: chunks of one piece that are copied together, and their pieces of memory.

    for batch in batches(piece, number, layers, 16 << 20):
        batch.copies_of_chunks(reach, staged)      # one piece of memory for each chunk
        batch.copies_of_runs(reach)                # pieces that are contiguous in the blocks, too

Pure numpy. Addresses and sizes are int64 arrays.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvhold.kernels import Chunks, Plan
from kvhold.kernels.view import Int64s, Tensor
from kvhold.memory.copier import Piece
from kvhold.memory.device.driver import Copies
from kvhold.memory.device.pinning import Reach


@dataclass(frozen=True)
class Batch:
    """Some chunks of a piece.

    number: the piece's number in its transfer
    chunks: numbers of the chunks in the piece's plan
    layers: the layers of these chunks to copy
    """

    piece: Piece
    number: int
    chunks: Int64s
    layers: range

    @cached_property
    def plan(self) -> Plan:
        """The plan of these chunks alone. They keep their numbers."""
        plan = self.piece.planned.plan
        ours = np.isin(plan.chunk, self.chunks)
        if ours.all():
            return plan
        return replace(
            plan,
            chunk=plan.chunk[ours],
            first_rows=plan.first_rows[ours],
            slots=plan.slots[ours],
            rows=plan.rows[ours],
            memo={},
        )

    @cached_property
    def sizes(self) -> Int64s:
        """int64 [chunks]: bytes of each chunk, with all its layers."""
        return _sizes(self.plan)[self.chunks]

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, with all their layers."""
        return int(self.sizes.sum())

    @property
    def begin(self) -> int:
        """Where the first chunk begins in the piece's buffer, in bytes."""
        return int(self.plan.chunk_starts[self.chunks].min())

    @property
    def end(self) -> int:
        """The end of the last chunk in the piece's buffer, in bytes."""
        return int((self.plan.chunk_starts[self.chunks] + self.sizes).max())

    @property
    def is_whole(self) -> bool:
        """Whether every row of the chunks is copied."""
        plan = self.plan
        rows = np.bincount(plan.chunk, plan.rows, plan.chunk_rows.size)
        return bool((rows[self.chunks] == plan.chunk_rows[self.chunks]).all())

    @property
    def is_coded(self) -> bool:
        """Whether the chunks are encoded: their bytes differ from those of the blocks."""
        return self.plan.view.coding is not None

    @property
    def smallest_piece(self) -> int:
        """Bytes of the smallest piece in `copies_of_runs`."""
        view = self.plan.view
        if view.runs_are_whole:
            return int(self.plan.rows.min()) * view.row_bytes
        return view.row_bytes if view.rows_are_whole else view.head_bytes

    def staged(self, memory: Tensor, start: int) -> Plan:
        """Return the plan with the chunks end to end in other memory, from `start` on."""
        starts = np.zeros_like(self.plan.chunk_starts)
        starts[self.chunks] = start + np.cumsum(self.sizes) - self.sizes
        return replace(
            self.plan,
            chunks=Chunks(memory, starts, self.plan.chunks.num_tokens),
            chunk_starts=starts,
            memo={},
        )

    def copies_of_chunks(self, reach: Reach, staged: Plan) -> Copies:
        """Return copies with one piece for each chunk: its layers."""
        of_layer = self.sizes // self.plan.view.layers
        skipped, nbytes = of_layer * self.layers.start, of_layer * len(self.layers)
        arena = reach.address + self.plan.chunk_starts[self.chunks] + skipped
        device = staged.chunks.address + staged.chunk_starts[self.chunks] + skipped
        return _within_slices(Copies(arena, device, nbytes, reach.pinned), reach)

    def copies_of_runs(self, reach: Reach) -> Copies:
        """Return copies of pieces that are contiguous in the blocks as well as in the chunks.

        A piece is a run, a row, or a head of a row.
        """
        plan, view = self.plan, self.plan.view
        arena, offsets, nbytes = plan.chunk_offsets, plan.view_offsets, plan.rows * view.row_bytes
        strides = plan.plane_strides
        if not view.runs_are_whole:
            row = np.arange(plan.num_rows) - np.repeat(np.cumsum(plan.rows) - plan.rows, plan.rows)
            arena = np.repeat(arena, plan.rows) + row * view.row_bytes
            offsets = np.repeat(offsets, plan.rows) + row * view.row_stride
            strides, nbytes = np.repeat(strides, plan.rows), np.full(row.size, view.row_bytes)
        if not view.rows_are_whole:
            head = np.tile(np.arange(view.heads), arena.size)
            arena, offsets, strides = (
                np.repeat(each, view.heads) for each in (arena, offsets, strides)
            )
            arena, offsets = arena + head * view.head_bytes, offsets + head * view.head_stride
            nbytes = np.full(arena.size, view.head_bytes)
        planes = np.arange(self.layers.start * view.planes, self.layers.stop * view.planes)[:, None]
        copies = Copies(
            host=(reach.address + arena[None] + planes * strides[None]).reshape(-1),
            device=(view.table.reshape(-1)[planes] + offsets[None]).reshape(-1),
            nbytes=np.tile(nbytes, planes.size),
            pinned=reach.pinned,
        )
        return _within_slices(copies, reach)


def batches(piece: Piece, number: int, layers: range, most_bytes: int) -> Iterator[Batch]:
    """Yield batches of the chunks that have rows to copy, in order.

    number:     see `Batch`
    most_bytes: of a batch, unless it consists of one chunk
    """
    plan = piece.planned.plan
    chunks = np.unique(plan.chunk)
    if not chunks.size or not layers:
        return
    ends = np.cumsum(_sizes(plan)[chunks])
    first = 0
    while first < chunks.size:
        limit = (ends[first - 1] if first else 0) + most_bytes
        last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield Batch(piece, number, chunks[first:last], layers)
        first = last


def _within_slices(copies: Copies, reach: Reach) -> Copies:
    """Divide pieces at the ends of slices: a device copies none across two registrations."""
    host, device, nbytes = copies.host, copies.device, copies.nbytes
    while reach.pinned:
        room = reach.slice_bytes - (host - reach.address) % reach.slice_bytes
        over = np.flatnonzero(nbytes > room)
        if not over.size:
            break
        host = np.concatenate((host, host[over] + room[over]))
        device = np.concatenate((device, device[over] + room[over]))
        rest = nbytes[over] - room[over]
        nbytes = np.minimum(nbytes, room)
        nbytes = np.concatenate((nbytes, rest))
    return Copies(host, device, nbytes, copies.pinned)


def _sizes(plan: Plan) -> npt.NDArray[np.int64]:
    return plan.chunk_rows * (plan.view.layers * plan.view.planes * plan.view.row_bytes)
