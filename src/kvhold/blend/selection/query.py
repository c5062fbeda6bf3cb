from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhold.blend.selection.base import BlendPlan, Budget, Flow, LayerState

_POWER = 1.5  # of 1 to 3, 1.5 and 2 missed least in the lab's retrieval model


@dataclass
class QuerySelector:
    """Tokens to which the question attends (after ProphetKV, arXiv:2602.02579).

    The question follows the last text. A score adds up how far a token stands out in each
    query head: attention itself, after its softmax, lets a few heads decide alone. The first layer
    does not count; it sees single tokens.
    """

    budget: Budget
    name: str = field(default="query", init=False)
    flow: Flow = field(default="unheld", init=False)
    check_layer: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.budgets = (self.budget,)

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        import torch

        positions = torch.from_numpy(plan.held()).nonzero()[:, 0].to(layers[0].positions.device)
        counted = layers[1:] or layers
        scores = torch.zeros(len(positions), device=positions.device)
        for layer in counted:
            asking = layer.positions >= plan.question_start
            scores += _salience(layer, asking, positions) / len(counted)
        return budget.choose(scores, positions, plan.num_held)


def _salience(layer: LayerState, asking: Any, positions: Any) -> Any:
    """[positions]: mean over query heads. Of the logits' standard deviations above their mean, the
    largest row's, to the power `_POWER`.
    """
    keys = layer.old_keys[positions].float()
    queries = layer.queries[asking].float() * layer.scaling
    tokens, heads, head_dim = keys.shape
    rows = queries.shape[0]
    # [heads, rows * group, head_dim]
    grouped = queries.reshape(rows, heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    logits = (grouped @ keys.permute(1, 2, 0)).reshape(heads, -1, rows, tokens)
    spread = logits.std(-1, correction=0, keepdim=True).clamp_min(1e-6)
    above = (logits - logits.mean(-1, keepdim=True)) / spread
    return above.amax(2).clamp_min(0).pow(_POWER).mean((0, 1))
