"""Where blocks keep each element of keys and values, learnt by the engine's kernel."""

from typing import Any

import torch

from kvhold.core.errors import LayoutError

_DIGIT = 128  # integers that every dtype holds exactly


class BlockElements:
    """block: [1, ...], of one layer; is overwritten

    Raises LayoutError: elements change, or their order is not known.
    """

    def __init__(self, attention: Any, block: Any, block_tokens: int) -> None:
        heads, head_dim = attention.num_kv_heads, attention.head_size
        shape = (2, block_tokens, heads, head_dim)
        count = 2 * block_tokens * heads * head_dim
        if block.numel() != count or not block.is_contiguous():
            raise LayoutError(f"a block is {tuple(block.shape)}; its elements cannot be read")
        ids = torch.arange(count)
        found, digit = torch.zeros(count, dtype=torch.int64), 1
        while digit < count:
            keys, values = (ids // digit % _DIGIT).view(shape).to(block.dtype)
            write_blocks(attention, keys, values, block, torch.arange(block_tokens))
            found += block.reshape(-1).to(torch.int64) * digit
            digit *= _DIGIT
        if not torch.equal(found.sort().values, ids):
            raise LayoutError("the elements of its blocks cannot be read")
        # [2, heads, tokens, head_dim]
        self._places = found.argsort().view(shape).transpose(1, 2).contiguous()
        self._strides = [_strides(plane) for plane in self._places]

    def read(self, blocks: Any, into: Any, plane: int) -> None:
        """blocks: [n, ...]
        into:   [heads, tokens, head_dim], the first tokens of the blocks
        plane:  0: keys; 1: values
        """
        num_blocks = blocks.shape[0]
        heads, size, head_dim = self._places.shape[1:]
        tokens = into.shape[1]
        strides = self._strides[plane]
        if strides is not None:
            first, steps = int(self._places[plane].reshape(-1)[0]), strides
            every = blocks.as_strided(
                (heads, num_blocks, size, head_dim),
                (steps[0], blocks.stride(0), *steps[1:]),
                blocks.storage_offset() + first,
            )
        else:
            flat = blocks.view(num_blocks, -1)
            taken = flat.index_select(1, self._places[plane].reshape(-1))
            every = taken.view(num_blocks, heads, size, head_dim).transpose(0, 1)
        whole, rest = divmod(tokens, size)
        into[:, : whole * size].view(heads, whole, size, head_dim).copy_(every[:, :whole])
        if rest:
            into[:, whole * size :].copy_(every[:, whole, :rest])


def write_blocks(attention: Any, keys: Any, values: Any, blocks: Any, slots: Any) -> None:
    """keys, values: [tokens, heads, head_dim]; slots: [tokens] int64"""
    attention.impl.do_kv_cache_update(
        attention, keys.contiguous(), values.contiguous(), blocks, slots
    )


def _strides(places: Any) -> tuple[int, ...] | None:
    """None: they are not even. places: [heads, tokens, head_dim]"""
    first, steps, even = places[0, 0, 0], [], places[0, 0, 0]
    for axis, size in enumerate(places.shape):
        line = places.select(axis, min(1, size - 1))
        step = line.flatten()[0] - first
        steps.append(int(step))
        shape = [size if other == axis else 1 for other in range(3)]
        even = even + step * torch.arange(size).view(shape)
    return tuple(steps) if torch.equal(even, places) else None
