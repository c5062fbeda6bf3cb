"""Attention of some tokens of a prompt over the KV of all of them, each by its true position.

transformers calls `attend` through its table of attention functions, without a mask.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvhold.core.errors import LayoutError

_NAME = "kvhold_rows"
_BLOCK = 128  # rows that share the slice of keys up to their last position
_HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_FLOWING: "ContextVar[FlowingRows | None]" = ContextVar("kvhold_rows", default=None)


class ProbedLayer(Exception):
    """Leaves a layer after its projections. queries: [1, heads, rows, head_dim]"""

    def __init__(self, queries: Any, scaling: float) -> None:
        super().__init__()
        self.queries, self.scaling = queries, scaling


class FlowingRows:
    """The tokens that flow through the layers now.

    positions: [rows] int64, ascending
    kv:        of the whole prompt; `cache` writes the rows' KV into it
    queries:   by layer, if `is_recorded`
    """

    def __init__(self, kv: DynamicCache, positions: Any, *, is_recorded: bool = False) -> None:
        self.kv = kv
        self.positions = positions
        self.is_probing = False
        self.is_recorded = is_recorded
        self.layer = -1
        self.queries: dict[int, tuple[Any, float]] = {}
        self.probed: tuple[Any, Any] = ()  # type: ignore[assignment]
        self.attended: list[int] = []
        self.cache = DynamicCache(config=None)
        self.cache.layers = [_RowLayer(self, layer) for layer in kv.layers]

    def attend(self, query: Any, key: Any, value: Any, scaling: float) -> Any:
        """Return [1, rows, query heads, head_dim]."""
        if self.is_probing:
            raise ProbedLayer(query, scaling)
        if self.is_recorded:
            self.queries[self.layer] = query, scaling
        self.attended.append(self.layer)
        return attend_rows(query, key, value, self.positions, scaling)


class _RowLayer(DynamicLayer):
    def __init__(self, rows: FlowingRows, whole: Any) -> None:
        super().__init__()
        self._rows = rows
        self.lazy_initialization(whole.keys, whole.values)
        self.keys, self.values = whole.keys, whole.values

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        if self._rows.is_probing:
            self._rows.probed = key_states, value_states
        else:
            self.keys.index_copy_(2, self._rows.positions, key_states)
            self.values.index_copy_(2, self._rows.positions, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


def attend_rows(query: Any, key: Any, value: Any, positions: Any, scaling: float) -> Any:
    """Causal attention: row i sees the keys 0 to positions[i].

    query:      [1, query heads, rows, head_dim]
    key, value: [1, heads, tokens, head_dim]
    positions:  [rows] int64, ascending

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
    ends: Sequence[int] = (positions[_BLOCK - 1 :: _BLOCK] + 1).tolist()
    ends = [*ends, int(positions[-1]) + 1]
    numbers = torch.arange(num_tokens, device=query.device)
    for block, first in enumerate(range(0, num_rows, _BLOCK)):
        part = slice(first, min(first + _BLOCK, num_rows))
        end, rows = ends[block], part.stop - part.start
        seen = numbers[:end] <= positions[part, None]
        found = scaled_dot_product_attention(
            query[:, :, part].reshape(1, heads, group * rows, head_dim),
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=seen.repeat(group, 1),
            scale=scaling,
        )
        out[:, part] = found.view(query_heads, rows, -1).transpose(0, 1)
    return out


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Any, None]:
    rows = _FLOWING.get()
    if rows is None:
        raise RuntimeError("another thread blends with this model; use it in one thread at a time")
    unknown = sorted(
        name for name, value in others.items() if value is not None and name not in _HARMLESS
    )
    if unknown or attention_mask is not None:
        raise LayoutError(
            f"{type(module).__name__}: its attention takes {', '.join(unknown) or 'a mask'}, which "
            "kvhold cannot apply to single tokens"
        )
    return rows.attend(query, key, value, scaling or query.shape[-1] ** -0.5), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def flowing(config: Any, rows: FlowingRows) -> Iterator[None]:
    """The model with `config` attends by `rows`."""
    before, token = config._attn_implementation, _FLOWING.set(rows)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _FLOWING.reset(token)
