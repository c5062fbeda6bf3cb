"""One declarative table of what kvhold counts, and the counters that live by it.

    metrics = Metrics(); metrics.add("kvhold_lookup_tokens", 4000, result="hit")

Exporters (Prometheus, OpenTelemetry) and `kvhold status` read the same table. An unknown name or label is a programming error and
raises KeyError at once. Adding is safe from any thread that holds the GIL for the addition's two dictionary steps; the owners of a
`Metrics` (a cache, a node's loop, a connector) are single writers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One line of the table. A counter only grows; a gauge is set."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Sample:
    """One value as exported."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


TABLE = {
    m.name: m
    for m in (
        Metric("kvhold_lookup_requests", "counter", "requests", ("result",), "Lookups, by result: hit, partial, miss."),
        Metric("kvhold_lookup_tokens", "counter", "tokens", ("result",), "Tokens looked up: those found here (hit) and those not (miss)."),
        Metric("kvhold_loaned_chunks", "counter", "chunks", (), "Chunks lent to engines."),
        Metric("kvhold_loaned_bytes", "counter", "bytes", (), "Bytes lent to engines."),
        Metric("kvhold_claims_failed", "counter", "claims", ("reason",), "Claims that found their ticket no longer good."),
        Metric("kvhold_stored_chunks", "counter", "chunks", (), "Chunks committed."),
        Metric("kvhold_stored_bytes", "counter", "bytes", (), "Bytes committed."),
        Metric("kvhold_store_skipped_chunks", "counter", "chunks", ("reason",), "Chunks not stored: present, in progress, or no room."),
        Metric("kvhold_abandoned_chunks", "counter", "chunks", (), "Chunks reserved and never committed."),
        Metric("kvhold_evicted_chunks", "counter", "chunks", ("tier",), "Chunks evicted to make room."),
        Metric("kvhold_evicted_bytes", "counter", "bytes", ("tier",), "Bytes evicted to make room."),
        Metric("kvhold_cleared_chunks", "counter", "chunks", (), "Chunks removed by clear."),
        Metric("kvhold_connections", "counter", "connections", ("result",), "Connections to the node: accepted, refused, lost."),
        Metric("kvhold_protocol_errors", "counter", "errors", ("reason",), "Messages that broke the protocol."),
    )
}


class Metrics:
    """The values of one owner."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count `amount` more."""
        key = (name, _ordered(name, labels))
        self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._values[name, _ordered(name, labels)] = value

    def value(self, name: str, **labels: str) -> float:
        """What stands there now; 0 if nothing was counted yet."""
        return self._values.get((name, _ordered(name, labels)), 0)

    def samples(self) -> Iterator[Sample]:
        """Every value, in the table's order."""
        order = {name: i for i, name in enumerate(TABLE)}
        for name, labels in sorted(self._values, key=lambda key: (order[key[0]], key[1])):
            yield Sample(TABLE[name], labels, self._values[name, labels])

    def as_dict(self) -> dict[str, float]:
        """`{"name{label=value}": value}` for status output."""
        flat = {}
        for sample in self.samples():
            pairs = ",".join(f"{k}={v}" for k, v in zip(sample.metric.labels, sample.labels, strict=True))
            flat[f"{sample.metric.name}{{{pairs}}}" if pairs else sample.metric.name] = sample.value
        return flat


def _ordered(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    metric = TABLE[name]
    if len(labels) != len(metric.labels):
        raise KeyError(f"{name} has the labels {metric.labels}, not {tuple(labels)}")
    return tuple([labels[label] for label in metric.labels])
