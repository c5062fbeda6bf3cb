"""The contract of selectors. Tensors are torch's.

Tokens without stored KV and the last token are always recomputed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import ConfigError

Flow: TypeAlias = Literal["none", "all", "unheld"]


@dataclass(frozen=True)
class StoredSpan:
    """Stored KV of the tokens `start` to before `end` of a prompt.

    stored_from: the position for which the first token's key was computed
    text_end:    of the text whose beginning is stored; 0: `end`
    """

    start: int
    end: int
    stored_from: int = 0
    text_end: int = 0


@dataclass(frozen=True)
class BlendPlan:
    """num_exact: first tokens, with exact KV. Raises ValueError."""

    num_tokens: int
    spans: tuple[StoredSpan, ...]
    num_exact: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_exact < self.num_tokens:
            raise ValueError(f"{self.num_exact} exact tokens of {self.num_tokens}; one must be new")
        end = self.num_exact
        for span in self.spans:
            if not end <= span.start < span.end <= self.num_tokens or span.stored_from < 0:
                raise ValueError(
                    f"{span} in a prompt of {self.num_tokens} tokens: spans must be in order, "
                    f"apart, and after the {self.num_exact} exact tokens"
                )
            end = span.end
            if span.text_end and not span.end <= span.text_end <= self.num_tokens:
                raise ValueError(
                    f"text_end is {span.text_end}; it must be 0, or from the span's end, "
                    f"{span.end}, to the prompt's, {self.num_tokens}"
                )

    @property
    def question_start(self) -> int:
        """The question follows the last text; it has a token or more."""
        end = max((max(span.end, span.text_end) for span in self.spans), default=0)
        return min(end, self.num_tokens - 1)

    @property
    def num_held(self) -> int:
        return int(self.held().sum())

    def held(self) -> npt.NDArray[np.bool_]:
        """[num_tokens]: the tokens that a selector may leave as they are"""
        held = np.zeros(self.num_tokens, bool)
        for span in self.spans:
            held[span.start : span.end] = True
        held[-1] = False
        return held

    def unheld(self) -> npt.NDArray[np.int64]:
        """Positions that are always recomputed, ascending."""
        required = ~self.held()
        required[: self.num_exact] = False
        return np.flatnonzero(required)

    def tails(self) -> npt.NDArray[np.int64]:
        """Positions of texts where nothing is stored any more, ascending."""
        tails = np.zeros(self.num_tokens, bool)
        for span in self.spans:
            tails[span.end : span.text_end] = True
        tails[self.question_start :] = False
        tails &= ~self.held()
        return np.flatnonzero(tails)


@dataclass(frozen=True)
class LayerState:
    """What a selector sees of one layer.

    positions:            [rows] int64, ascending: the tokens that are computed here
    queries:              [rows, query heads, head_dim], rotated
    keys, values:         [rows, heads, head_dim], computed
    old_keys, old_values: [tokens, heads, head_dim], stored, at their new positions
    """

    number: int
    positions: Any
    queries: Any
    keys: Any
    values: Any
    old_keys: Any
    old_values: Any
    scaling: float


@dataclass(frozen=True)
class Budget:
    """Either a share of the held tokens, or all tokens whose score exceeds a bound."""

    ratio: float | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.bound is None):
            raise ConfigError("give a ratio or a bound, and not both")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise ConfigError(f"ratio is {self.ratio}; it must be from 0 to 1")
        if self.bound is not None and not self.bound >= 0:
            raise ConfigError(f"bound is {self.bound}; it must be 0 or more")

    def choose(self, scores: Any, positions: Any, num_held: int) -> Any:
        """scores, positions: [n] -> [chosen] positions, the highest scores first"""
        if self.ratio is None:
            return positions[scores > self.bound]
        count = min(math.ceil(self.ratio * num_held - 1e-9), len(positions))
        return positions[scores.topk(count).indices]


class Selector(Protocol):
    """Chooses tokens to recompute. Without side effects.

    flow: the tokens that are computed before it chooses.
        "none":   no tokens
        "all":    all, up to `check_layer`; from there on the chosen ones
        "unheld": those without stored KV, but no tails, through all layers; then the chosen ones
                  as well
    budgets: the first for the choice; with "all", one for each further layer that narrows it
    """

    @property
    def name(self) -> str: ...

    @property
    def flow(self) -> Flow: ...

    @property
    def check_layer(self) -> int: ...

    @property
    def budgets(self) -> tuple[Budget, ...]: ...

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        """Return positions of held tokens, [chosen] int64 in any order.

        layers: "none": empty; "all": the check layer; "unheld": all layers
        """
