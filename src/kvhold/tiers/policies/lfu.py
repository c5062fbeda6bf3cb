"""Least frequently used: the chunk that was asked for least often goes first; of equals, the one that has been so often longest.

Uses are counted for as long as the chunk is here and are forgotten with it; they do not age.
"""

from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class LfuPolicy(ChainPolicy):
    """Ranked by uses, then by when that number was reached."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now(), major=chunk.uses)

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.uses += 1
            self._rank(chunk, self._now(), major=chunk.uses)
