"""The records between a node and the nodes that read its chunks, its followers.

After LoginHello and PeerWelcome (`login.py`), a follower may introduce itself. Then a connection
carries gets, or is given to one Follow.

A **get** is answered by one or more PeerValues, whose sizes belong to the keys in order. The bytes
of the values follow their record.

A **follow** is answered by a stream: the pages of a snapshot, unless the node still has all events
after the follower's number, and then events without end. Each change has a number, one more than
the change before. A follower whose number is not `after` has missed changes and follows again. A
node sends an empty Happened when nothing has happened for `BEAT_S`.
"""

from typing import Union

import msgspec

from kvhold.net.login import LoginRefused

PEERS_VERSION = 1
PEERS_MAGIC = "kvhold-peer"
DEFAULT_PORT = 7711
BEAT_S = 1.0
MOST_KEYS = 4096  # of one get


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base record."""


class PeerBus(PeerMessage, frozen=True):
    """How to know this node's records on a bus (`tiers/peers/bus.py`).

    key:      seals them
    clock_ms: the node's clock now
    """

    key: bytes
    clock_ms: int

    def __repr__(self) -> str:
        return "PeerBus(***)"


class PeerWelcome(PeerMessage, frozen=True):
    """incarnation: random; another one after each start of the node
    name:        of the host
    bus:         None: the node publishes its changes on no bus
    """

    version: int
    kvhold: str
    incarnation: int
    name: str = ""
    bus: PeerBus | None = None


class Introduce(PeerMessage, frozen=True):
    """Say who follows. There is no answer.

    name: of the host
    port: where it serves peers; 0: it does not
    """

    name: str
    port: int


class PeerGet(PeerMessage, frozen=True):
    """Read frames, or ranges of them. -> PeerValues, repeatedly

    keys:   KEY_BYTES each, joined
    room:   the most bytes for each frame
    starts: the starts of ranges of exactly `room` bytes; None: whole frames
    """

    keys: bytes
    room: list[int]
    starts: list[int] | None = None


class PeerValues(PeerMessage, frozen=True):
    """Sizes of the next values, whose bytes follow; None: not here, or larger than its room."""

    sizes: list[int | None]


class Follow(PeerMessage, frozen=True):
    """Ask for the stream of changes. -> Page, Happened

    incarnation, after: what the follower knows; 0: nothing
    """

    incarnation: int
    after: int


class ClearNumber(PeerMessage, frozen=True):
    """The node has nothing from before this clear (`tiers/peers/clear_numbers.py`).

    prefix: a namespace, or empty for all
    """

    prefix: bytes
    number: int


class Page(PeerMessage, frozen=True):
    """Chunks of a snapshot.

    number:         events after this one are not in the snapshot
    is_first:       the follower forgets what it knew
    digests, sizes: 8 bytes for each chunk, joined, little-endian: xxh3_64 of the key, and the size
                    of the frame
    """

    number: int
    is_first: bool
    is_last: bool
    clears: list[ClearNumber]
    digests: bytes
    sizes: bytes


class Run(PeerMessage, frozen=True):
    """Changes of one kind in a row. sizes: empty if the chunks were removed"""

    digests: bytes
    sizes: bytes


class Happened(PeerMessage, frozen=True):
    """The next changes, in order. after: the number of the change before"""

    after: int
    runs: list[Run]
    clears: list[ClearNumber]


Greeting = Union[PeerWelcome, LoginRefused]  # noqa: UP007 - msgspec reads the union
Request = Union[PeerGet, Follow, Introduce]  # noqa: UP007
News = Union[Page, Happened]  # noqa: UP007
