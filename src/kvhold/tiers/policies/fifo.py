"""First in, first out: the oldest chunk goes first, whoever asks for it."""

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class FifoPolicy(ChainPolicy):
    """Being asked for changes nothing."""

    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now())
