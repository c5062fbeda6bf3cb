"""Reads chunks from tiers into memory and checks them. One event loop, and a pool to decode."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Protocol

from kvhold.cache.transfer.commands import FetchCommand, PendingRead
from kvhold.cache.transfer.read_buffer import ReadBuffer
from kvhold.cache.transfer.read_span import ReadSpan
from kvhold.cache.transfer.tasks import Tasks
from kvhold.codecs.sealing import Keyring
from kvhold.core.errors import FrameError
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import BAD_FRAME, EXPIRED, TIER_DOWN, Reason
from kvhold.core.tracing import Tracer
from kvhold.tiers.base import Origin
from kvhold.tiers.gate import Urgency
from kvhold.tiers.guard import Guard
from kvhold.tiers.ram import Entry, RamTier
from kvhold.tiers.stack import Stack

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Arrived:
    read_buffer: ReadBuffer
    expires_at: int = 0
    fault: FrameError | None = None


class ReadOwner(Protocol):
    @property
    def ram(self) -> RamTier: ...

    def fetched(
        self,
        entry: Entry,
        ok: bool,
        expires_at: int = 0,
        *,
        why: Reason = TIER_DOWN,
        origin: Origin | None = None,
    ) -> None:
        """The memory is free. expires_at: 0: never"""

    def given_up(self, entry: Entry) -> None:
        """The read failed and may still write to the memory until `let_go`."""

    def let_go(self, entry: Entry) -> None: ...


class TierReader:
    check = True
    """Off only to measure the cost of checks."""
    tracer: Tracer | None = None
    """Set before any call, to trace reads."""

    def __init__(
        self,
        owner: ReadOwner,
        stack: Stack,
        metrics: Metrics,
        tasks: Tasks,
        *,
        keyrings: Sequence[Keyring | None] = (),
        checking: Executor | None = None,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """keyrings: one per tier; None: not encrypted. Empty: no tier is
        checking: pool that checks and decodes; None: all entries are opaque frames
        post:     runs a call under the owner's lock, or in its loop
        """
        self._owner = owner
        self._ram = owner.ram
        self._stack = stack
        self._keyrings = keyrings or [None] * len(stack)
        self._metrics = metrics
        self._tasks = tasks
        self._checking = checking
        self._post = post

    def fetch(self, command: FetchCommand) -> None:
        by_tier: dict[int, list[PendingRead]] = {}
        for pending_read in command.pending_reads:
            by_tier.setdefault(pending_read.place.tier, []).append(pending_read)
        for tier, pending_reads in by_tier.items():
            guard = self._stack.guards[tier]
            for batch in _batches(
                pending_reads, lambda pending_read: pending_read.entry.nbytes, guard.batch_bytes
            ):
                span = None
                if self.tracer is not None:
                    span = ReadSpan.begin(self.tracer, guard.name, batch)
                fetching = self._tasks.start(
                    self._fetch_batch(guard, self._keyrings[tier], batch, span=span)
                )
                if span is not None:
                    fetching.add_done_callback(span.end)

    async def _fetch_batch(
        self,
        guard: Guard,
        keyring: Keyring | None,
        batch: list[PendingRead],
        *,
        again: bool = False,
        span: ReadSpan | None = None,
    ) -> None:
        left = {id(pending_read): pending_read for pending_read in batch}
        why: dict[int, Reason] = {}
        try:
            async with guard.gate.turn(Urgency.READ):
                if span is not None:
                    span.starts()
                read_buffers = [
                    ReadBuffer.of(self._ram, pending_read, keyring) for pending_read in batch
                ]
                keys = [pending_read.entry.key for pending_read in batch]
                outcome = await guard.get(keys, [read_buffer.parts for read_buffer in read_buffers])
            if outcome.pending is not None:
                self._give_up(left, outcome.pending)
                return
            arrived = await self._checked(read_buffers, outcome.items)
            good = [one for one in arrived if self._is_good(one)]
            origins = dict(
                zip((one.entry for one in batch), outcome.origins or repeat(None), strict=False)
            )
            self._tell_fetched(
                [
                    (left.pop(id(one.read_buffer.pending_read)).entry, one.expires_at)
                    for one in good
                ],
                origins,
            )
            why |= {
                id(pending_read): reason
                for pending_read, reason in zip(batch, outcome.why, strict=True)
            }
            if span is not None:
                span.got(outcome, num_good=len(good))
            if not again:
                missed = zip(batch, outcome.items, outcome.failed, strict=True)
                resized = await self._resized(
                    guard,
                    [
                        pending_read
                        for pending_read, size, failed in missed
                        if size is None and not failed and pending_read.layout is not None
                    ],
                )
                for number in resized:
                    del left[number]
                if resized:
                    self._tasks.start(
                        self._fetch_batch(guard, keyring, list(resized.values()), again=True)
                    )
            why |= {
                id(one.read_buffer.pending_read): BAD_FRAME if one.fault is not None else EXPIRED
                for one in arrived
            }
            await self._remove_bad(guard, arrived)
        # the tier may still use the memory
        except asyncio.CancelledError:
            self._tell_given_up(left)
            raise
        finally:  # no search waits for ever, no memory is lost
            self._tell_fetched(
                [
                    (pending_read.entry, why.get(number, TIER_DOWN))
                    for number, pending_read in left.items()
                ]
            )

    async def _resized(self, guard: Guard, missed: list[PendingRead]) -> dict[int, PendingRead]:
        """By `id`: missed chunks that were re-encoded since the probe."""
        sizes = (
            await guard.probe([pending_read.entry.key for pending_read in missed]) if missed else []
        )
        return {
            id(pending_read): replace(pending_read, place=replace(pending_read.place, nbytes=size))
            for pending_read, size in zip(missed, sizes, strict=True)
            if size is not None and size != pending_read.place.nbytes
        }

    def _give_up(self, left: dict[int, PendingRead], pending: "asyncio.Task[Any]") -> None:
        entries = self._tell_given_up(left)

        def let_go(_: Any) -> None:
            for entry in entries:
                self._post(lambda entry=entry: self._owner.let_go(entry))  # type: ignore[misc]

        pending.add_done_callback(let_go)

    def _tell_given_up(self, left: dict[int, PendingRead]) -> list[Entry]:
        entries = [pending_read.entry for pending_read in left.values()]
        left.clear()
        for entry in entries:
            self._post(lambda entry=entry: self._owner.given_up(entry))  # type: ignore[misc]
        return entries

    async def _checked(
        self, read_buffers: Sequence[ReadBuffer], sizes: Sequence[int | None]
    ) -> list[_Arrived]:
        pairs = zip(read_buffers, sizes, strict=True)
        if self._checking is None or all(size is None or one.is_summed for one, size in pairs):
            return self._check_all(read_buffers, sizes)
        return await asyncio.get_running_loop().run_in_executor(
            self._checking, self._check_all, read_buffers, sizes
        )

    def _check_all(
        self, read_buffers: Sequence[ReadBuffer], sizes: Sequence[int | None]
    ) -> list[_Arrived]:
        return [
            _accepted(read_buffer, nbytes, check=self.check)
            for read_buffer, nbytes in zip(read_buffers, sizes, strict=True)
            if nbytes is not None and read_buffer.fits(nbytes)
        ]

    def _is_good(self, one: _Arrived) -> bool:
        return one.fault is None and not self._has_expired(one)

    def _has_expired(self, one: _Arrived) -> bool:
        return 0 < one.expires_at <= self._ram.now()

    async def _remove_bad(self, guard: Guard, arrived: Sequence[_Arrived]) -> None:
        keys = []
        for one in arrived:
            key = one.read_buffer.pending_read.entry.key
            if one.fault is not None:
                self._metrics.add(
                    "kvhold_tier_bad_frames", tier=guard.name, reason=one.fault.reason
                )
                log.warning(
                    "tier %s: chunk %s has a bad frame, so it is removed: %s",
                    guard.name,
                    key.hex(),
                    one.fault,
                )
                keys.append(key)
            elif self._has_expired(one):
                self._metrics.add("kvhold_expired_chunks", tier=guard.name)
                self._metrics.add(
                    "kvhold_expired_bytes",
                    one.read_buffer.pending_read.entry.nbytes,
                    tier=guard.name,
                )
                keys.append(key)
        if keys:
            await remove(guard, keys)

    def _tell_fetched(
        self,
        ended: Sequence[tuple[Entry, int | Reason]],
        origins: Mapping[Entry, Origin | None] = {},
    ) -> None:
        def tell() -> None:
            for entry, outcome in ended:
                if isinstance(outcome, Reason):
                    self._owner.fetched(entry, False, why=outcome)
                else:
                    self._owner.fetched(entry, True, outcome, origin=origins.get(entry))

        if ended:
            self._post(tell)


async def remove(guard: Guard, keys: list[bytes]) -> None:
    """Nothing with `read_only`."""
    if not guard.config.read_only:
        async with guard.gate.turn(Urgency.DELETE):
            await guard.delete(keys)


def _accepted(read_buffer: ReadBuffer, nbytes: int, *, check: bool) -> _Arrived:
    try:
        return _Arrived(read_buffer, read_buffer.accept(nbytes, check=check))
    except FrameError as fault:
        return _Arrived(read_buffer, fault=fault)


def _batches(items: Sequence[Any], size: Callable[[Any], int], most: int) -> Iterable[list[Any]]:
    batch: list[Any] = []
    left = most
    for item in items:
        if batch and size(item) > left:
            yield batch
            batch, left = [], most
        batch.append(item)
        left -= size(item)
    if batch:
        yield batch
