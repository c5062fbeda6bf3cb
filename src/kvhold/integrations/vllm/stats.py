import threading
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

BELOW_MINIMUM, NOT_NAMED, NO_ANSWER, NOT_AWAITED = (
    "below_minimum",
    "not_named",
    "no_answer",
    "not_awaited",
)

METRICS: dict[str, tuple[tuple[str, ...], str]] = {
    "lookup_tokens": ((), "Prompt tokens that were looked up."),
    "hit_tokens": (("source",), "Prompt tokens whose KV was found, by the tier it was in."),
    "missed_tokens": (
        ("reason",),
        (
            "Prompt tokens whose KV was not found, by reason: a word of kvhold.core.reasons, "
            "below_minimum, not_named, no_answer or not_awaited."
        ),
    ),
    "refused_requests": (
        (),
        (
            "Requests that are not cached, because their kv_transfer_params have unknown or "
            "forbidden values."
        ),
    ),
    "loads": ((), "Hits that were loaded into blocks."),
    "failed_loads": (
        (),
        (
            "Hits that were not loaded, or only in part because chunks were damaged. The missing "
            "KV was computed."
        ),
    ),
    "loaded_bytes": ((), "Bytes copied into blocks."),
    "stored_bytes": ((), "Bytes copied out of blocks."),
    "stored_chunks": ((), "Chunks copied out of blocks, of one shard each."),
    "hints": (
        ("action", "outcome"),
        "Hints of requests, by action and by outcome (docs/hints.md).",
    ),
    "load_seconds": ((), "Time from a load's start to its end, summed."),
    "spans": (
        ("result",),
        "Spans for the OpenTelemetry collector: exported, dropped, failed.",
    ),
}
"""`{name: (labels, help)}`; all are counters."""


class Tally:
    """Counters since the last `take`. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        assert len(METRICS[name][0]) == len(labels) and all(labels), "a metric has its labels"
        key = ":".join((name, *labels))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + value

    def looked_up(self, num_tokens: int, *, sources: Mapping[str, int], reason: str) -> None:
        found = sum(sources.values())
        self.add("lookup_tokens", num_tokens)
        for source, tokens in sources.items():
            self.add("hit_tokens", tokens, source)
        if num_tokens > found:
            self.add("missed_tokens", num_tokens - found, reason)

    def take(self) -> "Stats | None":
        with self._lock:
            counts, self._counts = self._counts, {}
        return Stats(counts) if counts else None


class Stats(KVConnectorStats):
    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvhold_{name}",
                documentation=text,
                labelnames=[*self._labelnames, *labels],
            )
            for name, (labels, text) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, _, rest = key.partition(":")
            if name in self._counters:
                # a tier's name may contain a colon
                labels = rest.split(":", len(METRICS[name][0]) - 1) if rest else []
                self._counters[name].labels(*engine, *labels).inc(value)
