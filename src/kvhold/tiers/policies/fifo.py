"""First in, first out: evicts the oldest chunk first, used or not."""

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class FifoPolicy(ChainPolicy):
    """Ranks chunks by the time of insertion."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now())
