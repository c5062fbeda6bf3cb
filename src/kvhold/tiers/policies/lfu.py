"""Least frequently used: evicts the chunk with the fewest uses first.

Of chunks with equal uses, the one that reached this number first is evicted first. A chunk's uses
are counted while it is here, and forgotten when it is removed. They do not age.
"""

from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class LfuPolicy(ChainPolicy):
    """Ranks chunks by uses, then by the time when that number was reached."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now(), major=chunk.uses)

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.uses += 1
            self._rank(chunk, self._now(), major=chunk.uses)
