"""The records between a central cache and its hosts.

A client sends LoginHello. The answer is Welcome, or LoginRefused and a closed connection. Then
requests are answered in order. Bytes of values follow their Put in the order of its keys, or the
answer to a Get.
"""

from typing import Union

import msgspec

from kvhold.core.keys import KEY_BYTES
from kvhold.net.login import LoginRefused

CENTRAL_VERSION = 3
CENTRAL_MAGIC = "kvhold-central"
DEFAULT_PORT = 7710


class CentralMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base record."""


class CentralWelcome(CentralMessage, frozen=True):
    version: int
    max_value_bytes: int


class Check(CentralMessage, frozen=True):
    """Ask whether the cache answers. -> CentralDone"""


class Probe(CentralMessage, frozen=True):
    """Ask for the sizes of values. -> ValueSizes

    keys: KEY_BYTES each, joined, in all records
    """

    keys: bytes


class Get(CentralMessage, frozen=True):
    """Read values, or ranges. -> ValueSizes

    room:   the most bytes for each value
    starts: the starts of ranges of exactly `room` bytes; None: whole values
    """

    keys: bytes
    room: list[int]
    starts: list[int] | None = None


class ValueSizes(CentralMessage, frozen=True):
    """Size of each value; None: missing, larger than `room`, or a bad range.

    whole: of a Probe: no tier failed; else a failed tier may have the missing values
    """

    sizes: list[int | None]
    whole: bool = True


class Put(CentralMessage, frozen=True):
    """Store values. Their bytes follow the record. -> Stored

    ttl_s: infinity, or above MAX_TTL_S: never expires, not even in lower tiers; None: as the
           settings of the tiers say
    """

    keys: bytes
    sizes: list[int]
    ttl_s: float | None = None


class Stored(CentralMessage, frozen=True):
    """Why each value is not stored: "full", or "busy" (being written); "" if it is stored."""

    faults: list[str]


class Delete(CentralMessage, frozen=True):
    """Delete values. -> Removed"""

    keys: bytes


class Removed(CentralMessage, frozen=True):
    """For each key, whether a value was removed. whole: no tier failed"""

    removed: list[bool]
    whole: bool = True


class Scan(CentralMessage, frozen=True):
    """Ask for the next keys with a prefix, unordered. -> CentralKeys

    after: the previous page's last key; empty: begin
    """

    prefix: bytes
    after: bytes


class CentralKeys(CentralMessage, frozen=True):
    """whole: no tier failed"""

    keys: bytes
    more: bool
    whole: bool = True


class CentralDone(CentralMessage, frozen=True):
    """Answer to Check."""


Greeting = Union[CentralWelcome, LoginRefused]  # noqa: UP007 - msgspec reads the union
Request = Union[Check, Probe, Get, Put, Delete, Scan]  # noqa: UP007
Answer = Union[ValueSizes, Stored, Removed, CentralKeys, CentralDone, LoginRefused]  # noqa: UP007


def split_keys(joined: bytes) -> list[bytes]:
    """Split joined keys. Raises ValueError: no multiple of KEY_BYTES."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not keys of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
