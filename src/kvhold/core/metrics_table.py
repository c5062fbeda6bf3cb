from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


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
        Metric(
            "kvhold_handovers",
            "counter",
            "prompts",
            ("result",),
            "Prompts that were kept for another engine, by why that ended: read, deadline, "
            "repeated, owner left, cleared.",
        ),
        Metric(
            "kvhold_handover_skipped_chunks",
            "counter",
            "chunks",
            ("reason",),
            "Chunks that were not kept for another engine, by reason: no share (of memory or of "
            "the quota), too many.",
        ),
        Metric(
            "kvhold_retains",
            "counter",
            "prompts",
            ("result",),
            "Prompts that were kept in memory by a hint, by why that ended: released, deadline, "
            "owner left, cleared.",
        ),
        Metric(
            "kvhold_demoted_chunks",
            "counter",
            "chunks",
            (),
            "Chunks that a hint or a newer turn made go first in eviction.",
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
            "kvhold_spans",
            "counter",
            "spans",
            ("result",),
            "Spans for the OpenTelemetry collector: exported, dropped, failed.",
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
            "kvhold_router_events",
            "counter",
            "events",
            ("kind",),
            "KV cache events published for routers, by kind: stored, removed, cleared.",
        ),
        Metric(
            "kvhold_router_losses",
            "counter",
            "losses",
            ("reason",),
            "Descriptions of chunks, changes and replays not used for routers, by reason: limit, "
            "full, malformed, overflow, replay.",
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

_STATE = (
    ("kvhold_up", "nodes", "1: the node answers."),
    ("kvhold_uptime_seconds", "seconds", "Seconds since the node's start."),
    ("kvhold_arena_bytes", "bytes", "Size of the arena."),
    ("kvhold_arena_used_bytes", "bytes", "Arena bytes in use."),
    ("kvhold_resident_bytes", "bytes", "The node's memory without the arena."),
    ("kvhold_chunks", "chunks", "Chunks in memory, reserved ones included."),
    ("kvhold_pinned_chunks", "chunks", "Chunks held by hits, leases or transfers."),
    ("kvhold_clearing_chunks", "chunks", "Cleared chunks that still take memory."),
    ("kvhold_arriving_chunks", "chunks", "Chunks being read from tiers."),
    ("kvhold_write_behind_chunks", "chunks", "Chunks on their way to tiers."),
    ("kvhold_write_behind_bytes", "bytes", "Bytes of these chunks."),
    ("kvhold_reencodings", "re-encodings", "Running and waiting re-encodings."),
    ("kvhold_namespaces", "namespaces", "Namespaces with chunks in memory."),
    ("kvhold_clients", "clients", "Connected clients."),
    ("kvhold_hits_held", "hits", "Hits held by clients."),
    ("kvhold_leases_held", "leases", "Leases held by clients."),
    ("kvhold_reservations_held", "reservations", "Reservations held by clients."),
)
TABLE |= {name: Metric(name, "gauge", unit, (), help) for name, unit, help in _STATE}
