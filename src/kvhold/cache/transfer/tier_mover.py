"""Copies or moves chunks from tier to tier, in batches. Runs in the tier worker's loop.

A chunk leaves its tier when a probe finds it whole in the other one. A lossy frame stays as it is:
no chunk loses precision twice. Others get the other tier's codec, without loss.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeVar

from kvhold.cache.transfer.commands import DropCommand, TransferCommand
from kvhold.cache.transfer.framing import Framer, on_a_page
from kvhold.cache.transfer.outbox import FrameCoding
from kvhold.codecs import (
    Codec,
    Raw,
    check_identity,
    check_loss,
    find_codec,
    make_codec,
    max_frame_bytes,
    read_header,
    unframe_payload,
    verify,
)
from kvhold.codecs.frame import group_of
from kvhold.codecs.sealing import OVERHEAD_BYTES
from kvhold.core.api import CopyProgress
from kvhold.core.errors import ConfigError, FrameError, LayoutError
from kvhold.core.metrics import Metrics
from kvhold.core.store_options import StoreOptions
from kvhold.memory.pages import page_aligned
from kvhold.tiers.base import Parts
from kvhold.tiers.gate import Urgency
from kvhold.tiers.guard import Guard
from kvhold.tiers.ram import NEVER
from kvhold.tiers.stack import Stack
from kvhold.tiers.table import KeyList

Answer = TypeVar("Answer")
_Item = tuple[bytes, int]  # key and bytes


@dataclass(frozen=True)
class _Carried:
    key: bytes
    parts: Parts
    expires_at: int


@dataclass
class _Run:
    """fresh:  keys of the batch that no clear has removed"""

    command: TransferCommand
    source: Guard
    target: Guard
    source_coding: FrameCoding
    target_coding: FrameCoding
    codec: Codec
    most_bytes: int
    fresh: set[bytes] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    lost_some: bool = False
    copied: int = 0
    failed: int = 0
    dropped: int = 0
    nbytes: int = 0

    def progress(self, *, done: bool = False, stopped: str = "") -> CopyProgress:
        return CopyProgress(done, stopped, self.copied, self.failed, self.dropped, self.nbytes)

    @property
    def fault(self) -> str:
        for guard in (self.source, self.target):
            if guard.name in self.silent or not guard.available:
                return f"tier {guard.name} failed: {guard.last_fault}"
        if self.lost_some:
            names = f"{self.source.name} and {self.target.name}"
            return f"chunks left both tiers, and were put back: {names} may be one place"
        return ""


class TierMover:
    def __init__(
        self,
        stack: Stack,
        codings: Sequence[FrameCoding],
        metrics: Metrics,
        threads: Executor,
        *,
        is_barred: Callable[[bytes], bool],
        report: Callable[[int, CopyProgress], None],
        now: Callable[[], float],
    ) -> None:
        self._stack = stack
        self._codings = codings
        self._metrics = metrics
        self._threads = threads
        self._is_barred = is_barred
        self._report = report
        self._now = now
        self._turn = asyncio.Lock()
        self._run: _Run | None = None
        self._putting: asyncio.Future[None] | None = None

    async def run(self, command: TransferCommand) -> None:
        last = CopyProgress(done=True, stopped="stopped")
        try:
            async with self._turn:
                run = self._run = await self._begin(command)
                try:
                    await self._move(run)
                    last = run.progress(done=True, stopped=run.fault)
                finally:
                    self._run = None
        except ConfigError as error:
            last = CopyProgress(done=True, stopped=str(error))
        finally:
            self._report(command.number, last)

    async def drop(self, command: DropCommand) -> None:
        """Of chunks that memory has, and holds until the report."""
        guard, num_keys, silent = self._stack.guards[command.tier], len(command.keys), set[str]()
        removed = [False] * num_keys
        try:
            async with guard.gate.turn(Urgency.DELETE):
                removed = await guard.delete(command.keys, silent)
        finally:
            stopped = f"tier {guard.name} failed: {guard.last_fault}" if silent else ""
            progress = CopyProgress(True, stopped, num_keys, 0, sum(removed), command.nbytes)
            self._report(command.number, progress)

    def spoil(self, prefix: bytes) -> None:
        """Cleared values of the batch are not put any more. `put_ended` waits for one that is."""
        if self._run is not None:
            self._run.fresh = {key for key in self._run.fresh if not key.startswith(prefix)}

    def spoil_keys(self, names: Sequence[bytes]) -> None:
        for name in names if self._run is not None else ():
            self.spoil(name)

    async def put_ended(self) -> None:
        if self._putting is not None:
            await asyncio.wait((self._putting,))

    async def _begin(self, command: TransferCommand) -> _Run:
        coding = self._codings[command.target]
        codec = await self._in_thread(lambda: make_codec(coding.codec))
        layout = command.layout
        most_bytes = OVERHEAD_BYTES + 2 * max(
            max_frame_bytes(Raw(), layout, group, layout.tokens_per_chunk)
            for group in range(len(layout.groups))
        )
        guards = self._stack.guards
        return _Run(
            command,
            guards[command.source],
            guards[command.target],
            self._codings[command.source],
            coding,
            codec,
            most_bytes,
        )

    async def _move(self, run: _Run) -> None:
        command = run.command
        keys = (
            KeyList(command.keys)
            if command.keys is not None
            else await run.source.scan(command.namespace, run.silent)
        )
        for part in keys.parts:
            sizes = await run.source.probe(part, run.silent)
            there = [(key, size) for key, size in zip(part, sizes, strict=True) if size]
            for batch in _batches(there, min(run.source.batch_bytes, run.target.batch_bytes)):
                if run.fault:
                    return
                await self._move_batch(run, batch)
                self._report(command.number, run.progress())

    async def _move_batch(self, run: _Run, batch: Sequence[_Item]) -> None:
        keys = [key for key, _ in batch]
        run.fresh = set(keys)
        present = await run.target.probe(keys, run.silent)
        missing = [item for item, size in zip(batch, present, strict=True) if size is None]
        known = [(key, size) for key, size in zip(keys, present, strict=True) if size]
        frames: list[_Carried] = []
        if run.command.drop and known:
            frames = await self._read(run, run.target, run.target_coding, known)
            missing += await self._remove_unreadable(run, known, frames)
        if missing and run.target.name not in run.silent:
            read = await self._read(run, run.source, run.source_coding, missing)
            await self._put(run, read)
            frames += read
        sizes = await run.target.probe(keys, run.silent)
        stored = [
            (key, size)
            for (key, size), there in zip(batch, sizes, strict=True)
            if there is not None and key in run.fresh
        ]
        run.copied += len(stored)
        run.failed += len(batch) - len(stored)
        run.nbytes += sum(size for _, size in stored)
        if run.command.drop and stored:
            await self._drop(run, {key for key, _ in stored}, frames)

    async def _drop(self, run: _Run, stored: set[bytes], frames: Sequence[_Carried]) -> None:
        """Both tiers may be one place under two names: chunks that went there, too, come back."""
        async with run.source.gate.turn(Urgency.DELETE):
            keys = [frame.key for frame in frames if frame.key in stored & run.fresh]
            gone = await run.source.delete(keys, run.silent)
        left = await run.target.probe(keys, run.silent)
        lost = {key for key, size in zip(keys, left, strict=True) if size is None} & run.fresh
        if lost:
            await self._put(run, [frame for frame in frames if frame.key in lost])
            run.lost_some = True
        run.dropped += sum(was and key not in lost for key, was in zip(keys, gone, strict=True))

    async def _remove_unreadable(
        self, run: _Run, known: Sequence[_Item], frames: Sequence[_Carried]
    ) -> list[_Item]:
        good = {frame.key for frame in frames}
        bad = [item for item in known if item[0] not in good]
        if bad:
            async with run.target.gate.turn(Urgency.DELETE):
                await run.target.delete([key for key, _ in bad])
        return bad

    async def _read(
        self, run: _Run, guard: Guard, coding: FrameCoding, items: Sequence[_Item]
    ) -> list[_Carried]:
        fits = [(key, size) for key, size in items if size <= run.most_bytes]
        buffers = [page_aligned(size) for _, size in fits]
        async with guard.gate.turn(Urgency.REWRITE):
            outcome = await guard.get([key for key, _ in fits], [[buffer] for buffer in buffers])
        found: list[_Carried] = []
        for (key, _), buffer, size in zip(fits, buffers, outcome.items, strict=True):
            if size is None:
                continue
            try:
                carry = partial(self._carried, run, coding, key, buffer[:size])
                found.append(await self._in_thread(carry))
            except FrameError as fault:
                self._metrics.add("kvhold_tier_bad_frames", tier=guard.name, reason=fault.reason)
            except LayoutError:
                self._metrics.add("kvhold_tier_bad_frames", tier=guard.name, reason="identity")
        return found

    async def _put(self, run: _Run, found: Sequence[_Carried]) -> None:
        for expires_at in sorted({one.expires_at for one in found}):
            ttl_s = inf if expires_at == NEVER else expires_at - self._now() if expires_at else None
            async with run.target.gate.turn(Urgency.WRITE):
                # no await before the put: a clear spoils the keys, or waits for it
                items = [
                    (one.key, one.parts)
                    for one in found
                    if one.expires_at == expires_at
                    and one.key in run.fresh
                    and not self._is_barred(one.key)
                ]
                if not items or (ttl_s is not None and ttl_s <= 0):
                    continue
                self._putting = asyncio.get_running_loop().create_future()
                try:
                    outcome = await run.target.put(items, ttl_s=ttl_s)
                    if outcome.pending is not None:  # the tier may still read the memory
                        await asyncio.wait((outcome.pending,))
                finally:
                    self._putting.set_result(None)
                    self._putting = None

    def _carried(self, run: _Run, coding: FrameCoding, key: bytes, value: memoryview) -> _Carried:
        """Raises FrameError, LayoutError."""
        layout, tenant = run.command.layout, run.command.tenant
        frame = value
        if coding.keyring is not None:
            frame = coding.keyring.unseal(value, key=key, tenant=tenant)
        header = read_header(frame, frame_bytes=len(frame))
        layout.check_tokens(header.num_tokens)
        check_identity(header, key=key, layout=layout, num_tokens=header.num_tokens)
        check_loss(header)
        payload, codec = frame[header.header_bytes :], find_codec(header.codec)
        keyring = run.target_coding.keyring
        if codec is None or not codec.lossless or header.codec == run.codec.name:
            verify(header, payload)
            parts: Parts = [frame]
            if keyring is not None:
                parts = on_a_page(keyring.seal(parts, key=key, tenant=tenant))
            return _Carried(key, parts, header.expires_at)
        chunk = page_aligned(layout.chunk_bytes(group_of(key, layout), header.num_tokens))
        unframe_payload(header, payload, chunk, layout=layout)
        written = Framer(run.codec, keyring).encoded(
            chunk,
            layout,
            StoreOptions(max_error=0, tenant=tenant),
            key=key,
            num_tokens=header.num_tokens,
            first_token=header.first_token,
            expires_at=header.expires_at,
        )
        if written is None:
            raise FrameError("sealed", "there is no key for it")
        return _Carried(key, written.parts, header.expires_at)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _batches(items: Sequence[_Item], most_bytes: int) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    left = most_bytes
    for item in items:
        if batch and item[1] > left:
            yield batch
            batch, left = [], most_bytes
        batch.append(item)
        left -= item[1]
    if batch:
        yield batch
