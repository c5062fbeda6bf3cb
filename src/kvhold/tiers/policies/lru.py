"""Least recently used: the chunk that nobody asked for longest goes first."""

from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class LruPolicy(ChainPolicy):
    """A new chunk and one that was asked for are the newest."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now())

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._rank(chunk, self._now())
