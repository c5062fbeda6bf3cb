"""Most recently used: evicts the chunk with the latest use first.

For texts that are used in turn and are together larger than the tier. LRU would miss each of them
every time; MRU keeps a part.
"""

from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class MruPolicy(ChainPolicy):
    """Ranks chunks by their last use, in reverse; the insertion counts as one."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, -self._now())

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._rank(chunk, -self._now())
