"""Try a model before its prompts are blended: turned keys, chosen tokens, and who sees whom."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvhold.blend.selection import (
    BlendPlan,
    Budget,
    DeviationSelector,
    Flow,
    LayerState,
    StoredSpan,
)
from kvhold.core.errors import LayoutError

if TYPE_CHECKING:
    from kvhold.integrations.transformers.blending import Blender

_TOKENS, _SHIFT = 12, 7
_FIRST = 5  # tokens that must not see the later ones


class _Chosen:
    name = "chosen"
    flow: Flow = "none"
    check_layer = 0
    budgets = (Budget(ratio=0.0),)

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        return torch.tensor(self._positions, dtype=torch.int64)


def prove(blender: "Blender") -> None:
    """Raises LayoutError."""
    try:
        _try(blender)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _failed(blender, f"its layers are called otherwise ({error})") from error


def _try(blender: "Blender") -> None:
    tokens = torch.arange(3, 3 + _TOKENS, device=blender.model.device)[None]
    exact, shifted = _filled(blender, tokens, 0), _filled(blender, tokens, _SHIFT)
    span = StoredSpan(0, _TOKENS, _SHIFT)
    plan = BlendPlan(_TOKENS, (span,))

    kv = _copy(blender, shifted)
    blender.prefill(tokens, kv, plan, _Chosen([3, 8]))
    _compare(blender, kv, exact, _TOKENS, "keys at other positions are not turned keys")

    kv = _copy(blender, exact, noise_from=0)
    blender.prefill(tokens, kv, plan, _Chosen(range(_TOKENS)))
    _compare(blender, kv, exact, _TOKENS, "computing all tokens does not give the model's KV")

    kv = _copy(blender, exact, noise_from=_FIRST)
    blender.prefill(tokens, kv, BlendPlan(_TOKENS, (StoredSpan(0, _TOKENS),)), _Chosen([1, 4]))
    _compare(blender, kv, exact, _FIRST, "a token sees later ones")

    kv = _copy(blender, shifted)
    last = len(exact.layers) - 1
    selector = DeviationSelector((Budget(ratio=0.5),), check_layer=min(1, last))
    blender.prefill(tokens, kv, plan, selector)
    _compare(blender, kv, exact, _TOKENS, "its layers do not take fewer tokens")


def _filled(blender: "Blender", tokens: Any, shift: int) -> DynamicCache:
    kv = blender.geometry.empty()
    positions = torch.arange(shift, shift + _TOKENS, device=tokens.device)[None]
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        blender.model(input_ids=tokens, position_ids=positions, past_key_values=kv, use_cache=True)
    return kv


def _copy(blender: "Blender", kv: DynamicCache, noise_from: int = _TOKENS) -> DynamicCache:
    copy = blender.geometry.allocated(1, _TOKENS)
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(copy.layers, kv.layers, strict=True):
        for name in ("keys", "values"):
            part = getattr(ours, name).copy_(getattr(theirs, name))[:, :, noise_from:]
            noise = torch.randn(part.shape, generator=generator)
            part.copy_(noise * (1 + getattr(theirs, name).float().abs().mean().cpu()))
    return copy


def _compare(
    blender: "Blender", kv: DynamicCache, exact: DynamicCache, num_tokens: int, fault: str
) -> None:
    for number, (ours, theirs) in enumerate(zip(kv.layers, exact.layers, strict=True)):
        for name in ("keys", "values"):
            mine, other = (
                getattr(layer, name)[:, :, :num_tokens].double() for layer in (ours, theirs)
            )
            error = float((mine - other).norm() / other.norm().clamp_min(1e-30))
            eps = torch.finfo(getattr(ours, name).dtype).eps
            if not error <= max(1e-3, 8 * eps):
                raise _failed(blender, f"{fault} ({name} of layer {number}: error {error:.2g})")


def _failed(blender: "Blender", reason: str) -> LayoutError:
    return LayoutError(f"kvhold does not blend with this {type(blender.model).__name__}: {reason}")
