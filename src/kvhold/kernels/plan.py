"""Pair a view's slots with places in the arena, as runs for all layers. One thread at a time.

A *run* is rows in order both in the view and in one chunk. All bounds are checked here.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import LayoutError
from kvhold.kernels.view import Int64s, Tensor, View


@dataclass(frozen=True, eq=False)
class Chunks:
    """Places of chunks in one region of memory, in token order.

    base:           uint8 [bytes], contiguous: a numpy array, or a torch tensor
    offsets:        int64 [n], bytes from `base`
    num_tokens:     int64 [n]
    device_address: of `base`, on a view's device
    """

    base: Tensor
    offsets: Int64s
    num_tokens: Int64s
    device_address: int | None = None

    def __post_init__(self) -> None:
        if str(self.base.dtype).removeprefix("torch.") != "uint8" or len(self.base.shape) != 1:
            raise ValueError(
                f"chunks.base must be uint8 with one axis; it is {self.base.dtype} "
                f"{tuple(self.base.shape)}"
            )
        if not (
            self.base.flags.c_contiguous
            if isinstance(self.base, np.ndarray)
            else self.base.is_contiguous()
        ):
            raise ValueError("chunks.base must be contiguous")
        _check_int64s("chunks.offsets", self.offsets)
        _check_int64s("chunks.num_tokens", self.num_tokens)
        if self.offsets.size != self.num_tokens.size:
            raise ValueError(
                f"chunks.offsets names {self.offsets.size} chunks, chunks.num_tokens "
                f"{self.num_tokens.size}"
            )

    @property
    def nbytes(self) -> int:
        return int(self.base.shape[0])

    @property
    def device(self) -> str:
        return "cpu" if isinstance(self.base, np.ndarray) else str(self.base.device)

    @property
    def address(self) -> int:
        return int(
            self.base.__array_interface__["data"][0]
            if isinstance(self.base, np.ndarray)
            else self.base.data_ptr()
        )

    @property
    def writable(self) -> bool:
        return bool(self.base.flags.writeable) if isinstance(self.base, np.ndarray) else True

    def address_seen_from(self, device: str) -> int | None:
        return self.address if device == self.device else self.device_address


@dataclass(frozen=True, eq=False)
class Plan:
    """Run i: `rows[i]` rows, from `slots[i]` in the view and `first_rows[i]` of chunk `chunk[i]`.

    memo: values that a worker derives once
    """

    view: View
    chunks: Chunks
    chunk: Int64s
    first_rows: Int64s
    slots: Int64s
    rows: Int64s
    chunk_starts: Int64s  # [chunks], bytes from `base`
    chunk_rows: Int64s
    memo: dict[object, Any] = field(default_factory=dict, repr=False)

    @property
    def num_runs(self) -> int:
        return int(self.rows.size)

    @cached_property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    def of_rows(self) -> tuple[Int64s, Int64s, Int64s]:
        """`view_offsets`, `chunk_offsets` and `plane_strides` per row, int64 [rows]."""
        within = np.arange(self.num_rows) - np.repeat(np.cumsum(self.rows) - self.rows, self.rows)
        block, row = np.divmod(np.repeat(self.slots, self.rows) + within, self.view.rows_per_block)
        in_view = block * self.view.block_stride + row * self.view.row_stride
        in_chunks = np.repeat(self.chunk_offsets, self.rows) + within * self.view.row_bytes
        return in_view, in_chunks, np.repeat(self.plane_strides, self.rows)

    def nbytes(self, layers: int) -> int:
        return layers * self.view.planes * self.num_rows * self.view.row_bytes

    @cached_property
    def view_offsets(self) -> Int64s:
        """int64 [runs]: bytes from `table[layer, plane]`."""
        block, row = np.divmod(self.slots, self.view.rows_per_block)
        offsets: Int64s = block * self.view.block_stride + row * self.view.row_stride
        return offsets

    @cached_property
    def chunk_offsets(self) -> Int64s:
        """int64 [runs]: bytes from `chunks.base`, in layer 0, plane 0."""
        offsets: Int64s = self.chunk_starts[self.chunk] + self.first_rows * self.view.row_bytes
        return offsets

    @cached_property
    def plane_strides(self) -> Int64s:
        """int64 [runs]: bytes between planes, also across layers."""
        strides: Int64s = self.chunk_rows[self.chunk] * self.view.row_bytes
        return strides


def plan_slots(view: View, slots: npt.NDArray[np.int64], chunks: Chunks) -> Plan:
    """Pair slot i with token i of the chunks, end to end.

    slots: int64 [sum(chunks.num_tokens)]; negative: skipped. To scatter, they must differ.

    Raises ValueError for slots or chunks out of bounds, LayoutError for an opaque packing.
    """
    if view.is_opaque:
        raise LayoutError(f"packing {view.group.packing!r} moves whole blocks; use plan_blocks")
    _check_int64s("slots", slots)
    chunk_rows = _chunk_rows(view, chunks)
    if slots.size != int(chunk_rows.sum()):
        raise ValueError(f"{slots.size} slots for chunks of {int(chunk_rows.sum())} tokens")
    if slots.size and int(slots.max()) >= view.num_rows:
        raise ValueError(f"slot {int(slots.max())} is beyond the {view.num_rows} slots of the view")
    chunk, row = _numbered(chunk_rows)
    kept = slots >= 0
    rows = np.ones(np.count_nonzero(kept), np.int64)
    return _merged(
        Plan(
            view,
            chunks,
            chunk[kept],
            row[kept],
            slots[kept],
            rows,
            chunks.offsets.copy(),
            chunk_rows,
        )
    )


def plan_blocks(view: View, block_ids: npt.NDArray[np.int64], chunks: Chunks) -> Plan:
    """Pair whole blocks with each chunk. A chunk's last block may be used in part.

    block_ids: int64 [sum(ceil(num_tokens / tokens_per_block))], as `slots` in `plan_slots`
    """
    _check_int64s("block_ids", block_ids)
    chunk_rows = _chunk_rows(view, chunks)
    chunk, block = _numbered(-(-chunk_rows // view.rows_per_block))
    if block_ids.size != chunk.size:
        raise ValueError(f"{block_ids.size} block ids for chunks of {chunk.size} blocks")
    if block_ids.size and int(block_ids.max()) >= view.num_blocks:
        raise ValueError(
            f"block id {int(block_ids.max())} is beyond the {view.num_blocks} blocks of the view"
        )
    kept = block_ids >= 0
    if not kept.all():
        chunk, block, block_ids = chunk[kept], block[kept], block_ids[kept]
    first_rows = block * view.rows_per_block
    rows = np.minimum(view.rows_per_block, chunk_rows[chunk] - first_rows)
    plan = Plan(
        view,
        chunks,
        chunk,
        first_rows,
        block_ids * view.rows_per_block,
        rows,
        chunks.offsets.copy(),
        chunk_rows,
    )
    return _merged(plan) if view.is_flat else plan


def _chunk_rows(view: View, chunks: Chunks) -> Int64s:
    if not chunks.offsets.size:
        return chunks.num_tokens
    if int(chunks.num_tokens.min()) < 0:
        raise ValueError(
            f"chunks.num_tokens holds {int(chunks.num_tokens.min())}; it must be 0 or more"
        )
    if int(chunks.num_tokens.max()) > chunks.nbytes:
        raise ValueError(
            f"a chunk of {int(chunks.num_tokens.max())} tokens does not fit into "
            f"{chunks.nbytes} bytes"
        )
    tokens_per_row = view.tokens_per_block if view.is_opaque else 1
    rows = -(-chunks.num_tokens // tokens_per_row)
    bytes_per_row = view.layers * view.planes * view.row_bytes
    room = (chunks.nbytes - chunks.offsets) // bytes_per_row
    outside = (chunks.offsets < 0) | (chunks.offsets > chunks.nbytes) | (rows > room)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"chunk {first} at offset {int(chunks.offsets[first])} with "
            f"{int(chunks.num_tokens[first])} tokens "
            f"({int(rows[first]) * bytes_per_row} bytes) is not inside the {chunks.nbytes} "
            "bytes of chunks.base"
        )
    return rows


def _numbered(counts: Int64s) -> tuple[Int64s, Int64s]:
    chunk = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    firsts = np.cumsum(counts) - counts
    return chunk, np.arange(chunk.size, dtype=np.int64) - firsts[chunk]


def _merged(plan: Plan) -> Plan:
    if plan.num_runs < 2:
        return plan
    rows = plan.rows[:-1]
    joins = plan.slots[1:] == plan.slots[:-1] + rows
    joins &= plan.chunk[1:] == plan.chunk[:-1]
    joins &= plan.first_rows[1:] == plan.first_rows[:-1] + rows
    if not plan.view.is_flat:
        joins &= plan.slots[1:] % plan.view.rows_per_block != 0
    first = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joins) + 1))
    return replace(
        plan,
        chunk=plan.chunk[first],
        first_rows=plan.first_rows[first],
        slots=plan.slots[first],
        rows=np.add.reduceat(plan.rows, first),
    )


def _check_int64s(name: str, values: object) -> None:
    if not isinstance(values, np.ndarray) or values.dtype != np.int64 or values.ndim != 1:
        raise ValueError(f"{name} must be a numpy array of int64 with one axis")
