from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvhold.blend.selection.base import BlendPlan, Budget, Flow, LayerState
from kvhold.core.errors import ConfigError


@dataclass
class DeviationSelector:
    """Tokens whose computed KV differs most from the stored (CacheBlend, EuroSys'25).

    A score is the mean square of the difference, divided by that of all computed values.
    budgets: the check layer's, and smaller ones for the layers above it
    """

    budgets: tuple[Budget, ...]
    of: Literal["values", "keys"] = "values"
    check_layer: int = 1
    name: str = field(default="deviation", init=False)
    flow: Flow = field(default="all", init=False)

    def __post_init__(self) -> None:
        if not self.budgets:
            raise ConfigError("budgets is empty; give one for the check layer")
        if self.of not in ("values", "keys"):
            raise ConfigError(f"of is {self.of!r}; it must be 'values' or 'keys'")
        if self.check_layer < 0:
            raise ConfigError(f"check_layer is {self.check_layer}; it must be 0 or more")

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        import torch

        (layer,) = layers
        new, old = (
            (layer.values, layer.old_values)
            if self.of == "values"
            else (layer.keys, layer.old_keys)
        )
        held = torch.from_numpy(plan.held()).to(layer.positions.device)[layer.positions]
        positions = layer.positions[held]
        new = new[held].float()
        deviation = (new - old[positions].float()).square().mean((1, 2))
        scores = deviation / new.square().mean().clamp_min(1e-30)
        return budget.choose(scores, positions, plan.num_held)
