"""Rendezvous hashing (Thaler and Ravishankar, 1998): all hosts choose the same keeper."""

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

_MOST = (1 << 64) - 1


def keeper_of(digest: int, incarnations: Iterable[int]) -> int:
    """digest: of what is kept"""
    return max(incarnations, key=lambda one: (_weight(digest, one), one))


def _weight(digest: int, incarnation: int) -> int:
    return xxh3_64_intdigest((incarnation & _MOST).to_bytes(8, "little"), digest)
