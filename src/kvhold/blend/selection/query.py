from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhold.blend.selection.base import BlendPlan, Budget, Flow, LayerState


@dataclass
class QuerySelector:
    """Tokens to which the question attends (after ProphetKV, arXiv:2602.02579).

    The question is what follows the last span. A score is the largest attention of a query head in
    any layer, as a multiple of an even share.
    """

    budget: Budget
    name: str = field(default="query", init=False)
    flow: Flow = field(default="unheld", init=False)
    check_layer: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.budgets = (self.budget,)

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        import torch

        end = max((span.end for span in plan.spans), default=0)
        scores = torch.zeros(plan.num_tokens, device=layers[0].positions.device)
        for layer in layers:
            asking = layer.positions >= min(end, plan.num_tokens - 1)
            scores = torch.maximum(scores, _attention(layer, asking))
        positions = torch.from_numpy(plan.held()).to(scores.device).nonzero()[:, 0]
        return budget.choose(scores[positions] * plan.num_tokens, positions, plan.num_held)


def _attention(layer: LayerState, asking: Any) -> Any:
    """[tokens]: the largest over query heads and rows"""
    import torch

    keys = layer.old_keys.float().index_copy(0, layer.positions, layer.keys.float())
    tokens, heads, head_dim = keys.shape
    queries = layer.queries[asking].float() * layer.scaling
    rows = queries.shape[0]
    # [heads, rows * group, head_dim]
    grouped = queries.reshape(rows, heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    logits = (grouped @ keys.permute(1, 2, 0)).reshape(heads, -1, rows, tokens)
    future = torch.arange(tokens, device=keys.device) > layer.positions[asking][:, None]
    return logits.masked_fill(future, -torch.inf).softmax(-1).amax((0, 1, 2))
