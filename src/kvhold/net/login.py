"""The greeting on TCP: LoginHello, then LoginRefused and a closed connection, or a welcome.

These records never change.
"""

import msgspec

MAX_HELLO_BYTES = 4 << 10
MAX_TOKEN_BYTES = 3 << 10
_MOST_QUOTED = 200


class LoginHello(msgspec.Struct, frozen=True, array_like=True, tag="CentralHello"):
    magic: str
    version: int
    token: str


class LoginRefused(msgspec.Struct, frozen=True, array_like=True, tag="CentralRefused"):
    """denied:           the client lacks the rights
    is_other_version: of the client
    """

    reason: str
    denied: bool = False
    is_other_version: bool = False


def quoted(text: str, most: int = _MOST_QUOTED) -> str:
    return "".join(one if one.isprintable() else "?" for one in text[:most])
