"""The reference for the fast copies, and their substitute.

If the device cannot address the arena, each piece goes through a temporary.
"""

from typing import Any

import numpy as np

from kvhold.kernels.plan import Chunks, Plan
from kvhold.kernels.view import Int64s, Tensor, View


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    view, chunks = plan.view, plan.chunks
    chunk, row, slot = _each_row(plan)
    block, row_in_block = np.divmod(slot, view.rows_per_block)
    base = np.asarray(chunks.base) if view.device == "cpu" else _as_tensor(chunks)
    for c in np.unique(chunk):
        mine = chunk == c
        shape = (view.layers, view.planes, int(plan.chunk_rows[c]), view.heads, view.head_bytes)
        start = int(plan.chunk_starts[c])
        body = base[start : start + int(np.prod(shape))].reshape(shape)
        places = _index(row[mine], base)
        for layer in layers:
            for plane in range(view.planes):
                paged = _paged(view, layer, plane)
                where = _index(block[mine], paged), _index(row_in_block[mine], paged)
                if to_arena:
                    body[layer, plane][places] = _beside(paged[where], body)
                else:
                    paged[where] = _beside(body[layer, plane][places], paged)


def _each_row(plan: Plan) -> tuple[Int64s, Int64s, Int64s]:
    within = np.arange(plan.num_rows) - np.repeat(np.cumsum(plan.rows) - plan.rows, plan.rows)
    return (
        np.repeat(plan.chunk, plan.rows),
        np.repeat(plan.first_rows, plan.rows) + within,
        np.repeat(plan.slots, plan.rows) + within,
    )


class _HostMemory:
    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], read_only: bool
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, read_only),
            "shape": shape,
            "strides": strides,
        }


def _paged(view: View, layer: int, plane: int) -> Tensor:
    """uint8 [blocks, rows_per_block, heads, head_bytes]."""
    shape = (view.num_blocks, view.rows_per_block, view.heads, view.head_bytes)
    strides = (view.block_stride, view.row_stride, view.head_stride, 1)
    address = int(view.table[layer, plane])
    if view.device == "cpu":
        return np.asarray(_HostMemory(address, shape, strides, not view.writable))
    owner = view.owners[layer][plane]
    item = owner.element_size()
    elements = owner.as_strided(
        (*shape[:3], view.head_bytes // item),
        (*(stride // item for stride in strides[:3]), 1),
        owner.storage_offset() + (address - owner.data_ptr()) // item,
    )
    return elements.view(_torch().uint8)


def _as_tensor(chunks: Chunks) -> Tensor:
    """Declared writable, because torch warns about read-only memory."""
    if not isinstance(chunks.base, np.ndarray):
        return chunks.base
    return _torch().as_tensor(
        np.asarray(_HostMemory(chunks.address, (chunks.nbytes,), (1,), False))
    )


def _index(values: Int64s, of: Tensor) -> Any:
    return values if isinstance(of, np.ndarray) else _torch().from_numpy(values).to(of.device)


def _beside(values: Tensor, other: Tensor) -> Tensor:
    return values if isinstance(other, np.ndarray) else values.to(other.device)


def _torch() -> Any:
    import torch

    return torch
