"""One tier's writes, in order. Runs in the loop of `WriteBehind`."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvhold.cache.transfer.commands import WriteCommand
from kvhold.cache.transfer.framing import Framed
from kvhold.codecs.frame import RAW
from kvhold.codecs.sealing import Keyring
from kvhold.core.metrics import Metrics
from kvhold.tiers.guard import Guard


@dataclass(frozen=True)
class FrameCoding:
    codec: str = RAW
    keyring: Keyring | None = None


@dataclass(eq=False)
class Write:
    """waiting: number of tiers that have not handled it
    stale:   cleared, so it must not be written
    """

    command: WriteCommand
    waiting: int = 0
    stale: bool = False
    frames: "dict[FrameCoding, asyncio.Task[Framed | None]]" = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.command.entry.nbytes


class Outbox:
    def __init__(self, guard: Guard, coding: FrameCoding, metrics: Metrics) -> None:
        self.guard = guard
        self.coding = coding
        self.ready = asyncio.Event()
        self._metrics = metrics
        self._queue: deque[Write] = deque()
        self._writing: set[Write] = set()
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._queue or self._writing)

    def __len__(self) -> int:
        return len(self._queue) + len(self._writing)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def push(self, write: Write) -> None:
        self._queue.append(write)
        self._nbytes += write.nbytes
        self.ready.set()
        self._set_gauges()

    async def wait(self) -> None:
        while not self._queue:
            self.ready.clear()
            await self.ready.wait()

    def take(self, most_bytes: int) -> list[Write]:
        """At most `most_bytes`, or one write. `finish` ends the writes."""
        batch = [self._queue.popleft()]
        left = most_bytes - batch[0].nbytes
        while self._queue and self._queue[0].nbytes <= left:
            batch.append(self._queue.popleft())
            left -= batch[-1].nbytes
        self._writing.update(batch)
        return batch

    def begin(self, batch: list[Write]) -> None:
        """Begin writes that were not in the queue. `finish` ends them."""
        self._writing.update(batch)
        self._nbytes += sum(write.nbytes for write in batch)
        self._set_gauges()

    def finish(self, batch: list[Write]) -> None:
        self._writing.difference_update(batch)
        self._nbytes -= sum(write.nbytes for write in batch)
        self._set_gauges()

    def drop(self, prefix: bytes) -> list[Write]:
        dropped: list[Write] = []
        kept = deque[Write]()
        for write in self._queue:
            (dropped if write.command.entry.key.startswith(prefix) else kept).append(write)
        self._queue = kept
        self._nbytes -= sum(write.nbytes for write in dropped)
        self._set_gauges()
        return dropped

    def writing(self, prefix: bytes) -> set[Write]:
        return {write for write in self._writing if write.command.entry.key.startswith(prefix)}

    def is_writing_any(self, keys: set[bytes]) -> bool:
        return any(write.command.entry.key in keys for write in self._writing)

    def is_writing(self, writes: set[Write]) -> bool:
        return not self._writing.isdisjoint(writes)

    def _set_gauges(self) -> None:
        self._metrics.set("kvhold_tier_queued_chunks", len(self), tier=self.guard.name)
        self._metrics.set("kvhold_tier_queued_bytes", self._nbytes, tier=self.guard.name)
