from collections.abc import Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk


class MruPolicy(ChainPolicy):
    def _inserted(self, chunk: Chunk) -> None:
        self._rank(chunk, -self._now())

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._rank(chunk, -self._now())
