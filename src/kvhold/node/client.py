"""The cache of this host's node, as one process sees it. Any thread may call.

A call past its deadline raises DeadlineExceeded; the connection stays in use. Calls raise NodeError
when the node has ended, or owed an answer for `client.call_timeout_s`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvhold.core.api import (
    DemoteAnswer,
    EventBatch,
    Found,
    Hit,
    RetainedPrompt,
    Uses,
    mask_bytes,
)
from kvhold.core.cleanup import on_error
from kvhold.core.config import ClientConfig
from kvhold.core.errors import (
    DeadlineExceeded,
    KVHoldError,
    NodeError,
    NodeLost,
    NodeRefused,
    ProtocolError,
)
from kvhold.core.held_spans import HeldSpans
from kvhold.core.holdings import Lease, Reservation
from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.planning import BlendReport, ComputeCost, ComputeIntent, RequestInfo
from kvhold.core.rules import store_options_of
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.core.tracing import TraceContext
from kvhold.net import messages as m
from kvhold.net.offsets import unpack
from kvhold.node import forks
from kvhold.node.describing import DescribesChunks
from kvhold.node.link import Link
from kvhold.node.membership import Departures, Duty, Membership
from kvhold.node.notifier import Notifier
from kvhold.node.operator_calls import OperatorCalls

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=m.Message)

_TEND_S = 0.5
_FLUSH_PAUSE_S = 0.05


class NodeClient(DescribesChunks, OperatorCalls):
    def __init__(
        self,
        path: Path,
        config: ClientConfig | None = None,
        *,
        name: str = "python",
        requires: bytes = b"",
        revive: Callable[[threading.Event], None] | None = None,
    ) -> None:
        """requires: packed requirements (`node/requirements.py`)
        revive:   starts a node before each attempt to rejoin

        Raises NodeError: no node; NodeRefused.
        """
        self.path, self._config = path, config or ClientConfig()
        self.checks_memory = self._config.check_memory
        self._name, self._requires, self._revive = name, requires, revive
        self._lock = threading.Lock()
        self._lost_at_s: float | None = None
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._wake = Notifier()
        with on_error(self._wake.close):
            self._membership = Membership(
                path,
                Link(path, name, self._config.connect_timeout_s, requires),
                Departures.of_process(path),
            )
        self._keeper = threading.Thread(target=self._keep, name="kvhold-keeper", daemon=True)
        self._keeper.start()
        forks.remember(self)

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and not self._membership.is_silent(
            link, self._config.call_timeout_s
        )

    @property
    def is_rejoining(self) -> bool:
        return self._revive is not None and self._membership.is_rejoining

    @property
    def lost_at_s(self) -> float | None:
        """Monotonic; None: never."""
        return self._lost_at_s

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[bytes]"""
        return self._current("arena").buffer

    def map_for_device(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """See `Cache`. From now on, the node keeps memory until this process has ended."""
        link = self._current("arena")
        link.uses_device = True
        self._call(m.UseDevice(), m.Done, None, link)
        return link.mappings()

    def report_pinned(self, nbytes: int, *, numa_node: int = -1) -> None:
        link = self._current("arena")
        link.uses_device = True
        self._call(m.UseDevice(nbytes, numa_node), m.Done, None, link)

    def register(self, namespace: Namespace) -> None:
        request = m.Register(
            namespace.layout,
            namespace.digest,
            store_options_of(namespace.tags),
            namespace.description,
        )
        with self._lock:
            self._membership.register(request)
        self._call(request, m.Done, self._config.connect_timeout_s)

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
        trace: TraceContext = "",
    ) -> Hit:
        """See `Cache`. deadline_s: per request; `wait_s` limits the wait for lower tiers"""
        link = self._current("lookup")
        request = m.Lookup(query, cost, have_tokens, uses, intent, trace, info)
        hit = self._hit(self._call(request, m.LookupAnswer, deadline_s, link), link, deadline_s)
        if hit.arriving and wait_s != 0:
            wait_s = self._config.arrival_timeout_s if wait_s is None else wait_s
            with on_error(hit.close):
                hit.wait(time.monotonic() + wait_s)
        return hit

    def spans(
        self,
        queries: Sequence[Query],
        *,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> HeldSpans:
        """See `Cache`. deadline_s: per request"""
        link = self._current("spans")
        found = self._call(m.LookupSpans(tuple(queries)), m.SpansAnswer, deadline_s, link).spans
        spans = HeldSpans([self._hit(one, link, deadline_s) for one in found])
        if len(found) != len(queries):
            raise self._misunderstood(m.SpansAnswer(found), link)
        if spans.arriving and wait_s != 0:
            wait_s = self._config.arrival_timeout_s if wait_s is None else wait_s
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
        self._call(m.Timing(request, load_s, compute_s), m.Done, deadline_s)

    def report_blend(self, report: BlendReport, *, deadline_s: float | None = None) -> None:
        self._call(m.ReportBlend(report), m.Done, deadline_s)

    def prefetch(self, query: Query, *, deadline_s: float | None = None) -> None:
        self._call(m.Prefetch(query), m.Done, deadline_s)

    def retain(
        self, query: Query, ttl_s: float, *, deadline_s: float | None = None
    ) -> RetainedPrompt:
        link = self._current("retain")
        answer = self._call(m.Retain(query, ttl_s), m.Retained, deadline_s, link).answer
        return RetainedPrompt(answer, lambda: self._let_go(link, answer.number))

    def demote(
        self, query: Query, *, first_chunk: int = 0, deadline_s: float | None = None
    ) -> DemoteAnswer:
        return self._call(m.Demote(query, first_chunk), m.Demoted, deadline_s).answer

    def claim(
        self,
        ticket: int,
        shard: int = 0,
        *,
        first_chunk: int = 0,
        arriving: bool = False,
        deadline_s: float | None = None,
    ) -> Lease | None:
        """See `Cache`. Tickets of other processes are valid."""
        link = self._current("claim")
        buffer = link.hold()
        leased: m.Answer | None = None
        try:
            leased = self._request(m.Claim(ticket, shard, first_chunk, arriving), deadline_s, link)
        finally:
            if not isinstance(leased, m.Leased):
                link.let_go()
        if isinstance(leased, m.NotFound):
            return None
        if not isinstance(leased, m.Leased):
            raise self._misunderstood(leased, link)
        lease = leased.lease
        try:
            return Lease(
                unpack(leased.offsets, len(leased.offsets), len(leased.num_tokens)),
                np.array(leased.num_tokens, dtype=np.int64),
                first_chunk,
                buffer,
                lambda: self._give_back(link, m.Release(lease), held=True),
                checksums=leased.checksums if self.checks_memory else None,
                report=lambda offsets: self._report_damage(link, lease, offsets),
            )
        except ProtocolError as error:
            link.let_go()
            self._break(link, str(error))
            raise

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
        request = m.Reserve(
            layout.fingerprint, names, shard, store_options, mask_bytes(groups, layout, names)
        )
        link = self._current("reserve")
        buffer = link.hold(writable=True)
        granted: m.Granted | None = None
        try:
            granted = self._call(request, m.Granted, deadline_s, link)
        finally:
            if granted is None:
                link.let_go()
        reservation = granted.reservation
        try:
            offsets = unpack(granted.offsets, len(layout.groups), len(names))
        except ProtocolError as error:
            link.let_go()
            self._break(link, str(error))
            raise
        return Reservation(
            offsets,
            names.num_tokens(layout),
            buffer,
            lambda chunks, checksums: self._commit(link, reservation, chunks, checksums),
            lambda: self._give_back(
                link, m.Abandon(reservation) if reservation else None, held=True
            ),
            layout=layout,
        )

    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool:
        until_s = time.monotonic() + (
            self._config.arrival_timeout_s if deadline_s is None else deadline_s
        )
        link = self._current("flush")
        if mark is None:
            mark = self._mark(m.Flushed(0), link)
        while not self._call(m.Flushed(mark), m.Done, None, link).count:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            link.pause(min(_FLUSH_PAUSE_S, left_s))
        return True

    def snapshot(self, *, deadline_s: float | None = None) -> EventBatch:
        """See `Cache`. deadline_s: per page"""
        link = self._current("snapshot")
        part = self._call(m.Snapshot(0), m.Happened, deadline_s, link)
        events, pages = list(part.events), 1
        while part.more:
            part = self._call(m.Snapshot(pages), m.Happened, deadline_s, link)
            events += part.events
            pages += 1
        return EventBatch(events, part.next)

    def events(self, after: int, *, deadline_s: float | None = None) -> EventBatch:
        part = self._call(m.Events(after), m.Happened, deadline_s)
        return EventBatch(part.events, part.next, part.lost)

    def ping(self) -> None:
        self._call(m.Ping(), m.Done, None)

    def stop_node(self) -> None:
        self._call(m.Stop(), m.Done, None)

    def close(self) -> None:
        """The node takes the client's holdings back. Idempotent."""
        with self._lock:
            self._closed.set()
            self._wake.set()
            link = self._membership.close()
        if link is not None:
            link.retire()
        if self._keeper is not threading.current_thread():
            self._keeper.join(timeout=self._config.connect_timeout_s + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def renew_locks_in_child(self) -> None:
        was_closed = self._closed.is_set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._wake.close_in_child()
        if was_closed:
            self._closed.set()

    @property
    def _link(self) -> Link | None:
        return self._membership.link

    def _current(self, operation: str) -> Link:
        self._check_process()
        return self._membership.current(operation)

    def _check_process(self) -> None:
        # two processes would read each other's answers
        if self._pid != os.getpid():
            raise NodeError(
                "this client was made before the process forked; make one in each process"
            )

    def _call(
        self,
        request: m.Message,
        expected: type[Kind],
        deadline_s: float | None,
        link: Link | None = None,
    ) -> Kind:
        link = link or self._membership.link or self._current(request.operation)
        answer = self._request(request, deadline_s, link)
        if not isinstance(answer, expected):
            raise self._misunderstood(answer, link)
        return answer

    def _hit(self, answer: m.LookupAnswer, link: Link, deadline_s: float | None) -> Hit:
        def poll(ticket: int, settle: bool, growth: bool) -> Found:
            again = m.Refresh(ticket, settle, growth)
            return self._call(again, m.LookupAnswer, deadline_s, link).found()

        number = answer.ticket or answer.announcement
        return Hit(
            answer.found(),
            lambda: self._let_go(link, number),
            poll=poll,
            pause=link.pause,
            give_back_hit=lambda: self._let_go(link, number, keep_announcement=True),
        )

    def _request(
        self, request: m.Message, deadline_s: float | None, link: Link, *, keep: bool = False
    ) -> m.Answer:
        """keep: send it even to a silent or late node, to return a grant

        Raises NodeLost: the connection breaks; NodeError: the node refuses; DeadlineExceeded.
        """
        self._check_process()
        if not keep and self._membership.is_silent(link, self._config.call_timeout_s):
            raise self._membership.silence(link, request.operation)
        try:
            answer = link.call(request, deadline_s or self._config.call_timeout_s, keep=keep)
        except DeadlineExceeded:
            self._wake.set()
            raise
        except OSError as error:
            self._break(link, str(error))
            raise NodeLost(f"{request.operation}: lost the node on {self.path}: {error}") from None
        except BaseException as error:
            if link.is_broken:
                self._break(link, str(error) or type(error).__name__)
            self._wake.set()
            raise
        if isinstance(answer, m.Refused):
            if answer.fatal:
                self._break(link, answer.reason)
            raise NodeError(f"{request.operation}: the node refused: {answer.reason}")
        return answer

    def _misunderstood(self, answer: m.Answer, link: Link) -> ProtocolError:
        self._break(link, "an answer of the wrong kind")
        return ProtocolError(f"the node answered with {type(answer).__name__}")

    def _let_go(self, link: Link, number: int, *, keep_announcement: bool = False) -> None:
        self._give_back(link, m.Release(number, keep_announcement) if number else None)

    def _commit(self, link: Link, reservation: int, chunks: Sequence[int], checksums: bytes) -> int:
        if not reservation or not chunks:
            return 0
        return self._mark(m.Commit(reservation, list(chunks), checksums), link)

    def _mark(self, request: m.Commit | m.Flushed, link: Link) -> int:
        done = self._call(request, m.Done, None, link)
        if done.mark is None:
            raise self._misunderstood(done, link)
        return done.mark

    def _report_damage(self, link: Link, lease: int, offsets: list[int]) -> None:
        """Never raises: the next read finds the damage again."""
        try:
            self._call(m.Damaged(lease, offsets), m.Done, None, link)
        except KVHoldError as error:
            log.warning("damaged chunks could not be reported: %s", error)

    def _give_back(self, link: Link, request: m.Message | None, *, held: bool = False) -> None:
        if held:
            link.let_go()
            if link.closed:
                self._wake.set()
        within_s = self._membership.return_within_s(link, self._config.call_timeout_s)
        if request is not None and within_s is not None:
            try:
                self._request(request, within_s, link, keep=True)
            except KVHoldError as error:
                log.debug("giving back: %s", error)

    def _break(self, link: Link, why: str) -> None:
        with self._lock:
            # others read it without the lock
            if self._membership.link is link:
                self._lost_at_s = time.monotonic()
            lost = self._membership.lose(link)
            if lost:
                self._wake.set()
        if lost:
            log.warning(
                "lost the node on %s (%s); computing without it until it is back", self.path, why
            )
        link.retire(at_once=False)

    def _keep(self) -> None:
        while not self._closed.is_set():
            link = self._link
            if link is None:
                self._rejoin()
                continue
            try:
                if not link.has_loose_ends:
                    link.watch(self._wake, self._config.heartbeat_interval_s)
            except (OSError, ProtocolError) as error:
                self._break(link, str(error))
                continue
            self._wake.clear()
            self._beat(link)
        self._wake.close()

    def _beat(self, link: Link) -> None:
        duty = self._membership.duty(link, time.monotonic(), self._config.heartbeat_interval_s)
        try:
            if duty is Duty.TEND:
                link.tend(min(self._config.heartbeat_interval_s, _TEND_S))
            elif duty is Duty.DEPART:
                for departed in self._membership.departures.due(link):
                    self._call(departed, m.Done, None, link)
                    self._membership.departures.told(departed)
            elif duty is Duty.PING:
                self._call(m.Ping(), m.Done, None, link)
        except KVHoldError as error:
            log.debug("heartbeat: %s", error)
            if link.is_broken:
                self._break(link, str(error))
        except OSError as error:
            self._break(link, str(error))

    def _rejoin(self) -> None:
        link, revived = None, False
        try:
            if self._revive is not None:
                self._revive(self._closed)
            revived = True
            link = Link(self.path, self._name, self._config.connect_timeout_s, self._requires)
            self._introduce(link)
        except (OSError, KVHoldError) as error:
            log.debug("no node yet: %s", error)
            if isinstance(error, NodeRefused) and self._membership.is_news(str(error)):
                log.warning("computing without the node: %s", error)
            if link is not None:
                link.retire()
            with self._lock:
                self._membership.failed(may_be_back=revived and not isinstance(error, NodeRefused))
            self._closed.wait(self._membership.pause_s(self._config.reconnect_interval_s))

    def _introduce(self, link: Link) -> None:
        told: set[bytes] = set()
        while True:
            with self._lock:
                missing = self._membership.introduce(link, told)
                is_used = self._membership.link is link
            if is_used:
                log.info("joined the node on %s again", self.path)
                return
            if not missing:
                link.retire()
                return
            for request in missing:
                link.call(request, self._config.connect_timeout_s)
                told.add(request.namespace)
