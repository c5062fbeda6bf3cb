"""The chunks that wait to be written to one tier, in order, and those that are being written.

    outbox = Outbox(guard, coding, metrics)
    outbox.push(write)                  # constant time, however many wait
    batch = outbox.take(most_bytes)     # the oldest; they are `writing` until `finish(batch)`
    outbox.drop(prefix)                 # of a clear: takes out what waits

The counts of what waits are running sums. One loop (the mover's) uses it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvhold.cache.landing import Written
from kvhold.cache.orders import WriteOrder
from kvhold.codecs.sealing import Keyring
from kvhold.core.metrics import Metrics
from kvhold.tiers.guard import Guard


@dataclass(frozen=True)
class Coding:
    """How a tier's frames are made: by which codec, and whether they are encrypted."""

    codec: str
    keyring: Keyring | None


@dataclass(eq=False)
class Write:
    """An entry that is being written.

    waiting: how many tiers have not dealt with it yet
    stale:   its namespace was cleared by another host: it is not to be written any more
    frames:  its frames by how they are made; each is made when a first tier is ready for it
    """

    order: WriteOrder
    waiting: int = 0
    stale: bool = False
    frames: "dict[Coding, asyncio.Task[Written | None]]" = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk in memory."""
        return self.order.entry.nbytes


class Outbox:
    """The queue of one tier."""

    def __init__(self, guard: Guard, coding: Coding, metrics: Metrics) -> None:
        self.guard = guard
        self.coding = coding
        self.ready = asyncio.Event()
        self._metrics = metrics
        self._queue: deque[Write] = deque()
        self._writing: set[Write] = set()
        self._nbytes = 0  # of both

    def __bool__(self) -> bool:
        return bool(self._queue or self._writing)

    def __len__(self) -> int:
        return len(self._queue) + len(self._writing)

    @property
    def num_queued(self) -> int:
        """The number of chunks whose writing has not begun."""
        return len(self._queue)

    def push(self, write: Write) -> None:
        """Add a write at the end."""
        self._queue.append(write)
        self._nbytes += write.nbytes
        self.ready.set()
        self._tell()

    async def wait(self) -> None:
        """Wait until a write is queued."""
        while not self._queue:
            self.ready.clear()
            await self.ready.wait()

    def take(self, most_bytes: int) -> list[Write]:
        """Take the oldest writes, at most `most_bytes` or one. They are being written until
        `finish`.
        """
        batch = [self._queue.popleft()]
        left = most_bytes - batch[0].nbytes
        while self._queue and self._queue[0].nbytes <= left:
            batch.append(self._queue.popleft())
            left -= batch[-1].nbytes
        self._writing.update(batch)
        return batch

    def finish(self, batch: list[Write]) -> None:
        """Note that the writing of a batch has ended."""
        self._writing.difference_update(batch)
        self._nbytes -= sum(write.nbytes for write in batch)
        self._tell()

    def drop(self, prefix: bytes) -> list[Write]:
        """Remove and return the queued writes whose key begins with `prefix`, in one pass."""
        dropped: list[Write] = []
        kept = deque[Write]()
        for write in self._queue:
            (dropped if write.order.entry.key.startswith(prefix) else kept).append(write)
        self._queue = kept
        self._nbytes -= sum(write.nbytes for write in dropped)
        self._tell()
        return dropped

    def writing(self, prefix: bytes) -> set[Write]:
        """Return the writes in progress whose key begins with `prefix`."""
        return {write for write in self._writing if write.order.entry.key.startswith(prefix)}

    def is_writing(self, writes: set[Write]) -> bool:
        """Return whether any of these writes is in progress."""
        return not self._writing.isdisjoint(writes)

    def _tell(self) -> None:
        self._metrics.set("kvhold_tier_queued_chunks", len(self), tier=self.guard.name)
        self._metrics.set("kvhold_tier_queued_bytes", self._nbytes, tier=self.guard.name)
