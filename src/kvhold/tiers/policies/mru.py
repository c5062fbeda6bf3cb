"""Most recently used: the chunk that was asked for last goes first.

For texts that come round in turn and together are larger than the tier: whatever goes first, LRU would miss every time, and this keeps
a part of them.
"""

from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class MruPolicy(ChainPolicy):
    """A new chunk and one that was asked for are the newest."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, -self._now())

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._rank(chunk, -self._now())
