"""One client of the node, as a state machine without I/O."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from kvhold.cache.chores import TURN, Running, Turns
from kvhold.cache.events import MOST, snapshot_of
from kvhold.cache.held_ages import ages_turns
from kvhold.cache.leases import ClaimAnswer
from kvhold.cache.prompt_clears import PromptClear
from kvhold.cache.state import CacheState
from kvhold.cache.transfer.copies import CopyRequest
from kvhold.cache.transfer.reencodings import ReencodeRequest
from kvhold.core.api import CopyProgress, Found, ReencodeProgress
from kvhold.core.errors import KVHoldError, ProtocolError
from kvhold.core.status import NodeStatus
from kvhold.net import messages as m
from kvhold.net.offsets import pack
from kvhold.node.live_settings import LiveSettings
from kvhold.node.names import Names
from kvhold.node.router_publisher import RouterPublisher
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.ram import Entry

_CLEAR_STEPS = 400  # about 20,000 chunks
_MOST_PARTS = 64
# enough for 1.2 million tokens of 80 layers
_MOST_CHECKSUMS = m.MAX_MESSAGE_BYTES * 3 // 4
_MAX_NAME = 100

Result = TypeVar("Result")


class _Snapshot:
    def __init__(self, number: int, parts: Iterator[list[Entry]]) -> None:
        self.number = number
        self.page = 0
        self.more = True
        self._parts = parts

    def take_turns(self) -> Turns[list[Entry]]:
        self.page += 1
        entries: list[Entry] = []
        for _ in range(_MOST_PARTS):
            part = next(self._parts, None)
            yield 1 if part is None else 1 + len(part)
            if part is None:
                self.more = False
                break
            entries += part
            if len(entries) >= MOST // 8:
                break
        return entries


class SessionNode(Protocol):
    names: Names
    settings: LiveSettings
    router_publisher: RouterPublisher | None

    def status(self) -> NodeStatus: ...

    def measure(self) -> list[m.MetricSample]: ...

    def disks(self) -> dict[str, list[BytesByAge]]: ...

    def stop(self) -> None: ...

    def clients(self, first: int) -> m.ClientList: ...

    def kick(self, number: int, pid: int) -> m.ClientList: ...

    def departed(self, run: int, number: int, pid: int) -> None: ...


def _watch_nothing() -> None: ...


class Session:
    """One client after the handshake. `answer` takes one request at a time."""

    def __init__(
        self,
        state: CacheState,
        hello: m.Hello,
        node: SessionNode,
        pid: int = 0,
        *,
        watch_process: Callable[[], None] = _watch_nothing,
    ) -> None:
        """watch_process: called when a device copies; raises NodeError"""
        self.name = hello.name[:_MAX_NAME]
        self.pid = pid if pid > 0 else hello.pid
        self._state = state
        self._node = node
        self._watch_process = watch_process
        self.uses_device, self.pinned_bytes = False, 0
        # ticket -> number of arrivals; more cause News
        self._arriving: dict[int, float] = {}
        self._unwritten: int | None = None
        self._seen = _Snapshot(0, iter(()))
        self._verbs: dict[type, Callable[[Any], m.Answer | Running[m.Answer]]] = {
            m.Register: self._register,
            m.Lookup: self._lookup,
            m.LookupSpans: self._lookup_spans,
            m.Refresh: self._refresh,
            m.Timing: self._report_timing,
            m.ReportBlend: self._report_blend,
            m.Explain: self._explain,
            m.ListNamespaces: self._list_names,
            m.ListOwned: self._list_owned,
            m.MeasureTenants: self._measure_tenants,
            m.ListShares: self._list_shares,
            m.ListWorths: self._list_worths,
            m.MeasureHeld: self._measure_held,
            m.Prefetch: self._prefetch,
            m.Retain: self._retain,
            m.Demote: self._demote,
            m.Claim: self._claim,
            m.Damaged: self._damaged,
            m.Release: self._release,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abandon: self._abandon,
            m.Clear: self._clear,
            m.ClearPrompt: self._clear_prompt,
            m.LastClear: self._last_clear,
            m.Flushed: self._flushed,
            m.Reencode: self._reencode,
            m.Copy: self._copy,
            m.Progress: self._progress,
            m.Snapshot: self._snapshot,
            m.Events: self._events,
            m.FindUndescribed: self._find_undescribed,
            m.Describe: self._describe,
            m.Status: self._report,
            m.ChangeSettings: self._settings,
            m.FindLayout: self._find_layout,
            m.Measure: self._measure,
            m.Clients: self._clients,
            m.Kick: self._kick,
            m.UseDevice: self._use_device,
            m.Departed: self._departed,
            m.Stop: self._end,
            m.Ping: self._ping,
        }

    def answer(self, request: m.Request) -> m.Answer | Running[m.Answer]:
        """The answer, or a running call of several turns.

        Our own errors refuse the request. Raises ProtocolError.
        """
        try:
            return self._verbs[type(request)](request)
        except ProtocolError:
            raise
        except KVHoldError as error:
            return m.Refused(str(error), fatal=False)

    def take_news(self) -> bool:
        news = [
            ticket
            for ticket, told in self._arriving.items()
            if self._state.is_over(ticket) or self._state.num_arrived(ticket) > told
        ]
        for ticket in news:
            del self._arriving[ticket]
        written = self._unwritten is not None and self._state.all_done(self._unwritten)
        if written:
            self._unwritten = None
        return bool(news) or written

    @property
    def label(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def touches_memory(self) -> bool:
        return self._state.touches_memory(self)

    def release_all(self) -> None:
        """The client must no longer touch the arena."""
        self._state.release_owner(self)
        self._verbs.clear()  # a reference cycle; a busy node does not collect them
        self._watch_process = _watch_nothing

    def _in_turns(
        self, turns: Turns[Result], answer: Callable[[Result], m.Answer]
    ) -> m.Answer | Running[m.Answer]:
        def run() -> Turns[m.Answer]:
            try:
                result = yield from turns
            except ProtocolError:
                raise
            except KVHoldError as error:
                return m.Refused(str(error), fatal=False)
            return answer(result)

        running = Running(run(), self._state.turn_s)
        return running.result if running.step() else running

    def _register(self, request: m.Register) -> m.Answer:
        self._state.register(request.layout, request.namespace, request.store_options)
        self._node.names.learn(request.namespace, self.label, request.description)
        return m.Done()

    def _lookup(self, request: m.Lookup) -> m.Answer | Running[m.Answer]:
        turns = self._state.lookup_turns(
            self,
            request.query,
            request.cost,
            have_tokens=request.have_tokens,
            uses=request.uses,
            intent=request.intent,
            trace=request.trace,
            info=request.info,
        )
        return self._in_turns(turns, self._found)

    def _lookup_spans(self, request: m.LookupSpans) -> m.Answer | Running[m.Answer]:
        return self._in_turns(
            self._state.spans_turns(self, request.queries),
            lambda spans: m.SpansAnswer([self._found(span) for span in spans]),
        )

    def _refresh(self, request: m.Refresh) -> m.Answer | Running[m.Answer]:
        turns = self._state.refresh_turns(request.ticket, settle=request.settle)
        return self._in_turns(turns, lambda found: self._found(found, growth=request.growth))

    def _report_timing(self, request: m.Timing) -> m.Answer:
        self._state.planner.report_timing(
            request.request, load_s=request.load_s, compute_s=request.compute_s
        )
        return m.Done()

    def _report_blend(self, request: m.ReportBlend) -> m.Answer:
        self._state.planner.report_blend(request.report)
        return m.Done()

    def _explain(self, request: m.Explain) -> m.Answer:
        return m.Explained(self._state.planner.explain(request.request, request.tenant))

    def _list_names(self, request: m.ListNamespaces) -> m.Answer:
        page, more = self._node.names.page(request.after, request.prefix)
        used = self._state.ram.used_bytes_of
        spaces = [msgspec.structs.replace(space, nbytes=used(space.digest)) for space in page]
        described = [nbytes for digest in self._node.names.digests() if (nbytes := used(digest))]
        others = self._state.ram.num_namespaces - len(described)
        return m.Named(spaces, more, others, max(0, self._state.ram.used_bytes - sum(described)))

    def _list_owned(self, request: m.ListOwned) -> m.Answer | Running[m.Answer]:
        if request.tag:
            tags = self._state.tags
            return m.Owned(
                b"".join(tags.carrying(request.tag)),
                sum(space not in tags for space in self._state.ram.used_by_namespace),
                tags.num_forgotten,
                tags.since_s,
            )
        turns = self._state.reencodings.owned_turns(request.tenant)
        return self._in_turns(turns, lambda owned: m.Owned(b"".join(owned)))

    def _measure_tenants(self, request: m.MeasureTenants) -> m.Answer | Running[m.Answer]:
        used = list(self._state.ram.used_by_namespace.items())
        turns = self._state.reencodings.tenants_turns(used)
        return self._in_turns(turns, m.TenantBytes)

    def _measure_held(self, request: m.MeasureHeld) -> m.Answer | Running[m.Answer]:
        state = self._state
        places = {"ram": [state.held], **self._node.disks()}
        turns = ages_turns(places, state.reencodings.tenant_of, state.held.slot())
        return self._in_turns(turns, m.HeldRows)

    def _list_shares(self, request: m.ListShares) -> m.Answer:
        return m.ShareRows(list(self._state.usage.shares.rows()))

    def _list_worths(self, request: m.ListWorths) -> m.Answer | Running[m.Answer]:
        state = self._state
        turns = state.usage.worths_turns(state.reencodings.tenant_of, request.tenant)
        return self._in_turns(turns, m.WorthRows)

    def _prefetch(self, request: m.Prefetch) -> m.Answer | Running[m.Answer]:
        return self._in_turns(self._state.prefetch_turns(self, request.query), lambda _: m.Done())

    def _retain(self, request: m.Retain) -> m.Answer | Running[m.Answer]:
        return self._in_turns(
            self._state.retain_turns(self, request.query, request.ttl_s), m.Retained
        )

    def _demote(self, request: m.Demote) -> m.Answer | Running[m.Answer]:
        return self._in_turns(
            self._state.demote_turns(request.query, request.first_chunk), m.Demoted
        )

    def _claim(self, request: m.Claim) -> m.Answer | Running[m.Answer]:
        turns = self._state.claim_turns(
            self, request.ticket, request.shard, request.first_chunk, arriving=request.arriving
        )
        return self._in_turns(
            turns, lambda leased: m.NotFound() if leased is None else self._leased(leased)
        )

    def _leased(self, leased: ClaimAnswer) -> m.Answer:
        nbytes = sum(len(packed) for packed in leased.checksums)
        if nbytes > _MOST_CHECKSUMS:
            self._state.release(self, leased.lease)
            return m.Refused(
                f"the claimed chunks have {nbytes} bytes of checksums; at most "
                f"{_MOST_CHECKSUMS} fit an answer",
                fatal=False,
            )
        return m.Leased(leased.lease, pack(leased.offsets), leased.num_tokens, leased.checksums)

    def _damaged(self, request: m.Damaged) -> m.Answer:
        self._state.damaged(self, request.lease, request.offsets)
        return m.Done(len(request.offsets))

    def _release(self, request: m.Release) -> m.Answer:
        self._state.release(self, request.number, keep_announcement=request.keep_announcement)
        return m.Done()

    def _reserve(self, request: m.Reserve) -> m.Answer | Running[m.Answer]:
        layout = self._state.layout(request.layout)
        turns = self._state.reserve_turns(
            self,
            layout,
            request.names,
            request.shard,
            groups=request.groups,
            store_options=request.store_options,
        )
        return self._in_turns(
            turns, lambda granted: m.Granted(granted.reservation, pack(granted.offsets))
        )

    def _commit(self, request: m.Commit) -> m.Answer | Running[m.Answer]:
        turns = self._state.commit_turns(
            self, request.reservation, request.chunks, request.checksums
        )
        return self._in_turns(turns, lambda mark: m.Done(len(request.chunks), mark))

    def _abandon(self, request: m.Abandon) -> m.Answer | Running[m.Answer]:
        return self._in_turns(
            self._state.abandon_turns(self, request.reservation), lambda _: m.Done()
        )

    def _clear(self, request: m.Clear) -> m.Answer | Running[m.Answer]:
        return self._in_turns(self._clear_turns(request), m.Done)

    def _clear_prompt(self, request: m.ClearPrompt) -> m.Answer | Running[m.Answer]:
        clear = PromptClear(request.query, request.only_end)
        return self._in_turns(self._state.clear_prompt_turns(clear), m.Done)

    def _last_clear(self, request: m.LastClear) -> m.Answer:
        return m.Done(self._state.cleared_ns(request.namespace))

    def _clear_turns(self, request: m.Clear) -> Turns[int]:
        removed = self._state.clear(request.namespace, at_ns=request.at_ns, tier=request.tier)
        for _ in range(_CLEAR_STEPS):
            if not self._state.has_chores:
                break
            yield TURN
            self._state.step()
        return removed

    def _flushed(self, request: m.Flushed) -> m.Answer:
        done = self._state.all_done(request.mark)
        self._unwritten = None if done else request.mark
        return m.Done(int(done), self._state.mark)

    def _reencode(self, request: m.Reencode) -> m.Answer:
        return m.ReencodeStatus(
            self._state.reencode(
                self, ReencodeRequest(request.tier, request.codec, request.namespace, request.query)
            ),
            ReencodeProgress(),
        )

    def _copy(self, request: m.Copy) -> m.Answer:
        copy = CopyRequest(
            request.tier, request.query, request.drop, request.source, request.namespace
        )
        return m.CopyStatus(self._state.copy(self, copy), CopyProgress())

    def _progress(self, request: m.Progress) -> m.Answer:
        number = request.number
        if (reencoded := self._state.reencodings.find(self, number)) is not None:
            return m.ReencodeStatus(number, reencoded)
        copied = self._state.moves.find(self, number)
        return m.NotFound() if copied is None else m.CopyStatus(number, copied)

    def _snapshot(self, request: m.Snapshot) -> m.Answer | Running[m.Answer]:
        if request.page == 0:
            self._seen = _Snapshot(*self._state.snapshot())
        if request.page != self._seen.page:
            raise ProtocolError(
                f"page {request.page} of a snapshot; the next one is {self._seen.page}, "
                "and 0 begins another"
            )
        seen = self._seen
        return self._in_turns(
            seen.take_turns(),
            lambda entries: m.Happened(
                snapshot_of(entries, seen.number), seen.number, more=seen.more
            ),
        )

    def _events(self, request: m.Events) -> m.Answer:
        batch = self._state.events(request.after)
        return m.Happened(batch.events, batch.next, batch.lost)

    def _find_undescribed(self, request: m.FindUndescribed) -> m.Answer:
        publisher = self._node.router_publisher
        return m.Undescribed([] if publisher is None else publisher.undescribed(request.names))

    def _describe(self, request: m.Describe) -> m.Answer:
        if self._node.router_publisher is not None:
            self._node.router_publisher.describe(request.chunks)
        return m.Done()

    def _report(self, request: m.Status) -> m.Answer:
        return m.Report(dict(self._node.status()))

    def _settings(self, request: m.ChangeSettings) -> m.Answer:
        if request.changes:
            self._node.settings.change(request.changes)
        return m.Report(self._node.settings.values())

    def _find_layout(self, request: m.FindLayout) -> m.Answer:
        return m.FoundLayout(self._state.layout_of(request.namespace))

    def _measure(self, request: m.Measure) -> m.Answer:
        return m.MetricSamples(self._node.measure())

    def _clients(self, request: m.Clients) -> m.Answer:
        return self._node.clients(request.first)

    def _kick(self, request: m.Kick) -> m.Answer:
        return self._node.kick(request.number, request.pid)

    def _use_device(self, request: m.UseDevice) -> m.Answer:
        self._watch_process()
        self.uses_device, self.pinned_bytes = True, max(0, request.pinned_bytes)
        self._state.place_near(self, request.numa_node if request.numa_node >= 0 else None)
        return m.Done()

    def _departed(self, request: m.Departed) -> m.Answer:
        self._node.departed(request.run, request.number, self.pid)
        return m.Done()

    def _end(self, request: m.Stop) -> m.Answer:
        self._node.stop()
        return m.Done()

    def _ping(self, request: m.Ping) -> m.Answer:
        return m.Done()

    def _found(self, found: Found, *, growth: bool = False) -> m.LookupAnswer:
        if found.arriving:
            self._arriving[found.ticket] = (
                self._state.num_arrived(found.ticket) if growth else math.inf
            )
        else:
            self._arriving.pop(found.ticket, None)
        return m.LookupAnswer.of(found)
