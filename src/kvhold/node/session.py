"""One client's conversation with the node, as a state machine: a message in, an answer out, no I/O.

A session is the owner of what its client holds. It ends with its connection, and with it all that it held.
"""

import math
from collections.abc import Callable
from typing import Any

from kvhold.cache.events import MOST, snapshot_of
from kvhold.cache.recode import Wish
from kvhold.cache.state import CacheState
from kvhold.core.api import Found, Recoded
from kvhold.core.errors import KVHoldError, ProtocolError
from kvhold.net import messages as m
from kvhold.tiers.ram import Entry

_MAX_NAME = 100  # it is shown in every status and log line


class Session:
    """After the handshake; `answer` takes one request at a time, in order."""

    def __init__(self, state: CacheState, hello: m.Hello, status: Callable[[], dict[str, Any]], stop: Callable[[], None]) -> None:
        self.name = hello.name[:_MAX_NAME]
        self.pid = hello.pid
        self._state = state
        self._status = status
        self._stop = stop
        self._arriving: dict[int, float] = {}  # tickets that it was told are arriving, and how much news of each it waits for
        self._unwritten: int | None = None  # the last mark that it was told is not written yet
        self._seen: tuple[int, list[Entry]] = (0, [])  # the snapshot that is being fetched
        self._verbs: dict[type, Callable[[Any], m.Answer]] = {
            m.Register: self._register,
            m.Lookup: self._lookup,
            m.Refresh: self._refresh,
            m.Outcome: self._outcome,
            m.Explain: self._explain,
            m.Prefetch: self._prefetch,
            m.Claim: self._claim,
            m.Damaged: self._damaged,
            m.Release: self._release,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abandon: self._abandon,
            m.Clear: self._clear,
            m.Flushed: self._flushed,
            m.Recode: self._recode,
            m.Progress: self._progress,
            m.Snapshot: self._snapshot,
            m.Events: self._events,
            m.Status: self._report,
            m.Stop: self._end,
            m.Ping: self._ping,
        }

    def answer(self, request: m.Request) -> m.Answer:
        """Do it. A request that makes no sense is refused, and the connection stays usable."""
        try:
            return self._verbs[type(request)](request)
        except ProtocolError:
            raise
        except KVHoldError as error:
            return m.Refused(str(error), fatal=False)

    def take_news(self) -> bool:
        """Whether something has ended, or grown, that this client was told is under way; said once."""
        news = [ticket for ticket, told in self._arriving.items() if self._state.is_over(ticket) or self._state.num_come(ticket) > told]
        for ticket in news:
            del self._arriving[ticket]
        written = self._unwritten is not None and self._state.all_done(self._unwritten)
        if written:
            self._unwritten = None
        return bool(news) or written

    @property
    def touches_memory(self) -> bool:
        """Whether the client may be reading or writing the arena now."""
        return self._state.touches_memory(self)

    def gone(self) -> None:
        """The connection is closed."""
        self._state.gone(self)

    def _register(self, request: m.Register) -> m.Answer:
        self._state.register(request.layout, request.namespace, request.terms)
        return m.Done()

    def _lookup(self, request: m.Lookup) -> m.Answer:
        return self._found(self._state.lookup(self, request.query, request.work, have_tokens=request.have_tokens))

    def _refresh(self, request: m.Refresh) -> m.Answer:
        return self._found(self._state.refresh(request.ticket, settle=request.settle), growth=request.growth)

    def _outcome(self, request: m.Outcome) -> m.Answer:
        self._state.planner.came_of(request.request, load_s=request.load_s, compute_s=request.compute_s)
        return m.Done()

    def _explain(self, request: m.Explain) -> m.Answer:
        return m.Explained(self._state.planner.explain(request.request))

    def _prefetch(self, request: m.Prefetch) -> m.Answer:
        self._state.prefetch(self, request.query)
        return m.Done()

    def _claim(self, request: m.Claim) -> m.Answer:
        lent = self._state.claim(self, request.ticket, request.shard, request.first_chunk, arriving=request.arriving)
        return m.Gone() if lent is None else m.Lent(lent.loan, lent.offsets, lent.num_tokens, lent.checksums)

    def _damaged(self, request: m.Damaged) -> m.Answer:
        self._state.damaged(self, request.loan, request.offsets)
        return m.Done(len(request.offsets))

    def _release(self, request: m.Release) -> m.Answer:
        self._state.release(self, request.number)
        return m.Done()

    def _reserve(self, request: m.Reserve) -> m.Answer:
        layout = self._state.layout(request.layout)
        granted = self._state.reserve(self, layout, request.names, request.shard, groups=request.groups, terms=request.terms)
        return m.Granted(granted.room, granted.offsets)

    def _commit(self, request: m.Commit) -> m.Answer:
        return m.Done(len(request.chunks), self._state.commit(self, request.room, request.chunks, request.checksums))

    def _abandon(self, request: m.Abandon) -> m.Answer:
        self._state.abandon(self, request.room)
        return m.Done()

    def _clear(self, request: m.Clear) -> m.Answer:
        return m.Done(self._state.clear(request.namespace))

    def _flushed(self, request: m.Flushed) -> m.Answer:
        done = self._state.all_done(request.mark)
        self._unwritten = None if done else request.mark
        return m.Done(int(done), self._state.mark)

    def _recode(self, request: m.Recode) -> m.Answer:
        return m.Recoding(self._state.recode(self, Wish(request.tier, request.codec, request.namespace, request.query)), Recoded())

    def _progress(self, request: m.Progress) -> m.Answer:
        recoded = self._state.recodings.find(self, request.number)
        return m.Gone() if recoded is None else m.Recoding(request.number, recoded)

    def _snapshot(self, request: m.Snapshot) -> m.Answer:
        if request.first == 0:
            self._seen = self._state.snapshot()
        if request.first < 0:
            raise ProtocolError(f"a snapshot from number {request.first} on; the first one is 0")
        number, entries = self._seen
        page = entries[request.first : request.first + MOST]
        more = request.first + len(page) < len(entries)
        if not more:
            self._seen = (number, [])
        return m.Happened(snapshot_of(page, number), number, more=more)

    def _events(self, request: m.Events) -> m.Answer:
        batch = self._state.events(request.after)
        return m.Happened(batch.events, batch.next, batch.lost)

    def _report(self, request: m.Status) -> m.Answer:
        return m.Report(self._status())

    def _end(self, request: m.Stop) -> m.Answer:
        self._stop()
        return m.Done()

    def _ping(self, request: m.Ping) -> m.Answer:
        return m.Done()

    def _found(self, found: Found, *, growth: bool = False) -> m.Found:
        if found.arriving:
            self._arriving[found.ticket] = self._state.num_come(found.ticket) if growth else math.inf
        else:
            self._arriving.pop(found.ticket, None)
        return m.Found(found.ticket, found.num_tokens, found.arriving, found.sources, found.reason)
