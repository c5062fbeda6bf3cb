"""The copy to which the fast ones are compared, and which does their work where they cannot run.

Plain indexing, one layer, plane and chunk at a time: numpy in host memory, torch on a device, the
same lines for both. Where the device cannot address the arena, each piece goes through a temporary
on the other side. Does not use threads.
"""

from typing import Any

import numpy as np

from kvhold.kernels.plan import Chunks, Plan
from kvhold.kernels.view import Int64s, Tensor, View


def copy(plan: Plan, layers: range, to_arena: bool, threads: int) -> None:
    """Move the plan's rows of `layers`, to the arena or from it.

    Arguments were checked by the door.
    """
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
                paged = _paged(
                    view, layer, plane
                )  # [blocks, rows_per_block, heads, head_bytes] uint8
                where = _index(block[mine], paged), _index(row_in_block[mine], paged)
                if to_arena:
                    body[layer, plane][places] = _beside(paged[where], body)
                else:
                    paged[where] = _beside(body[layer, plane][places], paged)


def _each_row(plan: Plan) -> tuple[Int64s, Int64s, Int64s]:
    """The plan's runs taken apart again: for each row its chunk, its number in the
    chunk, its slot.
    """
    within = np.arange(plan.num_rows) - np.repeat(np.cumsum(plan.rows) - plan.rows, plan.rows)
    return (
        np.repeat(plan.chunk, plan.rows),
        np.repeat(plan.first_rows, plan.rows) + within,
        np.repeat(plan.slots, plan.rows) + within,
    )


class _HostMemory:
    """Memory at an address, as numpy's array interface wants it."""

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
    """uint8 [blocks, rows_per_block, heads, head_bytes] over the engine's own memory."""
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
    """The chunks' memory for torch, which knows no read-only memory and warns of it; nothing is
    written to what is not writable.
    """
    if not isinstance(chunks.base, np.ndarray):
        return chunks.base
    return _torch().as_tensor(
        np.asarray(_HostMemory(chunks.address, (chunks.nbytes,), (1,), False))
    )


def _index(values: Int64s, of: Tensor) -> Any:
    return values if isinstance(of, np.ndarray) else _torch().from_numpy(values).to(of.device)


def _beside(values: Tensor, other: Tensor) -> Tensor:
    """`values` on the device, and of the kind, of `other`."""
    return values if isinstance(other, np.ndarray) else values.to(other.device)


def _torch() -> Any:
    import torch

    return torch
