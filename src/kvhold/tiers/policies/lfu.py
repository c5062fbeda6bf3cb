"""Evicts the chunk with the fewest uses; of several, the oldest.

Uses do not decay. A removal forgets them.
"""

from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class LfuPolicy(ChainPolicy):
    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now(), major=chunk.uses)

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.uses += 1
            self._rank(chunk, self._now(), major=chunk.uses)
