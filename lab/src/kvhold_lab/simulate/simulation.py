"""Simulates hit rates, by the rules in `policy_replay.py`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhold.cache.values import ChunkValues, ValueRun
from kvhold.core.keys import NAMESPACE_BYTES, Query
from kvhold.core.layout import Group, Layout
from kvhold_lab.simulate.numba_eviction import POLICIES as MODELS
from kvhold_lab.simulate.numba_eviction import replay
from kvhold_lab.simulate.policy_replay import Replayed, find_policy, replay_class
from kvhold_lab.simulate.prefill_cost import PrefillCost
from kvhold_lab.simulate.trace import Cut

BOUND = "belady"
_CHUNK = Layout(
    (Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),), tokens_per_chunk=1
)


@dataclass(frozen=True)
class Setup:
    """policy:     a name, or module:Class
    disk_bytes: of a tier below memory; 0: none
    ratio:      the disk codec's plain bytes / frame bytes
    policy_for: for `learned`, else empty
    """

    policy: str
    ram_bytes: int
    token_bytes: int
    disk_bytes: int = 0
    codec: str = "raw"
    ratio: float = 1.0
    cost: PrefillCost = field(default_factory=PrefillCost)
    policy_for: str = ""

    def ram_chunks(self, tokens_per_chunk: int) -> int:
        return self.ram_bytes // (tokens_per_chunk * self.token_bytes)

    def disk_chunks(self, tokens_per_chunk: int) -> int:
        return int(self.disk_bytes * self.ratio) // (tokens_per_chunk * self.token_bytes)


@dataclass(frozen=True)
class SimulatedRow:
    """hit_rate:         tokens found / tokens of all prompts
    saved_s:          seconds of prefill, without the time to load
    evicted:          from memory
    written_bytes:    to disk; 0 for `belady`
    events_per_s:     chunks replayed, in one thread
    """

    policy: str
    policy_for: str
    capacity_bytes: int
    disk_bytes: int
    chunk_tokens: int
    codec: str
    hit_tokens: int
    hit_requests: int
    saved_s: float
    evicted: int
    written_bytes: int
    hit_rate: float
    request_hit_rate: float
    ram_hit_rate: float
    disk_hit_rate: float
    bytes_read: int
    bytes_written: int
    disk_bytes_read: int
    disk_bytes_written: int
    evictions: int
    disk_evictions: int
    events_per_s: float


def replay_policy(
    cut: Cut,
    policy: str,
    *,
    capacity: int,
    lower_capacity: int = 0,
    values: Sequence[ValueRun] | None = None,
) -> Replayed:
    trace = cut.chunks, cut.starts, cut.parents
    if policy in MODELS:
        return replay(*trace, policy=policy, capacity=capacity, lower_capacity=lower_capacity)
    return replay_class(
        *trace,
        make=find_policy(policy),
        capacity=capacity,
        lower_capacity=lower_capacity,
        times_s=cut.times_s,
        values=values,
    )


def values_of(cut: Cut, setup: Setup) -> Sequence[ValueRun] | None:
    """None: all are equal, as for `tokens` and `bytes`. For `ttft`, a tier below is slow."""
    if setup.policy_for != "ttft":
        return None
    most = int(np.diff(cut.starts).max(initial=0))
    query = Query(bytes(NAMESPACE_BYTES), _CHUNK.fingerprint, 1, b"")
    cost = setup.cost.compute_cost(cut.tokens_per_chunk)
    return ChunkValues(setup.policy_for).runs(query, _CHUNK, most, cost)


def simulate(cut: Cut, num_tokens: int, setup: Setup) -> SimulatedRow:
    """num_tokens: of all prompts, with partial chunks

    With two tiers, `belady` has one memory of both sizes, and memory alone.
    """
    ram, disk = setup.ram_chunks(cut.tokens_per_chunk), setup.disk_chunks(cut.tokens_per_chunk)
    begun = time.perf_counter()
    if setup.policy == BOUND:
        replayed = replay_policy(cut, BOUND, capacity=ram + disk)
    else:
        replayed = replay_policy(
            cut, setup.policy, capacity=ram, lower_capacity=disk, values=values_of(cut, setup)
        )
    elapsed_s = time.perf_counter() - begun
    in_memory = replayed
    if setup.policy == BOUND and disk:
        in_memory = replay_policy(cut, BOUND, capacity=ram)
    return _row(cut, num_tokens, setup, replayed, in_memory, elapsed_s)


def best_hit_rate(cut: Cut, num_tokens: int) -> float:
    replayed = replay_policy(cut, "fifo", capacity=cut.num_ids)
    return int(replayed.found.sum()) * cut.tokens_per_chunk / max(1, num_tokens)


def _row(
    cut: Cut,
    num_tokens: int,
    setup: Setup,
    replayed: Replayed,
    in_memory: Replayed,
    elapsed_s: float,
) -> SimulatedRow:
    chunk_bytes, total = cut.tokens_per_chunk * setup.token_bytes, max(1, num_tokens)
    hit_tokens = replayed.found.sum(axis=1, dtype=np.int64) * cut.tokens_per_chunk
    hit_requests = int((hit_tokens > 0).sum())
    found = int(replayed.found.sum())
    written_bytes = int(replayed.written * chunk_bytes / setup.ratio)
    from_ram = int(in_memory.found[:, 0].sum())
    return SimulatedRow(
        policy=setup.policy,
        policy_for=setup.policy_for,
        capacity_bytes=setup.ram_bytes,
        disk_bytes=setup.disk_bytes,
        chunk_tokens=cut.tokens_per_chunk,
        codec=setup.codec,
        hit_tokens=int(hit_tokens.sum()),
        hit_requests=hit_requests,
        saved_s=float(setup.cost.seconds(hit_tokens).sum()),
        evicted=replayed.evicted,
        written_bytes=written_bytes,
        hit_rate=found * cut.tokens_per_chunk / total,
        request_hit_rate=hit_requests / max(1, replayed.found.shape[0]),
        ram_hit_rate=from_ram * cut.tokens_per_chunk / total,
        disk_hit_rate=(found - from_ram) * cut.tokens_per_chunk / total,
        bytes_read=found * chunk_bytes,
        bytes_written=replayed.stored * chunk_bytes,
        disk_bytes_read=int(replayed.promoted * chunk_bytes / setup.ratio),
        disk_bytes_written=written_bytes,
        evictions=replayed.evicted,
        disk_evictions=replayed.evicted_below,
        events_per_s=cut.chunks.size / elapsed_s if elapsed_s else 0.0,
    )
