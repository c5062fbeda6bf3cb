"""Which tokens of reused spans are recomputed.

selector = make_selector("deviation", ratio=0.15)
"""

from kvhold.blend.selection.base import (
    BlendPlan,
    Budget,
    Flow,
    LayerState,
    Selector,
    StoredSpan,
)
from kvhold.blend.selection.deviation import DeviationSelector
from kvhold.blend.selection.first_tokens import FirstTokensSelector
from kvhold.blend.selection.nothing import NoSelection
from kvhold.blend.selection.query import QuerySelector
from kvhold.core.errors import ConfigError

__all__ = [
    "SELECTORS",
    "BlendPlan",
    "Budget",
    "DeviationSelector",
    "FirstTokensSelector",
    "Flow",
    "LayerState",
    "NoSelection",
    "QuerySelector",
    "Selector",
    "StoredSpan",
    "make_selector",
]

SELECTORS = ("deviation", "first", "query", "none")


def make_selector(
    name: str,
    *,
    ratio: float | None = None,
    bound: float | None = None,
    check_layer: int = 1,
) -> Selector:
    """check_layer: for "deviation" only. Raises ConfigError."""
    if name == "none":
        return NoSelection()
    budget = Budget(ratio=ratio, bound=bound)
    if name == "deviation":
        return DeviationSelector((budget,), check_layer=check_layer)
    if name == "first":
        return FirstTokensSelector(budget)
    if name == "query":
        return QuerySelector(budget)
    raise ConfigError(f"selector is {name!r}; known are {', '.join(SELECTORS)}")
