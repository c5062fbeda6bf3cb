"""The records of the node's protocol, one class each; msgpack on the wire (`wire.py`).

A client says Hello first and is answered with Welcome, which carries the arena's descriptor. Then it numbers its requests, from 1 on, and
each answer has its request's number; the type of the answer stands beside the request here. `Release`, `Commit`, `Abandon` are answered
with Done, so that a caller knows that a chunk is visible. What the node says unasked has number 0: News, when something has ended that it
had said is under way (a hit that was arriving, a flush), and fatal refusals.

Anything that breaks the rules is answered with a fatal Refused, and the connection is closed: by the node at once, or, where the client has
a loan or a room, by the client when it touches that memory no longer.
"""

from typing import Annotated, Any, Union

import msgspec

from kvhold.core.api import Event, Recoded
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Query
from kvhold.core.layout import Layout
from kvhold.core.naming import MAX_DESCRIPTION_BYTES
from kvhold.core.planning import MOST_NAME, Decision, Work
from kvhold.core.terms import FREE, Terms

PROTOCOL_VERSION = 8
MAX_MESSAGE_BYTES = 8 << 20  # the hashes of a prompt of 100 million tokens
MAX_HELLO_BYTES = 4 << 10  # of a Hello, and of the answer to it
MAGIC = "kvhold"

_Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all records."""


class Hello(Message, frozen=True):
    """The first thing a client says. `magic` and `version` never move, so that any two versions understand this much.

    requires: what it requires of the node (`core/requirements.py`), packed, so that another version's is not in the way; empty: nothing
    """

    magic: str
    version: int
    name: str
    pid: int
    requires: bytes = b""


class Welcome(Message, frozen=True):
    """Answer to Hello: who the node is, and the arena. With it comes the arena's descriptor.

    different: what the client requires and does not get, in words; empty: nothing
    """

    version: int
    node: str
    pid: int
    arena_bytes: int
    huge_pages: bool
    different: str = ""


class Register(Message, frozen=True):
    """Make a layout known, and of a namespace of it the budget and the tenant in its tags; None: nobody knows. -> Done

    description: what the namespace is made of, packed by `core.naming`; empty: nobody says
    """

    layout: Layout
    namespace: bytes = b""
    terms: Terms | None = None
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)] = b""


class Lookup(Message, frozen=True):
    """work: what computing costs whoever asks, who then gets no more than is faster; have_tokens: that it has already. -> Found"""

    query: Query
    work: Work | None = None
    have_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class Found(Message, frozen=True):
    """What a lookup found and pinned. arriving: more may come from lower tiers; ask again with Refresh.

    sources: tokens by where their KV was, reason: why the hit ends there; both when it is final
    """

    ticket: int
    num_tokens: int
    arriving: bool = False
    sources: dict[str, int] = {}
    reason: str = ""


class Refresh(Message, frozen=True):
    """How far does it go now? settle: make do with what is here; growth: ring when there is more of it, not only at its end. -> Found"""

    ticket: int
    settle: bool
    growth: bool = False


class Outcome(Message, frozen=True):
    """How long a request's load took in its engine, and computing the rest, in seconds; -1: there was none. -> Done"""

    request: _Name
    load_s: float
    compute_s: float


class Explain(Message, frozen=True):
    """The latest decisions about requests whose names have this in them; empty: about all. -> Explained"""

    request: _Name


class Explained(Message, frozen=True):
    """The last one first; some twenty at most."""

    decisions: list[Decision]


class Names(Message, frozen=True):
    """List the namespaces that were registered, after digest `after`, whose digests begin with `prefix` in hexadecimal digits. -> Named"""

    after: Annotated[bytes, msgspec.Meta(max_length=NAMESPACE_BYTES)] = b""
    prefix: Annotated[str, msgspec.Meta(max_length=2 * NAMESPACE_BYTES)] = ""


class KnownSpace(msgspec.Struct, frozen=True, array_like=True):
    """A namespace that was registered.

    client:      who registered it last
    description: what it is made of, packed by `core.naming`
    at_s:        when, as Unix time
    nbytes:      memory that its chunks have now
    """

    digest: bytes
    client: str
    description: bytes
    at_s: float
    nbytes: int = 0


class Named(Message, frozen=True):
    """One page of namespaces.

    more:         there are others after these
    other_spaces: namespaces with chunks in memory that are described nowhere: an adapter, a salt or tags of a request
    other_bytes:  memory of their chunks
    """

    spaces: list[KnownSpace]
    more: bool
    other_spaces: int
    other_bytes: int


class Prefetch(Message, frozen=True):
    """Bring what lower tiers have into memory. -> Done"""

    query: Query


class Claim(Message, frozen=True):
    """-> Lent, or Gone when the ticket is no longer good. As often as is wanted; each loan is released by itself.

    arriving: what has come of it so far, and it goes on arriving
    """

    ticket: int
    shard: int
    first_chunk: int
    arriving: bool = False


class Lent(Message, frozen=True):
    """Where the claimed chunks lie. checksums: `[group]`, of those that are not ABSENT, 8 bytes for each layer, as committed."""

    loan: int
    offsets: list[list[int]]
    num_tokens: list[int]
    checksums: list[bytes]


class Damaged(Message, frozen=True):
    """Chunks of a loan, by their offsets, whose bytes are not those that were committed. They are removed. -> Done"""

    loan: int
    offsets: list[int]


class Gone(Message, frozen=True):
    """What was asked for is no longer there."""


class Release(Message, frozen=True):
    """Let go of a ticket, a loan or a recoding, which stops if it is not done. -> Done"""

    number: int


class Reserve(Message, frozen=True):
    """-> Granted. groups: `[group][chunk]`, a byte each, not 0 where it is to be written; None: all"""

    layout: bytes
    names: ChunkNames
    shard: int
    terms: Terms = FREE
    groups: bytes | None = None


class Granted(Message, frozen=True):
    """Where the reserved chunks are to be written."""

    room: int
    offsets: list[list[int]]


class Commit(Message, frozen=True):
    """Make chunks of a room visible. -> Done; its mark stands for their being written to lower tiers

    checksums: for each of the chunks, each once, for each granted group and each layer 8 bytes: xxh3_64 of what was written
    """

    room: int
    chunks: list[int]
    checksums: bytes


class Abandon(Message, frozen=True):
    """Give a room's uncommitted chunks back. -> Done"""

    room: int


class Clear(Message, frozen=True):
    """Forget one namespace, or everything. -> Done, with how many chunks went"""

    namespace: bytes | None


class Flushed(Message, frozen=True):
    """Has all up to this mark been written to lower tiers, or given up, and is nothing being cleared? -> Done; 1 for yes"""

    mark: int


class Recode(Message, frozen=True):
    """Write what a tier holds anew, of one namespace, of one prompt, or of all that are known. -> Recoding"""

    tier: str
    codec: str
    namespace: bytes | None = None
    query: Query | None = None


class Progress(Message, frozen=True):
    """How far has a recoding come? -> Recoding, or Gone"""

    number: int


class Recoding(Message, frozen=True):
    """How far it has come; released when nobody asks any more."""

    number: int
    recoded: Recoded


class Snapshot(Message, frozen=True):
    """A page of all that is visible in memory, as events: 0 begins a new snapshot, then 1, 2 ... continue it. -> Happened

    The cache changes between two pages; what does is in the events that follow the snapshot's number.
    """

    page: int


class Events(Message, frozen=True):
    """What has happened since event number `after`? -> Happened"""

    after: int


class Happened(Message, frozen=True):
    """Events. next: the number to go on from; lost: some are missing; more: of a snapshot, this is not all."""

    events: list[Event]
    next: int
    lost: bool = False
    more: bool = False


class Status(Message, frozen=True):
    """-> Report"""


class Report(Message, frozen=True):
    """Sizes, counts and counters."""

    values: dict[str, Any]


class Clients(Message, frozen=True):
    """A page of the node's clients: from number `first` on. -> ClientList"""

    first: Annotated[int, msgspec.Meta(ge=0)] = 0


class Kick(Message, frozen=True):
    """End the client of that number, or those of a process; 0: not by this. -> ClientList, of those that were ended"""

    number: int = 0
    pid: int = 0


class Client(msgspec.Struct, frozen=True):
    """A client, and what it holds.

    number:  the node's for this connection
    alive:   whether its process lives, as far as can be told
    hits:    with their pins
    nbytes:  of the arena, in loans and rooms
    ended:   the node does not listen to it any more, and waits for its end
    """

    number: int
    name: str
    pid: int
    alive: bool
    silent_s: float
    hits: int
    loans: int
    rooms: int
    nbytes: int
    ended: bool


class ClientList(Message, frozen=True):
    """more: this is not all; what follows begins after the last one's number."""

    clients: list[Client]
    more: bool = False


class Stop(Message, frozen=True):
    """End the node. -> Done"""


class Ping(Message, frozen=True):
    """Are you there? -> Done"""


class News(Message, frozen=True):
    """Unasked: something has ended, or grown, that this client was told is under way; it may ask again at once."""


class Done(Message, frozen=True):
    """It is done; `count` says how much, where that has a meaning. mark: stands for all that was committed so far."""

    count: int = 0
    mark: int = 0


class Refused(Message, frozen=True):
    """It was not done, and why. `fatal`: the connection is closed after this."""

    reason: str
    fatal: bool


Request = Union[  # noqa: UP007 - msgspec reads the union
    Register,
    Lookup,
    Refresh,
    Outcome,
    Explain,
    Names,
    Prefetch,
    Claim,
    Damaged,
    Release,
    Reserve,
    Commit,
    Abandon,
    Clear,
    Flushed,
    Recode,
    Progress,
    Snapshot,
    Events,
    Status,
    Clients,
    Kick,
    Stop,
    Ping,
]
Answer = Union[Found, Explained, Named, Lent, Gone, Granted, Recoding, Happened, Report, ClientList, News, Done, Refused]  # noqa: UP007
