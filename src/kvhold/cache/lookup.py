"""Lookups and prefetches.

    waiting  -> another engine computes the next chunk (`computing.py`)
    probing  -> the tiers are probed for missing chunks
    arriving -> chunks are read and pinned; the hit may still grow
    settled  -> the hit has a ticket (`leases.py`), or there is none

Between two steps, a lookup may be released or cleared. No I/O.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvhold.cache.answers import Answers
from kvhold.cache.chores import TURN, Chores, Turns, emptied_dicts, unless_short
from kvhold.cache.computing import AnyWait, Computing, Wait, WaitEnd
from kvhold.cache.handover_pins import HandoverPins
from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.index.missing import ExpectedChunk
from kvhold.cache.index.pins import Pins
from kvhold.cache.index.presence import Extent, FirstKeys, Prefix, Presence
from kvhold.cache.leases import ClaimAnswer, Leases, Owner
from kvhold.cache.peer_waits import PeerWaits
from kvhold.cache.planner import Planner
from kvhold.cache.query_limits import check_query
from kvhold.cache.transfer.commands import ProbeCommand
from kvhold.cache.transfer.search import Search
from kvhold.cache.transfer.searches import Searches
from kvhold.cache.transfer.use_queue import UseQueue
from kvhold.cache.usage import LookupUsage
from kvhold.cache.values import ChunkValues, split_runs
from kvhold.core.api import Found, Uses
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import Query
from kvhold.core.layout import Layout
from kvhold.core.planning import ComputeCost, ComputeIntent, RequestInfo
from kvhold.core.reasons import CLEARED, SLOWER
from kvhold.core.tracing import TraceContext
from kvhold.tiers.ram import Entry, RamTier

_MOST_NOTED = 64  # per step
_MOST_USED = 16  # per step
_USED_UNITS = 7  # per present chunk, if all are leaves
_LEARNING = 4  # factor of a lookup's time with a learning policy
_LOOKUP_ATTEMPTS = 3  # a clear repeats a lookup
_MOST_FUTILE = 2  # waits that brought nothing


@dataclass(frozen=True)
class _Asked:
    owner: Owner
    query: Query
    layout: Layout
    num_keys: int
    cost: ComputeCost | None
    have_tokens: int
    uses: Uses
    intent: ComputeIntent | None
    trace: TraceContext
    probes: list[ProbeCommand] | None
    info: RequestInfo | None

    def search(self, wait: AnyWait | None = None) -> Search:
        return Search(
            self.owner,
            self.query,
            self.layout,
            self.num_keys,
            cost=self.cost,
            have_tokens=self.have_tokens,
            intent=self.intent,
            wait=wait,
            trace=self.trace,
            probes=self.probes,
            uses=self.uses,
            info=self.info,
        )


@dataclass(frozen=True)
class _Looked:
    """missing:    the first missing chunk, if it is expected back"""

    number: int
    asked: _Asked
    num_clears: int
    presence: Presence[Entry]
    prefix: Prefix[Entry]
    missing: ExpectedChunk | None

    @property
    def extent(self) -> Extent:
        return self.prefix.extent


class Lookups:
    def __init__(
        self,
        ram: RamTier,
        usage: LookupUsage,
        chores: Chores,
        pins: Pins,
        leases: Leases,
        searches: Searches,
        planner: Planner,
        computing: Computing,
        peer_waits: PeerWaits,
        handovers: HandoverPins,
        answers: Answers,
        values: ChunkValues,
        uses: UseQueue,
        numbers: Iterator[int],
        *,
        has_tiers: bool,
        find_layout: Callable[[bytes], Layout],
    ) -> None:
        """find_layout: by fingerprint; raises LayoutError."""
        self._ram = ram
        self._usage = usage
        self._chores = chores
        self._pins = pins
        self._leases = leases
        self._searches = searches
        self._planner = planner
        self._computing = computing
        self._peer_waits = peer_waits
        self._handovers = handovers
        self._answers = answers
        self._values = values
        self._uses = uses
        self._numbers = numbers
        self._has_tiers = has_tiers
        self._find_layout = find_layout
        self._has_news = False
        # called when a search has ended
        self.when_over: Callable[[int], None] = lambda _: None

    def lookup_turns(
        self,
        owner: Owner,
        query: Query,
        cost: ComputeCost | None = None,
        *,
        have_tokens: int = 0,
        uses: Uses = "all",
        intent: ComputeIntent | None = None,
        trace: TraceContext = "",
        probes: list[ProbeCommand] | None = None,
        info: RequestInfo | None = None,
    ) -> Turns[Found]:
        layout = self._find_layout(query.layout)
        notes_use = self._ram.policy.learns and uses != "none"
        num_keys = check_query(layout, query) * (_LEARNING if notes_use else 1)
        asked = _Asked(
            owner, query, layout, num_keys, cost, have_tokens, uses, intent, trace, probes, info
        )
        if intent is not None:
            begin = self._handovers.begin_turns(owner, query, layout, intent)
            yield from unless_short(num_keys, begin)
        return (yield from self._look_up(asked))

    def refresh_turns(self, ticket: int, *, settle: bool = False) -> Turns[Found]:
        num_keys = self._searches[ticket].num_keys if ticket in self._searches else 0
        return (yield from unless_short(num_keys, self._refresh(ticket, settle=settle)))

    def claim_turns(
        self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, arriving: bool = False
    ) -> Turns[ClaimAnswer | None]:
        """See `Leases.claim_turns`. arriving: do not settle the hit"""
        if first_chunk < 0:
            raise ProtocolError(f"first_chunk is {first_chunk}; it must be 0 or more")
        while self._is_arriving(ticket):
            search = self._searches[ticket]
            if search.settling:
                yield TURN
            elif not arriving:
                yield from self.refresh_turns(ticket, settle=True)
            elif shard not in search.query.shard_numbers:
                break
            else:
                extent = yield from search.here.extent_turns()
                if self._searches.get(ticket) is search and not search.settling:
                    return (
                        yield from self._lend_arriving(
                            owner, ticket, search, shard, first_chunk, extent
                        )
                    )
        return (
            yield from self._leases.claim_turns(
                owner, ticket, shard, first_chunk, is_arriving=self._is_arriving(ticket)
            )
        )

    def prefetch_turns(self, owner: Owner, query: Query) -> Turns[None]:
        layout = self._find_layout(query.layout)
        num_keys = check_query(layout, query)
        return (yield from unless_short(num_keys, self._prefetch(query, layout, num_keys)))

    def is_over(self, ticket: int) -> bool:
        """Nothing more will arrive, or a wait is over. Cheap."""
        search = self._searches.get(ticket)
        if search is None or search.wait is None:
            return search is None or search.over
        return self._computing.end_of(search.wait) is not None

    def num_arrived(self, ticket: int) -> int:
        return len(self._searches[ticket].sources) if ticket in self._searches else 0

    def take_news(self) -> bool:
        news, self._has_news = self._has_news, False
        return self._computing.take_news() or news

    def release(self, owner: Owner, number: int) -> bool:
        """False: the owner has none."""
        search = self._searches.get(number)
        if search is None or search.owner != owner:
            return False
        self._searches.take(number)
        self._leases.withdraw(owner, number)
        if search.wait is not None:
            self._end_wait(search, WaitEnd.CUT_SHORT)
        self._end_handover(search.query, search.intent)
        self._planner.settled(number, 0, waited_s=self._waited_s(search))
        self._chores.run(self._count_and_let_go(number, search), search.num_keys)
        return True

    def search_ended(self, number: int) -> None:
        if self._searches[number].owner is None:
            self._let_go(self._searches.take(number))
        self._has_news = True
        self.when_over(number)

    def _look_up(self, asked: _Asked) -> Turns[Found]:
        """A short lookup is one step until its chunks are pinned."""
        missing, notes_use = None, self._ram.policy.learns
        for _ in range(_LOOKUP_ATTEMPTS):
            num_clears = self._ram.num_clears
            held: list[Entry] = []
            try:
                presence = Presence(
                    asked.query, asked.layout, self._pins.finder(asked.num_keys, held)
                )
                prefix = yield from unless_short(asked.num_keys, presence.take_turns())
                if notes_use:
                    notes_use = False
                    if asked.cost is not None:
                        missing = self._answers.expected_back(presence.gap(prefix.extent))
                    yield from unless_short(asked.num_keys, self._note_use_turns(asked, prefix))
                number = next(self._numbers)
                looked = _Looked(number, asked, num_clears, presence, prefix, missing)
                found = yield from self._answer_or_search(looked)
                if found is not None:
                    return found
            finally:
                self._pins.unpin(held)
        return Found(0, 0, reason=CLEARED)

    def _answer_or_search(self, looked: _Looked) -> Turns[Found | None]:
        """None: memory was cleared."""
        asked, extent, declined = looked.asked, looked.extent, False
        wait = self._computing.begin_wait(
            asked.owner, asked.query, asked.layout, extent.num_tokens, asked.intent
        )
        if wait is not None:
            return (yield from unless_short(asked.num_keys, self._search(looked, wait)))
        if self._is_worth_a_search(asked.query, looked.presence, extent):
            declined = (
                asked.cost is not None
                and not self._peer_waits.has_some(asked.intent)
                and not self._planner.pays(asked.cost, asked.query, asked.layout, extent)
            )
            if not declined:
                return (yield from unless_short(asked.num_keys, self._search(looked)))
        # in the same turn as `begin_wait`, so the first of two lookups announces
        is_announced = self._computing.announce(
            asked.owner,
            looked.number,
            asked.query,
            asked.layout,
            extent.num_tokens,
            asked.intent,
        )
        found = yield from self._answer_from_ram(looked, declined, is_announced)
        if found is None:
            self._computing.withdraw(asked.owner, looked.number)
        elif declined and self._planner.is_to_try():
            yield from self._search_for_nobody(
                asked.query, asked.layout, asked.num_keys, sample=True
            )
        return found

    def _search(self, looked: _Looked, wait: AnyWait | None = None) -> Turns[Found | None]:
        number, asked = looked.number, looked.asked
        self._leases.promise(asked.owner, number)
        search = self._peer_waits.marked(asked.search(wait))
        yield from self._searches.begin_turns(number, search, looked.prefix)
        if looked.num_clears != self._ram.num_clears:
            self._forget_search(number, asked.owner)
            return None
        if self._searches.get(number) is search:
            search.missing = looked.missing
            self._note_wait(number, search)
        return (yield from self._refresh(number))

    def _answer_from_ram(
        self, looked: _Looked, declined: bool, is_announced: bool
    ) -> Turns[Found | None]:
        asked = looked.asked
        pinned = yield from unless_short(asked.num_keys, looked.prefix.in_order_turns())
        yield from self._pins.pin_turns(pinned)
        if looked.num_clears != self._ram.num_clears:
            self._pins.unpin(pinned)
            return None
        answer = self._judge(looked, declined=declined)
        answer = replace(answer, announcement=looked.number if is_announced else 0)
        if answer.ticket:
            self._leases.issue(
                asked.owner, answer, asked.query, asked.layout, looked.prefix, pinned
            )
        else:
            self._pins.unpin(pinned)
        self._end_handover(asked.query, asked.intent)
        return answer

    def _end_handover(self, query: Query, intent: ComputeIntent | None) -> None:
        """A decode engine's hit now pins the chunks; or it asks no more."""
        if intent is not None and intent.handover is not None:
            self._handovers.read(query)

    def _note_use_turns(self, asked: _Asked, prefix: Prefix[Entry]) -> Turns[None]:
        query, layout, uses = asked.query, asked.layout, asked.uses
        if uses == "none":
            return
        policy, keys, extent = self._ram.policy, FirstKeys(query, layout), prefix.extent
        lookup = policy.looked_up(keys, extent.whole)
        runs = self._values.runs(query, layout, max(len(keys), extent.chunks), asked.cost)
        recorded = extent.chunks  # from here on, in an earlier row
        for (group, _), row in sorted(prefix.rows.items(), key=lambda item: item[0] != keys.place):
            yield 1
            first = needed_chunks(layout, group, extent.num_tokens).start
            for is_repeat, begin, end in (
                (False, first, recorded),
                (True, max(first, recorded), len(row)),
            ):
                for run in split_runs(runs, begin, end, _MOST_USED):
                    here = [entry.key for entry in row[run.first : run.last] if entry is not None]
                    policy.used(here, lookup, run.value, is_repeat=is_repeat)
                    yield _USED_UNITS * len(here)
            recorded = min(recorded, first)
        for run in split_runs(runs, extent.whole, len(keys), _MOST_NOTED):
            policy.missed(keys[run.first : run.last], lookup, run.value, if_known=uses == "known")
            yield _MOST_NOTED
        if runs:
            self._uses.add(query, layout, lookup, runs[-1].value)

    def _forget_search(self, number: int, owner: Owner) -> None:
        self._leases.withdraw(owner, number)
        if number in self._searches:
            search = self._searches.take(number)
            if search.wait is not None:
                self._end_wait(search, WaitEnd.CUT_SHORT)
            self._let_go(search)

    def _judge(self, looked: _Looked, *, declined: bool) -> Found:
        number, asked = looked.number, looked.asked
        answer = self._answers.answer(number, asked.owner, looked.presence, looked.extent)
        if asked.cost is not None:
            answer = self._if_worth_loading(number, answer, asked, asked.cost, declined)
            gap = looked.presence.gap(looked.extent)
            self._planner.missed(number, self._answers.describe(answer.reason, gap, looked.missing))
        self._usage.count(number, asked, answer, looked.presence.asked_tokens)
        return answer

    def _if_worth_loading(
        self, number: int, answer: Found, asked: _Asked, cost: ComputeCost, declined: bool
    ) -> Found:
        query, layout, num_tokens = asked.query, asked.layout, answer.num_tokens
        worth = self._planner.is_worth_loading(cost, query, layout, num_tokens)
        self._planner.decided_here(
            number, cost, query, layout, num_tokens, worth=worth, declined=declined
        )
        if num_tokens and not worth:
            return Found(0, 0, reason=SLOWER)
        return replace(answer, reason=SLOWER) if declined else answer

    def _prefetch(self, query: Query, layout: Layout, num_keys: int) -> Turns[None]:
        held: list[Entry] = []
        try:
            presence = Presence(query, layout, self._pins.finder(num_keys, held))
            prefix = yield from presence.take_turns()
            if self._is_worth_a_search(query, presence, prefix.extent):
                yield from self._search_for_nobody(query, layout, num_keys, prefix=prefix)
            else:
                present = yield from prefix.in_order_turns()
                yield from self._pins.pin_turns(present)
                self._pins.unpin(present)
        finally:
            self._pins.unpin(held)

    def _search_for_nobody(
        self,
        query: Query,
        layout: Layout,
        num_keys: int,
        *,
        prefix: Prefix[Entry] | None = None,
        sample: bool = False,
    ) -> Turns[None]:
        number, clears, has_begun = next(self._numbers), self._ram.num_clears, False
        held: list[Entry] = []
        try:
            if prefix is None:
                presence = Presence(query, layout, self._pins.finder(num_keys, held))
                prefix = yield from presence.take_turns()
            search = Search(None, query, layout, num_keys, sample=sample)
            yield from self._searches.begin_turns(number, search, prefix)
            has_begun = clears == self._ram.num_clears
        finally:  # the caller may have closed this generator
            if number in self._searches and not has_begun:
                self._let_go(self._searches.take(number))
            self._pins.unpin(held)

    def _is_worth_a_search(self, query: Query, presence: Presence[Entry], extent: Extent) -> bool:
        return (
            self._has_tiers
            and extent.num_tokens < presence.asked_tokens
            and self._searches.may_begin(query)
        )

    def _refresh(self, ticket: int, *, settle: bool = False) -> Turns[Found]:
        while self._is_arriving(ticket):
            search = self._searches[ticket]
            if search.settling:
                yield TURN  # another call settles it
                continue
            if search.wait is not None:
                end = self._computing.end_of(search.wait)
                if end is None and not settle:
                    extent = yield from search.here.extent_turns()
                    if not self.is_over(ticket) and search.wait is not None:
                        return Found(ticket, extent.num_tokens, arriving=True, waits=True)
                    continue
                self._end_wait(search, end or WaitEnd.CUT_SHORT)
                search.requesting = True
                probes = self._has_tiers and self._searches.may_begin(search.query)
                yield from self._searches.resume_turns(ticket, search, has_tiers=probes)
                continue
            if settle or search.over:
                if search.intent is not None and not search.is_announced:
                    extent = yield from search.here.extent_turns()
                    if self._searches.get(ticket) is not search or search.settling:
                        continue
                    if not settle and self._waits_again(ticket, search, extent):
                        return Found(ticket, extent.num_tokens, arriving=True, waits=True)
                    self._announce(ticket, search, extent)
                return (yield from self._settle(ticket))
            extent = yield from search.here.extent_turns()
            if not self.is_over(ticket) and not search.settling:
                if not self._searches.is_too_slow(ticket, extent.num_tokens):
                    return Found(ticket, extent.num_tokens, arriving=True)
                settle = True
        return self._leases.found(ticket) or Found(0, 0)

    def _waits_again(self, ticket: int, search: Search, extent: Extent) -> bool:
        if search.wait is not None or search.futile >= _MOST_FUTILE:
            return search.wait is not None
        search.wait = self._computing.begin_wait(
            search.owner,
            search.query,
            search.layout,
            extent.num_tokens,
            search.intent,
            waited_s=search.waited_s,
        ) or self._peer_waits.next(search, extent, self._waited_s(search))
        self._note_wait(ticket, search)
        return search.wait is not None

    def _note_wait(self, ticket: int, search: Search) -> None:
        if isinstance(wait := search.wait, Wait):
            self._planner.decided_to_wait(
                ticket,
                wait.cost,
                search.query,
                search.layout,
                hit_tokens=wait.hit_tokens,
                end_tokens=wait.end_tokens,
                wait_s=self._computing.expected_s(wait),
                is_plan=search.cost is not None,
            )

    def _end_wait(self, search: Search, end: WaitEnd) -> None:
        assert search.wait is not None
        self._computing.leave(search.wait, end)
        self._peer_waits.leave(search)
        began_s, search.wait = min(search.began_s, search.wait.began_s), None
        search.futile += end.is_futile
        now_s = self._planner.clock()
        search.waited_s, search.began_s = search.waited_s + now_s - began_s, now_s

    def _announce(self, ticket: int, search: Search, extent: Extent) -> None:
        search.is_announced = self._computing.announce(
            search.owner, ticket, search.query, search.layout, extent.num_tokens, search.intent
        )

    def _is_arriving(self, ticket: int) -> bool:
        return ticket in self._searches and self._searches[ticket].owner is not None

    def _lend_arriving(
        self,
        owner: Owner,
        ticket: int,
        search: Search,
        shard: int,
        first_chunk: int,
        extent: Extent,
    ) -> Turns[ClaimAnswer | None]:
        rows = search.here.shard_rows(shard, extent)
        num_tokens = [search.layout.tokens_per_chunk] * max(0, len(rows[0]) - first_chunk)
        return (
            yield from self._leases.lend_turns(
                owner,
                rows,
                num_tokens,
                first_chunk,
                may_go_on=lambda: self._searches.get(ticket) is search,
            )
        )

    def _settle(self, number: int) -> Turns[Found]:
        search, is_settled = self._searches[number], False
        search.settling = True
        try:
            prefix = yield from search.here.take_turns()
            answer = yield from self._answers.answer_turns(number, search, prefix)
            if search.cost is not None and not self._planner.is_worth_loading(
                search.cost, search.query, search.layout, prefix.extent.num_tokens
            ):
                answer = Found(0, 0, reason=SLOWER)
            pinned = (yield from self._pins.hold_turns(prefix)) if answer.ticket else []
            is_settled = True
            if self._searches.get(number) is not search:
                self._pins.unpin(pinned)
                return Found(0, 0)
            waited_s, loaded = self._waited_s(search), search.origins.loaded()
            if search.cost is not None or search.intent is not None:
                self._planner.settled(number, answer.num_tokens, waited_s=waited_s, loaded=loaded)
                gap = self._answers.gap_anywhere(search.here, prefix.extent, search)
                self._planner.missed(
                    number, self._answers.describe(answer.reason, gap, search.missing)
                )
            asked = search.here.asked_tokens
            self._usage.count(number, search, answer, asked, waited_s=waited_s, loaded=loaded)
            answer = replace(answer, announcement=number if search.is_announced else 0)
            self._searches.take(number)
            self._leases.withdraw(search.owner, number)
            if answer.ticket:
                self._leases.issue(
                    search.owner, answer, search.query, search.layout, prefix, pinned
                )
            self._end_handover(search.query, search.intent)
            self._let_go(search)
            return answer
        finally:
            search.settling = False
            if not is_settled:
                search.forget_what_is_here()

    def _waited_s(self, search: Search) -> float:
        return search.waited_s + self._planner.clock() - search.began_s

    def _count_and_let_go(self, number: int, search: Search) -> Turns[None]:
        try:
            presence = Presence(search.query, search.layout, search.pinned.get)
            prefix = yield from presence.take_turns()
            answer = yield from self._answers.answer_turns(number, search, prefix)
            waited_s = self._waited_s(search)
            self._usage.count(number, search, answer, search.here.asked_tokens, waited_s=waited_s)
            yield from prefix.empty_turns()
        finally:
            self._let_go(search)

    def _let_go(self, search: Search) -> None:
        self._chores.run(self._let_go_turns(search), search.num_keys)

    def _let_go_turns(self, search: Search) -> Turns[None]:
        for part in search.pinned.emptied():
            self._ram.unpin_all(part)
            yield len(part) // 3
        for sources in search.sources.emptied():
            yield len(sources) // 4
        yield from emptied_dicts(search.places, search.faults, search.unknown)
