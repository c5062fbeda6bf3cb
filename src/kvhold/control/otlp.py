"""The node's metrics for an OpenTelemetry collector. Imported only if `otel.endpoint` is set."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Thread

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtelMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvhold import __version__
from kvhold.control.exposition import state_samples
from kvhold.control.node import ControlledNode
from kvhold.control.recorder import state_and_samples
from kvhold.control.refusals import ControlRefusal
from kvhold.core.metrics import TABLE, Metric
from kvhold.core.otel_config import OtelConfig
from kvhold.core.status import NodeStatus
from kvhold.net.messages import MetricSample
from kvhold.node.otel import collector_of

log = logging.getLogger(__name__)

_UNITS = {"seconds": "s", "bytes": "By"}
_SAME_S = 2.0


class MetricsExport:
    """One event loop, and a thread for each export; the process may end without it."""

    def __init__(self, node: ControlledNode, config: OtelConfig) -> None:
        """Raises ConfigError."""
        collector = collector_of(config, "kvhold-node")
        self._node = node
        self._interval_s = config.metrics_interval_s
        self._url = collector.path("metrics")
        resource = {name: of for name, of in collector.resource.items() if name != "process.pid"}
        self._resource = Resource.create(resource)
        self._exporter = OTLPMetricExporter(
            endpoint=self._url,
            certificate_file=collector.ca_file,
            headers=collector.headers or None,
            timeout=collector.timeout_s,
        )
        self._timeout_ms = collector.timeout_s * 1000
        self._task: asyncio.Task[None] | None = None
        self._is_away = False
        self._run_began: tuple[int, int] = (0, 0)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._exporter.shutdown()  # ends its pause between two tries

    async def _run(self) -> None:
        while True:
            try:
                await self._send(await self._collect())
            except Exception:
                log.exception("the metrics were not sent to %s", self._url)
            await asyncio.sleep(self._interval_s)

    async def _collect(self) -> MetricsData:
        try:
            status, samples = await self._node.call(state_and_samples)
        except ControlRefusal as refusal:
            log.debug("metrics: %s", refusal)
            absent = MetricSample("kvhold_up", (), 0)
            return self._data([absent], began_ns=0)
        return self._data([*state_samples(status), *samples], began_ns=self._began_ns(status))

    def _began_ns(self, status: NodeStatus) -> int:
        began_ns = time.time_ns() - round(status["uptime_s"] * 1e9)
        pid, known_ns = self._run_began
        if pid != status["pid"] or abs(known_ns - began_ns) > _SAME_S * 1e9:
            self._run_began = status["pid"], began_ns
        return self._run_began[1]

    def _data(self, samples: Sequence[MetricSample], *, began_ns: int) -> MetricsData:
        metrics = list(_metrics(samples, began_ns, time.time_ns()))
        scope = InstrumentationScope("kvhold", __version__)
        return MetricsData(
            [ResourceMetrics(self._resource, [ScopeMetrics(scope, metrics, "")], "")]
        )

    async def _send(self, data: MetricsData) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            try:
                self._export(data)
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(ended.set)

        Thread(target=send, name="kvhold-otlp", daemon=True).start()
        await ended.wait()

    def _export(self, data: MetricsData) -> None:
        result = self._exporter.export(data, timeout_millis=self._timeout_ms)
        is_away = result is not MetricExportResult.SUCCESS
        if is_away != self._is_away:
            self._is_away = is_away
            if is_away:
                log.warning("%s does not take the metrics", self._url)
            else:
                log.info("%s takes the metrics again", self._url)


def _metrics(samples: Sequence[MetricSample], began_ns: int, now_ns: int) -> Iterator[OtelMetric]:
    by_name: dict[str, list[MetricSample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    for name, metric in TABLE.items():
        if name in by_name:
            unit = _UNITS.get(metric.unit, f"{{{metric.unit}}}")
            data = _points(metric, by_name[name], began_ns, now_ns)
            yield OtelMetric(name, metric.help, unit, data)


def _points(
    metric: Metric, samples: Sequence[MetricSample], began_ns: int, now_ns: int
) -> Sum | Gauge | Histogram:
    cumulative = AggregationTemporality.CUMULATIVE
    if metric.kind == "histogram":
        points = [_histogram(metric, sample, began_ns, now_ns) for sample in samples]
        return Histogram(points, cumulative)
    numbers = [
        NumberDataPoint(_attributes(metric, sample), began_ns, now_ns, float(sample.value))
        for sample in samples
    ]
    return Sum(numbers, cumulative, True) if metric.kind == "counter" else Gauge(numbers)


def _histogram(
    metric: Metric, sample: MetricSample, began_ns: int, now_ns: int
) -> HistogramDataPoint:
    counts = [
        count - before for before, count in zip((0, *sample.counts), sample.counts, strict=False)
    ]
    return HistogramDataPoint(
        _attributes(metric, sample),
        began_ns,
        now_ns,
        count=sample.counts[-1],
        sum=sample.value,
        bucket_counts=counts,
        explicit_bounds=metric.buckets,
        min=None,
        max=None,
    )


def _attributes(metric: Metric, sample: MetricSample) -> Mapping[str, str]:
    return dict(zip(metric.labels, sample.labels, strict=True))
