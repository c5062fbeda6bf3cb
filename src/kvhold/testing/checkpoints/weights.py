"""Random weights that make a model worth asking: its greedy output depends on its whole context and does not repeat itself.

What transformers draws by default (standard deviation 0.02) gives attention that looks at everything alike and logits that are all the
same; then wrong KV changes no token. Here each matrix keeps the size of what goes through it, attention is sharper than that, and logits
lead by far more than float32 noise. What is no matrix (norms, biases, decay rates, convolutions) stays as transformers draws it.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_GAIN = 1.2
_QUERY_KEY_GAIN = 1.6
_LOGIT_STD = 3.0
_QUERY_KEY_NORM = 1.5  # where queries and keys are normalised, their sharpness lies here
_SCALED_EMBEDDING = ("gemma",)  # multiply embeddings by the root of their size


def draw_weights(model: Any, seed: int) -> None:
    """Overwrite the model's matrices, in place. The same model and seed give the same weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    scaled = model.config.model_type.startswith(_SCALED_EMBEDDING)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if _is_query_key_norm(name):
                weight.fill_(_QUERY_KEY_NORM - 1.0 if scaled else _QUERY_KEY_NORM)
            elif (std := _std(name, weight, scaled)) is not None:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def _std(name: str, weight: "torch.Tensor", scaled: bool) -> float | None:
    parts = name.removesuffix(".weight").split(".")
    if weight.ndim < 2 or "norm" in name or parts[-1] in ("conv1d", "A_log") or name.endswith(".conv.conv.weight"):
        return None
    if "position" in parts[-1] or "class_embedding" in parts[-1] or "patch_embedding" in parts[-1]:
        return None
    fan_in = int(weight.shape[-1])
    if "embed" in parts[-1]:
        return 1 / math.sqrt(fan_in) if scaled else 1.0
    if parts[-1] == "lm_head":
        return _LOGIT_STD / math.sqrt(fan_in)
    return (_QUERY_KEY_GAIN if parts[-1] in ("q_proj", "k_proj") else _GAIN) / math.sqrt(fan_in)


def _is_query_key_norm(name: str) -> bool:
    return any(f".{part}.weight" in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"))
