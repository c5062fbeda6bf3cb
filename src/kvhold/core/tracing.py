"""The tracer's contract; `node.tracing` implements it. Without a tracer, OpenTelemetry is not
imported.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol, TypeAlias

import msgspec

Attribute: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes: TypeAlias = Mapping[str, Attribute]

# a W3C `traceparent` of version 00; empty: not traced
TraceContext: TypeAlias = Annotated[str, msgspec.Meta(max_length=55)]


class OpenSpan(Protocol):
    """Any thread."""

    @property
    def context(self) -> TraceContext:
        """The parent of its children, in any process."""

    def end(
        self,
        attributes: Attributes | None = None,
        *,
        fault: str = "",
        ended_s: float | None = None,
    ) -> None:
        """A second call does nothing.

        fault:   why the work failed; empty: it did not
        ended_s: on the monotonic clock; None: now
        """


class Tracer(Protocol):
    """Any thread. Nothing here raises, or waits for the collector."""

    def begin_request(
        self, name: str, headers: Mapping[str, str] | None, attributes: Attributes
    ) -> OpenSpan | None:
        """None: the trace is not sampled.

        headers: `traceparent` and `tracestate`. Without them, the span begins a trace.
        """

    def begin(
        self,
        name: str,
        parent: TraceContext,
        attributes: Attributes,
        *,
        links: Sequence[TraceContext] = (),
        began_s: float | None = None,
    ) -> OpenSpan | None:
        """None: `parent` is empty, wrong or not sampled.

        links:   other spans that caused it
        began_s: on the monotonic clock; None: now
        """

    def close(self) -> None:
        """Send what waits, but return within two seconds."""
