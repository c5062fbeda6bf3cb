from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Group, Layout

# vLLM's attention on x86: per head K as [head_dim][token], then V as [token][head_dim]
_HEADS_WITH_K_TRANSPOSED = frozenset(
    f"vllm-{release}-cpu_attn-{kind}"
    for release in ("0.30", "0.31", "0.32")
    for kind in ("vec", "vec16")
)


def is_known(group: Group) -> bool:
    block_bytes = 2 * group.block_tokens * group.token_bytes
    return (
        group.packing in _HEADS_WITH_K_TRANSPOSED
        and group.planes == 2
        and group.block_bytes == block_bytes
    )


@lru_cache(64)
def canonical_twin(layout: Layout, group: int) -> Layout | None:
    place = layout.groups[group]
    if not is_known(place):
        return None
    groups = list(layout.groups)
    groups[group] = replace(place, packing=CANONICAL, block_tokens=0, block_bytes=0)
    return replace(layout, groups=tuple(groups))


def to_canonical(layer: memoryview, group: Group) -> memoryview:
    plain = np.empty(len(layer), np.uint8)
    for packed, plane in zip(
        _packed(np.frombuffer(layer, np.uint8), group), _planes(plain, group), strict=True
    ):
        np.copyto(plane, packed)
    return memoryview(plain.data)


def from_canonical(plain: memoryview, layer: memoryview, group: Group) -> None:
    for packed, plane in zip(
        _packed(np.frombuffer(layer, np.uint8), group),
        _planes(np.frombuffer(plain, np.uint8), group),
        strict=True,
    ):
        np.copyto(packed, plane)


def _planes(
    plain: npt.NDArray[np.uint8], group: Group
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """K and V, each [blocks, tokens of a block, heads, head_dim]."""
    k, v = plain.view(_kind(group)).reshape(2, -1, group.block_tokens, group.heads, group.head_dim)
    return k, v


def _packed(
    layer: npt.NDArray[np.uint8], group: Group
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    blocks = layer.view(_kind(group)).reshape(
        -1, group.heads, 2, group.block_tokens * group.head_dim
    )
    k = blocks[:, :, 0].reshape(-1, group.heads, group.head_dim, group.block_tokens)
    v = blocks[:, :, 1].reshape(-1, group.heads, group.block_tokens, group.head_dim)
    return k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)


def _kind(group: Group) -> str:
    return f"<u{DTYPE_BYTES[group.dtype]}"
