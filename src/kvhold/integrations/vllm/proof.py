"""Proof, when the engine's tensors are registered, that our copies see its blocks as it does.

    prove(part, tensors, views, copier)     # LayoutError says what differs; the blocks are zero again afterwards

Random bytes are written through the engine's own tensors, gathered by us and compared, byte by byte, with what torch reads there; then
they are wiped, scattered back and compared again, and the blocks beside them must not have changed. The copier is the one that serves,
and it gets the marks that it gets then. Nothing is served before that.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvhold.core.api import ChunkBytes
from kvhold.core.errors import LayoutError
from kvhold.integrations.vllm.geometry import Part
from kvhold.memory.copier import Copier, Piece
from kvhold.memory.views import View


def prove(part: Part, tensors: Sequence[torch.Tensor], views: Sequence[View], copier: Copier) -> None:
    """tensors: of the part's layers, `[blocks, ...]`, unused so far; views: of its shards, each a slice of the tensors' second axis.

    Raises LayoutError where what we copy is not what the engine reads and writes.
    """
    num_blocks = tensors[0].shape[0]
    chosen = sorted({0, 1, num_blocks // 2, num_blocks - 2, num_blocks - 1} & set(range(num_blocks)))
    proved, beside = chosen[::2], chosen[1::2]
    random = torch.Generator().manual_seed(1)
    for tensor in tensors:
        for block in chosen:
            _bytes(tensor[block]).copy_(torch.randint(0, 256, _bytes(tensor[block]).shape, generator=random, dtype=torch.uint8))
    before = [[_bytes(tensor[block]).clone() for block in chosen] for tensor in tensors]
    try:
        for view, lot in zip(views, lots(tensors, len(views)), strict=True):
            _prove_one(part, view, lot, np.array(proved, dtype=np.int64), copier)
        for tensor, was in zip(tensors, before, strict=True):
            for block, expected in zip(chosen, was, strict=True):
                if not torch.equal(_bytes(tensor[block]), expected):
                    what = "changed though it was not copied" if block in beside else "did not come back as it was"
                    raise LayoutError(f"kvhold: {_name(part)}: block {block} {what}")
    finally:
        for tensor in tensors:
            for block in chosen:
                tensor[block].zero_()


def _prove_one(part: Part, view: View, tensors: Sequence[torch.Tensor], blocks: npt.NDArray[np.int64], copier: Copier) -> None:
    group = part.group
    buffer = np.zeros(group.layers * len(blocks) * group.block_bytes, dtype=np.uint8)
    places = ChunkBytes(np.zeros(1, dtype=np.int64), np.array([len(blocks) * group.block_tokens], dtype=np.int64))
    piece = Piece(view, blocks, buffer, places)
    copier.gather([piece], after=copier.mark()).wait()
    expected = torch.cat([_bytes(tensor[int(block)]).reshape(-1) for tensor in tensors for block in blocks])
    if not np.array_equal(buffer, expected.cpu().numpy()):
        raise LayoutError(f"kvhold: {_name(part)}: gathered bytes are not those that the engine wrote")
    for tensor in tensors:
        for block in blocks:
            tensor[int(block)].zero_()
    copier.scatter([piece], after=copier.mark()).wait()


def lots(tensors: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """The tensors as the views of `count` shards have them: whole, or equal slices of their heads (axis 1)."""
    if count == 1:
        return [list(tensors)]
    return [list(lot) for lot in zip(*(tensor.chunk(count, dim=1) for tensor in tensors), strict=True)]


def _bytes(block: torch.Tensor) -> torch.Tensor:
    """A block's bytes, in the order in which they lie: the axis with the longest step first. A view, not a copy."""
    order = sorted(range(block.ndim), key=lambda axis: -block.stride(axis))
    return block.permute(order).view(torch.uint8)


def _name(part: Part) -> str:
    return f"KV cache group {part.table} ({part.layer_names[0]} and {len(part.layer_names) - 1} more layers, {part.group.packing})"
