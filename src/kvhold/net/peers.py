"""The records between a node and its followers.

After LoginHello and PeerWelcome (`login.py`), a follower may introduce itself. A connection has
gets and reads, or one Follow.

A **get** is answered by PeerValues, each followed by the values' bytes, in the keys' order.

A **read** is answered by one Lent. Of a lent value, only the first bytes follow; the rest is read
by the channel (`remote_memory.py`) until the lease ends: by Returned, with the connection,
or after `peers.request_timeout_s`.

A **load** ends with its connection.

A **follow** is answered by events, after a snapshot's pages if the node lacks events after the
follower's number. A follower whose number is not `after` follows again. A node sends an empty
PeerChanges after `BEAT_S` without an event.
"""

from typing import Union

import msgspec

from kvhold.core.keys import Query
from kvhold.net.login import LoginRefused

PEERS_VERSION = 1
VERSIONS_APART = 1  # at most
PEERS_MAGIC = "kvhold-peer"
DEFAULT_PORT = 7711
BEAT_S = 1.0
MOST_KEYS = 4096  # per get


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True): ...


class PeerBus(PeerMessage, frozen=True):
    """Access to this node's records on a bus (`tiers/peers/bus.py`).

    key:      seals them
    clock_ms: now
    """

    key: bytes
    clock_ms: int

    def __repr__(self) -> str:
        return "PeerBus(***)"


class PeerWelcome(PeerMessage, frozen=True):
    """incarnation: random, per start of the node
    channel:     "nixl": it lends its memory; or empty
    """

    version: int
    kvhold: str
    incarnation: int
    name: str = ""
    bus: PeerBus | None = None
    channel: str = ""


class Introduce(PeerMessage, frozen=True):
    """The follower's host. Without an answer.

    port: where it serves peers; 0: it does not
    """

    name: str
    port: int


class PeerGet(PeerMessage, frozen=True):
    """Frames, or a range of each.

    keys:   KEY_BYTES each, joined
    room:   the most bytes for each frame
    starts: of ranges of exactly `room` bytes; None: whole frames
    """

    keys: bytes
    room: list[int]
    starts: list[int] | None = None


class PeerValues(PeerMessage, frozen=True):
    """Sizes of values whose bytes follow; None: not here, or larger than its room."""

    sizes: list[int | None]


class OpenChannel(PeerMessage, frozen=True):
    """-> ChannelOffer"""


class ChannelOffer(PeerMessage, frozen=True):
    """The memory that the node lends.

    fault:    why it lends none; then nothing else is set
    number:   of the node's agent; Lent repeats it
    metadata: of the agent
    address, nbytes:              of the arena
    sample_address, sample_bytes: of constant memory, for measurements
    """

    fault: str = ""
    number: int = 0
    metadata: bytes = b""
    address: int = 0
    nbytes: int = 0
    sample_address: int = 0
    sample_bytes: int = 0


class GetSample(PeerMessage, frozen=True):
    """The sample by TCP. -> PeerValues with one value"""


class PeerRead(PeerMessage, frozen=True):
    """Borrow frames. -> Lent, for the first keys or all. keys, room: as in a get"""

    keys: bytes
    room: list[int]


class Lent(PeerMessage, frozen=True):
    """Frames that stay in their places. Bytes that are not lent follow.

    channel:   number of the agent
    lease:     for Returned
    sizes:     as in PeerValues
    lent:      the last bytes of each frame; 0: all its bytes follow
    addresses: of the lent bytes
    """

    channel: int
    lease: int
    sizes: list[int | None]
    lent: list[int]
    addresses: list[int]


class Returned(PeerMessage, frozen=True):
    """End a lease. Without an answer."""

    lease: int


class PeerLoad(PeerMessage, frozen=True):
    """Load a prompt into memory. Without an answer.

    incarnation, number: of the follower and its latest change
    """

    query: Query
    incarnation: int
    number: int


class PeerHas(PeerMessage, frozen=True):
    """-> PeerHolds: once all keys are in memory, at the load's end, or after a second"""

    keys: bytes


class PeerHolds(PeerMessage, frozen=True):
    """are_here:   a byte for each key
    num_tokens: of the prompt; None: the load goes on
    """

    are_here: bytes
    num_tokens: int | None = None
    fault: str = ""


class Follow(PeerMessage, frozen=True):
    """incarnation, after: the latest known; 0: none"""

    incarnation: int
    after: int


class ClearNumber(PeerMessage, frozen=True):
    """The node has nothing from before this clear (`tiers/peers/clear_numbers.py`).

    prefix: a namespace; empty: all
    """

    prefix: bytes
    number: int


class Page(PeerMessage, frozen=True):
    """number:         later events are not in the snapshot
    is_first:       the follower forgets its earlier chunks
    digests, sizes: 8 bytes a chunk, joined, little-endian: xxh3_64 of the key, and the frame's size
    """

    number: int
    is_first: bool
    is_last: bool
    clears: list[ClearNumber]
    digests: bytes
    sizes: bytes


class Run(PeerMessage, frozen=True):
    """Changes of one kind. sizes: empty if the chunks were removed"""

    digests: bytes
    sizes: bytes


class PeerChanges(PeerMessage, frozen=True, tag="Happened"):
    """after: the number of the change before"""

    after: int
    runs: list[Run]
    clears: list[ClearNumber]


Greeting = Union[PeerWelcome, LoginRefused]  # noqa: UP007 - msgspec reads the union
Request = Union[  # noqa: UP007
    PeerGet, Follow, Introduce, OpenChannel, GetSample, PeerRead, Returned, PeerLoad, PeerHas
]
News = Union[Page, PeerChanges]  # noqa: UP007
