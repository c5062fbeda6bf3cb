"""Writes held entries to the tiers in batches. `WriteQueue` bounds the sum of the tiers' queues."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from math import inf
from typing import Any, Protocol

from kvhold.cache.transfer.commands import WriteCommand
from kvhold.cache.transfer.framing import Framed, Framer
from kvhold.cache.transfer.outbox import FrameCoding, Outbox, Write
from kvhold.cache.transfer.tasks import Tasks
from kvhold.codecs import make_codec
from kvhold.codecs.frame import RAW
from kvhold.core.errors import DamagedChunks
from kvhold.core.metrics import Metrics
from kvhold.tiers.gate import Urgency
from kvhold.tiers.guard import Guard
from kvhold.tiers.ram import NEVER, Entry, RamTier

log = logging.getLogger(__name__)

_MOMENT_S = 0.05


class WriteOwner(Protocol):
    @property
    def ram(self) -> RamTier: ...

    def written(self, number: int) -> None:
        """The entry may be released."""

    def found_damaged(self, entry: Entry) -> None: ...

    def wrote_removed(self, guard: Guard, entries: Sequence[Entry]) -> None:
        """Entries removed during their write. The tier may have them."""


class WriteBehind:
    def __init__(
        self,
        owner: WriteOwner,
        guards: Sequence[Guard],
        metrics: Metrics,
        *,
        codings: Sequence[FrameCoding] = (),
        encoding: Executor | None = None,
    ) -> None:
        """codings: one per tier; empty: opaque frames"""
        self._owner = owner
        self._ram = owner.ram
        self._metrics = metrics
        self._writers = Tasks()
        self._encoding = encoding
        self._outboxes = [
            Outbox(guard, coding, metrics)
            for guard, coding in zip(guards, codings or [FrameCoding()] * len(guards), strict=True)
        ]
        self._dealt_with = asyncio.Event()

    def start(self) -> None:
        for outbox in self._outboxes:
            if not outbox.guard.read_only:
                for _ in range(max(1, outbox.guard.config.concurrent_calls - 1)):
                    self._writers.start(self._write_from(outbox))

    def add(self, command: WriteCommand) -> None:
        write = Write(command)
        for number, outbox in enumerate(self._outboxes):
            if outbox.guard.read_only or (command.above is not None and number >= command.above):
                continue
            write.waiting += 1
            outbox.push(write)
        if not write.waiting:
            self._owner.written(command.number)

    async def write_now(
        self,
        tier: int,
        commands: Sequence[WriteCommand],
        pending: "list[asyncio.Task[Any]]",
    ) -> None:
        """Write entries to one tier, beside its queue. `written` is not called.

        pending: receives calls that use the memory beyond the deadline
        """
        outbox = self._outboxes[tier]
        batch = [Write(command) for command in commands]
        outbox.begin(batch)
        try:
            async with outbox.guard.gate.turn(Urgency.WRITE):
                await self._write_batch(outbox.guard, outbox.coding, batch, pending)
        except Exception:
            log.exception("tier %s: a part of a copy was not written", outbox.guard.name)
        # not after a cancellation: the tier may still use the memory
        outbox.finish(batch)
        self._dealt_with.set()

    def drop(self, prefix: bytes, guard: Guard | None = None) -> None:
        for outbox in self._outboxes:
            if guard is None or outbox.guard is guard:
                self._finish(outbox.drop(prefix))

    def spoil(self, prefix: bytes) -> None:
        """Drop writes whose put has not begun."""
        self.drop(prefix)
        for outbox in self._outboxes:
            for write in outbox.writing(prefix):
                write.stale = True

    def writing(
        self, prefix: bytes, guard: Guard | None = None
    ) -> "list[tuple[Outbox, set[Write]]]":
        return [
            (outbox, outbox.writing(prefix))
            for outbox in self._outboxes
            if guard is None or outbox.guard is guard
        ]

    def writing_tiers(self, keys: set[bytes]) -> set[str]:
        return {outbox.guard.name for outbox in self._outboxes if outbox.is_writing_any(keys)}

    async def wait_for(self, writing: "Iterable[tuple[Outbox, set[Write]]]") -> None:
        for outbox, writes in writing:
            while outbox.is_writing(writes):
                await self._some_written()

    async def drain(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while loop.time() < until and any(box for box in self._outboxes if box.guard.available):
            await self._some_written()
        left = sum(box.num_queued for box in self._outboxes)
        if left:
            log.warning("%d chunks were not written to lower tiers before the end", left)

    async def end(self) -> None:
        await self._writers.end()

    async def _some_written(self) -> None:
        self._dealt_with.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._dealt_with.wait(), _MOMENT_S)

    async def _write_from(self, outbox: Outbox) -> None:
        guard = outbox.guard
        while True:
            await outbox.wait()
            batch = outbox.take(guard.batch_bytes)
            pending: list[asyncio.Task[Any]] = []
            try:
                async with guard.gate.turn(Urgency.WRITE):
                    await self._write_batch(guard, outbox.coding, batch, pending)
            except Exception:
                log.exception("tier %s: a batch was not written", guard.name)
                guard.drop(len(batch), reason="internal")
            # not after a cancellation: the tier may still use the memory
            outbox.finish(batch)
            self._dealt_with.set()
            if not pending:
                self._end(guard, batch)
            else:  # the tier may still read it
                ended = asyncio.ensure_future(_all(pending))
                ended.add_done_callback(lambda _, batch=batch: self._end(guard, batch))  # type: ignore[misc]

    async def _write_batch(
        self,
        guard: Guard,
        coding: FrameCoding,
        batch: list[Write],
        pending: "list[asyncio.Task[Any]]",
    ) -> None:
        if not guard.available:
            guard.drop(len(batch), reason="unavailable")
            return
        there = await guard.probe([write.command.entry.key for write in batch])
        missing = [
            write
            for write, size in zip(batch, there, strict=True)
            if size is None
            and not self._ram.is_doomed(write.command.entry)
            and guard.admits(write.command.entry.key, write.nbytes)
        ]
        for expires_at in sorted({write.command.entry.expires_at for write in missing}):
            ttl_s = self._ttl_s(expires_at)
            if ttl_s is not None and ttl_s <= 0:
                continue
            group = [write for write in missing if write.command.entry.expires_at == expires_at]
            framed = [
                (write, written)
                for write in group
                if (written := await self._frame(guard, coding, write))
            ]
            # no await before the put: a clear drops the write or waits for its put
            items = [
                (write.command.entry.key, written.parts)
                for write, written in framed
                if not write.stale and not self._ram.is_doomed(write.command.entry)
            ]
            if not items:
                continue
            outcome = await guard.put(items, ttl_s=ttl_s)
            if outcome.pending is not None:
                pending.append(outcome.pending)

    def _ttl_s(self, expires_at: int) -> float | None:
        if expires_at == NEVER:
            return inf
        return expires_at - self._ram.now() if expires_at else None

    async def _frame(self, guard: Guard, coding: FrameCoding, write: Write) -> Framed | None:
        """None: the chunk is damaged, or has no key. Tiers with the same coding share the frame."""
        if write.command.layout is None:
            return Framed([self._ram.view(write.command.entry)], write.nbytes, RAW)
        if coding not in write.frames:
            making = asyncio.get_running_loop().run_in_executor(
                self._encoding, self._make_frame, coding, write.command
            )
            write.frames[coding] = asyncio.ensure_future(_future_result(making))
        try:
            written = await asyncio.shield(write.frames[coding])
        except DamagedChunks:
            guard.drop(1, reason="damaged")
            self._owner.found_damaged(write.command.entry)
            return None
        if written is None:
            guard.drop(1, reason="no key")
            return None
        self._metrics.add("kvhold_encoded_chunks", tier=guard.name, codec=written.codec)
        self._metrics.add(
            "kvhold_encoded_bytes", written.nbytes, tier=guard.name, codec=written.codec
        )
        self._metrics.add(
            "kvhold_encoded_plain_bytes", write.nbytes, tier=guard.name, codec=written.codec
        )
        return written

    def _make_frame(self, coding: FrameCoding, command: WriteCommand) -> Framed | None:
        assert command.layout is not None
        writer = Framer(make_codec(coding.codec), coding.keyring)
        return writer.framed(
            command.entry, command.layout, self._ram.view(command.entry), command.store_options
        )

    def _end(self, guard: Guard, batch: list[Write]) -> None:
        removed = [
            write.command.entry for write in batch if self._ram.is_doomed(write.command.entry)
        ]
        if removed:
            self._owner.wrote_removed(guard, removed)
        self._finish(batch)

    def _finish(self, batch: Iterable[Write]) -> None:
        for write in batch:
            write.waiting -= 1
            if not write.waiting:
                write.frames.clear()
                self._owner.written(write.command.number)


async def _all(tasks: "list[asyncio.Task[Any]]") -> None:
    await asyncio.wait(tasks)


async def _future_result(future: "asyncio.Future[Any]") -> Any:
    return await future
