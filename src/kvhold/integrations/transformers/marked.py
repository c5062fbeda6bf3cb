from dataclasses import dataclass
from typing import Any

from kvhold.blend.selection import Selector, selector_of
from kvhold.blend.spans import Span, of_ranges, split
from kvhold.core.blend_config import BlendConfig
from kvhold.integrations.transformers.calls import GenerateCall

_LEAST_TOKENS = 2


@dataclass(frozen=True)
class Blend:
    """How prompts of one row are blended.

    separator: token ids between spans; the last run is the question, and no span
    """

    selector: Selector
    separator: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: BlendConfig) -> "Blend | None":
        """None: off. Raises ConfigError."""
        selector = selector_of(config)
        return None if selector is None else cls(selector, config.separator)

    def spans(self, call: GenerateCall, marks: Any) -> tuple[Span, ...]:
        """marks: pairs of first token and end, instead of separators. Raises ValueError."""
        tokens = call.tokens()
        found: tuple[Span, ...] = ()
        if marks is not None:
            found = of_ranges(marks, tokens.shape[1])
        elif self.separator and len(tokens) == 1:
            found = split(tokens[0], self.separator)[:-1]
        if len(tokens) != 1:
            return ()
        return tuple(span for span in found if span.num_tokens >= _LEAST_TOKENS)
