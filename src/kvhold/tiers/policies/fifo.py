from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class FifoPolicy(ChainPolicy):
    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, self._now())
