"""The Cache: what integrations see, whether it lives in this process or in this host's node.

    with cache.lookup(prompt.query()) as hit:                          # pinned: how many tokens are here
        with cache.claim(hit.ticket) as loan:                          # the bytes of one shard, lent until closed
            scatter(loan.chunks(group=0), ...)
    with cache.reserve(namespace, prompt.chunks(first=3)) as room:     # memory for what is missing
        gather(..., room.chunks(group=0)); room.commit()               # visible now; what is not committed is given back

A hit, a loan and a room are owned by whoever holds them and end with their `with`, or with the holder's connection. A ticket is a
number that may be sent to another process (scheduler to worker), which claims the loan there. All calls are safe from any thread.
A miss is a shorter hit; a fault or a deadline missed is one of our errors, and leaves nothing behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout

ABSENT = -1  # the offset of a chunk that was not granted, or that the hit does not need


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Chunks of one group, where they lie in the arena.

    offsets:    [n] int64, in bytes from the arena's start; ABSENT where there is none
    num_tokens: [n] int64
    """

    offsets: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]


class Holding:
    """Something held in the cache until closed: a hit, a loan or a room. Closing twice is harmless."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        """Give it back."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Hit(Holding):
    """What a lookup found and pinned: `num_tokens` from the prompt's start, `ticket` to claim it with (0 when nothing was found)."""

    def __init__(self, ticket: int, num_tokens: int, give_back: Callable[[], None]) -> None:
        super().__init__(give_back)
        self.ticket = ticket
        self.num_tokens = num_tokens


class Loan(Holding):
    """The bytes of one shard's part of a hit. Read only; they stay where they are until the loan is closed."""

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        first_chunk: int,
        buffer: npt.NDArray[np.uint8],
        give_back: Callable[[], None],
    ) -> None:
        """offsets: [groups, chunks]; num_tokens: [chunks]; first_chunk: the number of the first one in its prompt."""
        super().__init__(give_back)
        self.first_chunk = first_chunk
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._offsets = offsets

    def chunks(self, group: int = 0) -> ChunkBytes:
        """Where the chunks of `group` lie in `buffer`."""
        return ChunkBytes(self._offsets[group], self.num_tokens)


class Room(Holding):
    """Memory reserved for chunks that are missing. Nobody sees a chunk before `commit`; closing gives back what was not committed."""

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        buffer: npt.NDArray[np.uint8],
        commit: Callable[[Sequence[int]], None],
        give_back: Callable[[], None],
    ) -> None:
        """offsets: [groups, chunks], a column of ABSENT for each chunk that is there already, or found no room."""
        super().__init__(give_back)
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._offsets = offsets
        self._commit = commit

    @property
    def granted(self) -> list[int]:
        """The numbers of the chunks (within the reservation) that got memory."""
        return [int(i) for i in np.flatnonzero(self._offsets[0] != ABSENT)]

    def chunks(self, group: int = 0) -> ChunkBytes:
        """Where the chunks of `group` are to be written in `buffer`."""
        return ChunkBytes(self._offsets[group], self.num_tokens)

    def commit(self, chunks: Sequence[int] | None = None) -> None:
        """Make chunks visible (all that were granted, if not told which). Their bytes must be complete."""
        self._commit(self.granted if chunks is None else chunks)


class Cache(Protocol):
    """One cache. `arena_buffer` is the host memory that every offset counts in."""

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes]; the same memory in every process that shares the cache."""

    def register(self, namespace: Namespace) -> None:
        """Make the layout known. Before any other call about it; again is harmless."""

    def lookup(self, query: Query, *, deadline_s: float | None = None) -> Hit:
        """The longest prefix of which every shard and every group has what it needs. Pins it."""

    def claim(self, ticket: int, shard: int = 0, *, first_chunk: int = 0, deadline_s: float | None = None) -> Loan | None:
        """Take over one shard's part of a hit, from chunk `first_chunk` on; None when the ticket is not (or no longer) good."""

    def reserve(self, layout: Layout, names: ChunkNames, shard: int = 0, *, deadline_s: float | None = None) -> Room:
        """Memory for those of `names` that are missing and that nobody else is writing; a chunk gets all its groups or none."""

    def clear(self, namespace: bytes | None = None, *, deadline_s: float | None = None) -> int:
        """Forget everything, or one namespace. Returns how many chunks went; what is pinned goes when its pins fall."""

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Sizes, counts and counters, for people and monitors."""

    def close(self) -> None:
        """Give back everything that was held through this object."""
