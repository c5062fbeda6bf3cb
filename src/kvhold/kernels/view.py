"""The engine's KV as addresses and strides, in bytes.

A *row* is the memory of one slot: one token of one plane (canonical packing), or one whole block
(opaque packing). It lies at `table[layer, plane] + (slot // rows_per_block) * block_stride + (slot
% rows_per_block) * row_stride`. A view keeps the engine's tensors alive.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Group

Int64s: TypeAlias = npt.NDArray[np.int64]
Tensor: TypeAlias = Any


@dataclass(frozen=True)
class Coding:
    """A row of 8 bits: `elements` codes (int8), then a scale (float32) for each run.

    A scale is the largest magnitude of its run: infinity or NaN if an element is not finite.
    """

    dtype: str
    elements: int
    run: int

    @property
    def scales(self) -> int:
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

    table:    int64 [layers, planes] (opaque: [layers, 1]), addresses of slot 0
    owners:   [layers][planes], the tensor that holds each address
    num_rows: slots are 0 .. num_rows - 1
    coding:   the form of rows in chunks; None: the engine's bytes
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
        """A run may cross a block's end."""
        return self.block_stride == self.rows_per_block * self.row_stride

    @property
    def rows_are_whole(self) -> bool:
        """The heads of a row are adjacent, as in a chunk."""
        return self.heads == 1 or self.head_stride == self.head_bytes

    @property
    def runs_are_whole(self) -> bool:
        """A run is one piece of memory."""
        return self.rows_are_whole and self.row_stride == self.row_bytes
