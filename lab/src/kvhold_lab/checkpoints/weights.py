"""Random weights whose output depends on the whole context."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_GAIN = 1.2
_QUERY_KEY_GAIN = 1.6
_LOGIT_STD = 3.0
_QUERY_KEY_NORM = 1.5
_SCALED_EMBEDDING = ("gemma",)  # these multiply embeddings by the root of their size


def draw_weights(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    scaled, tied = (
        model.config.model_type.startswith(_SCALED_EMBEDDING),
        model.config.tie_word_embeddings,
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if _is_query_key_norm(name):
                weight.fill_(_QUERY_KEY_NORM - 1.0 if scaled else _QUERY_KEY_NORM)
            elif (std := _std(name, weight, scaled=scaled, tied=tied)) is not None:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def _std(name: str, weight: "torch.Tensor", *, scaled: bool, tied: bool) -> float | None:
    leaf = name.removesuffix(".weight").split(".")[-1]
    if weight.ndim < 2 or "norm" in name or leaf == "A_log" or "position" in leaf:
        return None
    if "conv" in leaf or "patch" in leaf:
        return _GAIN / math.sqrt(math.prod(weight.shape[1:]))
    size = int(weight.shape[-1])
    if leaf == "lm_head" or ("embed" in leaf and tied):
        return _LOGIT_STD / math.sqrt(size)
    if "embed" in leaf:
        return 1 / math.sqrt(size) if scaled else 1.0
    return (_QUERY_KEY_GAIN if leaf in ("q_proj", "k_proj") else _GAIN) / math.sqrt(size)


def _is_query_key_norm(name: str) -> bool:
    return any(
        f".{part}.weight" in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
    )
