"""A collector for OTLP over HTTP, on loopback: it decodes what is sent with OpenTelemetry's own
protobuf classes.
"""

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_WITHIN_S = 20.0  # only a hang takes so long
_KINDS: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
}


@dataclass(frozen=True)
class SentSpan:
    """`parent` is empty for a root; `service` is the resource's `service.name`."""

    name: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    service: str
    fault: str


class Collector:
    """Answers with `status`; while `holds` is set, it answers nothing."""

    def __init__(self) -> None:
        self.spans: list[SentSpan] = []
        self.metrics: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.held = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.held.set()
                collector.goes_on.wait(_WITHIN_S)
                collector.headers.append({k.lower(): v for k, v in self.headers.items()})
                if collector.status == 200:
                    collector.take(_KINDS[self.path].FromString(body))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, request: Any) -> None:
        if isinstance(request, ExportMetricsServiceRequest):
            self.metrics.append(request)
            return
        for of_resource in request.resource_spans:
            service = values_of(of_resource.resource.attributes)["service.name"]
            for scope in of_resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]

    def until(self, what: Callable[[], Any]) -> Any:
        """The first true answer. Fails when there is none in time."""
        deadline_s = time.monotonic() + _WITHIN_S
        while not (answer := what()):
            assert time.monotonic() < deadline_s, sorted(span.name for span in self.spans)
            time.sleep(0.005)
        return answer

    def named(self, name: str) -> list[SentSpan]:
        return [span for span in list(self.spans) if span.name == name]

    def one(self, name: str, **attributes: Any) -> SentSpan:
        """Wait for the span; `attributes` with `_` for `.`."""

        def found() -> list[SentSpan]:
            return [
                span
                for span in self.named(name)
                if attributes.items()
                <= {key.replace(".", "_"): value for key, value in span.attributes.items()}.items()
            ]

        self.until(found)
        (span,) = found()
        return span

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _span(span: Any, service: str) -> SentSpan:
    return SentSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values_of(span.attributes),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        service,
        span.status.message if span.status.code == 2 else "",
    )


def values_of(attributes: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, kind)
        for one in attributes
        if (kind := one.value.WhichOneof("value")) is not None
    }
