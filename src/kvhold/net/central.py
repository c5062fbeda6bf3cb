"""After the greeting (`login.py`), requests are answered in order. Values' bytes follow their Put,
or the answer to a Get.
"""

from typing import Union

import msgspec

from kvhold.core.keys import KEY_BYTES
from kvhold.net.login import LoginRefused

CENTRAL_VERSION = 3
CENTRAL_MAGIC = "kvhold-central"
DEFAULT_PORT = 7710


class CentralMessage(msgspec.Struct, frozen=True, array_like=True, tag=True): ...


class CentralWelcome(CentralMessage, frozen=True):
    version: int
    max_value_bytes: int


class Check(CentralMessage, frozen=True):
    """-> CentralDone"""


class Probe(CentralMessage, frozen=True):
    """The sizes of values. -> ValueSizes

    keys: KEY_BYTES each, joined, in all records
    """

    keys: bytes


class Get(CentralMessage, frozen=True):
    """Values, or ranges. -> ValueSizes

    room:   the most bytes for each value
    starts: of ranges of exactly `room` bytes; None: whole values
    """

    keys: bytes
    room: list[int]
    starts: list[int] | None = None


class ValueSizes(CentralMessage, frozen=True):
    """None: missing, larger than `room`, or a bad range.

    whole: of a Probe: no tier failed; else a failed one may have missing values
    """

    sizes: list[int | None]
    whole: bool = True


class Put(CentralMessage, frozen=True):
    """The values' bytes follow. -> Stored

    ttl_s: above MAX_TTL_S: never expires; None: by the tiers' settings
    """

    keys: bytes
    sizes: list[int]
    ttl_s: float | None = None


class Stored(CentralMessage, frozen=True):
    """Why a value is not stored: "full" or "busy" (being written); "": it is stored."""

    faults: list[str]


class Delete(CentralMessage, frozen=True):
    keys: bytes


class Removed(CentralMessage, frozen=True):
    """Whether each key's value was removed. whole: no tier failed"""

    removed: list[bool]
    whole: bool = True


class Scan(CentralMessage, frozen=True):
    """The next keys with a prefix. -> CentralKeys

    after: the previous page's last key; empty: begin
    """

    prefix: bytes
    after: bytes


class CentralKeys(CentralMessage, frozen=True):
    """whole: no tier failed"""

    keys: bytes
    more: bool
    whole: bool = True


class CentralDone(CentralMessage, frozen=True): ...


Greeting = Union[CentralWelcome, LoginRefused]  # noqa: UP007 - msgspec reads the union
Request = Union[Check, Probe, Get, Put, Delete, Scan]  # noqa: UP007
Answer = Union[ValueSizes, Stored, Removed, CentralKeys, CentralDone, LoginRefused]  # noqa: UP007


def split_keys(joined: bytes) -> list[bytes]:
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not keys of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
