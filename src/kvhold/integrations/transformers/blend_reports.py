import os
from collections.abc import Container, Sequence
from itertools import count
from typing import TYPE_CHECKING

from kvhold.blend.reports import drift_note, report, span_report
from kvhold.blend.selection import Selector, selector_text
from kvhold.blend.spans import Span
from kvhold.core.api import Cache
from kvhold.core.held_spans import HeldSpans
from kvhold.core.planning import MOST_NAME, MOST_NOTE, BlendReport, SpanReport

if TYPE_CHECKING:
    from kvhold.integrations.transformers.reuse import ReuseResult

_calls = count(1)


class BlendReports:
    """Reports calls with spans to the cache, as `transformers-PROCESS-NUMBER`."""

    def __init__(self, cache: Cache, selector: Selector) -> None:
        self._cache = cache
        self._selector = selector_text(selector)[:MOST_NAME]
        self._spans: list[SpanReport] = []

    def found(self, spans: Sequence[Span], held: HeldSpans, alone: Container[int]) -> None:
        self._spans = [
            span_report(span, held.hit_of(number), is_alone=number in alone)
            for number, span in enumerate(spans)
        ]

    def report(self, result: "ReuseResult", *, is_blended: bool) -> None:
        """Nothing if the exact tokens left no span."""
        spans, self._spans = self._spans, []
        note = result.reason
        if result.drift is not None:
            drift = drift_note(result.drift)
            note = f"{drift}; {note}" if note else drift
        elif not (note or is_blended):
            return
        name = f"transformers-{os.getpid()}-{next(_calls)}"
        report(
            self._cache,
            BlendReport(
                name,
                "canary" if result.drift is not None else "refused" if note else "blended",
                result.num_tokens,
                result.num_loaded,
                result.num_blended,
                result.num_computed,
                self._selector,
                note[:MOST_NOTE],
                spans,
            ),
        )
