"""A cache in this process: the state machine under a lock.

with open_cache(ram_bytes="2GiB", tiers=["disk:///var/cache/kvhold"]) as cache: ...
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvhold.cache.events import snapshot_of
from kvhold.cache.prompt_clears import PromptClear
from kvhold.cache.scrub import Scrubber
from kvhold.cache.state import new_state
from kvhold.cache.transfer.copies import CopyRequest
from kvhold.cache.transfer.reencodings import ReencodeRequest
from kvhold.cache.transfer.tier_worker import TierWorker, make_tier_worker
from kvhold.core.api import (
    Copying,
    CopyProgress,
    DemoteAnswer,
    EventBatch,
    Found,
    Hit,
    ReencodeProgress,
    Reencoding,
    RetainedPrompt,
    Uses,
    mask_bytes,
)
from kvhold.core.arrays import WholePrompts
from kvhold.core.cleanup import on_error
from kvhold.core.config import Config, load_config
from kvhold.core.errors import KVHoldError
from kvhold.core.held_spans import HeldSpans
from kvhold.core.holdings import Lease, Reservation
from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.planning import BlendReport, ComputeCost, ComputeIntent, Decision, RequestInfo
from kvhold.core.rules import store_options_of
from kvhold.core.status import MEMORY, CacheStatus, TiersStatus
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.memory.arena import Arena, Toucher, default_arena_bytes
from kvhold.tiers.policies import Policy


def open_cache(**settings: Any) -> "LocalCache":
    """Open a cache. Settings: the fields of `Config`."""
    return LocalCache(load_config(settings))


class LocalCache(WholePrompts):
    """After `close`, every call raises KVHoldError."""

    def __init__(self, config: Config, *, policy: Policy | None = None) -> None:
        """Raises CapacityError, or ConfigError for invalid tiers."""
        self._config = config
        self._arena = Arena.create(
            config.ram_bytes or default_arena_bytes(), huge_pages=config.huge_pages
        )
        self._state = new_state(config, self._arena, policy)
        self._lock = threading.Condition()
        self._closed = False
        self._owner = object()
        self._buffer = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        self._read_only = np.frombuffer(self._arena.buffer.toreadonly(), dtype=np.uint8)
        # its thread may call `_happen` at once
        self.tier_worker: TierWorker | None = None
        with on_error(self._unmap):
            self.tier_worker = make_tier_worker(config, self._state, self._happen)
        with self._lock:
            self._move()
        self._toucher = Toucher(self._arena.regions).start()
        self._scrubber = Scrubber(self._state, self._happen, config.scrub_interval_s).start()

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        self._check_open()
        return self._read_only

    def map_for_device(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        self._check_open()
        return self._read_only, self._buffer

    def report_pinned(self, nbytes: int, *, numa_node: int = -1) -> None:
        pass

    def register(self, namespace: Namespace) -> None:
        with self._lock:
            self._check_open()
            self._state.register(
                namespace.layout, namespace.digest, store_options_of(namespace.tags)
            )

    def lookup(
        self,
        query: Query,
        *,
        cost: ComputeCost | None = None,
        have_tokens: int = 0,
        uses: Uses = "all",
        intent: ComputeIntent | None = None,
        info: RequestInfo | None = None,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Hit:
        with self._lock:
            self._check_open()
            found = self._state.lookup(
                self._owner,
                query,
                cost,
                have_tokens=have_tokens,
                uses=uses,
                intent=intent,
                info=info,
            )
            self._move()
            if found.arriving and wait_s != 0:
                wait_s = self._config.client.arrival_timeout_s if wait_s is None else wait_s
                found = self._await(found.ticket, wait_s)
        self._finish_chores()
        return self._hit(found)

    def spans(
        self,
        queries: Sequence[Query],
        *,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> HeldSpans:
        with self._lock:
            self._check_open()
            found = self._state.spans(self._owner, queries)
            self._move()
        self._finish_chores()
        spans = HeldSpans([self._hit(one) for one in found])
        if spans.arriving and wait_s != 0:
            wait_s = self._config.client.arrival_timeout_s if wait_s is None else wait_s
            with on_error(spans.close):
                spans.wait(time.monotonic() + wait_s)
        return spans

    def report_timing(
        self,
        request: str,
        *,
        load_s: float | None,
        compute_s: float | None,
        deadline_s: float | None = None,
    ) -> None:
        with self._lock:
            self._check_open()
            self._state.planner.report_timing(request, load_s=load_s, compute_s=compute_s)

    def report_blend(self, report: BlendReport, *, deadline_s: float | None = None) -> None:
        with self._lock:
            self._check_open()
            self._state.planner.report_blend(report)

    def explain(self, request: str = "", *, deadline_s: float | None = None) -> list[Decision]:
        with self._lock:
            self._check_open()
            return self._state.planner.explain(request)

    def prefetch(self, query: Query, *, deadline_s: float | None = None) -> None:
        with self._lock:
            self._check_open()
            self._state.prefetch(self._owner, query)
            self._move()
        self._finish_chores()

    def retain(
        self, query: Query, ttl_s: float, *, deadline_s: float | None = None
    ) -> RetainedPrompt:
        with self._lock:
            self._check_open()
            answer = self._state.retain(self._owner, query, ttl_s)
        self._finish_chores()
        return RetainedPrompt(answer, lambda: self._release(answer.number))

    def demote(
        self, query: Query, *, first_chunk: int = 0, deadline_s: float | None = None
    ) -> DemoteAnswer:
        with self._lock:
            self._check_open()
            return self._state.demote(query, first_chunk)

    def claim(
        self,
        ticket: int,
        shard: int = 0,
        *,
        first_chunk: int = 0,
        arriving: bool = False,
        deadline_s: float | None = None,
    ) -> Lease | None:
        with self._lock:
            self._check_open()
            leased = self._state.claim(self._owner, ticket, shard, first_chunk, arriving=arriving)
        self._finish_chores()
        if leased is None:
            return None
        return Lease(
            _table(leased.offsets),
            _table(leased.num_tokens),
            first_chunk,
            self._read_only,
            lambda: self._release(leased.lease),
            checksums=leased.checksums if self._config.client.check_memory else None,
            report=lambda offsets: self._damaged(leased.lease, offsets),
        )

    def reserve(
        self,
        layout: Layout,
        names: ChunkNames,
        shard: int = 0,
        *,
        groups: npt.ArrayLike | None = None,
        store_options: StoreOptions = DEFAULT_OPTIONS,
        deadline_s: float | None = None,
    ) -> Reservation:
        mask = mask_bytes(groups, layout, names)
        with self._lock:
            self._check_open()
            layout = self._state.layout(layout.fingerprint)
            granted = self._state.reserve(
                self._owner, layout, names, shard, groups=mask, store_options=store_options
            )
        return Reservation(
            _table(granted.offsets),
            names.num_tokens(layout),
            self._buffer,
            lambda chunks, checksums: self._commit(granted.reservation, chunks, checksums),
            lambda: self._abandon(granted.reservation),
            layout=layout,
        )

    def clear(
        self,
        namespace: bytes | None = None,
        *,
        tier: str = "",
        deadline_s: float | None = None,
    ) -> int:
        with self._lock:
            self._check_open()
            removed = self._state.clear(namespace, tier=tier)
            self._move()
        self._finish_chores()
        self.flush(0, deadline_s=deadline_s)
        return removed

    def clear_prompt(
        self, query: Query, *, only_end: bool = False, deadline_s: float | None = None
    ) -> int:
        with self._lock:
            self._check_open()
            removed = self._state.clear_prompt(PromptClear(query, only_end))
            self._move()
        self._finish_chores()
        self.flush(0, deadline_s=deadline_s)
        return removed

    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool:
        with self._lock:
            self._check_open()
            mark = self._state.mark if mark is None else mark
            wait_s = self._config.client.arrival_timeout_s if deadline_s is None else deadline_s
            return (
                self._lock.wait_for(lambda: self._closed or self._state.all_done(mark), wait_s)
                and not self._closed
            )

    def reencode(
        self,
        tier: str,
        codec: str,
        *,
        namespace: bytes | None = None,
        query: Query | None = None,
        deadline_s: float | None = None,
    ) -> Reencoding:
        with self._lock:
            self._check_open()
            number = self._state.reencode(
                self._owner, ReencodeRequest(tier, codec, namespace, query)
            )
            self._move()
        return Reencoding(
            ReencodeProgress(),
            lambda: self._release(number),
            poll=lambda: self._poll_reencoding(number),
        )

    def copy(
        self,
        tier: str,
        query: Query | None,
        *,
        drop: bool = False,
        source: str = MEMORY,
        namespace: bytes = b"",
        deadline_s: float | None = None,
    ) -> Copying:
        with self._lock:
            self._check_open()
            request = CopyRequest(tier, query, drop, source, namespace)
            number = self._state.copy(self._owner, request)
            self._move()
        self._finish_chores()
        return Copying(
            CopyProgress(), lambda: self._release(number), poll=lambda: self._poll_copy(number)
        )

    def snapshot(self, *, deadline_s: float | None = None) -> EventBatch:
        with self._lock:
            self._check_open()
            number, parts = self._state.snapshot()
            events = [event for part in parts for event in snapshot_of(part, number)]
        return EventBatch(events, number)

    def events(self, after: int, *, deadline_s: float | None = None) -> EventBatch:
        with self._lock:
            self._check_open()
            return self._state.events(after)

    def status(self, *, deadline_s: float | None = None) -> CacheStatus:
        with self._lock:
            self._check_open()
            tiers: TiersStatus = {}
            if self.tier_worker is not None:
                tiers = self.tier_worker.status()
            return {
                **self._state.status(),
                "arena_touched_bytes": self._toucher.touched_bytes,
                "scrub": self._scrubber.status(),
                **tiers,
            }

    def close(self) -> None:
        """Write queued chunks for at most `drain_timeout_s`, then free all. Idempotent."""
        self._toucher.stop()
        self._scrubber.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._state.release_owner(self._owner)
            self._lock.notify_all()
        if self.tier_worker is not None:
            self.tier_worker.close(drain_timeout_s=self._config.drain_timeout_s)
        self._unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _unmap(self) -> None:
        self._buffer = self._read_only = np.empty(0, dtype=np.uint8)
        self._arena.close()

    def _check_open(self) -> None:
        if self._closed:
            raise KVHoldError("this cache is closed")

    def _hit(self, found: Found) -> Hit:
        number = found.ticket or found.announcement
        return Hit(
            found,
            lambda: self._release(number),
            poll=self._poll_hit,
            pause=self._pause,
            give_back_hit=lambda: self._release(number, keep_announcement=True),
        )

    def _await(self, ticket: int, wait_s: float) -> Found:
        """The caller holds the lock."""
        with on_error(lambda: self._state.release(self._owner, ticket)):
            self._lock.wait_for(lambda: self._closed or self._state.is_over(ticket), wait_s)
        return self._state.refresh(ticket, settle=True)

    def _move(self) -> None:
        """The caller holds the lock."""
        if self.tier_worker is not None:
            self.tier_worker.submit(self._state.take_commands())

    def _happen(self, event: Callable[[], None]) -> None:
        with self._lock:
            event()
            self._move()
            self._lock.notify_all()
        self._finish_chores()

    def _finish_chores(self) -> None:
        while self._state.has_chores:
            with self._lock:
                if self._closed:
                    return
                self._state.step()
                self._move()
                if self._state.take_news():
                    self._lock.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._lock:
            if not self._closed:
                self._lock.wait(seconds)

    def _poll_hit(self, ticket: int, settle: bool, growth: bool) -> Found:
        with self._lock:
            self._check_open()
            found = self._state.refresh(ticket, settle=settle)
        self._finish_chores()
        return found

    def _poll_reencoding(self, number: int) -> ReencodeProgress:
        with self._lock:
            self._check_open()
            return self._state.reencodings.find(self._owner, number) or ReencodeProgress(
                done=True, stopped="closed"
            )

    def _poll_copy(self, number: int) -> CopyProgress:
        with self._lock:
            self._check_open()
            return self._state.moves.find(self._owner, number) or CopyProgress(
                done=True, stopped="closed"
            )

    def _release(self, number: int, *, keep_announcement: bool = False) -> None:
        with self._lock:
            self._state.release(self._owner, number, keep_announcement=keep_announcement)
            self._move()
        self._finish_chores()

    def _damaged(self, lease: int, offsets: list[int]) -> None:
        with self._lock:
            self._state.damaged(self._owner, lease, offsets)
            self._move()

    def _commit(self, reservation: int, chunks: Sequence[int], checksums: bytes) -> int:
        with self._lock:
            self._check_open()
            mark = self._state.commit(self._owner, reservation, chunks, checksums)
            self._move()
            return mark

    def _abandon(self, reservation: int) -> None:
        with self._lock:
            self._state.abandon(self._owner, reservation)


def _table(rows: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)
