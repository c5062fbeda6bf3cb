"""The status of a cache, a node and a central store, as plain values.

    status = cache.status(); status["used_bytes"]      # CacheStatus
    client.status()["pid"]                             # NodeStatus, as in `kvhold status --json`

The values are dicts, as printed in JSON.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from kvhold.core.errors import ProtocolError

MEMORY = "ram"
"""In the place of a tier's name."""


class HeldStatus(TypedDict):
    """tickets:      hits
    leases:       leases
    reservations: reservations
    """

    tickets: int
    leases: int
    reservations: int


class WriteBehindStatus(TypedDict):
    """Chunks waiting to be written to tiers, or being written.

    chunks: number
    bytes:  in memory
    """

    chunks: int
    bytes: int


class ScrubStatus(TypedDict):
    """The scrubber of memory.

    interval_s: for one pass; 0: off
    passes:     complete passes
    pass_bytes: checked in the current pass
    """

    interval_s: float
    passes: int
    pass_bytes: int


class FollowedPeerStatus(TypedDict):
    """Rates are of the last minute.

    address:            as in the tier's URL or directory
    name:               its host; empty: unknown
    state:              following, paused, away, refused, connecting, itself or elsewhere
    cause:              of paused, away or refused, one word; else empty
    by_bus:             changes come over the bus
    channel:            of chunks in memory: tcp or nixl
    channel_reason:     why not nixl; empty: it is
    nixl_bytes:         received by NIXL
    state_s:            seconds in it
    incarnation:        random, per start; 0: unknown
    version:            of kvhold; empty: unknown
    chunks:             in the index
    events:             its changes
    events_per_s:       its changes
    loads:              gets from it
    loads_per_s:        gets
    loaded_chunks:      sent
    loaded_bytes:       of frames
    loaded_bytes_per_s: of frames
    absent_chunks:      wanted, but evicted
    last_load_s:        of the last answered get; null: none
    median_load_s:      of the last 64; null: none
    last_fault:         empty: none
    last_fault_ago_s:   null: none
    """

    address: str
    name: str
    state: str
    cause: str
    by_bus: bool
    channel: str
    channel_reason: str
    nixl_bytes: int
    state_s: float
    incarnation: int
    version: str
    chunks: int
    events: int
    events_per_s: float
    loads: int
    loads_per_s: float
    loaded_chunks: int
    loaded_bytes: int
    loaded_bytes_per_s: float
    absent_chunks: int
    last_load_s: float | None
    median_load_s: float | None
    last_fault: str
    last_fault_ago_s: float | None


class FollowedPeersStatus(TypedDict):
    """The peers of a tier.

    directory:   of the list; empty: the tier's URL
    list_age_s:  since read; null: never, or in the URL
    list_fault:  of the latest read; empty: none
    registered:  this node's address there; empty: none
    bus:         of changes; empty: a connection to each peer
    bus_fault:   empty: none
    bus_ignored: ignored records: forged, damaged, or of unknown nodes
    chunks:      in the index
    peers:       by number
    """

    directory: str
    list_age_s: float | None
    list_fault: str
    registered: str
    bus: str
    bus_fault: str
    bus_ignored: int
    chunks: int
    peers: list[FollowedPeerStatus]


class TierPeersStatus(TypedDict, total=False):
    """Absent in other tiers.

    followed_peers: nodes that it reads
    """

    followed_peers: FollowedPeersStatus


class TierStatus(TierPeersStatus):
    """name:           unique in its cache
    kind:           such as `disk`
    available:      false: skipped after faults, until it answers
    last_fault:     empty: none
    stuck_calls:    abandoned, but still hold memory
    durable:        its chunks outlive a killed process
    shared:         others may change its chunks
    replaces:       can be re-encoded
    read_only:      never written to
    pending_clears: not done yet
    used_bytes:     null: unknown
    index_bytes:    of its index; null: none
    """

    name: str
    kind: str
    available: bool
    last_fault: str
    stuck_calls: int
    durable: bool
    shared: bool
    replaces: bool
    read_only: bool
    pending_clears: int
    used_bytes: int | None
    index_bytes: int | None


class CacheTierStatus(TierStatus):
    """A tier that encodes chunks.

    codec:       of new chunks
    codec_ready: compiled
    encrypted:   new chunks are encrypted
    """

    codec: str
    codec_ready: bool
    encrypted: bool


class TiersStatus(TypedDict, total=False):
    """Absent in a cache without tiers.

    tiers:         in their order
    tier_counters: their metrics
    """

    tiers: list[CacheTierStatus]
    tier_counters: dict[str, float]


class ActivityStatus(TypedDict):
    """Lookups of a namespace or a tenant.

    namespace:     digest; empty: of a tenant
    tenant:        empty: none, several, or unknown
    lookups:       number
    lookup_tokens: looked up
    hit_tokens:    found
    """

    namespace: str
    tenant: str
    lookups: int
    lookup_tokens: int
    hit_tokens: int


class StateStatus(TypedDict):
    """The state machine of a cache.

    arena_bytes:      size
    used_bytes:       of the arena
    chunks:           in memory, reserved ones included
    pinned_chunks:    held by hits, leases or transfers
    clearing_chunks:  cleared, memory not yet free
    arriving_chunks:  being read from tiers
    announced_chunks: whole chunks that engines compute
    handover_chunks:  pinned for another engine
    retained_chunks:  pinned by `retain`
    reencodings:      running and waiting
    write_behind:     chunks on their way to tiers
    namespaces:       used bytes, by digest
    busiest_namespaces: the 16 that lately looked up most tokens
    busiest_tenants:  the same
    held:             holdings of callers
    counters:         metrics of the cache, and of its node
    """

    arena_bytes: int
    used_bytes: int
    chunks: int
    pinned_chunks: int
    clearing_chunks: int
    arriving_chunks: int
    announced_chunks: int
    handover_chunks: int
    retained_chunks: int
    reencodings: int
    write_behind: WriteBehindStatus
    namespaces: dict[str, int]
    busiest_namespaces: list[ActivityStatus]
    busiest_tenants: list[ActivityStatus]
    held: HeldStatus
    counters: dict[str, float]


class CacheStatus(StateStatus, TiersStatus):
    """arena_touched_bytes: faulted in
    scrub:               of memory
    """

    arena_touched_bytes: int
    scrub: ScrubStatus


class LoopStatus(TypedDict):
    """A turn is an uninterrupted run of the event loop.

    longest_turn_s:            since the start
    recent_longest_turn_s:     since the previous status
    recent_longest_turn_cpu_s: its CPU time
    """

    longest_turn_s: float
    recent_longest_turn_s: float
    recent_longest_turn_cpu_s: float


class ClientStatus(TypedDict):
    """name:     such as `vllm` or `kvhold status`
    pid:      of its process
    silent_s: since its latest message
    """

    name: str
    pid: int
    silent_s: float


class ServedPeerStatus(TypedDict):
    """A node that reads this node's chunks.

    address:         with a port if it serves peers; `others`: beyond 32
    name:            its host; empty: unknown
    connections:     0: it has left
    follows:         it receives changes
    state_s:         since it came, or left
    chunks:          sent
    absent_chunks:   asked for in vain
    bytes:           of sent frames
    bytes_per_s:     in the last minute
    in_flight_bytes: being sent
    """

    address: str
    name: str
    connections: int
    follows: bool
    state_s: float
    chunks: int
    absent_chunks: int
    bytes: int
    bytes_per_s: float
    in_flight_bytes: int


class RefusedPeerStatus(TypedDict):
    """A host whose connections were refused.

    address: of the host
    reason:  of the latest
    times:   number
    ago_s:   since the latest
    """

    address: str
    reason: str
    times: int
    ago_s: float


class ServedPeersStatus(TypedDict):
    """The service for other nodes.

    address:         where the node listens
    channel:         nixl: offered beside TCP; or tcp
    channel_reason:  why not nixl; empty: it is
    incarnation:     random, per start
    connections:     of other nodes
    chunks:          findable here
    index_bytes:     of the index
    in_flight_bytes: being sent
    peers:           present and former
    refused:         the latest 16 hosts
    counters:        its metrics
    """

    address: str
    channel: str
    channel_reason: str
    incarnation: int
    connections: int
    chunks: int
    index_bytes: int
    in_flight_bytes: int
    peers: list[ServedPeerStatus]
    refused: list[RefusedPeerStatus]
    counters: dict[str, float]


class NodePeersStatus(TypedDict, total=False):
    """Absent without `peers.listen`.

    served_peers: the service
    """

    served_peers: ServedPeersStatus


class RouterEventsStatus(TypedDict):
    """Events for routers.

    publish:           the address
    replay:            the address; empty: none
    next_sequence:     number of the next batch
    described_chunks:  can be announced
    description_bytes: their memory
    replay_bytes:      of kept batches
    waiting_changes:   not published yet
    """

    publish: str
    replay: str
    next_sequence: int
    described_chunks: int
    description_bytes: int
    replay_bytes: int
    waiting_changes: int


class NodeEventsStatus(TypedDict, total=False):
    """Absent without `events.publish`.

    router_events: the publisher
    """

    router_events: RouterEventsStatus


class ControlProcessStatus(TypedDict):
    """The API that the node started.

    pid:        0: it does not run now
    address:    where it listens; empty: it does not yet
    restarts:   number
    last_fault: how it ended; empty: it never did
    """

    pid: int
    address: str
    restarts: int
    last_fault: str


class NodeControlStatus(TypedDict, total=False):
    """Absent without `control.in_node`.

    control: the API
    """

    control: ControlProcessStatus


class NodeStatus(CacheStatus, NodePeersStatus, NodeEventsStatus, NodeControlStatus):
    """version:        of kvhold
    protocol:       its version, between nodes and clients
    pid:            of its process
    socket:         path
    uptime_s:       since its start
    resident_bytes: its memory without the arena
    huge_pages:     the arena is in huge pages
    loop:           turns
    clients:        one per client
    """

    version: str
    protocol: int
    pid: int
    socket: str
    uptime_s: float
    resident_bytes: int
    huge_pages: bool
    loop: LoopStatus
    clients: list[ClientStatus]


class CentralStatus(TypedDict):
    """arena_bytes:   size
    used_bytes:    of the arena
    values:        in memory
    writing_bytes: being written to tiers
    tiers:         in their order
    counters:      of the store and its tiers
    """

    arena_bytes: int
    used_bytes: int
    values: int
    writing_bytes: int
    tiers: list[TierStatus]
    counters: dict[str, float]


def check_status(status: Mapping[str, Any]) -> NodeStatus:
    """Return the status that a node sent, with the known fields.

    Raises ProtocolError for a missing field or a value of another type.
    """
    try:
        return msgspec.convert(status, NodeStatus)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the node's status cannot be read: {error}") from None
