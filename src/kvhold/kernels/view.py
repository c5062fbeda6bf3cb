"""What the copies need to know about an engine's KV: addresses and strides, all in bytes.

    view = kvhold.memory.views.per_layer(group, kv_caches, axes="plane block token head dim")

A *row* is what one slot names: one token of one plane (canonical packing), or one whole block of
bytes (opaque packing, where a slot is a block). Rows of one layer and plane lie at `table[layer,
plane] + (slot // rows_per_block) * block_stride + (slot % rows_per_block) * row_stride`; inside a
row, head h lies `h * head_stride` further on. A view is a value: any thread may use it. It keeps
the engine's tensors alive, and is wrong the day the engine moves them. The constructors, with all
the checks, are in `kvhold.memory.views`.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Group

Int64s: TypeAlias = npt.NDArray[np.int64]
Tensor: TypeAlias = Any  # torch.Tensor or np.ndarray; torch is not imported for a type's sake


@dataclass(frozen=True)
class Coding:
    """How a row is kept in a chunk with 8 bits an element: `elements` codes (int8), then a scale
    (float32) for each `run` of them.

    A scale is the largest magnitude of its run, an infinity or NaN where one of its elements is not
    finite.

    dtype:    of the engine's elements: bfloat16, float16 or float32
    elements: of one row; a multiple of `run`
    run:      consecutive elements that share a scale; a power of two
    """

    dtype: str
    elements: int
    run: int

    @property
    def scales(self) -> int:
        """Of one row."""
        return self.elements // self.run

    @property
    def nbytes(self) -> int:
        """Of a row in a chunk."""
        return self.elements + 4 * self.scales

    @property
    def plain_bytes(self) -> int:
        """Of a row in the engine's memory."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """One group's KV on one device.

    group:    as the chunks have it; where `coding` is set, its blocks are smaller than the engine's
    table:    int64 [layers, planes] (opaque: [layers, 1]), address of slot 0 of each layer and
        plane
    owners:   [layers][planes], the tensor each address lies in
    num_rows: slots are 0 .. num_rows - 1
    block_stride, row_stride, head_stride: bytes
    writable: False when some tensor is read-only; such a view cannot be scattered into
    coding:   how rows are kept in chunks; None: byte by byte
    """

    group: Group
    device: str
    table: Int64s
    owners: tuple[tuple[Tensor, ...], ...]
    num_rows: int
    rows_per_block: int
    block_stride: int
    row_stride: int
    head_stride: int
    writable: bool = True
    coding: Coding | None = None

    @property
    def is_opaque(self) -> bool:
        return self.group.packing != CANONICAL

    @property
    def layers(self) -> int:
        return self.group.layers

    @property
    def planes(self) -> int:
        return 1 if self.is_opaque else self.group.planes

    @property
    def heads(self) -> int:
        return 1 if self.is_opaque else self.group.heads

    @property
    def head_bytes(self) -> int:
        return (
            self.group.block_bytes
            if self.is_opaque
            else self.group.head_dim * DTYPE_BYTES[self.group.dtype]
        )

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_bytes

    @property
    def tokens_per_block(self) -> int:
        return self.group.block_tokens if self.is_opaque else self.rows_per_block

    @property
    def num_blocks(self) -> int:
        return self.num_rows // self.rows_per_block

    @property
    def is_flat(self) -> bool:
        """Slots follow each other without a step at the end of a block, so a run of slots may cross
        it.
        """
        return self.block_stride == self.rows_per_block * self.row_stride

    @property
    def rows_are_whole(self) -> bool:
        """The heads of a row lie together: a row is one piece of memory, as it is in a chunk."""
        return self.heads == 1 or self.head_stride == self.head_bytes

    @property
    def runs_are_whole(self) -> bool:
        """The rows of a run lie together too: a run is one piece of memory."""
        return self.rows_are_whole and self.row_stride == self.row_bytes
