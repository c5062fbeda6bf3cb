from collections.abc import Sequence
from typing import Any

from kvhold.blend.selection.base import BlendPlan, Budget, Flow, LayerState


class NoSelection:
    """All held tokens stay as they are."""

    name = "none"
    flow: Flow = "none"
    check_layer = 0
    budgets = (Budget(ratio=0.0),)

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        import torch

        return torch.empty(0, dtype=torch.int64)
