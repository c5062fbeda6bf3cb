"""Small engines for the copy tests: random bytes arranged in every way, and a slow, independent way
to find one token in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvhold.core.layout import DTYPE_BYTES, Group
from kvhold.kernels import Chunks, Plan, View
from kvhold.memory.views import cross_layer, opaque_blocks, per_layer, separate_pools

MARGIN = 192  # bytes of poison around every tensor
BLOCKS, TOKENS = 7, 4
ARRANGEMENTS = {
    "NHD": "plane block token head dim",
    "HND": "plane block head token dim",
    "plane inside a block": "block plane token head dim",
    "heads outside": "head block token plane dim",
    "cross-layer": "block layer plane head token dim",
    "cross-layer, layer first": "layer plane block token head dim",
    "K and V pools": "slot head dim",
    "unpaged": "block head token dim",
    "MLA": "block token dim",
    "MLA with axes of one": "plane slot head dim",
    "opaque": "block head token dim",
}


@dataclass
class Engine:
    """Tensors, the raw memory they lie in, and the view under test."""

    group: Group
    axes: list[str]
    tensors: list[list[torch.Tensor]]  # [layers][planes], [layers][1] or [1][1]
    memory: list[np.ndarray]  # uint8, margins included
    view: View

    def row(self, layer: int, plane: int, slot: int) -> np.ndarray:
        """The bytes of one token (opaque: one block) by plain indexing: uint8 [heads, head_bytes],
        writable.
        """
        at_layer = self.tensors[layer if len(self.tensors) > 1 else 0]
        tensor = at_layer[plane if len(at_layer) > 1 else 0]
        if self.view.is_opaque:
            return _as_bytes(tensor[slot].reshape(1, -1))
        block, token = divmod(slot, self.view.tokens_per_block)
        where: dict[str, Any] = {
            "layer": layer,
            "plane": plane,
            "block": block,
            "token": token,
            "slot": slot,
        }
        index = tuple(where.get(axis, slice(None)) for axis in self.axes)
        left = [axis for axis in self.axes if axis not in where]
        picked = tensor[index]
        if left == ["dim", "head"]:
            picked = picked.transpose(0, 1)
        return _as_bytes(picked if len(left) == 2 else picked.unsqueeze(0))


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.view(torch.uint8).numpy()
    return found


def make(
    kind: str,
    *,
    dtype: str = "bfloat16",
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 5,
    pad: int = 0,
    seed: int = 0,
    blocks: int = BLOCKS,
    tokens: int = TOKENS,
) -> Engine:
    """An engine of an arrangement. pad: elements of poison after each `dim`, so that nothing is
    contiguous but `dim`.
    """
    mla, opaque = kind.startswith("MLA"), kind == "opaque"
    heads = 1 if mla else heads
    group = Group(
        layers=layers, planes=1 if mla else 2, heads=heads, head_dim=head_dim, dtype=dtype
    )
    if opaque:
        block_bytes = heads * tokens * 2 * head_dim * DTYPE_BYTES[dtype]
        group = Group(
            layers=layers,
            planes=2,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            packing="test",
            block_tokens=tokens,
            block_bytes=block_bytes,
        )
    axes = ARRANGEMENTS[kind].split()
    pools = kind in ("K and V pools", "unpaged")
    sizes = {
        "layer": layers,
        "plane": group.planes,
        "block": blocks,
        "token": tokens,
        "slot": blocks * tokens,
        "head": heads,
    }
    shape = [*(sizes[axis] for axis in axes[:-1]), 2 * head_dim if opaque else head_dim]
    counts = (1 if "layer" in axes else layers), (group.planes if pools else 1)
    rng = np.random.default_rng(seed)
    memory: list[np.ndarray] = []
    tensors = [
        [_tensor(rng, memory, shape, dtype, 0 if opaque else pad) for _ in range(counts[1])]
        for _ in range(counts[0])
    ]
    pages = tokens if "slot" in axes else None
    if opaque:
        view = opaque_blocks(group, [layer[0] for layer in tensors], block_axis=0)
    elif pools:
        view = separate_pools(
            group, list(zip(*tensors, strict=True)), axes=axes, tokens_per_block=pages
        )
    elif "layer" in axes:
        view = cross_layer(group, tensors[0][0], axes=axes)
    else:
        view = per_layer(group, [layer[0] for layer in tensors], axes=axes, tokens_per_block=pages)
    return Engine(group, axes, tensors, memory, view)


def of_permuted_axes(
    physical: Sequence[str],
    logical: Sequence[str],
    *,
    group: Group,
    blocks: int,
    tokens: int,
    seed: int,
) -> Engine:
    """A tensor a layer whose memory runs as `physical` (dim last) and whose axes are named as
    `logical`, a permutation of it.
    """
    sizes = {
        "plane": group.planes,
        "block": blocks,
        "token": tokens,
        "head": group.heads,
        "dim": group.head_dim,
    }
    rng = np.random.default_rng(seed)
    memory: list[np.ndarray] = []
    order = [list(physical).index(axis) for axis in logical]
    tensors = [
        [_tensor(rng, memory, [sizes[axis] for axis in physical], group.dtype, 0).permute(order)]
        for _ in range(group.layers)
    ]
    view = per_layer(group, [layer[0] for layer in tensors], axes=logical)
    return Engine(group, list(logical), tensors, memory, view)


def _tensor(
    rng: np.random.Generator, memory: list[np.ndarray], shape: Sequence[int], dtype: str, pad: int
) -> torch.Tensor:
    *outer, dim = shape
    item = DTYPE_BYTES[dtype]
    nbytes = int(np.prod(outer)) * (dim + pad) * item
    raw = lines(2 * MARGIN + nbytes)
    raw[:] = rng.integers(0, 256, raw.size, dtype=np.uint8)
    memory.append(raw)
    return (
        torch.from_numpy(raw[MARGIN : MARGIN + nbytes])
        .view(getattr(torch, dtype))
        .view(*outer, dim + pad)[..., :dim]
    )


def lines(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] that begins on a cache line."""
    raw = np.empty(nbytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + nbytes]


def arena_for(
    view: View, num_tokens: Sequence[int], *, seed: int = 1, gap: int = 64, first: int = 128
) -> Chunks:
    """Chunks of random bytes, with `gap` bytes of poison around each."""
    rows = [-(-n // view.tokens_per_block) if view.is_opaque else n for n in num_tokens]
    sizes = [view.layers * view.planes * n * view.row_bytes for n in rows]
    offsets, at = [], first
    for size in sizes:
        offsets.append(at)
        at += size + gap + (-size % 64 if gap % 64 == 0 else 0)
    base = lines(at + 64)
    base[:] = np.random.default_rng(seed).integers(0, 256, base.size, dtype=np.uint8)
    return Chunks(base, np.array(offsets, np.int64), np.array(num_tokens, np.int64))


def slowly(
    engine: Engine,
    chunks: Chunks,
    slots: Sequence[int],
    to_arena: bool,
    layers: range | None = None,
) -> None:
    """What gather and scatter are to do, one row at a time.

    For an opaque view, slots are block ids.
    """
    view = engine.view
    at = 0
    for offset, num_tokens in zip(chunks.offsets.tolist(), chunks.num_tokens.tolist(), strict=True):
        rows = -(-num_tokens // view.tokens_per_block) if view.is_opaque else num_tokens
        shape = (view.layers, view.planes, rows, view.heads, view.head_bytes)
        chunk = chunks.base[offset : offset + int(np.prod(shape))].reshape(shape)
        for number, slot in enumerate(slots[at : at + rows]):
            for layer in layers or range(view.layers) if slot >= 0 else ():
                for plane in range(view.planes):
                    if to_arena:
                        chunk[layer, plane, number] = engine.row(layer, plane, slot)
                    else:
                        engine.row(layer, plane, slot)[:] = chunk[layer, plane, number]
        at += rows
    assert at == len(slots)


def slots_of(plan: Plan) -> list[int]:
    """The slots of a plan's rows, in order."""
    return [
        slot + n
        for slot, rows in zip(plan.slots.tolist(), plan.rows.tolist(), strict=True)
        for n in range(rows)
    ]
