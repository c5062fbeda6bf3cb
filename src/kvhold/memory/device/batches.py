from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvhold.kernels import Chunks, Plan, Ranges
from kvhold.kernels.view import Int64s, Tensor
from kvhold.memory.copier import Piece
from kvhold.memory.device.driver import Copies
from kvhold.memory.device.pinning import Reach


@dataclass(frozen=True)
class Batch:
    """number: the piece's number in its transfer
    chunks: numbers in the piece's plan: all chunks with rows, from the first to the last
    """

    piece: Piece
    number: int
    chunks: Int64s
    layers: range
    is_whole: bool

    @cached_property
    def plan(self) -> Plan:
        plan = self.piece.planned.plan
        first, last = np.searchsorted(plan.chunk, (self.chunks[0], self.chunks[-1] + 1))
        if last - first == plan.num_runs:
            return plan
        ours = slice(first, last)
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
        """int64 [chunks]: bytes, with all layers."""
        return _sizes(self.plan)[self.chunks]

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def begin(self) -> int:
        return int(self.plan.chunk_starts[self.chunks].min())

    @property
    def end(self) -> int:
        return int((self.plan.chunk_starts[self.chunks] + self.sizes).max())

    @property
    def is_coded(self) -> bool:
        return self.plan.view.coding is not None

    @property
    def smallest_piece(self) -> int:
        view = self.plan.view
        if view.runs_are_whole:
            return int(self.plan.rows.min()) * view.row_bytes
        return view.row_bytes if view.rows_are_whole else view.head_bytes

    def staged(self, memory: Tensor, start: int) -> Plan:
        starts = np.zeros_like(self.plan.chunk_starts)
        starts[self.chunks] = start + np.cumsum(self.sizes) - self.sizes
        return replace(
            self.plan,
            chunks=Chunks(memory, starts, self.plan.chunks.num_tokens),
            chunk_starts=starts,
            memo={},
        )

    def copies_of_chunks(self, reach: Reach, staged: Plan) -> Copies:
        of_layer = self.sizes // self.plan.view.layers
        skipped, nbytes = of_layer * self.layers.start, of_layer * len(self.layers)
        arena = reach.address + self.plan.chunk_starts[self.chunks] + skipped
        device = staged.chunks.address + staged.chunk_starts[self.chunks] + skipped
        return _within_slices(Copies(arena, device, nbytes, reach.pinned), reach)

    def ranges_of_chunks(self, staged: Plan) -> Ranges:
        """[chunks, layers] in the ring."""
        of_layer = (self.sizes // self.plan.view.layers)[:, None]
        starts = staged.chunks.address + staged.chunk_starts[self.chunks][:, None]
        addresses = (starts + of_layer * np.arange(self.layers.start, self.layers.stop)).reshape(-1)
        nbytes = np.repeat(of_layer, len(self.layers))
        return Ranges(np.arange(addresses.size + 1), addresses, nbytes)

    def ranges_of_runs(self) -> Ranges | None:
        """[chunks, layers] in the blocks; None: their pieces are too small."""
        plan, view = self.plan, self.plan.view
        if not view.runs_are_whole or self.is_coded or not self.is_whole:
            return None
        planes = np.arange(self.layers.start * view.planes, self.layers.stop * view.planes)
        addresses = view.table.reshape(-1)[planes][:, None] + plan.view_offsets[None]
        nbytes = np.broadcast_to(plan.rows * view.row_bytes, addresses.shape)
        runs = np.bincount(plan.chunk)[self.chunks]
        if (runs == runs[0]).all():
            shape = (planes.size, runs.size, int(runs[0]))
            addresses, nbytes = (
                each.reshape(shape).swapaxes(0, 1).reshape(-1) for each in (addresses, nbytes)
            )
        else:  # by chunk, then as before
            order = np.argsort(np.tile(plan.chunk, planes.size), kind="stable")
            addresses, nbytes = addresses.reshape(-1)[order], nbytes.reshape(-1)[order]
        pieces = np.repeat(runs * view.planes, len(self.layers))
        return Ranges(np.concatenate(([0], np.cumsum(pieces))), addresses, nbytes)

    def copies_of_runs(self, reach: Reach) -> Copies:
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
    """Of up to `most_bytes`, the first of up to half; each has at least a chunk."""
    plan = piece.planned.plan
    chunks = np.unique(plan.chunk)
    if not chunks.size or not layers:
        return
    ends = np.cumsum(_sizes(plan)[chunks])
    rows = np.bincount(plan.chunk, plan.rows, plan.chunk_rows.size)
    is_whole = rows[chunks] == plan.chunk_rows[chunks]
    first = 0
    while first < chunks.size:
        limit = ends[first - 1] + most_bytes if first else most_bytes // 2
        last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield Batch(
            piece, number, chunks[first:last], layers, is_whole=bool(is_whole[first:last].all())
        )
        first = last


def _within_slices(copies: Copies, reach: Reach) -> Copies:
    """A device cannot copy across two registrations."""
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
