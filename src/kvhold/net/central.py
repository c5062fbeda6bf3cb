"""The records between a central cache and the hosts that use it; msgpack on the wire (`wire.py`), values as plain bytes behind them.

A client says Hello first and is answered with Welcome, or with Refused and a closed connection. Then each request is answered in order. The
bytes of values follow their record at once, end to end: those of a Put behind the request, in the order of its keys; those of a Get behind
its answer, for each key that has a size there.
"""

from typing import Union

import msgspec

from kvhold.core.keys import KEY_BYTES

CENTRAL_VERSION = 1
CENTRAL_MAGIC = "kvhold-central"
DEFAULT_PORT = 7710
MAX_HELLO_BYTES = 4 << 10  # the most that is read of anybody who has not logged in
MAX_TOKEN_BYTES = 3 << 10  # of UTF-8, so that a Hello has room for it


class CentralMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all records."""


class Hello(CentralMessage, frozen=True):
    """The first thing a client says. `magic` and `version` never move."""

    magic: str
    version: int
    token: str


class Welcome(CentralMessage, frozen=True):
    """The client may ask now. max_value_bytes: larger values are refused."""

    version: int
    max_value_bytes: int


class Refused(CentralMessage, frozen=True):
    """The conversation is over, and why. denied: it is a matter of rights."""

    reason: str
    denied: bool = False


class Check(CentralMessage, frozen=True):
    """-> Done"""


class Probe(CentralMessage, frozen=True):
    """keys: KEY_BYTES each, end to end, as everywhere here. -> Sizes"""

    keys: bytes


class Get(CentralMessage, frozen=True):
    """room: bytes that the client has for each value; starts: for ranges of exactly that many bytes. -> Sizes, and the bytes"""

    keys: bytes
    room: list[int]
    starts: list[int] | None = None


class Sizes(CentralMessage, frozen=True):
    """Of each value, None where there is none, or it does not fit."""

    sizes: list[int | None]


class Put(CentralMessage, frozen=True):
    """The bytes follow. -> Stored"""

    keys: bytes
    sizes: list[int]
    ttl_s: float | None = None


class Stored(CentralMessage, frozen=True):
    """For each value why it is not there: "full", "busy" (somebody else is writing it); empty where it is."""

    faults: list[str]


class Delete(CentralMessage, frozen=True):
    """-> Removed"""

    keys: bytes


class Removed(CentralMessage, frozen=True):
    """For each key whether something was."""

    removed: list[bool]


class Scan(CentralMessage, frozen=True):
    """The next keys with this prefix, in order, behind `after` (empty: from the first). -> Keys"""

    prefix: bytes
    after: bytes


class Keys(CentralMessage, frozen=True):
    """more: there are some behind these."""

    keys: bytes
    more: bool


class Done(CentralMessage, frozen=True):
    """It is well."""


Greeting = Union[Welcome, Refused]  # noqa: UP007 - msgspec reads the union
Request = Union[Check, Probe, Get, Put, Delete, Scan]  # noqa: UP007
Answer = Union[Sizes, Stored, Removed, Keys, Done, Refused]  # noqa: UP007


def split_keys(joined: bytes) -> list[bytes]:
    """The keys that lie end to end. Raises ValueError where they do not."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not keys of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
