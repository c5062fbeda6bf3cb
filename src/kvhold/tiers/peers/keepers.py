"""Rendezvous hashing: all hosts choose the same keeper."""

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

_MOST = (1 << 64) - 1


def keeper_of(digest: int, incarnations: Iterable[int]) -> int:
    return max(incarnations, key=lambda one: (_weight(digest, one), one))


def _weight(digest: int, incarnation: int) -> int:
    return xxh3_64_intdigest((incarnation & _MOST).to_bytes(8, "little"), digest)
