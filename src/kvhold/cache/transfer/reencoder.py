"""Re-encodes a tier's chunks, one at a time, after all other calls."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from kvhold.cache.transfer.commands import ReencodeCommand, Space
from kvhold.cache.transfer.framing import Framed, Framer
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
from kvhold.codecs.chunk import arranged
from kvhold.codecs.frame import group_of
from kvhold.codecs.sealing import OVERHEAD_BYTES, Keyring
from kvhold.core.api import ReencodeProgress
from kvhold.core.errors import ConfigError, FrameError, LayoutError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.core.turns import next_turn
from kvhold.memory.pages import page_aligned
from kvhold.tiers.gate import Urgency
from kvhold.tiers.guard import Guard
from kvhold.tiers.stack import Stack
from kvhold.tiers.table import KeyList

log = logging.getLogger(__name__)


Answer = TypeVar("Answer")
Result: TypeAlias = Literal["replaced", "same", "kept_lossy", "missing", "bad", "unknown", "failed"]


@dataclass
class _Tally:
    seen: int = 0
    replaced: int = 0
    over_budget: int = 0
    same: int = 0
    kept_lossy: int = 0
    missing: int = 0
    bad: int = 0
    unknown: int = 0
    failed: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def so_far(self, *, done: bool = False, stopped: str | None = None) -> ReencodeProgress:
        return ReencodeProgress(
            done, stopped or "", **{each.name: getattr(self, each.name) for each in fields(self)}
        )


@dataclass(frozen=True)
class _Looked:
    """result:      None: `written` replaces the frame
    over_budget: a more exact codec was used
    """

    result: Result | None = None
    written: Framed | None = None
    over_budget: bool = False
    plain_bytes: int = 0
    fault: FrameError | None = None
    expired: bool = False


@dataclass
class _Run:
    command: ReencodeCommand
    guard: Guard
    keyring: Keyring | None
    codec: Codec
    most_bytes: int
    tally: _Tally = field(default_factory=_Tally)


@dataclass
class _Ready:
    key: bytes
    before: int
    looked: _Looked
    written: Framed


class Reencoder:
    def __init__(
        self,
        stack: Stack,
        keyrings: Sequence[Keyring | None],
        metrics: Metrics,
        threads: Executor,
        *,
        report: Callable[[int, ReencodeProgress], None],
        now: Callable[[], float],
    ) -> None:
        self._stack = stack
        self._keyrings = keyrings
        self._metrics = metrics
        self._threads = threads
        self._report = report
        self._now = now
        self._turn = asyncio.Lock()

    async def run(self, command: ReencodeCommand) -> None:
        tally = _Tally()
        stopped: str | None = "stopped"
        try:
            async with self._turn:
                stopped = await self._reencode(command, tally)
        except ConfigError as error:
            stopped = str(error)
        finally:
            self._report(command.number, tally.so_far(done=True, stopped=stopped))

    async def _reencode(self, command: ReencodeCommand, tally: _Tally) -> str | None:
        guard, keyring = self._stack.guards[command.tier], self._keyrings[command.tier]
        codec = await self._in_thread(lambda: make_codec(command.codec))
        run = _Run(command, guard, keyring, codec, _most_bytes(command), tally)
        log.info(
            "tier %s: the chunks of %d namespaces are re-encoded with %s",
            guard.name,
            len(command.spaces),
            codec.name,
        )
        silent: set[str] = set()
        keys = (
            KeyList(command.keys)
            if command.keys is not None
            else await self._scan(guard, command.spaces, silent)
        )
        for part in keys.parts:
            if not guard.available:
                break
            await self._reencode_keys(run, part)
        if silent or not guard.available:
            return f"tier {guard.name} failed: {guard.last_fault}"
        progress = tally.so_far()
        log.info(
            "tier %s: %d of %d chunks were replaced", guard.name, progress.replaced, progress.seen
        )
        return None

    async def _scan(self, guard: Guard, spaces: Collection[bytes], silent: set[str]) -> KeyList:
        chosen = KeyList()
        if spaces:
            keys = await guard.scan(next(iter(spaces)) if len(spaces) == 1 else b"", silent)
            for part in keys.taken():
                for key in part:
                    if key[:NAMESPACE_BYTES] in spaces:
                        chosen.append(key)
                await next_turn()
        return chosen

    async def _reencode_keys(self, run: _Run, keys: list[bytes]) -> None:
        silent: set[str] = set()
        sizes = await run.guard.probe(keys, silent)
        there = [(key, size) for key, size in zip(keys, sizes, strict=True) if size is not None]
        if silent:
            self._count(run, "failed", len(keys) - len(there))
        elif run.command.keys is None:
            self._count(run, "missing", len(keys) - len(there))
        readable = [(key, size) for key, size in there if 0 < size <= run.most_bytes]
        self._count(run, "unknown", len(there) - len(readable))
        for batch in _batches(readable, run.guard.batch_bytes):
            await self._reencode_batch(run, batch)
            self._report(run.command.number, run.tally.so_far())

    async def _reencode_batch(self, run: _Run, batch: Sequence[tuple[bytes, int]]) -> None:
        guard = run.guard
        buffers = [page_aligned(size) for _, size in batch]
        async with guard.gate.turn(Urgency.REWRITE):
            names = dict(
                zip((key for key, _ in batch), guard.names([key for key, _ in batch]), strict=True)
            )
            num_clears = guard.chunk_clears.num_clears
            outcome = await guard.get([key for key, _ in batch], [[buffer] for buffer in buffers])
        frames = [
            None if size is None else buffer[:size]
            for buffer, size in zip(buffers, outcome.items, strict=True)
        ]
        ready: list[_Ready] = []
        unusable: list[bytes] = []
        for (key, _), frame, failed in zip(batch, frames, outcome.failed, strict=True):
            if frame is None:
                self._count(run, "failed" if failed else "missing")
                continue
            looked = await self._in_thread(partial(self._look, run, key, frame))
            if looked.written is not None:
                ready.append(_Ready(key, len(frame), looked, looked.written))
            if looked.result is not None:
                self._count_looked(run, key, looked)
                run.tally.over_budget += looked.over_budget
            if looked.fault is not None or looked.expired:
                unusable.append(key)
            if sum(one.written.nbytes for one in ready) >= guard.batch_bytes:
                await self._replace(run, ready, names, num_clears)
                ready = []
        await self._replace(run, ready, names, num_clears)
        if unusable:
            async with guard.gate.turn(Urgency.DELETE):
                await guard.delete(unusable)

    async def _replace(
        self,
        run: _Run,
        ready: Sequence[_Ready],
        names: Mapping[bytes, bytes],
        num_clears: int,
    ) -> None:
        if not ready:
            return
        guard, tally = run.guard, run.tally
        async with guard.gate.turn(Urgency.REWRITE):
            if guard.chunk_clears.num_clears != num_clears:
                # an old value must not replace one from after the clear
                self._count(run, "failed", len(ready))
                return
            replaced = [(one.key, one.written.parts) for one in ready]
            outcome = await guard.replace(replaced, names=[names[one.key] for one in ready])
        for one, done in zip(ready, outcome.items, strict=True):
            self._count(run, "failed" if done is None else "replaced" if done else "missing")
            if done:
                written = one.written
                tally.over_budget += one.looked.over_budget
                tally.bytes_before += one.before
                tally.bytes_after += written.nbytes
                self._metrics.add("kvhold_reencoded_bytes_before", one.before, tier=guard.name)
                self._metrics.add("kvhold_reencoded_bytes_after", written.nbytes, tier=guard.name)
                self._metrics.add("kvhold_encoded_chunks", tier=guard.name, codec=written.codec)
                self._metrics.add(
                    "kvhold_encoded_bytes", written.nbytes, tier=guard.name, codec=written.codec
                )
                self._metrics.add(
                    "kvhold_encoded_plain_bytes",
                    one.looked.plain_bytes,
                    tier=guard.name,
                    codec=written.codec,
                )

    def _look(self, run: _Run, key: bytes, value: memoryview) -> _Looked:
        space = run.command.spaces[key[:NAMESPACE_BYTES]]
        try:
            return self._reencoded(run, key, space, value)
        except FrameError as fault:
            return _Looked("bad", fault=fault)
        except LayoutError as error:  # no such key or number of tokens
            return _Looked("bad", fault=FrameError("identity", str(error)))

    def _reencoded(self, run: _Run, key: bytes, space: Space, value: memoryview) -> _Looked:
        frame = (
            value
            if run.keyring is None
            else run.keyring.unseal(value, key=key, tenant=space.store_options.tenant)
        )
        header = read_header(frame, frame_bytes=len(frame))
        layout = space.layout or run.command.layouts.get(header.layout)
        if layout is None:
            return _Looked("unknown")
        layout.check_tokens(header.num_tokens)
        check_identity(header, key=key, layout=layout, num_tokens=header.num_tokens)
        check_loss(header)
        if 0 < header.expires_at <= self._now():
            return _Looked("missing", expired=True)
        before = find_codec(header.codec)
        if before is None:  # other hosts may have the library
            return _Looked("unknown")
        payload, group = frame[header.header_bytes :], group_of(key, layout)
        if header.codec == run.codec.name or not (before.lossless or run.codec.lossless):
            verify(header, payload)
            return _Looked("same" if header.codec == run.codec.name else "kept_lossy")
        chunk = page_aligned(layout.chunk_bytes(group, header.num_tokens))
        unframe_payload(header, payload, chunk, layout=layout)
        written = Framer(run.codec, run.keyring).encoded(
            chunk,
            layout,
            space.store_options,
            key=key,
            num_tokens=header.num_tokens,
            first_token=header.first_token,
            expires_at=header.expires_at,
        )
        if written is None:
            return _Looked("failed")
        over_budget = (
            written.codec != run.codec.name and arranged(run.codec, layout, group) is not None
        )
        if written.codec == header.codec:
            return _Looked("same", over_budget=over_budget)
        return _Looked(written=written, over_budget=over_budget, plain_bytes=len(chunk))

    def _count(self, run: _Run, result: Result, count: int = 1) -> None:
        if count:
            run.tally.seen += count
            setattr(run.tally, result, getattr(run.tally, result) + count)
            self._metrics.add("kvhold_reencoded_chunks", count, tier=run.guard.name, result=result)

    def _count_looked(self, run: _Run, key: bytes, looked: _Looked) -> None:
        assert looked.result is not None
        self._count(run, looked.result)
        if looked.fault is not None:
            self._metrics.add(
                "kvhold_tier_bad_frames", tier=run.guard.name, reason=looked.fault.reason
            )
            log.warning(
                "tier %s: chunk %s has a bad frame, so it is removed: %s",
                run.guard.name,
                key.hex(),
                looked.fault,
            )
        if looked.expired:
            self._metrics.add("kvhold_expired_chunks", tier=run.guard.name)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _batches(
    items: Sequence[tuple[bytes, int]], most_bytes: int
) -> Iterator[list[tuple[bytes, int]]]:
    batch: list[tuple[bytes, int]] = []
    for item in items:
        if batch and sum(size for _, size in batch) + item[1] > most_bytes:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _most_bytes(command: ReencodeCommand) -> int:
    layouts = [
        *command.layouts.values(),
        *(space.layout for space in command.spaces.values() if space.layout is not None),
    ]
    raw = Raw()
    sizes = [
        max_frame_bytes(raw, layout, group, layout.tokens_per_chunk)
        for layout in layouts
        for group in range(len(layout.groups))
    ]
    return 2 * max(sizes, default=0) + OVERHEAD_BYTES
