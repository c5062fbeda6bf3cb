"""Spans of one request, in the scheduler's process (docs/tracing.md). Nothing here raises.

Scheduler's thread, if nothing else is said.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvhold.core.api import Hit
from kvhold.core.keys import Namespace
from kvhold.core.otel_config import OtelConfig
from kvhold.core.planning import MOST_NAME
from kvhold.core.tracing import Attribute, OpenSpan, TraceContext, Tracer
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.steps import Load, Store
from kvhold.node.otel import make_tracer

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestTrace:
    def __init__(self, tracer: Tracer, span: OpenSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._lookup: OpenSpan | None = None
        self._arrival: OpenSpan | None = None
        self._sources: Mapping[str, int] = {}
        self._reason = ""

    @property
    def context(self) -> TraceContext:
        return self._span.context

    @property
    def lookup_context(self) -> TraceContext:
        """Any thread."""
        lookup = self._lookup
        return lookup.context if lookup is not None else ""

    def begin_lookup(self, namespace: Namespace, num_tokens: int, computed_tokens: int) -> None:
        self.drop_lookup()
        self._lookup = self._tracer.begin(
            "kvhold.lookup",
            self.context,
            {
                "kvhold.namespace": namespace.digest.hex(),
                "kvhold.tokens": num_tokens,
                "kvhold.computed_tokens": computed_tokens,
            },
        )

    def note_arriving(self, hit: Hit) -> None:
        if self._arrival is None and self._lookup is not None:
            self._arrival = self._tracer.begin(
                "kvhold.arrival",
                self._lookup.context,
                {
                    "kvhold.hit_tokens_before": hit.num_tokens,
                    "kvhold.waits_for_engine": hit.waits,
                },
            )

    def end_lookup(self, hit: Hit | None, *, reason: str) -> None:
        """reason: why the hit ends"""
        if hit is not None:
            self._sources = hit.sources
        self._reason = reason
        self._end_lookup(self._found())

    def drop_lookup(self) -> None:
        self._end_lookup({"kvhold.reason": "given_up"})

    def end(self, *, status: str) -> None:
        self.drop_lookup()
        self._span.end({"kvhold.status": status, **self._found()})

    def _found(self) -> dict[str, Attribute]:
        return {
            "kvhold.hit_tokens": sum(self._sources.values()),
            "kvhold.reason": self._reason,
            **{f"kvhold.tokens_from.{name}": tokens for name, tokens in self._sources.items()},
        }

    def _end_lookup(self, attributes: dict[str, Attribute]) -> None:
        if self._arrival is not None:
            self._arrival.end(attributes)
        if self._lookup is not None:
            self._lookup.end(attributes)
        self._arrival = self._lookup = None


class RequestTracer:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, request: "Request") -> RequestTrace | None:
        """None: not sampled."""
        span = self._tracer.begin_request(
            "kvhold.request",
            request.trace_headers,
            {
                "kvhold.request_id": request.request_id[:MOST_NAME],
                "kvhold.prompt_tokens": request.num_prompt_tokens,
            },
        )
        return RequestTrace(self._tracer, span) if span is not None else None

    def close(self) -> None:
        self._tracer.close()


def request_tracer(config: OtelConfig, tally: Tally) -> RequestTracer | None:
    """None: off. Raises ConfigError."""
    tracer = engine_tracer(config, tally)
    return RequestTracer(tracer) if tracer is not None else None


def engine_tracer(config: OtelConfig, tally: Tally) -> Tracer | None:
    """None: off. Raises ConfigError."""

    def count(result: str, num_spans: int) -> None:
        tally.add("spans", num_spans, result)

    return make_tracer(config, "kvhold-engine", count)


def begin_load(tracer: Tracer, load: Load, *, rank: int, nbytes: int) -> OpenSpan | None:
    return tracer.begin(
        "kvhold.load",
        load.trace,
        {
            "kvhold.request_id": load.request_id[:MOST_NAME],
            "kvhold.ticket": load.ticket_of(rank),
            "kvhold.rank": rank,
            "kvhold.layerwise": load.inside,
            "kvhold.bytes": nbytes,
        },
    )


def end_load(span: OpenSpan, failed_blocks: Sequence[int]) -> None:
    span.end(
        {"kvhold.failed_blocks": len(failed_blocks)},
        fault="the KV did not arrive, or was damaged" if failed_blocks else "",
    )


def begin_store(tracer: Tracer, store: Store, *, rank: int, shard: int) -> OpenSpan | None:
    return tracer.begin(
        "kvhold.store",
        store.trace,
        {
            "kvhold.request_id": store.request_id[:MOST_NAME],
            "kvhold.rank": rank,
            "kvhold.shard": shard,
            "kvhold.chunks": len(store.names),
        },
    )
