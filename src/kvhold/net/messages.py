"""Hello is answered by Welcome, with the arena's descriptor. Each answer has its request's number;
0 marks News and fatal refusals. `->` names the answer; else it is Done.

After a fatal Refused the node closes the connection. A client that holds memory closes it itself.
"""

from typing import Annotated, Any, Union

import msgspec

from kvhold.core.api import (
    CopyProgress,
    DemoteAnswer,
    Event,
    Found,
    ReencodeProgress,
    RetainAnswer,
    Uses,
)
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Query
from kvhold.core.layout import Layout
from kvhold.core.naming import MAX_DESCRIPTION_BYTES
from kvhold.core.planning import (
    MOST_NAME,
    BlendReport,
    ComputeCost,
    ComputeIntent,
    Decision,
    LoadedChunks,
    RequestInfo,
)
from kvhold.core.reasons import Reason
from kvhold.core.router_events import ChunkDescription
from kvhold.core.status import MEMORY
from kvhold.core.store_options import DEFAULT_OPTIONS, MAX_TENANT, MAX_TTL_S, StoreOptions
from kvhold.core.tags import TAG_BYTES
from kvhold.core.tracing import TraceContext
from kvhold.net.message_rows import ClientInfo as ClientInfo
from kvhold.net.message_rows import KnownSpace as KnownSpace
from kvhold.net.message_rows import Message as Message
from kvhold.net.message_rows import MetricSample as MetricSample
from kvhold.net.usage_messages import HeldRows as HeldRows
from kvhold.net.usage_messages import ListShares as ListShares
from kvhold.net.usage_messages import ListWorths as ListWorths
from kvhold.net.usage_messages import MeasureHeld as MeasureHeld
from kvhold.net.usage_messages import ShareRows as ShareRows
from kvhold.net.usage_messages import WorthRows as WorthRows

PROTOCOL_VERSION = 26
MAX_MESSAGE_BYTES = 8 << 20  # hashes of 100 million tokens
MAX_HELLO_BYTES = 4 << 10
MAGIC = "kvhold"

_Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


class Hello(Message, frozen=True):
    """`magic` and `version` keep their places in every version.

    requires: packed `core.requirements`
    """

    magic: str
    version: int
    name: str
    pid: int
    requires: bytes = b""


class Welcome(Message, frozen=True):
    """different: unmet requirements, as text
    run:       random, per start of the node
    publishes: events for routers, so it needs chunk descriptions
    """

    version: int
    node: str
    pid: int
    arena_bytes: int
    huge_pages: bool
    different: str = ""
    run: int = 0
    number: int = 0
    publishes: bool = False


class Register(Message, frozen=True):
    """description: packed by `core.naming`"""

    layout: Layout
    namespace: bytes = b""
    store_options: StoreOptions | None = None
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)] = b""


class Lookup(Message, frozen=True):
    """-> LookupAnswer"""

    query: Query
    cost: ComputeCost | None = None
    have_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    uses: Uses = "all"
    intent: ComputeIntent | None = None
    trace: TraceContext = ""
    info: RequestInfo | None = None


class LookupAnswer(Message, frozen=True):
    """A pinned hit. `sources`, `reason`, `announcement` and `loaded` are set when it is final.

    arriving:     it may still grow; ask again with Refresh
    waits:        another engine computes missing chunks
    announcement: of chunks that the client computes, to be released; the ticket's number, if any;
                  0: none
    """

    ticket: int
    num_tokens: int
    arriving: bool = False
    sources: dict[str, int] = msgspec.field(default_factory=dict)
    reason: Reason | None = None
    waits: bool = False
    announcement: int = 0
    loaded: list[LoadedChunks] = msgspec.field(default_factory=list)

    @classmethod
    def of(cls, found: Found) -> "LookupAnswer":
        return cls(*(getattr(found, name) for name in cls.__struct_fields__))

    def found(self) -> Found:
        return Found(*msgspec.structs.astuple(self))


class LookupSpans(Message, frozen=True):
    """-> SpansAnswer"""

    queries: tuple[Query, ...]


class SpansAnswer(Message, frozen=True):
    """One for each query, each with a ticket of its own."""

    spans: list[LookupAnswer]


class Refresh(Message, frozen=True):
    """-> LookupAnswer

    settle: make the hit final
    growth: News when the hit grows, too
    """

    ticket: int
    settle: bool
    growth: bool = False


class Timing(Message, frozen=True):
    """None: not done."""

    request: _Name
    load_s: float | None
    compute_s: float | None


class ReportBlend(Message, frozen=True):
    report: BlendReport


class Explain(Message, frozen=True):
    """tenant: empty: all. -> Explained"""

    request: _Name
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""


class Explained(Message, frozen=True):
    decisions: list[Decision]


class ListNamespaces(Message, frozen=True):
    after: Annotated[bytes, msgspec.Meta(max_length=NAMESPACE_BYTES)] = b""
    prefix: Annotated[str, msgspec.Meta(max_length=2 * NAMESPACE_BYTES)] = ""


class Named(Message, frozen=True):
    """other_spaces: without a description"""

    spaces: list[KnownSpace]
    more: bool
    other_spaces: int
    other_bytes: int


class ListOwned(Message, frozen=True):
    """Namespaces with only this tenant, or with this tag (its digest). -> Owned"""

    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)]
    tag: Annotated[bytes, msgspec.Meta(max_length=TAG_BYTES)] = b""


class Owned(Message, frozen=True):
    """digests: joined. The others: see `TagClear`"""

    digests: bytes
    unknown: int = 0
    forgotten: int = 0
    since_s: float | None = None


class MeasureTenants(Message, frozen=True):
    """-> TenantBytes"""


class TenantBytes(Message, frozen=True):
    """Of the 1,000 largest tenants, in memory. "": without one"""

    nbytes: dict[str, int]


class Prefetch(Message, frozen=True):
    query: Query


class Retain(Message, frozen=True):
    """-> Retained"""

    query: Query
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)]


class Retained(Message, frozen=True):
    answer: RetainAnswer


class Demote(Message, frozen=True):
    """-> Demoted"""

    query: Query
    first_chunk: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0


class Demoted(Message, frozen=True):
    answer: DemoteAnswer


class Claim(Message, frozen=True):
    """-> Leased, or NotFound"""

    ticket: int
    shard: int
    first_chunk: int
    arriving: bool = False


class Leased(Message, frozen=True):
    """offsets:   `[group]`, packed (`offsets.py`); bytes from the arena's start, or ABSENT
    checksums: `[group]`, 8 bytes per layer of each present chunk
    """

    lease: int
    offsets: list[bytes]
    num_tokens: list[int]
    checksums: list[bytes]


class Damaged(Message, frozen=True):
    lease: int
    offsets: list[int]


class NotFound(Message, frozen=True):
    """The ticket, re-encoding or copy is unknown."""


class Release(Message, frozen=True):
    """A ticket and its announcement, a lease, a re-encoding or a copy.

    keep_announcement: only the ticket
    """

    number: int
    keep_announcement: bool = False


class Reserve(Message, frozen=True):
    """-> Granted

    groups: mask, `[group][chunk]`, one byte each; None: all
    """

    layout: bytes
    names: ChunkNames
    shard: int
    store_options: StoreOptions = DEFAULT_OPTIONS
    groups: bytes | None = None


class Granted(Message, frozen=True):
    """offsets: as in `Leased`"""

    reservation: int
    offsets: list[bytes]


class Commit(Message, frozen=True):
    """checksums: xxh3_64, 8 bytes per layer; by chunk, each once, then by granted group"""

    reservation: int
    chunks: list[int]
    checksums: bytes


class Abandon(Message, frozen=True):
    reservation: int


class Clear(Message, frozen=True):
    """namespace: None: everything. -> Done, count: removed chunks

    at_ns: time of another host's clear; 0: own
    tier:  only it, or `ram`; empty: all
    """

    namespace: bytes | None
    at_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    tier: str = ""


class ClearPrompt(Message, frozen=True):
    """-> Done, count: removed chunks

    only_end: keep the part that another prompt in memory continues
    """

    query: Query
    only_end: bool = False


class LastClear(Message, frozen=True):
    """Nanoseconds; 0: never. -> Done, count"""

    namespace: bytes


class Flushed(Message, frozen=True):
    """-> Done, count 1: all commits up to `mark` have ended, and no clear runs"""

    mark: int


class Reencode(Message, frozen=True):
    tier: str
    codec: str
    namespace: bytes | None = None
    query: Query | None = None


class Copy(Message, frozen=True):
    """-> CopyStatus. See `Cache.copy`"""

    tier: str
    query: Query | None
    drop: bool = False
    source: str = MEMORY
    namespace: bytes = b""


class Progress(Message, frozen=True):
    """-> ReencodeStatus, CopyStatus, or NotFound"""

    number: int


class ReencodeStatus(Message, frozen=True):
    """The client must release `number`."""

    number: int
    progress: ReencodeProgress


class CopyStatus(Message, frozen=True):
    """The client must release `number`."""

    number: int
    progress: CopyProgress


class Snapshot(Message, frozen=True):
    """A page of visible chunks. -> Happened

    Page 0 begins a snapshot; later changes are in events.
    """

    page: int


class Events(Message, frozen=True):
    """-> Happened"""

    after: int


class Happened(Message, frozen=True):
    """lost: some are missing"""

    events: list[Event]
    next: int
    lost: bool = False
    more: bool = False


class FindUndescribed(Message, frozen=True):
    """Chunks that need a description. -> Undescribed

    names: joined, NAME_BYTES each
    """

    names: bytes


class Undescribed(Message, frozen=True):
    """at: positions"""

    at: list[int]


class Describe(Message, frozen=True):
    chunks: list[ChunkDescription]


class Status(Message, frozen=True):
    """-> Report"""


class Report(Message, frozen=True):
    values: dict[str, Any]


class ChangeSettings(Message, frozen=True):
    """-> Report: each setting that may change"""

    changes: dict[str, Any] = msgspec.field(default_factory=dict)


class FindLayout(Message, frozen=True):
    """By the namespace's digest. -> FoundLayout"""

    namespace: bytes


class FoundLayout(Message, frozen=True):
    """None: the node does not know it."""

    layout: Layout | None


class Measure(Message, frozen=True):
    """-> MetricSamples"""


class MetricSamples(Message, frozen=True):
    samples: list[MetricSample]


class Clients(Message, frozen=True):
    """-> ClientList"""

    first: Annotated[int, msgspec.Meta(ge=0)] = 0


class UseDevice(Message, frozen=True):
    """A device copies for this client: its memory is kept until its process ends, or `Departed`.

    numa_node: of the device; -1: unknown
    """

    pinned_bytes: int = 0
    numa_node: int = -1


class Departed(Message, frozen=True):
    """No device copies for a closed client.

    run, number: from its Welcome
    """

    run: int
    number: int


class Kick(Message, frozen=True):
    """0: not given. pid: all clients of the process. -> ClientList"""

    number: int = 0
    pid: int = 0


class ClientList(Message, frozen=True):
    clients: list[ClientInfo]
    more: bool = False


class Stop(Message, frozen=True): ...


class Ping(Message, frozen=True): ...


class News(Message, frozen=True):
    """A hit or flush ended or grew, or a wait is over."""


class Done(Message, frozen=True):
    """mark: all commits so far; only for Commit and Flushed"""

    count: int = 0
    mark: int | None = None


class Refused(Message, frozen=True):
    reason: str
    fatal: bool


Request = Union[  # noqa: UP007 - msgspec reads the union
    Register,
    Lookup,
    LookupSpans,
    Refresh,
    Timing,
    ReportBlend,
    Explain,
    ListNamespaces,
    ListOwned,
    MeasureTenants,
    MeasureHeld,
    ListShares,
    ListWorths,
    Prefetch,
    Retain,
    Demote,
    Claim,
    Damaged,
    Release,
    Reserve,
    Commit,
    Abandon,
    Clear,
    ClearPrompt,
    LastClear,
    Flushed,
    Reencode,
    Copy,
    Progress,
    Snapshot,
    Events,
    FindUndescribed,
    Describe,
    Status,
    ChangeSettings,
    FindLayout,
    Measure,
    Clients,
    Kick,
    UseDevice,
    Departed,
    Stop,
    Ping,
]
Answer = Union[  # noqa: UP007
    LookupAnswer,
    SpansAnswer,
    Explained,
    Named,
    Owned,
    TenantBytes,
    HeldRows,
    ShareRows,
    WorthRows,
    Retained,
    Demoted,
    Leased,
    NotFound,
    Granted,
    ReencodeStatus,
    CopyStatus,
    Happened,
    Undescribed,
    Report,
    FoundLayout,
    MetricSamples,
    ClientList,
    News,
    Done,
    Refused,
]
