from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvhold.blend.selection.base import BlendPlan, Budget, Flow, LayerState
from kvhold.core.errors import ConfigError


@dataclass
class FirstTokensSelector:
    """The first tokens of each span (EPIC, arXiv:2410.15332). Raises ConfigError: a bound."""

    budget: Budget
    name: str = field(default="first", init=False)
    flow: Flow = field(default="none", init=False)
    check_layer: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.budget.ratio is None:
            raise ConfigError("bound: the first tokens have no score; give a ratio")
        self.budgets = (self.budget,)

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        import torch

        offsets = np.zeros(plan.num_tokens, np.int64)
        for span in plan.spans:
            offsets[span.start : span.end] = np.arange(span.end - span.start)
        positions = np.flatnonzero(plan.held())
        scores = torch.from_numpy(-offsets[positions]).double()
        return budget.choose(scores, torch.from_numpy(positions), len(positions))
