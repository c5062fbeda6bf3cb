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
from kvhold.blend.selection.text import (
    SELECTORS,
    make_selector,
    parse_selector,
    selector_of,
    selector_text,
)

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
    "parse_selector",
    "selector_of",
    "selector_text",
]
