"""The records of the node's protocol, one class each; msgpack on the wire (`wire.py`).

A client sends Hello first. The node answers Welcome, and passes the arena's descriptor with it.
Then the client numbers its requests, from 1 on, and each answer has the number of its request. A
request's docstring names the type of its answer after `->`. Release, Commit and Abandon are
answered too, with Done, so that the caller knows when a chunk is visible.

Unsolicited messages of the node have number 0. They are fatal refusals, and News: an operation has
ended that the node had reported as under way (an arriving hit, a flush).

A client that breaks the rules gets a fatal Refused, and the connection is closed. The node closes
it at once, unless the client has a loan or a room: then the client closes it, when it no longer
reads or writes that memory.
"""

from typing import Annotated, Any, Union

import msgspec

from kvhold.core.api import Event, Recoded
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Query
from kvhold.core.layout import Layout
from kvhold.core.naming import MAX_DESCRIPTION_BYTES
from kvhold.core.planning import MOST_NAME, Decision, Work
from kvhold.core.terms import FREE, Terms

PROTOCOL_VERSION = 10
MAX_MESSAGE_BYTES = 8 << 20  # the hashes of a prompt of 100 million tokens
MAX_HELLO_BYTES = 4 << 10  # of a Hello, and of its answer
MAGIC = "kvhold"

_Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all records."""


class Hello(Message, frozen=True):
    """The first message of a client.

    `magic` and `version` keep their places, so that any two versions can compare them.

    requires: the client's requirements (`core/requirements.py`), packed, so that a node of another
              version can still decode the Hello; empty: none
    """

    magic: str
    version: int
    name: str
    pid: int
    requires: bytes = b""


class Welcome(Message, frozen=True):
    """Answer to Hello. The arena's descriptor is sent with it.

    version:     of the protocol
    node:        the node's kvhold version
    pid:         the node's process
    arena_bytes: size of the arena
    huge_pages:  whether the arena has huge pages
    different:   requirements of the client that the node does not meet, as text; empty: none
    run:         a random number of this run of the node
    number:      the node's number for this client
    """

    version: int
    node: str
    pid: int
    arena_bytes: int
    huge_pages: bool
    different: str = ""
    run: int = 0
    number: int = 0


class Register(Message, frozen=True):
    """Register a layout, and optionally a namespace that uses it. -> Done

    namespace:   its digest; empty: none
    terms:       the budget and the tenant in the namespace's tags; None: not known
    description: the parts of the namespace, packed by `core.naming`; empty: not known
    """

    layout: Layout
    namespace: bytes = b""
    terms: Terms | None = None
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)] = b""


class Lookup(Message, frozen=True):
    """Look up a prompt, and pin the hit. -> Found

    work:        the caller's compute cost; the hit is capped where loading stops being faster
    have_tokens: number of tokens that the caller has already
    """

    query: Query
    work: Work | None = None
    have_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class Found(Message, frozen=True):
    """The hit of a lookup, pinned.

    arriving: the hit may still grow from lower tiers; ask again with Refresh
    sources:  number of tokens by the tier that held them; set when the hit is final
    reason:   why the hit ends there; set when the hit is final
    """

    ticket: int
    num_tokens: int
    arriving: bool = False
    sources: dict[str, int] = {}
    reason: str = ""


class Refresh(Message, frozen=True):
    """Ask for the current length of an arriving hit. -> Found

    settle: make the hit final, with the chunks that are in memory now
    growth: send News also when the hit has grown, not only when it is final
    """

    ticket: int
    settle: bool
    growth: bool = False


class Outcome(Message, frozen=True):
    """Report how long the engine took to load a request's hit and to compute the rest; -1: not
    done. -> Done
    """

    request: _Name
    load_s: float
    compute_s: float


class Explain(Message, frozen=True):
    """Ask for the latest decisions about requests whose names contain `request`; empty: about all.

    -> Explained
    """

    request: _Name


class Explained(Message, frozen=True):
    """The latest decisions, newest first, about twenty at most."""

    decisions: list[Decision]


class Names(Message, frozen=True):
    """List registered namespaces, in the order of their digests. -> Named

    after:  list only digests after this one
    prefix: hexadecimal digits that the digests begin with
    """

    after: Annotated[bytes, msgspec.Meta(max_length=NAMESPACE_BYTES)] = b""
    prefix: Annotated[str, msgspec.Meta(max_length=2 * NAMESPACE_BYTES)] = ""


class KnownSpace(msgspec.Struct, frozen=True, array_like=True):
    """A registered namespace.

    client:      the client that registered it last
    description: its parts, packed by `core.naming`
    at_s:        time of that registration, as Unix time
    nbytes:      memory of its chunks now
    """

    digest: bytes
    client: str
    description: bytes
    at_s: float
    nbytes: int = 0


class Named(Message, frozen=True):
    """One page of namespaces.

    more:         other namespaces follow these
    other_spaces: number of namespaces that have chunks in memory and no description: those of an
                  adapter, or of a request's salt or tags
    other_bytes:  memory of the chunks of those namespaces
    """

    spaces: list[KnownSpace]
    more: bool
    other_spaces: int
    other_bytes: int


class Prefetch(Message, frozen=True):
    """Load a prompt's chunks from lower tiers into memory, without a waiting request. -> Done"""

    query: Query


class Claim(Message, frozen=True):
    """Ask for a loan of one shard's part of a hit.

    -> Lent, or Gone when the ticket is no longer valid

    A ticket can be claimed many times. Each loan is released on its own.

    arriving: lend only the chunks that have arrived, and let the hit continue to arrive; otherwise
              a claim makes the hit final
    """

    ticket: int
    shard: int
    first_chunk: int
    arriving: bool = False


class Lent(Message, frozen=True):
    """The places of the claimed chunks.

    offsets:    `[group][chunk]`, in bytes from the arena's start; ABSENT where there is no chunk
    num_tokens: of each chunk
    checksums:  `[group]`, for each chunk that is not ABSENT: 8 bytes per layer, as committed
    """

    loan: int
    offsets: list[list[int]]
    num_tokens: list[int]
    checksums: list[bytes]


class Damaged(Message, frozen=True):
    """Report chunks of a loan, by their offsets, whose bytes differ from the committed bytes.

    The node removes them. -> Done
    """

    loan: int
    offsets: list[int]


class Gone(Message, frozen=True):
    """The node no longer has the requested ticket or recoding."""


class Release(Message, frozen=True):
    """Release a ticket, a loan or a recoding. A recoding that is not done stops. -> Done"""

    number: int


class Reserve(Message, frozen=True):
    """Reserve memory for chunks. -> Granted

    groups: `[group][chunk]`, one byte each; not 0 where the chunk will be written; None: all
    """

    layout: bytes
    names: ChunkNames
    shard: int
    terms: Terms = FREE
    groups: bytes | None = None


class Granted(Message, frozen=True):
    """The places of the reserved chunks: `offsets` is `[group][chunk]`, in bytes from the arena's
    start.
    """

    room: int
    offsets: list[list[int]]


class Commit(Message, frozen=True):
    """Make chunks of a room visible.

    -> Done; ask Flushed about its mark to learn whether lower tiers have them

    checksums: 8 bytes per layer, xxh3_64 of the written bytes; in the order of the chunks, each
               chunk once, and within a chunk in the order of its granted groups
    """

    room: int
    chunks: list[int]
    checksums: bytes


class Abandon(Message, frozen=True):
    """Return a room's uncommitted chunks. -> Done"""

    room: int


class Clear(Message, frozen=True):
    """Clear one namespace, or everything. -> Done, with the number of removed chunks"""

    namespace: bytes | None


class Flushed(Message, frozen=True):
    """Ask whether all commits up to this mark are written to lower tiers, or given up, and no clear
    is running. -> Done; 1: yes
    """

    mark: int


class Recode(Message, frozen=True):
    """Re-encode the chunks of a tier: those of one namespace, of one prompt, or of all known
    namespaces. -> Recoding
    """

    tier: str
    codec: str
    namespace: bytes | None = None
    query: Query | None = None


class Progress(Message, frozen=True):
    """Ask for the progress of a recoding. -> Recoding, or Gone"""

    number: int


class Recoding(Message, frozen=True):
    """The progress of a recoding. The client releases it when it needs no more answers."""

    number: int
    recoded: Recoded


class Snapshot(Message, frozen=True):
    """Ask for one page of the visible chunks in memory, as events. -> Happened

    Page 0 begins a new snapshot; 1, 2 ... continue it. Changes of the cache between two pages are
    in the events after the snapshot's number.
    """

    page: int


class Events(Message, frozen=True):
    """Ask for the events after number `after`. -> Happened"""

    after: int


class Happened(Message, frozen=True):
    """Events of the chunks in memory.

    next: the number to continue from
    lost: some events are missing
    more: more pages of the snapshot follow
    """

    events: list[Event]
    next: int
    lost: bool = False
    more: bool = False


class Status(Message, frozen=True):
    """Ask for the node's status. -> Report"""


class Report(Message, frozen=True):
    """The node's status: sizes, counts and counters."""

    values: dict[str, Any]


class Clients(Message, frozen=True):
    """Ask for one page of the node's clients, from number `first` on. -> ClientList"""

    first: Annotated[int, msgspec.Meta(ge=0)] = 0


class UseDevice(Message, frozen=True):
    """Report that a device copies between the arena and this client. -> Done

    From then on, the node takes the client's memory back only when its process has ended or has
    sent `Departed`.

    pinned_bytes: part of the arena that is registered with the device; reported again as it grows
    """

    pinned_bytes: int = 0


class Departed(Message, frozen=True):
    """Report that no device copies for another client of this process, which has closed its
    connection. -> Done

    The node may then take that client's memory back.

    run, number: from that client's Welcome
    """

    run: int
    number: int


class Kick(Message, frozen=True):
    """End a client by its number, or the clients of a process; 0: not given.

    -> ClientList, of the ended clients
    """

    number: int = 0
    pid: int = 0


class Client(msgspec.Struct, frozen=True):
    """A client, and its holdings.

    number:   the node's number for this connection
    name:     as the client gave it
    pid:      its process
    alive:    whether its process lives, as far as the node can tell
    silent_s: seconds since its last message
    hits:     number of its pinned hits
    loans:    number of its loans
    rooms:    number of its rooms
    nbytes:   arena bytes in its loans and rooms
    ended:    the node no longer reads its requests, and waits until it closes the connection
    device:   a device copies its memory
    pinned_bytes: arena bytes that are registered with that device
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
    device: bool = False
    pinned_bytes: int = 0


class ClientList(Message, frozen=True):
    """One page of clients. more: others follow, after the number of the last one here."""

    clients: list[Client]
    more: bool = False


class Stop(Message, frozen=True):
    """End the node. -> Done"""


class Ping(Message, frozen=True):
    """Ask whether the node answers. -> Done"""


class News(Message, frozen=True):
    """Unsolicited: a hit or a flush that the node had reported as under way has ended or grown.

    The client may ask again.
    """


class Done(Message, frozen=True):
    """The request is done.

    count: see the request; 0 where it has no meaning
    mark:  stands for all commits so far
    """

    count: int = 0
    mark: int = 0


class Refused(Message, frozen=True):
    """The request was not done, for `reason`. fatal: the connection is closed after this."""

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
    UseDevice,
    Departed,
    Stop,
    Ping,
]
Answer = Union[  # noqa: UP007
    Found,
    Explained,
    Named,
    Lent,
    Gone,
    Granted,
    Recoding,
    Happened,
    Report,
    ClientList,
    News,
    Done,
    Refused,
]
