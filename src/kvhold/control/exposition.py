from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from kvhold.core.metrics import TABLE, Metric
from kvhold.core.status import NodeStatus
from kvhold.net.messages import MetricSample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Once:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def render(status: NodeStatus, samples: Sequence[MetricSample]) -> bytes:
    return _text([*state_samples(status), *samples])


def state_samples(status: NodeStatus) -> list[MetricSample]:
    return [MetricSample(name, (), value) for name, value in _state(status).items()]


def render_absent() -> bytes:
    return _text([MetricSample("kvhold_up", (), 0)])


def _text(samples: Sequence[MetricSample]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(_families(samples)))
    text: bytes = generate_latest(registry)
    return text


def _families(samples: Sequence[MetricSample]) -> Iterator[Family]:
    by_name: dict[str, list[MetricSample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    for name, metric in TABLE.items():
        if name in by_name:
            yield _family(metric, by_name[name])


def _family(metric: Metric, samples: Sequence[MetricSample]) -> Family:
    family: Family = _KINDS[metric.kind](metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        if isinstance(family, HistogramMetricFamily):
            edges = [*map(str, metric.buckets), "+Inf"]
            family.add_metric(
                sample.labels, list(zip(edges, sample.counts, strict=True)), sample.value
            )
        else:
            family.add_metric(sample.labels, sample.value)
    return family


def _state(status: NodeStatus) -> Mapping[str, float]:
    held, behind = status["held"], status["write_behind"]
    return {
        "kvhold_up": 1,
        "kvhold_uptime_seconds": status["uptime_s"],
        "kvhold_arena_bytes": status["arena_bytes"],
        "kvhold_arena_used_bytes": status["used_bytes"],
        "kvhold_resident_bytes": status["resident_bytes"],
        "kvhold_chunks": status["chunks"],
        "kvhold_pinned_chunks": status["pinned_chunks"],
        "kvhold_clearing_chunks": status["clearing_chunks"],
        "kvhold_arriving_chunks": status["arriving_chunks"],
        "kvhold_write_behind_chunks": behind["chunks"],
        "kvhold_write_behind_bytes": behind["bytes"],
        "kvhold_reencodings": status["reencodings"],
        "kvhold_namespaces": len(status["namespaces"]),
        "kvhold_clients": len(status["clients"]),
        "kvhold_hits_held": held["tickets"],
        "kvhold_leases_held": held["leases"],
        "kvhold_reservations_held": held["reservations"],
    }
