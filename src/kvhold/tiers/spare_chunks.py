"""Evict first what peers have, too, among a few candidates of a reservation."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvhold.tiers.policies import Policy
from kvhold.tiers.policies.base import EndOfSearch

ONLY_HERE, KEPT_HERE, KEPT_ELSEWHERE = range(3)
CopiesOf: TypeAlias = Callable[[bytes, bytes], int]
"""Of a key, and that of its prompt's first chunk."""

_LOOKS, _LOOKS_A_CHUNK = 16, 2


class _Chunk(Protocol):
    @property
    def root(self) -> bytes: ...

    @property
    def taken_bytes(self) -> int: ...


class SpareChunks:
    def __init__(self, chunk_of: Callable[[bytes], _Chunk]) -> None:
        self._chunk_of = chunk_of
        self._looks = 0
        self.copies_of: CopiesOf | None = None

    def begin(self, num_chunks: int) -> None:
        self._looks = _LOOKS + _LOOKS_A_CHUNK * num_chunks

    def victims(
        self,
        policy: Policy,
        nbytes: int,
        pinned: Callable[[bytes], bool],
        namespace: bytes | None = None,
        wanted: bytes | None = None,
    ) -> list[bytes]:
        # `learned` compares `wanted` with victims
        if self.copies_of is not None and not (policy.learns and wanted is not None):
            chosen = self._spares(policy, nbytes, pinned, namespace)
            left = nbytes - sum(self._chunk_of(key).taken_bytes for key in chosen)
            if left <= 0:
                return chosen
            is_chosen = set(chosen).__contains__
            more = policy.victims(
                left, lambda key: is_chosen(key) or pinned(key), namespace, wanted
            )
            if more:
                return chosen + more
        return policy.victims(nbytes, pinned, namespace, wanted)

    def _spares(
        self,
        policy: Policy,
        nbytes: int,
        pinned: Callable[[bytes], bool],
        namespace: bytes | None,
    ) -> list[bytes]:
        known: dict[bytes, int] = {}
        chosen: dict[bytes, None] = {}
        left = nbytes

        def copies_of(key: bytes) -> int:
            assert self.copies_of is not None
            if key not in known:
                if not self._looks:
                    raise EndOfSearch
                self._looks -= 1
                known[key] = self.copies_of(key, self._chunk_of(key).root)
            return known[key]

        for least in (KEPT_ELSEWHERE, KEPT_HERE):
            more = policy.some_victims(
                left,
                lambda key: key in chosen or pinned(key) or copies_of(key) < least,  # noqa: B023
                namespace,
            )
            chosen |= dict.fromkeys(more)
            left -= sum(self._chunk_of(key).taken_bytes for key in more)
            if left <= 0:
                break
        return list(chosen)
