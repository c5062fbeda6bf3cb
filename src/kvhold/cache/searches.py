"""Lookups that go below RAM: what lower tiers have of a prompt is brought into the arena, and pinned for the lookup as it arrives.

    number = searches.begin(owner, query, layout)     # pins what RAM has; orders a probe
    searches.probed(number, places)                   # reserves memory for what tiers have; orders the reads
    searches.fetched(entry, ok) ...                   # the search is over when all of it has come or failed
    searches[number].presence()                       # at any time: what is pinned by now
    searches.finish(number, needed)                   # the end: but for these, all pins fall

Events in, orders out, no I/O. Several searches share what one of them fetches. A search that nobody waits for any more still brings
what it ordered: it is in RAM for the next one.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvhold.cache.chores import Turns, finish
from kvhold.cache.orders import Arrival, FetchOrder, Order, ProbeOrder
from kvhold.cache.planner import IN_RAM, Found, Marks, Planner
from kvhold.cache.presence import Extent, Need, Presence
from kvhold.cache.writes import Writes
from kvhold.core.keys import Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import Work
from kvhold.core.reasons import BEING_WRITTEN, CLEARED, DEADLINE, EXPIRED, NO_ROOM, TIER_DOWN
from kvhold.core.terms import Terms
from kvhold.tiers.ram import Entry, RamTier, Wanted
from kvhold.tiers.stack import Place

_MOST_PINS = 400  # in one step


@dataclass
class Search:
    """One lookup that waits.

    pinned: what is here for it; awaited: keys that are on their way; probing: tiers have not answered yet
    places: where tiers have what RAM has not; silent: some tier did not answer
    sources: of what came up for it, the number of its tier; faults: of what did not, why
    work: what computing costs whoever asked, who wants no more than is faster; began_s: when
    marks: when what was ordered will have come, and what is to follow it
    sample: one chunk is enough, to see how fast it comes; hurried: it makes do with what is here, because that is faster
    have_tokens: whoever asks has so many already, and needs no hit that is no longer; idle: no tier has more, so nothing comes up
    """

    owner: Hashable
    query: Query
    layout: Layout
    pinned: dict[bytes, Entry] = field(default_factory=dict)
    awaited: set[bytes] = field(default_factory=set)
    probing: bool = True
    places: dict[bytes, Place] = field(default_factory=dict)
    silent: bool = False
    sources: dict[bytes, int] = field(default_factory=dict)
    faults: dict[bytes, str] = field(default_factory=dict)
    work: Work | None = None
    began_s: float = 0.0
    marks: Marks = field(default_factory=Marks)
    sample: bool = False
    hurried: bool = False
    have_tokens: int = 0
    idle: bool = False

    @property
    def more(self) -> bool:
        """Whether of what is to come not all is ordered yet."""
        return self.marks.plan is not None and bool(self.marks.plan.more_bytes)

    def forgo_more(self) -> None:
        """What is not ordered yet will not be."""
        if self.marks.plan is not None:
            self.marks.plan = replace(self.marks.plan, more_bytes={})

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self.probing and not self.awaited and not self.more

    def declines(self, key: bytes) -> bool:
        """Whether it does without what a tier has, by choice."""
        if self.work is None or key in self.faults:
            return False
        return self.hurried if self.probing or key in self.awaited else key in self.places

    def presence(self) -> Presence[Entry]:
        """What is pinned, as a hit sees it."""
        return Presence(self.query, self.layout, self.pinned.get)

    def would_have(self, find: Callable[[bytes], Entry | None]) -> "Presence[Entry | Place]":
        """What is pinned, and what RAM (`find`) or tiers have and nobody has needed yet."""

        def anywhere(key: bytes) -> Entry | Place | None:
            lost = key in self.faults or key in self.awaited
            return self.pinned.get(key) or (None if lost else find(key) or self.places.get(key))

        return Presence(self.query, self.layout, anywhere)


@dataclass
class _Coming:
    """A reserved entry that is being read, and who waits for it."""

    arrival: Arrival
    searches: set[int] = field(default_factory=set)


class Searches:
    """All lookups below RAM of one cache."""

    def __init__(self, ram: RamTier, writes: Writes, metrics: Metrics, give_order: Callable[[Order], None], planner: Planner) -> None:
        self._planner = planner
        self._ram = ram
        self._writes = writes
        self._metrics = metrics
        self._give_order = give_order
        self._searches: dict[int, Search] = {}
        self._coming: dict[bytes, _Coming] = {}
        self._given_up: set[Entry] = set()
        self._clearing: list[bytes] = []

    def __contains__(self, number: int) -> bool:
        return number in self._searches

    def __getitem__(self, number: int) -> Search:
        return self._searches[number]

    @property
    def num_arriving(self) -> int:
        """Chunks that are being read, or whose read was given up and has not let go of their memory."""
        return len(self._coming) + len(self._given_up)

    def may_begin(self, query: Query) -> bool:
        """Not while the query's namespace is being cleared below RAM."""
        return not any(query.namespace.startswith(prefix) for prefix in self._clearing)

    def begin(
        self,
        number: int,
        owner: Hashable,
        query: Query,
        layout: Layout,
        work: Work | None = None,
        *,
        have_tokens: int = 0,
        sample: bool = False,
    ) -> None:
        """Ask the tiers for what RAM does not have; pin what it has, so that what arrives does not drive it out."""
        finish(self.begin_turns(number, owner, query, layout, work, have_tokens=have_tokens, sample=sample))

    def begin_turns(
        self,
        number: int,
        owner: Hashable,
        query: Query,
        layout: Layout,
        work: Work | None = None,
        *,
        have_tokens: int = 0,
        sample: bool = False,
    ) -> Turns[None]:
        """As `begin`, in steps."""
        search = Search(owner, query, layout, work=work, began_s=self._planner.clock(), sample=sample, have_tokens=have_tokens)
        self._searches[number] = search
        presence = Presence(query, layout, self._ram.find)
        needs = list(presence.needed((yield from presence.extent_turns())))
        for end in range(len(needs), 0, -_MOST_PINS):
            self._pin_present(search, needs[max(0, end - _MOST_PINS) : end])
            yield _MOST_PINS
        keys = yield from Presence(query, layout, self._find_or_coming).missing_turns()
        if number not in self._searches:
            return  # it was let go meanwhile
        if keys:
            self._give_order(ProbeOrder(number, keys))
        else:
            search.probing = False
            self._order(number, search)

    def probed(self, number: int, places: dict[bytes, Place], *, silent: bool = False) -> None:
        """The tiers have answered. Reserves memory from the prompt's start on, as far as there is room, and as it is worth waiting for."""
        search = self._searches.get(number)
        if search is None:
            return
        search.probing = False
        search.places, search.silent = places, silent
        self._planner.probed(self._planner.clock() - search.began_s)
        self._order(number, search)

    def is_too_slow(self, number: int, here: int) -> bool:
        """Whether what a search waits for takes longer than computing it. here: tokens that have come."""
        search = self._searches[number]
        if search.work is None or search.over:
            return False
        waited_s = self._planner.clock() - search.began_s
        search.hurried = self._planner.is_too_slow(
            number, search.work, search.query, search.layout, here, waited_s=waited_s, probing=search.probing, marks=search.marks
        )
        return search.hurried

    def _order(self, number: int, search: Search) -> None:
        """Reserve memory for what is to come next, and have it read."""
        search.marks.plan = None
        if not self.may_begin(search.query):
            search.places = {}  # cleared meanwhile
            return
        presence: Presence[Entry | Place] = Presence(search.query, search.layout, lambda key: self._find_anywhere(search, key))
        wanted = self._worth_ordering(number, search, presence, presence.extent())
        self._pin_present(search, wanted)
        arrivals: list[Arrival] = []
        for need in wanted:
            if need.key in search.pinned:
                continue
            if need.key not in self._coming:
                arrival = self._reserve(search, need, search.places.get(need.key))
                if arrival is None:
                    search.forgo_more()
                    break  # what follows would be of no use without it
                arrivals.append(arrival)
                self._coming[need.key] = _Coming(arrival)
                search.marks.by_tier[arrival.place.tier] = self._planner.ordered(arrival.place.tier, arrival.entry.nbytes)
            self._coming[need.key].searches.add(number)
            search.awaited.add(need.key)
        if not search.awaited:
            search.forgo_more()
        if arrivals:
            self._give_order(FetchOrder(arrivals))

    def _worth_ordering(self, number: int, search: Search, presence: Presence[Entry | Place], extent: Extent) -> list[Need[Entry | Place]]:
        """Of what was found, what is to be here next: all, but where the planner or a sample wants less. Sets the plan and `idle`."""
        search.idle = 0 < extent.num_tokens <= search.have_tokens
        if search.idle:
            return []
        needs = list(presence.needed(extent))
        if search.work is None and not search.sample:
            return needs
        tiers = [self._tier_of(search, need.key) for need in needs]
        if search.work is None:
            first = next((need.chunk for need, tier in zip(needs, tiers, strict=True) if tier != IN_RAM), -1)
            return [need for need in needs if need.chunk == first]
        coming = [need.key in self._coming for need in needs]
        here = search.presence().extent()
        came_from = {need.key: tier for need, tier in zip(needs, tiers, strict=True) if tier != IN_RAM}
        sources = sources_of(needs, extent.num_tokens, came_from | search.sources, self._planner.names)
        plan = self._planner.plan(number, search.work, search.layout, Found(search.query, here, extent, needs, tiers, coming, sources))
        search.marks.plan = plan
        for need, tier, comes in zip(needs, tiers, coming, strict=True):
            if comes and need.chunk < plan.chunks:
                search.marks.by_tier[tier] = self._planner.speeds[tier].ordered_bytes
        return [need for need in needs if need.chunk < plan.chunks]

    def _tier_of(self, search: Search, key: bytes) -> int:
        coming = self._coming.get(key)
        if coming is not None:
            return coming.arrival.place.tier
        if key in search.pinned or self._ram.find(key) is not None:
            return IN_RAM
        place = search.places.get(key)
        return place.tier if place is not None else IN_RAM  # it has just expired there

    def _find_anywhere(self, search: Search, key: bytes) -> Entry | Place | None:
        return self._find_or_coming(key) or (None if key in search.faults else search.places.get(key))

    def fetched(self, entry: Entry, ok: bool, *, expires_at: int = 0, why: str = TIER_DOWN) -> list[int]:
        """A read has ended, and its memory is the arena's again. Returns the searches that are over now.

        why: what was wrong, if it was not ok
        """
        coming = self._coming.pop(entry.key)
        self._planner.ended(coming.arrival.place.tier, entry.nbytes, ok=ok)
        if ok:
            entry.expires_at = expires_at
            cleared = self._ram.is_doomed(entry)
            self._ram.commit(entry)
            if cleared:
                self._metrics.add("kvhold_withdrawn_chunks", reason=CLEARED)
            else:
                self._metrics.add("kvhold_promoted_chunks")
                self._metrics.add("kvhold_promoted_bytes", entry.nbytes)
            if coming.arrival.place.tier > 0:
                terms = Terms(max_error=0, tenant=coming.arrival.tenant)  # what was lost of it was lost once
                self._writes.add(entry, coming.arrival.layout, terms, above=coming.arrival.place.tier)
        else:
            self._metrics.add("kvhold_withdrawn_chunks", reason=why)
            self._ram.abandon(entry)
        return self._tell(coming, entry, why if not ok else CLEARED if self._ram.is_doomed(entry) else EXPIRED)

    def given_up(self, entry: Entry) -> list[int]:
        """A read failed, but something may still write to its memory: nobody waits for it, and it stays reserved until `let_go`."""
        coming = self._coming.pop(entry.key)
        self._planner.ended(coming.arrival.place.tier, entry.nbytes, ok=False)
        self._given_up.add(entry)
        self._metrics.add("kvhold_withdrawn_chunks", reason=DEADLINE)
        return self._tell(coming, entry, DEADLINE)

    def let_go(self, entry: Entry) -> None:
        """Nothing writes to the memory of a read that was given up any more."""
        self._given_up.discard(entry)
        self._ram.abandon(entry)

    def finish(self, number: int, needed: Collection[Entry]) -> None:
        """End a search; but for those that are `needed`, all its pins fall. What is still on its way arrives all the same."""
        kept = {entry.key for entry in needed}
        for key, entry in self._end(number).pinned.items():
            if key not in kept:
                self._ram.unpin(entry)

    def drop(self, number: int) -> None:
        """Nobody waits for it any more."""
        search = self._end(number)
        for entry in search.pinned.values():
            self._ram.unpin(entry)

    def orphan(self, number: int) -> None:
        """Nobody waits for it, but what it finds is to come."""
        self._searches[number].owner = None

    def clear(self, prefix: bytes) -> None:
        """Until `cleared`, nothing with this prefix comes up."""
        self._clearing.append(prefix)

    def cleared(self, prefix: bytes) -> None:
        """The tiers hold nothing with this prefix any more."""
        self._clearing.remove(prefix)

    def _end(self, number: int) -> Search:
        search = self._searches.pop(number)
        for key in search.awaited:
            self._coming[key].searches.discard(number)
        return search

    def _tell(self, coming: _Coming, entry: Entry, why_not: str) -> list[int]:
        """Whoever waits has it now, or never will."""
        waiting = {number: self._searches[number] for number in coming.searches}
        arrived = self._ram.find(entry.key) is entry
        for search in waiting.values():
            search.awaited.discard(entry.key)
            if arrived:
                self._ram.pin(entry)
                search.pinned[entry.key] = entry
                search.sources[entry.key] = coming.arrival.place.tier
            else:
                search.faults[entry.key] = why_not
        for number, search in waiting.items():
            if search.more and not search.awaited:
                self._order(number, search)
        return [number for number, search in waiting.items() if search.over]

    def _reserve(self, search: Search, need: Need[Entry | Place], place: Place | None) -> Arrival | None:
        if place is None or self._ram.holds(need.key):  # somebody else is writing it, or a read that was given up still has its memory
            stuck = any(entry.key == need.key for entry in self._given_up)
            self._withdraw(search, need.key, DEADLINE if stuck else BEING_WRITTEN)
            return None
        first_token = need.chunk * search.layout.tokens_per_chunk
        wanted = Wanted(need.key, search.layout.chunk_bytes(need.group, need.num_tokens), need.parent)
        entries = self._ram.reserve_all([wanted], num_tokens=need.num_tokens, first_token=first_token)
        if entries is None:
            self._withdraw(search, need.key, NO_ROOM)
            return None
        return Arrival(entries[0], search.layout, place, search.query.tenant)

    def _withdraw(self, search: Search, key: bytes, why: str) -> None:
        self._metrics.add("kvhold_withdrawn_chunks", reason=why)
        search.faults[key] = why

    def _pin_present(self, search: Search, needs: Sequence[Need[Any]]) -> None:
        """Pin what is visible in RAM. Last one first, so that by age a prefix never goes before its continuation."""
        for need in reversed(needs):
            if need.key not in search.pinned and (entry := self._ram.find(need.key)) is not None:
                self._ram.pin(entry)
                search.pinned[need.key] = entry

    def _find_or_coming(self, key: bytes) -> Entry | None:
        coming = self._coming.get(key)
        return coming.arrival.entry if coming is not None else self._ram.find(key)


def sources_of(needs: Iterable[Need[Any]], num_tokens: int, came_from: dict[bytes, int], names: Sequence[str]) -> dict[str, int]:
    """Tokens of a hit by source: `ram`, or the slowest tier that anything came from which the hit needs of the chunk.

    came_from: key -> number of its tier in `names`, for what was not in RAM
    """
    slowest: dict[int, tuple[int, int]] = {}
    for need in needs:
        tier = came_from.get(need.key, -1)
        slowest[need.chunk] = max(tier, slowest.get(need.chunk, (-1, 0))[0]), need.num_tokens
    tokens: dict[str, int] = {}
    for tier, count in slowest.values():
        if tier >= 0:
            tokens[names[tier]] = tokens.get(names[tier], 0) + count
    in_ram = num_tokens - sum(tokens.values())
    return ({"ram": in_ram} if in_ram else {}) | tokens
