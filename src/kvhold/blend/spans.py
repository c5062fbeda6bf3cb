"""Spans: runs of tokens that are reused wherever they stand.

    spans = split(tokens, separator)                     # or of_ranges([(0, 512)], len(tokens))
    with cache.spans([span_prompt(prompt, span).query() for span in spans]) as held: ...

Their KV was computed in another context, and keys are rotated from position 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.cache.query_limits import MOST_SPANS
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Insert, Prompt
from kvhold.core.layout import CANONICAL, Layout
from kvhold.core.token_ids import as_tokens
from kvhold.kernels.rope import Rope

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Span:
    """Tokens `start` to before `end`."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def split(tokens: npt.ArrayLike, separator: npt.ArrayLike) -> tuple[Span, ...]:
    """The runs between separators; none without a separator. Raises ValueError."""
    text, mark = as_tokens(tokens), as_tokens(separator)
    if not mark.size:
        raise ValueError("separator is empty; it must be one token or more")
    starts = np.flatnonzero(_matches(text, mark)).tolist()
    edges, spans, begin = [], list[Span](), 0
    for start in starts:
        if start >= begin:
            edges.append((begin, start))
            begin = start + mark.size
    if not edges:
        return ()
    for first, end in (*edges, (begin, text.size)):
        if first < end:
            spans.append(Span(first, end))
    _check_number(len(spans), "separator")
    return tuple(spans)


def of_ranges(ranges: Iterable[Any], num_tokens: int) -> tuple[Span, ...]:
    """From pairs [start, end] in any order. Raises ValueError that names the field."""
    if isinstance(ranges, str | bytes | Mapping) or not isinstance(ranges, Iterable):
        raise ValueError(f"spans is {ranges!r}; it must be a list of pairs [start, end]")
    found: list[tuple[Span, int]] = []
    for number, pair in enumerate(ranges):
        _check_number(number + 1, "spans")
        found.append((_span_of(pair, f"spans[{number}]", num_tokens), number))
    found.sort(key=lambda item: item[0].start)
    for (before, i), (after, j) in pairwise(found):
        if after.start < before.end:
            raise ValueError(
                f"spans[{j}] begins at {after.start}, inside spans[{i}], which ends at "
                f"{before.end}; spans must not overlap"
            )
    return tuple(span for span, _ in found)


def span_prompt(prompt: Prompt, span: Span) -> Prompt:
    """The span as a prompt, in `Namespace.of_spans`.

    Raises ValueError: the prompt has extras, or an insert crosses the border.
    """
    if prompt.extras:
        raise ValueError("the prompt has extras, which depend on its chunks; it has no spans")
    inside: list[Insert] = []
    for insert in prompt.inserts:
        end = insert.start + insert.length
        if end <= span.start or span.end <= insert.start:
            continue
        if insert.start < span.start or span.end < end:
            raise ValueError(
                f"a span at {span.start} to {span.end} cuts an insert at {insert.start} to {end}"
            )
        inside.append(replace(insert, start=insert.start - span.start))
    return prompt.namespace.of_spans.prompt(prompt.tokens[span.start : span.end], inserts=inside)


def refusal(layout: Layout, rope: Rope | Mapping[str, Any]) -> str:
    """Why spans of this model cannot be reused; empty: they can.

    rope: or a Hugging Face config
    """
    if not isinstance(rope, Rope):
        try:
            rope = Rope.of(rope)
        except ConfigError as error:
            return str(error)
    for number, group in enumerate(layout.groups):
        name = f"group {number}"
        if group.attention == "state":
            return f"{name} is a state, which depends on all tokens before it"
        if group.attention == "sliding":
            return (
                f"{name} has sliding attention: beyond a window of {group.window} tokens, a "
                "text's KV depends on where it stands"
            )
        if not rope.rotary_dim:
            continue
        if group.packing != CANONICAL:
            return f"{name} has the packing {group.packing!r}, in which keys cannot be turned"
        if group.dtype not in _DTYPES:
            return f"{name} is {group.dtype}; keys of {', '.join(_DTYPES)} can be turned"
        if group.head_dim != rope.head_dim:
            return f"{name} has heads of {group.head_dim} elements, its rope of {rope.head_dim}"
    return ""


def _matches(text: npt.NDArray[np.int32], mark: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[positions]"""
    count = max(0, text.size - mark.size + 1)
    found = np.ones(count, np.bool_)
    for at, token in enumerate(mark.tolist()):
        found &= text[at : at + count] == token
    return found


def _span_of(pair: Any, name: str, num_tokens: int) -> Span:
    try:
        start, end = (index(value) for value in pair)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {pair!r}; it must be a pair [start, end] of tokens") from None
    if start == end:
        raise ValueError(f"{name} is empty: it begins and ends at {start}")
    if not 0 <= start < end <= num_tokens:
        raise ValueError(
            f"{name} is {start} to {end}; it must lie within the prompt's {num_tokens} tokens"
        )
    return Span(start, end)


def _check_number(number: int, field: str) -> None:
    if number > MOST_SPANS:
        raise ValueError(f"{field} gives more than {MOST_SPANS} spans, the limit of a request")
