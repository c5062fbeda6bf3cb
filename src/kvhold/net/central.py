"""The records between a central cache and the hosts that use it; msgpack on the wire (`wire.py`),
values as plain bytes behind them.

A client sends Hello first. The answer is Welcome, or Refused and a closed connection. Then requests
are answered in order. The bytes of values follow their record directly, without gaps: those of a
Put follow the request, in the order of its keys; those of a Get follow its answer, for each key
with a size.
"""

from typing import Union

import msgspec

from kvhold.core.keys import KEY_BYTES

CENTRAL_VERSION = 2
CENTRAL_MAGIC = "kvhold-central"
DEFAULT_PORT = 7710
MAX_HELLO_BYTES = 4 << 10  # the most that is read from a client that has not logged in
MAX_TOKEN_BYTES = 3 << 10  # of UTF-8, so that a Hello has room for it


class CentralMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all records."""


class Hello(CentralMessage, frozen=True):
    """The first message of a client. `magic` and `version` keep their places in every version."""

    magic: str
    version: int
    token: str


class Welcome(CentralMessage, frozen=True):
    """The client is logged in. max_value_bytes: larger values are refused."""

    version: int
    max_value_bytes: int


class Refused(CentralMessage, frozen=True):
    """The connection is closed, for `reason`. denied: the client lacks the rights"""

    reason: str
    denied: bool = False


class Check(CentralMessage, frozen=True):
    """Ask whether the cache answers. -> Done"""


class Probe(CentralMessage, frozen=True):
    """Ask for the sizes of values. -> Sizes

    keys: KEY_BYTES each, joined without gaps, as in all records here
    """

    keys: bytes


class Get(CentralMessage, frozen=True):
    """Read values, or ranges of them. -> Sizes, followed by the bytes

    room:   for each value, the bytes that the client can take
    starts: for each value, the start of a range of exactly `room` bytes; None: whole values
    """

    keys: bytes
    room: list[int]
    starts: list[int] | None = None


class Sizes(CentralMessage, frozen=True):
    """The size of each value; None if there is none or it does not fit `room`, or for a
    bad range.
    """

    sizes: list[int | None]


class Put(CentralMessage, frozen=True):
    """Store values. Their bytes follow the record. -> Stored

    ttl_s: infinity: never expires, in lower tiers either; None: as their settings say
    """

    keys: bytes
    sizes: list[int]
    ttl_s: float | None = None


class Stored(CentralMessage, frozen=True):
    """For each value, why it is not stored: "full", "busy" (another client is writing it); empty if
    it is stored.
    """

    faults: list[str]


class Delete(CentralMessage, frozen=True):
    """Delete values. -> Removed"""

    keys: bytes


class Removed(CentralMessage, frozen=True):
    """For each key, whether a value was removed. whole: no lower tier failed to delete"""

    removed: list[bool]
    whole: bool = True


class Scan(CentralMessage, frozen=True):
    """Ask for the next page of the keys with a prefix, in no order. -> Keys

    after: the last key of the page before; empty: begin a scan
    """

    prefix: bytes
    after: bytes


class Keys(CentralMessage, frozen=True):
    """One page of keys.

    more:  more keys follow
    whole: no lower tier failed to list its keys
    """

    keys: bytes
    more: bool
    whole: bool = True


class Done(CentralMessage, frozen=True):
    """The cache answers."""


Greeting = Union[Welcome, Refused]  # noqa: UP007 - msgspec reads the union
Request = Union[Check, Probe, Get, Put, Delete, Scan]  # noqa: UP007
Answer = Union[Sizes, Stored, Removed, Keys, Done, Refused]  # noqa: UP007


def split_keys(joined: bytes) -> list[bytes]:
    """Split joined keys. Raises ValueError if the length is no multiple of KEY_BYTES."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not keys of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
