"""Attention of some tokens of a prompt over the KV of all, each by its true position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_BLOCK = 64  # rows that share the slice of keys up to their last position


@dataclass
class LayerKV:
    """keys, values: [1, heads, tokens, head_dim]"""

    keys: Any
    values: Any


@dataclass
class PromptKV:
    layers: list[LayerKV]


class ProbedLayer(Exception):
    """Leaves a layer after its projections. queries: [1, heads, rows, head_dim]"""

    def __init__(self, queries: Any, scaling: float) -> None:
        super().__init__()
        self.queries, self.scaling = queries, scaling


class FlowingRows:
    """The tokens that flow through the layers now.

    kv:        of the whole prompt, or with `layers` alike; `write` completes it
    positions: [rows] int64, ascending
    hidden:    positions whose KV no token may see, or None
    queries:   by layer, if `is_recorded`
    """

    def __init__(
        self, kv: Any, positions: Any, *, hidden: Any = None, is_recorded: bool = False
    ) -> None:
        self.kv = kv
        self.positions = positions
        self.hidden = hidden
        self.is_probing = False
        self.is_recorded = is_recorded
        self.layer = -1
        self.queries: dict[int, tuple[Any, float]] = {}
        self.probed: tuple[Any, Any] = ()  # type: ignore[assignment]
        self.attended: list[int] = []

    def write(self, keys: Any, values: Any) -> None:
        """keys, values: [1, heads, rows, head_dim]"""
        if self.is_probing:
            self.probed = keys, values
            return
        layer = self.kv.layers[self.layer]
        layer.keys.index_copy_(2, self.positions, keys)
        layer.values.index_copy_(2, self.positions, values)

    def attend(self, query: Any, key: Any, value: Any, scaling: float) -> Any:
        """Return [1, rows, query heads, head_dim]; of the last layer, only the last row counts."""
        if self.is_probing:
            raise ProbedLayer(query, scaling)
        if self.is_recorded:
            self.queries[self.layer] = query, scaling
        self.attended.append(self.layer)
        is_last = self.layer == len(self.kv.layers) - 1
        # no other output of the last layer is used
        rows = slice(-1 if is_last else 0, None)
        found = attend_rows(
            query[:, :, rows], key, value, self.positions[rows], scaling, hidden=self.hidden
        )
        if is_last:
            found = torch.nn.functional.pad(found, (0, 0, 0, 0, query.shape[2] - 1, 0))
        return found


def attend_rows(
    query: Any, key: Any, value: Any, positions: Any, scaling: float, *, hidden: Any = None
) -> Any:
    """Causal attention: row i sees the keys 0 to positions[i].

    query:      [1, query heads, rows, head_dim]
    key, value: [1, heads, tokens, head_dim]
    positions:  [rows] int64, ascending
    hidden:     [n] int64: finite keys and values that no row sees

    Returns [1, rows, query heads, head_dim].
    """
    _, query_heads, num_rows, head_dim = query.shape
    heads, num_tokens = key.shape[1:3]
    group = query_heads // heads
    if num_rows == num_tokens:
        found = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=group > 1
        )
        return found.transpose(1, 2)
    out = query.new_empty(1, num_rows, query_heads, value.shape[-1])
    numbers = torch.arange(num_tokens, device=query.device)
    starts = range(0, num_rows, _BLOCK)
    lasts = [min(start + _BLOCK, num_rows) - 1 for start in starts]
    edges: Sequence[int] = (positions[[*starts, *lasts]] + 1).tolist()
    for start, begin, end in zip(starts, edges, edges[len(starts) :], strict=False):
        part = positions[start : start + _BLOCK, None]
        # all rows see the keys before `begin`
        bias = query.new_zeros(len(part), end)
        bias[:, begin:].masked_fill_(numbers[begin:end] > part, -torch.inf)
        if hidden is not None:
            bias.index_fill_(1, hidden[hidden < end], -torch.inf)
        rows = slice(start, start + len(part))
        keys, values = (one[0, :, None, :end].expand(-1, group, -1, -1) for one in (key, value))
        queries = query[0, :, rows].reshape(heads, group, len(part), head_dim)
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scaling)
        out[:, rows] = found.reshape(query_heads, len(part), -1).transpose(0, 1)
    return out
