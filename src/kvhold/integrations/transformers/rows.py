"""Attention of flowing rows, as transformers' functions for it.

transformers calls `_attend` by its table of attention functions, without a mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvhold.blend.rows import FlowingRows
from kvhold.core.errors import LayoutError

_NAME = "kvhold_rows"
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


def row_cache(rows: FlowingRows) -> DynamicCache:
    """Writes the rows' KV, and gives that of all tokens."""
    cache = DynamicCache(config=None)
    cache.layers = [_RowLayer(rows, layer) for layer in rows.kv.layers]
    return cache


class _RowLayer(DynamicLayer):
    def __init__(self, rows: FlowingRows, whole: Any) -> None:
        super().__init__()
        self._rows = rows
        self.lazy_initialization(whole.keys, whole.values)
        self.keys, self.values = whole.keys, whole.values

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        self._rows.write(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


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
