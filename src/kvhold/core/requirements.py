"""Compare an engine's requirements with the node, without secrets. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

STAYS_IN_MEMORY = ("memory", "null")  # these store nothing outside the node's memory


class TierTerms(msgspec.Struct, frozen=True, array_like=True):
    """place: equal for the same place, however the URL is written
    shown: its URL without secrets
    """

    place: bytes
    shown: str
    kind: str
    encrypt: bool
    codec: str


class Requirements(msgspec.Struct, frozen=True, array_like=True):
    """keys: digest of encryption.keys
    encrypted: every tier must be encrypted
    refuse: do not join if anything differs
    """

    tiers: tuple[TierTerms, ...] = ()
    keys: bytes = b""
    encrypted: bool = False
    refuse: bool = False


@dataclass(frozen=True)
class Missing:
    refused: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


def compare(required: Requirements, offered: Requirements) -> Missing:
    return Missing(tuple(_leaks(required, offered)), tuple(_differences(required, offered)))


def digest_of(lines: Sequence[str]) -> bytes:
    return (
        blake2b(
            "\0".join(sorted(lines)).encode(), digest_size=8, person=b"kvhold-requires"
        ).digest()
        if lines
        else b""
    )


def _leaks(required: Requirements, offered: Requirements) -> list[str]:
    if not required.encrypted and not any(tier.encrypt for tier in required.tiers):
        return []
    accepted = (
        set() if required.encrypted else {tier.place for tier in required.tiers if not tier.encrypt}
    )
    return [
        f"the node's tier {tier.shown} is not encrypted, but this engine's settings require "
        "encryption: its KV would be stored there in clear text"
        for tier in offered.tiers
        if not tier.encrypt and tier.kind not in STAYS_IN_MEMORY and tier.place not in accepted
    ]


def _differences(required: Requirements, offered: Requirements) -> list[str]:
    different, there = [], {tier.place: tier for tier in offered.tiers}
    for tier in required.tiers:
        found = there.get(tier.place)
        if found is None:
            different.append(f"the node has no tier {tier.shown}")
        elif found.encrypt and not tier.encrypt:
            different.append(f"the node encrypts {tier.shown}, but this engine's settings do not")
        elif found.codec != tier.codec:
            different.append(
                f"the node writes {tier.shown} with the codec {found.codec}, but this engine's "
                f"settings say {tier.codec}"
            )
    if required.keys and required.keys != offered.keys:
        different.append("the node has other encryption.keys")
    return different
