"""What an engine requires of the node that it joins, and what it finds missing there.

    missing = compare(required, offered)
    missing.refused          # why it must not join: its KV would be stored in clear text
    missing.different        # what else differs; refused or warned about, by the setting node.on_mismatch

Both are values without secrets: a tier is known by its URL less passwords and options, keys by a digest of where they come from. They go
with a client's Hello, so they are compared at each joining, also with a node that has come back. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

STAYS_IN_MEMORY = ("memory", "null")  # tiers that keep nothing outside the node's memory


class TierTerms(msgspec.Struct, frozen=True, array_like=True):
    """One tier, as far as engines care.

    place: names the same place for equal values, wherever it is written down
    shown: its URL for messages, without secrets
    kind:  the scheme, without wrappers
    """

    place: bytes
    shown: str
    kind: str
    encrypt: bool
    codec: str


class Requirements(msgspec.Struct, frozen=True, array_like=True):
    """What an engine is configured with, or a node.

    keys:      a digest of the setting encryption.keys; empty where there are none
    encrypted: every tier must be encrypted, whatever the engine's own are
    refuse:    the engine does not join where anything differs
    """

    tiers: tuple[TierTerms, ...] = ()
    keys: bytes = b""
    encrypted: bool = False
    refuse: bool = False


@dataclass(frozen=True)
class Missing:
    """Reasons, one text each, which say what to do."""

    refused: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


def compare(required: Requirements, offered: Requirements) -> Missing:
    """What an engine that requires the one does not get of a node that offers the other."""
    return Missing(tuple(_leaks(required, offered)), tuple(_differences(required, offered)))


def digest_of(lines: Sequence[str]) -> bytes:
    """Of settings; empty for none."""
    return blake2b("\0".join(sorted(lines)).encode(), digest_size=8, person=b"kvhold-requires").digest() if lines else b""


def _leaks(required: Requirements, offered: Requirements) -> list[str]:
    """The node's tiers that would hold the engine's KV in clear text. One that the engine itself has unencrypted is none of them."""
    if not required.encrypted and not any(tier.encrypt for tier in required.tiers):
        return []
    accepted = set() if required.encrypted else {tier.place for tier in required.tiers if not tier.encrypt}
    return [
        f"the node's tier {tier.shown} is not encrypted, and this engine's settings demand it: its KV would be stored there in clear text"
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
            different.append(f"the node writes {tier.shown} by the codec {found.codec}, and this engine's settings say {tier.codec}")
    if required.keys and required.keys != offered.keys:
        different.append("the node has other encryption.keys")
    return different
