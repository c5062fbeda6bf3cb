"""The requirements of an engine on the node that it joins, and the ones that the node does not
meet.

    missing = compare(required, offered)
    missing.refused          # why it must not join: its KV would be stored in clear text
    missing.different        # other differences; refused or warned about (setting node.on_mismatch)

Both values contain no secrets: a tier is identified by its URL without passwords and options, keys
by a digest of their sources. They are part of a client's Hello. So they are compared at each
joining, also with a restarted node. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

STAYS_IN_MEMORY = ("memory", "null")  # tiers that store nothing outside the node's memory


class TierTerms(msgspec.Struct, frozen=True, array_like=True):
    """The properties of one tier that matter to engines.

    place: identifies the tier's place; equal values mean the same place, however the URL is written
    shown: its URL for messages, without secrets
    kind:  the scheme, without wrappers
    """

    place: bytes
    shown: str
    kind: str
    encrypt: bool
    codec: str


class Requirements(msgspec.Struct, frozen=True, array_like=True):
    """The configuration of an engine or a node.

    keys:      a digest of the setting encryption.keys; empty without keys
    encrypted: every tier must be encrypted, whether or not the engine's own tiers are
    refuse:    the engine does not join if anything differs
    """

    tiers: tuple[TierTerms, ...] = ()
    keys: bytes = b""
    encrypted: bool = False
    refuse: bool = False


@dataclass(frozen=True)
class Missing:
    """Reasons, one text each, with advice."""

    refused: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


def compare(required: Requirements, offered: Requirements) -> Missing:
    """Return the requirements of an engine that a node does not meet."""
    return Missing(tuple(_leaks(required, offered)), tuple(_differences(required, offered)))


def digest_of(lines: Sequence[str]) -> bytes:
    """Return a digest of settings; empty for none."""
    return (
        blake2b(
            "\0".join(sorted(lines)).encode(), digest_size=8, person=b"kvhold-requires"
        ).digest()
        if lines
        else b""
    )


def _leaks(required: Requirements, offered: Requirements) -> list[str]:
    """Return the node's tiers that would hold the engine's KV in clear text.

    A tier that the engine itself configures without encryption is not among them.
    """
    if not required.encrypted and not any(tier.encrypt for tier in required.tiers):
        return []
    accepted = (
        set() if required.encrypted else {tier.place for tier in required.tiers if not tier.encrypt}
    )
    return [
        f"the node's tier {tier.shown} is not encrypted, and this engine's settings demand "
        "it: its KV would be stored there in clear text"
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
            different.append(f"the node encrypts {tier.shown}, and this engine's settings do not")
        elif found.codec != tier.codec:
            different.append(
                f"the node writes {tier.shown} by the codec {found.codec}, and this "
                f"engine's settings say {tier.codec}"
            )
    if required.keys and required.keys != offered.keys:
        different.append("the node has other encryption.keys")
    return different
