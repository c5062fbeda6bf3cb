"""Try a model before it blends: turned keys, chosen tokens, and who sees whom."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvhold.blend.rows import LayerKV, PromptKV
from kvhold.blend.selection import (
    BlendPlan,
    Budget,
    DeviationSelector,
    Flow,
    LayerState,
    Selector,
    StoredSpan,
)
from kvhold.core.errors import LayoutError

TOKENS = tuple(range(3, 15))

_SHIFT = 7
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


def prove(
    fill: Callable[[int], Any], blend: Callable[[PromptKV, BlendPlan, Selector], None]
) -> None:
    """fill:  the engine's own KV of TOKENS, from a position on
    blend: completes the KV of TOKENS

    Raises LayoutError.
    """
    try:
        _try(fill, blend)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"its layers are called otherwise ({error})") from error


def _try(
    fill: Callable[[int], Any], blend: Callable[[PromptKV, BlendPlan, Selector], None]
) -> None:
    count = len(TOKENS)
    exact, shifted = _copy(fill(0)), _copy(fill(_SHIFT))
    plan = BlendPlan(count, (StoredSpan(0, count, _SHIFT),))

    kv = _copy(shifted)
    blend(kv, plan, _Chosen([3, 8]))
    _compare(kv, exact, count, "keys at other positions are not turned keys")

    kv = _copy(exact, noise_from=0)
    blend(kv, plan, _Chosen(range(count)))
    _compare(kv, exact, count, "computing all tokens does not give the model's KV")

    kv = _copy(exact, noise_from=_FIRST)
    blend(kv, BlendPlan(count, (StoredSpan(0, count),)), _Chosen([1, 4]))
    _compare(kv, exact, _FIRST, "a token sees later ones")

    kv = _copy(shifted)
    selector = DeviationSelector((Budget(ratio=0.5),), check_layer=min(1, len(exact.layers) - 1))
    blend(kv, plan, selector)
    _compare(kv, exact, count, "its layers do not take fewer tokens")


def _copy(kv: Any, noise_from: int = len(TOKENS)) -> PromptKV:
    generator = torch.Generator().manual_seed(0)

    def copy(tensor: Any) -> Any:
        copied = tensor.clone()
        part = copied[:, :, noise_from:]
        noise = torch.randn(part.shape, generator=generator)
        part.copy_(noise * (1 + tensor.float().abs().mean().cpu()))
        return copied

    return PromptKV([LayerKV(copy(layer.keys), copy(layer.values)) for layer in kv.layers])


def _compare(kv: PromptKV, exact: PromptKV, num_tokens: int, fault: str) -> None:
    for number, (ours, theirs) in enumerate(zip(kv.layers, exact.layers, strict=True)):
        for name in ("keys", "values"):
            mine, other = (
                getattr(layer, name)[:, :, :num_tokens].double() for layer in (ours, theirs)
            )
            error = float((mine - other).norm() / other.norm().clamp_min(1e-30))
            eps = torch.finfo(getattr(ours, name).dtype).eps
            if not error <= max(1e-3, 8 * eps):
                raise LayoutError(f"{fault} ({name} of layer {number}: error {error:.2g})")
