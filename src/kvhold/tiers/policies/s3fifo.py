"""S3-FIFO (Yang et al., SOSP 2023).

New keys are in the small queue, a tenth of the bytes. At its turn, a used key moves to the main
queue with its prefix; an unused one is the victim, and a ghost.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvhold.tiers.policies.chains import ChainPolicy, Chunk, ChunkSpace, Walk

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MOST_FREQUENT = 3  # the paper counts uses in two bits


class S3FifoPolicy(ChainPolicy):
    def __init__(self) -> None:
        super().__init__()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def _inserted(self, chunk: Chunk) -> None:
        if chunk.key in self._ghosts:
            del self._ghosts[chunk.key]
            chunk.queue = _MAIN
        self._rank(chunk, self._now())
        self._count_small(chunk, 1)

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.uses = min(_MOST_FREQUENT, chunk.uses + 1)

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:
        self._count_small(chunk, -1)
        if evicted and chunk.queue == _SMALL:
            self._ghosts[chunk.key] = None
        while len(self._ghosts) > max(1, len(self)):
            self._ghosts.popitem(last=False)

    def _walk(
        self, space: ChunkSpace, pinned: Callable[[bytes], bool], wanted: bytes | None
    ) -> Walk:
        return _S3FifoWalk(self, space, pinned)

    def _move_on(self, chunk: Chunk) -> None:
        if chunk.queue == _MAIN:
            chunk.uses -= 1
            self._rank(chunk, self._now())
            return
        for each in (chunk, *self._above(chunk)):
            if each.queue == _MAIN:
                break
            each.uses = 0
            self._count_small(each, -1)
            each.queue = _MAIN
            self._rank(each, self._now())

    def _count_small(self, chunk: Chunk, sign: int) -> None:
        if chunk.queue == _SMALL:
            self._all.small_bytes += sign * chunk.nbytes
            chunk.space.small_bytes += sign * chunk.nbytes


class _S3FifoWalk(Walk):
    def __init__(
        self, policy: S3FifoPolicy, space: ChunkSpace, pinned: Callable[[bytes], bool]
    ) -> None:
        super().__init__(policy, space, pinned)
        self._moving = policy
        self._passed: tuple[dict[Chunk, None], ...] = ({}, {})
        self._small_bytes = space.small_bytes
        self._all_bytes = space.nbytes

    def choose(self) -> Chunk | None:
        first = (
            _SMALL
            if self._small_bytes > _SMALL_SHARE * (self._all_bytes - self.freed_bytes)
            else _MAIN
        )
        return self._cold(first) or self._cold(1 - first) or self._warm(_MAIN) or self._warm(_SMALL)

    def settle(self) -> None:
        for queue in (_SMALL, _MAIN):
            for chunk in self._passed[queue]:
                self._moving._move_on(chunk)

    def _cold(self, queue: int) -> Chunk | None:
        while (chunk := self.next(queue)) is not None:
            if queue == _SMALL:
                self._small_bytes -= chunk.nbytes
            if not chunk.uses:
                return chunk
            self._passed[queue][chunk] = None
        return None

    def _warm(self, queue: int) -> Chunk | None:
        for chunk in self._passed[queue]:
            del self._passed[queue][chunk]
            return chunk
        return None
