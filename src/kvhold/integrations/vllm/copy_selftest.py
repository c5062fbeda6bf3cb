"""At registration: do copies and the engine address the same blocks?

Random bytes are gathered, wiped and scattered back; neighbouring blocks stay.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvhold.core.errors import LayoutError
from kvhold.core.holdings import ChunkBytes
from kvhold.integrations.vllm.geometry import Part
from kvhold.memory.coding import coded_block
from kvhold.memory.copier import Copier, Piece
from kvhold.memory.device.check import TensorBlocks, all_bytes, bytes_of_block
from kvhold.memory.selftest import check_orders
from kvhold.memory.views import View


def prove(
    part: Part, tensors: Sequence[torch.Tensor], views: Sequence[View], copier: Copier
) -> None:
    """tensors: the part's layers, `[blocks, ...]`; not used by the engine yet
    views: the part's shards, each a slice of the tensors' second axis

    Raises LayoutError.
    """
    num_blocks = tensors[0].shape[0]
    chosen = sorted(
        {0, 1, num_blocks // 2, num_blocks - 2, num_blocks - 1} & set(range(num_blocks))
    )
    proved, beside = chosen[::2], chosen[1::2]
    random = torch.Generator().manual_seed(1)
    for tensor in tensors:
        for block in chosen:
            place = bytes_of_block(tensor[block])
            place.copy_(torch.randint(0, 256, place.shape, generator=random, dtype=torch.uint8))
    before = [[bytes_of_block(tensor[block]).clone() for block in chosen] for tensor in tensors]
    try:
        for view, head_split in zip(views, head_splits(tensors, len(views)), strict=True):
            _prove_one(part, view, head_split, np.array(proved, dtype=np.int64), copier)
        for tensor, was in zip(tensors, before, strict=True):
            for block, expected in zip(chosen, was, strict=True):
                if not torch.equal(bytes_of_block(tensor[block]), expected):
                    what = (
                        "changed though it was not copied"
                        if block in beside
                        else "did not come back as it was"
                    )
                    raise LayoutError(f"kvhold: {_part_name(part)}: block {block} {what}")
    finally:
        for tensor in tensors:
            for block in chosen:
                tensor[block].zero_()


def prove_coding(
    part: Part, tensors: Sequence[torch.Tensor], views: Sequence[View], copier: Copier
) -> None:
    """Raises LayoutError: copier and host encode or decode differently."""
    for view, head_split in zip(views, head_splits(tensors, len(views)), strict=True):
        if view.coding is not None:
            _prove_codes(part, view, head_split, copier)


def _prove_codes(part: Part, view: View, tensors: Sequence[torch.Tensor], copier: Copier) -> None:
    block = len(tensors[0]) - 1
    random = torch.Generator().manual_seed(3)
    for tensor in tensors:
        tensor[block].copy_(torch.randn(tensor[block].shape, generator=random) * 10)
    known = [
        coded_block(view, bytes_of_block(tensor[block]).cpu().numpy().tobytes())
        for tensor in tensors
    ]
    expected = np.frombuffer(b"".join(encoded for encoded, _ in known), np.uint8)
    places = ChunkBytes(np.zeros(1, np.int64), np.full(1, part.group.block_tokens))
    try:
        with copier.scratch(expected.size) as buffer:
            piece = Piece(view, np.array([block], np.int64), buffer, places)
            copier.gather([piece], after=copier.mark()).wait()
            if not np.array_equal(buffer, expected):
                raise LayoutError(
                    f"kvhold: {_part_name(part)}: memory_codec: this device and the host encode "
                    "differently"
                )
            for tensor in tensors:
                tensor[block].zero_()
            transfer = copier.scatter([piece], after=copier.mark())
            copier.fence([transfer])
            transfer.wait()
        found = [bytes_of_block(tensor[block]).cpu().numpy().tobytes() for tensor in tensors]
        if found != [decoded for _, decoded in known]:
            raise LayoutError(
                f"kvhold: {_part_name(part)}: memory_codec: this device and the host decode "
                "differently"
            )
    finally:
        for tensor in tensors:
            tensor[block].zero_()


def _prove_one(
    part: Part,
    view: View,
    tensors: Sequence[torch.Tensor],
    blocks: npt.NDArray[np.int64],
    copier: Copier,
) -> None:
    group = part.engine_group
    chunk_bytes = group.layers * group.block_bytes  # one block each: a device's ring is small
    places = ChunkBytes(
        np.arange(len(blocks)) * chunk_bytes, np.full(len(blocks), group.block_tokens)
    )
    with copier.scratch(len(blocks) * chunk_bytes) as buffer:
        piece = Piece(view, blocks, buffer, places)
        copier.gather([piece], after=copier.mark()).wait()
        expected = all_bytes(tensors, [int(block) for block in blocks])
        if not np.array_equal(buffer, expected.cpu().numpy()):
            raise LayoutError(
                f"kvhold: {_part_name(part)}: gathered bytes are not those that the engine wrote"
            )
        for tensor in tensors:
            for block in blocks:
                tensor[int(block)].zero_()
        check_orders(
            copier, piece, TensorBlocks(tensors, [int(block) for block in blocks], buffer.size)
        )
        buffer[:] = expected.cpu().numpy()
        copier.scatter([piece], after=copier.mark()).wait()


def head_splits(tensors: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    if count == 1:
        return [list(tensors)]
    return [
        list(head_split)
        for head_split in zip(*(tensor.chunk(count, dim=1) for tensor in tensors), strict=True)
    ]


def _part_name(part: Part) -> str:
    return (
        f"KV cache group {part.table} ({part.layer_names[0]} and {len(part.layer_names) - 1} "
        f"more layers, {part.group.packing})"
    )
