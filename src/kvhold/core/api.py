"""The Cache: what integrations see, whether it lives in this process or in this host's node.

    with cache.lookup(prompt.query()) as hit:                          # pinned: how many tokens are here, and have come from below
        with cache.claim(hit.ticket) as loan:                          # the bytes of one shard, lent until closed
            scatter(loan.chunks(group=0), ...)
    with cache.reserve(namespace, prompt.chunks(first=3)) as room:     # memory for what is missing
        gather(..., room.chunks(group=0)); room.commit()               # visible now; what is not committed is given back

A hit, a loan and a room are owned by whoever holds them and end with their `with`, or with the holder's connection. A ticket is a
number that may be sent to another process (scheduler to worker), which claims the loan there. Chunks that lower tiers have are brought
into memory by the lookup: a hit that is *arriving* may grow, and is final when it has been settled. All calls are safe from any thread.
A miss is a shorter hit; a fault or a deadline missed is one of our errors, and leaves nothing behind.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01  # between two questions after a hit that is arriving

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
    """What a lookup found and pinned: `num_tokens` from the prompt's start, `ticket` to claim it with (0 when nothing was found).

    arriving: lower tiers may have more, which is on its way; `refresh` asks again, `settle` makes do with what is here
    """

    def __init__(
        self,
        ticket: int,
        num_tokens: int,
        give_back: Callable[[], None],
        *,
        arriving: bool = False,
        ask: "Callable[[int, bool], tuple[int, int, bool]] | None" = None,
    ) -> None:
        """ask: `(ticket, settle)` -> `(ticket, num_tokens, arriving)`, for a hit that is arriving."""
        super().__init__(give_back)
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.arriving = arriving
        self._ask = ask

    def refresh(self) -> None:
        """How far it goes now."""
        self._update(settle=False)

    def settle(self) -> None:
        """Final, as far as it goes now."""
        self._update(settle=True)

    def wait(self, until_s: float) -> None:
        """Until all has come, or the monotonic clock says `until_s`; then it is settled."""
        pause_s = _FIRST_PAUSE_S
        while self.arriving and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
            self.refresh()
        self.settle()

    def _update(self, *, settle: bool) -> None:
        if self.arriving and self._ask is not None:
            self.ticket, self.num_tokens, self.arriving = self._ask(self.ticket, settle)


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
        commit: Callable[[Sequence[int]], int],
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

    def commit(self, chunks: Sequence[int] | None = None) -> int:
        """Make chunks visible (all that were granted, if not told which). Their bytes must be complete.

        Returns a mark: `flush(mark)` waits until they have been written to lower tiers, for whoever wants to know (write-through).
        """
        return self._commit(self.granted if chunks is None else chunks)


class Cache(Protocol):
    """One cache. `arena_buffer` is the host memory that every offset counts in."""

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes]; the same memory in every process that shares the cache."""

    def register(self, namespace: Namespace) -> None:
        """Make the layout known. Before any other call about it; again is harmless."""

    def lookup(self, query: Query, *, wait_s: float | None = None, deadline_s: float | None = None) -> Hit:
        """The longest prefix of which every shard and every group has what it needs. Pins it.

        wait_s: how long to wait for what comes from lower tiers; None: as the settings say; 0: not at all, the hit may be arriving
        """

    def prefetch(self, query: Query, *, deadline_s: float | None = None) -> None:
        """Have what lower tiers hold of a prompt brought into memory, and wait for nothing."""

    def claim(self, ticket: int, shard: int = 0, *, first_chunk: int = 0, deadline_s: float | None = None) -> Loan | None:
        """Take over one shard's part of a hit, from chunk `first_chunk` on; None when the ticket is not (or no longer) good."""

    def reserve(
        self, layout: Layout, names: ChunkNames, shard: int = 0, *, ttl_s: float | None = None, deadline_s: float | None = None
    ) -> Room:
        """Memory for those of `names` that are missing and that nobody else is writing; a chunk gets all its groups or none.

        ttl_s: they are not to be used after so long, here or below
        """

    def clear(self, namespace: bytes | None = None, *, deadline_s: float | None = None) -> int:
        """Forget everything, or one namespace, here and in all tiers that may be written to, and wait for that.

        Returns how many chunks memory had; what is pinned goes when its pins fall.
        """

    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool:
        """Wait until all that was committed up to `mark` (None: until now) has been written to lower tiers, or given up there.

        False when the deadline came first (None: as long as a request waits for chunks, by the settings).
        """

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Sizes, counts and counters, for people and monitors."""

    def close(self) -> None:
        """Give back everything that was held through this object."""
