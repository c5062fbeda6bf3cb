"""Spans for an OpenTelemetry collector (docs/tracing.md). Imported only if they are on.

One thread sends them. The provider is kvhold's own.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvhold import __version__
from kvhold.core.otel_config import OtelConfig
from kvhold.core.tracing import Attributes, TraceContext
from kvhold.node.otel import Collector, Count

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
_MOST_A_BATCH = 512
_HEADERS = ("traceparent", "tracestate")
_MOST_HEADER = 512  # characters, as W3C suggests


class OtelTracer:
    def __init__(self, config: OtelConfig, collector: Collector, count: Count) -> None:
        exporter = OTLPSpanExporter(
            endpoint=collector.path("traces"),
            certificate_file=collector.ca_file,
            headers=collector.headers or None,
            timeout=collector.timeout_s,
        )
        self._exporter = exporter
        self._processor = _Bounded(exporter, config, count, collector.path("traces"))
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create(collector.resource),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kvhold", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin_request(
        self, name: str, headers: Mapping[str, str] | None, attributes: Attributes
    ) -> "_OtelSpan | None":
        context = self._extract(headers or {})
        parent = _context_in(context)
        if parent.is_valid and not parent.trace_flags.sampled:
            return None
        return self._begin(name, context, attributes)

    def begin(
        self,
        name: str,
        parent: TraceContext,
        attributes: Attributes,
        *,
        links: Sequence[TraceContext] = (),
        began_s: float | None = None,
    ) -> "_OtelSpan | None":
        if not parent:
            return None
        context = self._extract({"traceparent": parent})
        if not _context_in(context).trace_flags.sampled:
            return None
        linked = [
            Link(found) for link in links if (found := self._context_of(link)).trace_flags.sampled
        ]
        return self._begin(name, context, attributes, linked, began_s)

    def close(self) -> None:
        closing = threading.Thread(
            target=self._processor.shutdown, name="kvhold-spans-end", daemon=True
        )
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # ends its pause between two tries
            log.warning("kvhold: the last spans were not sent within %g s", _CLOSE_S)

    def _begin(
        self,
        name: str,
        context: Context,
        attributes: Attributes,
        links: Sequence[Link] = (),
        began_s: float | None = None,
    ) -> "_OtelSpan | None":
        span = self._tracer.start_span(
            name,
            context=context,
            attributes=dict(attributes),
            links=links,
            start_time=_wall_ns(began_s),
        )
        return _OtelSpan(span) if span.is_recording() else None

    def _extract(self, headers: Mapping[str, str]) -> Context:
        """Empty if there is none, or a wrong one."""
        carrier = {
            name: text
            for name in _HEADERS
            if isinstance(text := headers.get(name), str) and len(text) <= _MOST_HEADER
        }
        # not the current context: the engine's thread may have a span of its own
        return self._propagator.extract(carrier, context=Context())

    def _context_of(self, link: TraceContext) -> SpanContext:
        return _context_in(self._extract({"traceparent": link}))


class _OtelSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext:
        of = self._span.get_span_context()
        return f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"

    def end(
        self,
        attributes: Attributes | None = None,
        *,
        fault: str = "",
        ended_s: float | None = None,
    ) -> None:
        if not self._span.is_recording():
            return
        if attributes:
            self._span.set_attributes(attributes)
        if fault:
            self._span.set_status(StatusCode.ERROR, fault)
        self._span.end(_wall_ns(ended_s))


class _Bounded(SpanProcessor):
    """Drops spans while too many wait, and counts them: OpenTelemetry's queue does not count."""

    def __init__(
        self, exporter: OTLPSpanExporter, config: OtelConfig, count: Count, shown: str
    ) -> None:
        self._most, self._count = config.max_waiting_spans, count
        self._lock = threading.Lock()
        self._waiting = 0
        self._batches = BatchSpanProcessor(
            _Counting(exporter, count, self._taken, shown),
            max_queue_size=self._most,
            schedule_delay_millis=config.send_interval_s * 1000,
            max_export_batch_size=min(_MOST_A_BATCH, self._most),
        )

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            is_full = self._waiting >= self._most
            self._waiting += not is_full
        if is_full:
            self._count("dropped", 1)
        else:
            self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._batches.force_flush(timeout_millis))

    def _taken(self, num_spans: int) -> None:
        with self._lock:
            self._waiting -= num_spans


class _Counting(SpanExporter):
    def __init__(
        self, exporter: OTLPSpanExporter, count: Count, taken: Callable[[int], None], shown: str
    ) -> None:
        self._exporter, self._count, self._taken = exporter, count, taken
        self._shown, self._is_away = shown, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        except Exception:
            log.exception("kvhold: spans could not be sent to %s", self._shown)
        finally:
            self._taken(len(spans))
        is_away = result is not SpanExportResult.SUCCESS
        self._count("failed" if is_away else "exported", len(spans))
        if is_away != self._is_away:
            self._is_away = is_away
            if is_away:
                log.warning("kvhold: %s does not take spans; they are lost", self._shown)
            else:
                log.info("kvhold: %s takes spans again", self._shown)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _context_in(context: Context) -> SpanContext:
    return get_current_span(context).get_span_context()


def _wall_ns(at_s: float | None) -> int | None:
    return None if at_s is None else time.time_ns() + round((at_s - time.monotonic()) * 1e9)
