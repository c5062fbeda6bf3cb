"""S3-FIFO (Yang et al., SOSP 2023): evicts chunks without a second use early.

- **Small** queue: new keys, a tenth of the bytes. At its turn, a used key moves to the main queue
  with its prefix; an unused key is the victim.
- **Ghost** queue: names of the small queue's victims. Such a key comes back into the main queue.
- **Main** queue: at its turn, a used key goes to the end.

A cleared key gets no ghost.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvhold.tiers.policies.chains import ChainPolicy, Chunk, Queue, Walk

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MOST_FREQUENT = 3  # the paper counts uses in two bits


class S3FifoPolicy(ChainPolicy):
    num_queues: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def _inserted(self, chunk: Chunk) -> None:
        if chunk.key in self._ghosts:
            del self._ghosts[chunk.key]
            chunk.queue = _MAIN
        self._rank(chunk, self._now())

    def _touched(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.uses = min(_MOST_FREQUENT, chunk.uses + 1)

    def _removed(self, chunk: Chunk, *, evicted: bool) -> None:
        if evicted and chunk.queue == _SMALL:
            self._ghosts[chunk.key] = None
        while len(self._ghosts) > max(1, len(self)):
            self._ghosts.popitem(last=False)

    def _walk(self, queues: list[Queue], pinned: Callable[[bytes], bool]) -> Walk:
        return _S3FifoWalk(self, queues, pinned)

    def _move_on(self, chunk: Chunk) -> None:
        if chunk.queue == _MAIN:
            chunk.uses -= 1
            self._move(chunk, _MAIN)
            return
        for each in (chunk, *self._above(chunk)):
            if each.queue == _MAIN:
                break
            each.uses = 0
            self._move(each, _MAIN)


class _S3FifoWalk(Walk):
    def __init__(
        self, policy: S3FifoPolicy, queues: list[Queue], pinned: Callable[[bytes], bool]
    ) -> None:
        super().__init__(policy, queues, pinned)
        self._moving = policy
        self._passed: tuple[dict[Chunk, None], ...] = ({}, {})
        self._small_bytes = queues[_SMALL].nbytes
        self._all_bytes = queues[_SMALL].nbytes + queues[_MAIN].nbytes

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
