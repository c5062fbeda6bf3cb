"""The table of all metrics, and the counters.

An unknown name or label raises KeyError. One thread writes. Another may `add` only if it keeps the
GIL during both dictionary steps.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """counts: a histogram's observations, cumulative by bucket; `value` is their sum."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TIER = ("tier",)

TABLE = {
    m.name: m
    for m in (
        Metric(
            "kvhold_lookup_requests",
            "counter",
            "requests",
            ("result",),
            "Lookups, by result: hit, partial, miss.",
        ),
        Metric(
            "kvhold_lookup_tokens",
            "counter",
            "tokens",
            (),
            "Tokens looked up, found or missed.",
        ),
        Metric(
            "kvhold_hit_tokens",
            "counter",
            "tokens",
            ("source",),
            "Tokens found, by the slowest place that held a part of their KV.",
        ),
        Metric(
            "kvhold_missed_tokens",
            "counter",
            "tokens",
            ("reason",),
            "Tokens missed, by the reason why the hit ended before them.",
        ),
        Metric(
            "kvhold_announced_chunks",
            "counter",
            "chunks",
            (),
            "Chunks that engines announced to compute.",
        ),
        Metric(
            "kvhold_waited_for_computing",
            "counter",
            "waits",
            ("result",),
            "Ended waits of lookups for chunks that another engine computed, by result: stored, "
            "ended, late, slower, cut short; of handovers also announced, not announced, deadline.",
        ),
        Metric(
            "kvhold_waited_for_computing_seconds",
            "counter",
            "seconds",
            (),
            "Seconds of these waits.",
        ),
        Metric("kvhold_leased_chunks", "counter", "chunks", (), "Chunks leased to engines."),
        Metric("kvhold_leased_bytes", "counter", "bytes", (), "Bytes leased to engines."),
        Metric(
            "kvhold_claims_failed",
            "counter",
            "claims",
            ("reason",),
            "Claims that failed, by reason: unknown ticket, no such shard.",
        ),
        Metric(
            "kvhold_reserved_chunks",
            "counter",
            "chunks",
            (),
            "Chunks for which memory was reserved.",
        ),
        Metric(
            "kvhold_reserved_bytes",
            "counter",
            "bytes",
            (),
            "Bytes reserved for chunks: stored, abandoned, or still being written.",
        ),
        Metric("kvhold_stored_chunks", "counter", "chunks", (), "Chunks committed."),
        Metric("kvhold_stored_bytes", "counter", "bytes", (), "Bytes committed."),
        Metric(
            "kvhold_store_skipped_chunks",
            "counter",
            "chunks",
            ("reason",),
            "Chunks not stored, by reason: present, in progress, no room, declined.",
        ),
        Metric(
            "kvhold_stalled_chunks",
            "counter",
            "chunks",
            (),
            "Chunks whose writer stalled; another may write them.",
        ),
        Metric(
            "kvhold_abandoned_chunks",
            "counter",
            "chunks",
            (),
            "Reserved chunks that never became visible.",
        ),
        Metric(
            "kvhold_abandoned_bytes",
            "counter",
            "bytes",
            (),
            "Bytes of reserved chunks that never became visible.",
        ),
        Metric(
            "kvhold_damaged_chunks",
            "counter",
            "chunks",
            ("found_by",),
            "Chunks in memory whose bytes had changed, by who found them: reader, scrubber, "
            "writer. Each was removed.",
        ),
        Metric(
            "kvhold_scrubbed_chunks",
            "counter",
            "chunks",
            (),
            "Idle chunks in memory that the scrubber has checked.",
        ),
        Metric(
            "kvhold_scrubbed_bytes",
            "counter",
            "bytes",
            (),
            "Bytes of idle chunks that the scrubber has checked.",
        ),
        Metric(
            "kvhold_evicted_chunks", "counter", "chunks", ("tier",), "Chunks evicted to make room."
        ),
        Metric(
            "kvhold_evicted_bytes", "counter", "bytes", ("tier",), "Bytes evicted to make room."
        ),
        Metric(
            "kvhold_cleared_chunks", "counter", "chunks", (), "Chunks removed from memory by clear."
        ),
        Metric(
            "kvhold_cleared_bytes", "counter", "bytes", (), "Bytes removed from memory by clear."
        ),
        Metric(
            "kvhold_expired_chunks",
            "counter",
            "chunks",
            _TIER,
            "Chunks dropped because their time to live had ended.",
        ),
        Metric(
            "kvhold_expired_bytes",
            "counter",
            "bytes",
            _TIER,
            "Bytes dropped because their time to live had ended.",
        ),
        Metric(
            "kvhold_tier_items",
            "counter",
            "items",
            ("tier", "operation", "result"),
            "Chunks in a tier's calls, by result.",
        ),
        Metric(
            "kvhold_tier_bytes",
            "counter",
            "bytes",
            ("tier", "operation"),
            "Bytes read from and written to a tier.",
        ),
        Metric(
            "kvhold_tier_seconds",
            "histogram",
            "seconds",
            ("tier", "operation"),
            "Duration of a tier's calls.",
            _SECONDS,
        ),
        Metric(
            "kvhold_tier_errors",
            "counter",
            "errors",
            ("tier", "operation", "reason"),
            "Faults of a tier's calls and items, by reason.",
        ),
        Metric(
            "kvhold_tier_dropped_chunks",
            "counter",
            "chunks",
            ("tier", "reason"),
            "Chunks not written to a tier, by reason.",
        ),
        Metric(
            "kvhold_tier_dropped_uses",
            "counter",
            "chunks",
            (),
            "Uses of chunks that were not reported to tiers with policy=learned.",
        ),
        Metric(
            "kvhold_encoded_chunks",
            "counter",
            "chunks",
            ("tier", "codec"),
            "Chunks encoded for a tier, by codec.",
        ),
        Metric(
            "kvhold_encoded_bytes",
            "counter",
            "bytes",
            ("tier", "codec"),
            "Bytes of the frames encoded for a tier, by codec.",
        ),
        Metric(
            "kvhold_encoded_plain_bytes",
            "counter",
            "bytes",
            ("tier", "codec"),
            "Bytes in memory of the chunks encoded for a tier, by codec.",
        ),
        Metric(
            "kvhold_tier_bad_frames",
            "counter",
            "frames",
            ("tier", "reason"),
            "Frames that failed a check; each was removed.",
        ),
        Metric(
            "kvhold_reencoded_chunks",
            "counter",
            "chunks",
            ("tier", "result"),
            "Chunks that a re-encoding looked at, by result.",
        ),
        Metric(
            "kvhold_reencoded_bytes_before",
            "counter",
            "bytes",
            _TIER,
            "Bytes of replaced frames, before re-encoding.",
        ),
        Metric(
            "kvhold_reencoded_bytes_after",
            "counter",
            "bytes",
            _TIER,
            "Bytes of replaced frames, after re-encoding.",
        ),
        Metric(
            "kvhold_tier_available",
            "gauge",
            "tiers",
            _TIER,
            "1 while the tier is used, 0 while its breaker is open.",
        ),
        Metric(
            "kvhold_tier_stuck_calls",
            "gauge",
            "calls",
            _TIER,
            "Abandoned calls that still hold memory.",
        ),
        Metric(
            "kvhold_tier_queued_chunks",
            "gauge",
            "chunks",
            _TIER,
            "Chunks waiting to be written to a tier, or being written.",
        ),
        Metric(
            "kvhold_tier_queued_bytes",
            "gauge",
            "bytes",
            _TIER,
            "Bytes of chunks waiting to be written to a tier, or being written.",
        ),
        Metric(
            "kvhold_promoted_chunks",
            "counter",
            "chunks",
            (),
            "Chunks loaded from a lower tier into the arena.",
        ),
        Metric(
            "kvhold_promoted_bytes",
            "counter",
            "bytes",
            (),
            "Bytes loaded from a lower tier into the arena.",
        ),
        Metric(
            "kvhold_withdrawn_chunks",
            "counter",
            "chunks",
            ("reason",),
            "Chunks of lower tiers that did not arrive, by reason.",
        ),
        Metric(
            "kvhold_plans",
            "counter",
            "plans",
            ("choice",),
            "Planned lookups, by the part of the hit to load.",
        ),
        Metric(
            "kvhold_plans_unasked",
            "counter",
            "plans",
            (),
            "Lookups that asked no tier, because computing was faster.",
        ),
        Metric(
            "kvhold_plans_cut_short",
            "counter",
            "plans",
            (),
            "Lookups that stopped waiting for chunks that took longer to load than to compute.",
        ),
        Metric(
            "kvhold_tier_call_seconds",
            "gauge",
            "seconds",
            _TIER,
            "The planner's estimate of a read's fixed cost.",
        ),
        Metric(
            "kvhold_tier_gib_seconds",
            "gauge",
            "seconds",
            _TIER,
            "The planner's estimate of a read's cost per GiB in memory.",
        ),
        Metric(
            "kvhold_loop_longest_turn_seconds",
            "gauge",
            "seconds",
            (),
            "Longest turn of the node's loop since its start.",
        ),
        Metric(
            "kvhold_connections",
            "counter",
            "connections",
            ("result",),
            "Connections to the node: accepted, refused, lost.",
        ),
        Metric(
            "kvhold_protocol_errors",
            "counter",
            "errors",
            ("reason",),
            "Messages that broke the protocol.",
        ),
        Metric(
            "kvhold_peer_loads",
            "counter",
            "loads",
            ("peer", "result"),
            "Gets from a peer: done, failed.",
        ),
        Metric(
            "kvhold_peer_load_seconds",
            "histogram",
            "seconds",
            ("peer",),
            "Duration of answered gets from a peer.",
            _SECONDS,
        ),
        Metric(
            "kvhold_peer_loaded_chunks",
            "counter",
            "chunks",
            ("peer",),
            "Chunks loaded from a peer.",
        ),
        Metric(
            "kvhold_peer_loaded_bytes",
            "counter",
            "bytes",
            ("peer",),
            "Bytes of frames loaded from a peer.",
        ),
        Metric(
            "kvhold_peer_missed_chunks",
            "counter",
            "chunks",
            ("peer", "reason"),
            "Chunks that a peer was asked for and did not send, by reason.",
        ),
        Metric(
            "kvhold_peer_faults",
            "counter",
            "faults",
            ("peer", "cause"),
            "Failed connections to a peer and failed gets from it, by cause.",
        ),
        Metric(
            "kvhold_peer_events",
            "counter",
            "events",
            ("peer",),
            "Changes that a peer has told.",
        ),
        Metric(
            "kvhold_peer_index_chunks",
            "gauge",
            "chunks",
            ("peer",),
            "Chunks of a peer in the index.",
        ),
        Metric(
            "kvhold_peer_bus_ignored",
            "counter",
            "records",
            ("reason",),
            "Records on the peers' bus that were ignored: forged, unknown, size, protocol.",
        ),
        Metric(
            "kvhold_peer_served_chunks",
            "counter",
            "chunks",
            ("peer", "result"),
            "Chunks that a peer asked of this node: sent, absent.",
        ),
        Metric(
            "kvhold_peer_served_bytes",
            "counter",
            "bytes",
            ("peer",),
            "Bytes of frames sent to a peer.",
        ),
    )
}


class Metrics:
    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, _ordered(name, labels))
        self._values[key] = self._values.get(key, 0) + amount

    def observe(self, name: str, amount: float, **labels: str) -> None:
        buckets, key = TABLE[name].buckets, (name, _ordered(name, labels))
        counts = self._counts.setdefault(key, [0] * (len(buckets) + 1))
        counts[bisect_left(buckets, amount)] += 1
        self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[name, _ordered(name, labels)] = value

    def forget(self, label: str, value: str) -> None:
        for name, labels in list(self._values):
            names = TABLE[name].labels
            if label in names and labels[names.index(label)] == value:
                del self._values[name, labels]
                self._counts.pop((name, labels), None)

    def value(self, name: str, **labels: str) -> float:
        return self._values.get((name, _ordered(name, labels)), 0)

    def samples(self) -> Iterator[Sample]:
        order = {name: i for i, name in enumerate(TABLE)}
        values = dict(self._values)
        for name, labels in sorted(values, key=lambda key: (order[key[0]], key[1])):
            counts = tuple(accumulate(self._counts.get((name, labels), ())))
            yield Sample(TABLE[name], labels, values[name, labels], counts)

    def as_dict(self) -> dict[str, float]:
        """Return `{"name{label=value}": value}`."""
        flat: dict[str, float] = {}
        for sample in self.samples():
            pairs = ",".join(
                f"{k}={v}" for k, v in zip(sample.metric.labels, sample.labels, strict=True)
            )
            braces = f"{{{pairs}}}" if pairs else ""
            if sample.counts:
                flat[f"{sample.metric.name}_count{braces}"] = sample.counts[-1]
                flat[f"{sample.metric.name}_sum{braces}"] = sample.value
            else:
                flat[f"{sample.metric.name}{braces}"] = sample.value
        return flat


def _ordered(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    metric = TABLE[name]
    if len(labels) != len(metric.labels):
        raise KeyError(f"{name} has the labels {metric.labels}, not {tuple(labels)}")
    return tuple(map(labels.__getitem__, metric.labels))
