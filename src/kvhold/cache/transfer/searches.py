"""Loads a prompt's chunks from lower tiers, and pins them on arrival. No I/O.

One read serves all searches. Between two steps, a search may be cleared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhold.cache.chores import Turns
from kvhold.cache.index.presence import Need, Prefix, Presence
from kvhold.cache.planner import IN_RAM, ChunkPlaces, Planner
from kvhold.cache.transfer.commands import (
    MOST_READS,
    Command,
    FetchCommand,
    PendingRead,
    ProbeCommand,
)
from kvhold.cache.transfer.search import Search
from kvhold.cache.transfer.write_queue import WriteQueue
from kvhold.core.keys import Query
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import (
    BEING_WRITTEN,
    CLEARED,
    DEADLINE,
    EXPIRED,
    NO_ROOM,
    TIER_DOWN,
    Reason,
)
from kvhold.core.store_options import StoreOptions
from kvhold.tiers.base import Origin
from kvhold.tiers.ram import Entry, RamTier, Wanted
from kvhold.tiers.stack import TierPlace

_MOST_PINS = 64  # per step
_MOST_RESERVED = 16  # per step


@dataclass
class _Coming:
    pending_read: PendingRead
    searches: set[int] = field(default_factory=set)


@dataclass
class _Survey:
    """slowest: `[chunk]`, the lowest tier that it needs, or IN_RAM
    below:   `{tier: [chunk]}` bytes to read; 1 for a read in progress
    """

    nbytes: list[int]
    slowest: list[int]
    below: dict[int, list[int]] = field(default_factory=dict)
    coming: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, num_chunks: int) -> "_Survey":
        return cls([0] * num_chunks, [IN_RAM] * num_chunks)

    def add(self, chunk: int, nbytes: int, tier: int, *, is_coming: bool) -> None:
        self.nbytes[chunk] += nbytes
        if tier == IN_RAM:
            return
        self.slowest[chunk] = max(self.slowest[chunk], tier)
        if tier not in self.below:
            self.below[tier] = [0] * len(self.nbytes)
        self.below[tier][chunk] += 1 if is_coming else nbytes
        if is_coming:
            self.coming.setdefault(tier, chunk)


class Searches:
    def __init__(
        self,
        ram: RamTier,
        writes: WriteQueue,
        metrics: Metrics,
        give_command: Callable[[Command], None],
        planner: Planner,
        *,
        run: Callable[[Turns[None], int], None],
        unpin: Callable[[list[Entry]], None],
        is_over: Callable[[int], None],
    ) -> None:
        self._planner = planner
        self._ram = ram
        self._writes = writes
        self._metrics = metrics
        self._give_command = give_command
        self._run = run
        self._unpin = unpin
        self._is_over = is_over
        self._searches: dict[int, Search] = {}
        self._coming: dict[bytes, _Coming] = {}
        self._given_up: set[Entry] = set()
        self._clearing: list[bytes] = []

    def __contains__(self, number: int) -> bool:
        return number in self._searches

    def __getitem__(self, number: int) -> Search:
        return self._searches[number]

    def get(self, number: int) -> Search | None:
        return self._searches.get(number)

    @property
    def num_arriving(self) -> int:
        return len(self._coming) + len(self._given_up)

    def may_begin(self, query: Query) -> bool:
        return not any(query.namespace.startswith(prefix) for prefix in self._clearing)

    def begin_turns(self, number: int, search: Search, prefix: Prefix[Entry]) -> Turns[None]:
        """prefix: the caller holds its entries until the last step"""
        search.began_s, search.probing = self._planner.clock(), search.wait is None
        self._searches[number] = search
        present = yield from prefix.in_order_turns()
        while present:
            part = present[-_MOST_PINS:]
            del present[-_MOST_PINS:]
            self._pin(search, part)
            yield _MOST_PINS
        search.here.remember(prefix)
        if search.wait is not None:
            return
        presence = Presence(search.query, search.layout, self._find_or_coming)
        keys = yield from presence.missing_turns()
        if self._searches.get(number) is not search:
            return
        if keys and search.probes is not None:
            search.probes.append(_probe(number, search, keys))
        elif keys:
            self._give_command(_probe(number, search, keys))
        else:
            search.probing, search.requesting = False, True
            yield from self._request_turns(number, search)

    def resume_turns(self, number: int, search: Search, *, has_tiers: bool) -> Turns[None]:
        held: list[Entry] = []
        try:
            self._unpin_cleared(search)

            def find(key: bytes) -> Entry | None:
                entry = search.pinned.get(key)
                if entry is None and (entry := self._ram.find(key)) is not None:
                    self._ram.hold(entry)
                    held.append(entry)
                return entry

            prefix = yield from Presence(search.query, search.layout, find).take_turns()
            present = yield from prefix.in_order_turns()
            while present and self._goes_on(number, search):
                part = present[-_MOST_PINS:]
                del present[-_MOST_PINS:]
                self._pin(search, [one for one in part if self._ram.find(one.key) is one])
                yield _MOST_PINS
            if not has_tiers or not self._goes_on(number, search):
                return
            missing = Presence(search.query, search.layout, self._find_or_coming).missing_turns()
            keys = yield from missing
            if keys and self._goes_on(number, search):
                search.probing = True
                self._give_command(_probe(number, search, keys))
            elif self._goes_on(number, search):
                yield from self._request_turns(number, search)
        finally:
            self._unpin(held)
            search.requesting = False

    def _unpin_cleared(self, search: Search) -> None:
        cleared = [entry for entry in search.pinned.values() if self._ram.is_doomed(entry)]
        if cleared:
            for entry in cleared:
                del search.pinned[entry.key]
            search.forget_what_is_here()
            self._unpin(cleared)

    def _goes_on(self, number: int, search: Search) -> bool:
        return self._searches.get(number) is search and not search.settling

    def probed(
        self,
        number: int,
        places: dict[bytes, TierPlace],
        *,
        silent: Reason | None = None,
        unknown: dict[bytes, Reason] | None = None,
    ) -> None:
        search = self._searches.get(number)
        if search is None:
            return
        search.probing = False
        search.places, search.silent, search.unknown = places, silent, unknown or {}
        self._planner.probed(self._planner.clock() - search.began_s)
        self._request(number, search)

    def is_too_slow(self, number: int, here: int) -> bool:
        search = self._searches[number]
        if search.cost is None or search.requesting or search.over:
            return False
        waited_s = self._planner.clock() - search.began_s
        search.hurried = self._planner.is_too_slow(
            number,
            search.cost,
            search.query,
            search.layout,
            here,
            waited_s=waited_s,
            probing=search.probing,
            marks=search.marks,
        )
        return search.hurried

    def _request(self, number: int, search: Search) -> None:
        search.requesting = True
        self._run(self._request_turns(number, search), search.num_keys)

    def _request_turns(self, number: int, search: Search) -> Turns[None]:
        held: list[Entry] = []
        pending_reads: list[PendingRead] = []
        search.marks.plan = None
        try:
            presence: Presence[Entry | TierPlace] = Presence(
                search.query, search.layout, self._finder_anywhere(search, held)
            )
            prefix = yield from presence.take_turns()
            chunks = yield from self._worth_requesting_turns(number, search, presence, prefix)
            parts = _parts(chunks, max(1, _MOST_RESERVED // len(prefix.rows)))
            for part in reversed(parts):
                if not self._may_request(number, search):
                    return
                found = [need.found for need in presence.needs(prefix, part)]
                self._pin(
                    search,
                    [
                        entry
                        for entry in found
                        if isinstance(entry, Entry) and self._ram.find(entry.key) is entry
                    ],
                )
                yield 3 * len(found)
            for part in parts:
                if not self._may_request(number, search):
                    return
                needs = presence.needs(prefix, part)
                has_room = self._reserve_all(number, search, needs, pending_reads)
                if len(pending_reads) >= MOST_READS:
                    self._give_command(FetchCommand(pending_reads))
                    pending_reads = []
                if not has_room:
                    search.forgo_more()
                    break
                yield 16 * len(needs)
            yield from prefix.empty_turns()
        finally:
            if pending_reads:
                self._give_command(FetchCommand(pending_reads))
            self._unpin(held)
            search.requesting = False
            if not search.awaited:
                search.forgo_more()
            if search.over and self._searches.get(number) is search:
                self._is_over(number)

    def _may_request(self, number: int, search: Search) -> bool:
        if not self.may_begin(search.query):
            search.places = {}
            return False
        return self._searches.get(number) is search and not search.settling

    def _reserve_all(
        self,
        number: int,
        search: Search,
        needs: Sequence[Need[Entry | TierPlace]],
        pending_reads: list[PendingRead],
    ) -> bool:
        for need in needs:
            if need.key in search.pinned:
                continue
            if need.key not in self._coming:
                pending_read = self._reserve(search, need, search.places.get(need.key))
                if pending_read is None:
                    return False
                pending_reads.append(pending_read)
                self._coming[need.key] = _Coming(pending_read)
                search.marks.by_tier[pending_read.place.tier] = self._planner.requested(
                    pending_read.place.tier, pending_read.entry.nbytes
                )
            self._coming[need.key].searches.add(number)
            search.awaited.add(need.key)
        return True

    def _worth_requesting_turns(
        self,
        number: int,
        search: Search,
        presence: Presence[Entry | TierPlace],
        prefix: Prefix[Entry | TierPlace],
    ) -> Turns[range]:
        extent, nothing = prefix.extent, range(0)
        search.idle = 0 < extent.num_tokens <= search.have_tokens
        if search.idle or not self._may_request(number, search):
            return nothing
        if search.cost is None and not search.sample:
            return range(extent.chunks)
        survey = _Survey.of(extent.chunks)
        for part in _parts(range(extent.chunks), max(1, _MOST_PINS // 2 // len(prefix.rows))):
            needs = presence.needs(prefix, part)
            for need in needs:
                tier = self._tier_of(search, need.key)
                nbytes = search.layout.chunk_bytes(need.group, need.num_tokens)
                survey.add(need.chunk, nbytes, tier, is_coming=need.key in self._coming)
                if (tier_before := search.sources.get(need.key)) is not None:
                    survey.slowest[need.chunk] = max(survey.slowest[need.chunk], tier_before)
            if search.cost is None and (
                below := [
                    chunk for chunk in part if any(row[chunk] for row in survey.below.values())
                ]
            ):
                return range(below[0], below[0] + 1)
            yield 3 * len(needs)
        if search.cost is None:
            return nothing
        here = yield from search.here.extent_turns()
        sources = _sources(
            survey.slowest, extent.num_tokens, search.layout.tokens_per_chunk, self._planner.names
        )
        found = ChunkPlaces(search.query, here, extent, survey.nbytes, survey.below, sources)
        plan = search.marks.plan = self._planner.plan(number, search.cost, search.layout, found)
        for tier, first in survey.coming.items():
            if first < plan.chunks:
                search.marks.by_tier[tier] = self._planner.speeds[tier].requested_bytes
        return range(plan.chunks)

    def _tier_of(self, search: Search, key: bytes) -> int:
        coming = self._coming.get(key)
        if coming is not None:
            return coming.pending_read.place.tier
        if key in search.pinned or self._ram.find(key) is not None:
            return IN_RAM
        place = search.places.get(key)
        return place.tier if place is not None else IN_RAM

    def _finder_anywhere(
        self, search: Search, held: list[Entry]
    ) -> Callable[[bytes], Entry | TierPlace | None]:
        """held: receives found entries in RAM, which are held"""

        def find(key: bytes) -> Entry | TierPlace | None:
            entry = self._find_or_coming(key)
            if entry is None:
                return None if key in search.faults else search.places.get(key)
            if entry.committed:
                self._ram.hold(entry)
                held.append(entry)
            return entry

        return find

    def fetched(
        self,
        entry: Entry,
        ok: bool,
        *,
        expires_at: int = 0,
        why: Reason = TIER_DOWN,
        origin: Origin | None = None,
    ) -> None:
        coming = self._coming.pop(entry.key)
        self._planner.ended(coming.pending_read.place.tier, entry.nbytes, ok=ok)
        if ok:
            entry.expires_at = expires_at
            cleared = self._ram.is_doomed(entry)
            self._ram.commit(entry)
            if cleared:
                self._metrics.add("kvhold_withdrawn_chunks", reason=CLEARED)
            else:
                self._metrics.add("kvhold_promoted_chunks")
                self._metrics.add("kvhold_promoted_bytes", entry.nbytes)
            if coming.pending_read.place.tier > 0:
                # max_error=0: a chunk loses precision only once
                store_options = StoreOptions(max_error=0, tenant=coming.pending_read.tenant)
                self._writes.add(
                    entry,
                    coming.pending_read.layout,
                    store_options,
                    above=coming.pending_read.place.tier,
                )
        else:
            self._metrics.add("kvhold_withdrawn_chunks", reason=why)
            self._ram.abandon(entry)
        why_not = why if not ok else CLEARED if self._ram.is_doomed(entry) else EXPIRED
        self._update_searches(coming, entry, why_not, origin)

    def given_up(self, entry: Entry) -> None:
        coming = self._coming.pop(entry.key)
        self._planner.ended(coming.pending_read.place.tier, entry.nbytes, ok=False)
        self._given_up.add(entry)
        self._metrics.add("kvhold_withdrawn_chunks", reason=DEADLINE)
        self._update_searches(coming, entry, DEADLINE)

    def let_go(self, entry: Entry) -> None:
        self._given_up.discard(entry)
        self._ram.abandon(entry)

    def take(self, number: int) -> Search:
        return self._searches.pop(number)

    def clear(self, prefix: bytes) -> None:
        self._clearing.append(prefix)

    def cleared(self, prefix: bytes) -> None:
        self._clearing.remove(prefix)

    def _update_searches(
        self, coming: _Coming, entry: Entry, why_not: Reason, origin: Origin | None = None
    ) -> None:
        waiting = {
            number: search
            for number in coming.searches
            if (search := self._searches.get(number)) is not None
        }
        arrived = self._ram.find(entry.key) is entry
        for search in waiting.values():
            search.awaited.discard(entry.key)
            if arrived:
                self._ram.pin(entry)
                search.pinned[entry.key] = entry
                search.sources[entry.key] = coming.pending_read.place.tier
                if origin is not None:
                    tokens_per_chunk = search.layout.tokens_per_chunk
                    search.origins.add(origin, entry.first_token // tokens_per_chunk)
            else:
                search.faults[entry.key] = why_not
        for number, search in waiting.items():
            if search.more and not search.awaited and not search.requesting:
                self._request(number, search)
            elif search.over:
                self._is_over(number)

    def _reserve(
        self, search: Search, need: Need[Entry | TierPlace], place: TierPlace | None
    ) -> PendingRead | None:
        # an engine writes the chunk, or a given-up read still uses its memory
        if place is None or self._ram.holds(need.key):
            stuck = any(entry.key == need.key for entry in self._given_up)
            self._withdraw(search, need.key, DEADLINE if stuck else BEING_WRITTEN)
            return None
        first_token = need.chunk * search.layout.tokens_per_chunk
        wanted = Wanted(
            need.key, search.layout.chunk_bytes(need.group, need.num_tokens), need.parent
        )
        entries = self._ram.reserve_all(
            [wanted], num_tokens=need.num_tokens, first_token=first_token
        )
        if entries is None:
            self._withdraw(search, need.key, NO_ROOM)
            return None
        return PendingRead(entries[0], search.layout, place, search.query.tenant, search.trace)

    def _withdraw(self, search: Search, key: bytes, why: Reason) -> None:
        self._metrics.add("kvhold_withdrawn_chunks", reason=why)
        search.faults[key] = why

    def _pin(self, search: Search, entries: Sequence[Entry]) -> None:
        fresh = {entry.key: entry for entry in reversed(entries) if entry.key not in search.pinned}
        self._ram.pin_all(list(fresh.values()))
        for key, entry in fresh.items():
            search.pinned[key] = entry

    def _find_or_coming(self, key: bytes) -> Entry | None:
        coming = self._coming.get(key)
        return coming.pending_read.entry if coming is not None else self._ram.find(key)


def sources_turns(
    prefix: Prefix[Entry], search: Search, names: Sequence[str]
) -> Turns[dict[str, int]]:
    slowest, find = list[int](), search.sources.get
    for column in prefix.columns():
        below = [
            tier for entry in column if entry is not None and (tier := find(entry.key)) is not None
        ]
        slowest.append(max(below, default=IN_RAM))
        yield len(column) // 4
    return _sources(slowest, prefix.extent.num_tokens, search.layout.tokens_per_chunk, names)


def _sources(
    slowest: Sequence[int], num_tokens: int, tokens_per_chunk: int, names: Sequence[str]
) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for chunk, tier in enumerate(slowest):
        if tier != IN_RAM:
            count = min(tokens_per_chunk, num_tokens - chunk * tokens_per_chunk)
            tokens[names[tier]] = tokens.get(names[tier], 0) + count
    in_ram = num_tokens - sum(tokens.values())
    return ({"ram": in_ram} if in_ram else {}) | tokens


def _probe(number: int, search: Search, keys: list[bytes]) -> ProbeCommand:
    # first: the mark goes after the last chunk has come
    keys = [search.mark, *keys] if search.mark else keys
    return ProbeCommand(number, keys, search.trace, search.query.tier)


def _parts(chunks: range, size: int) -> list[range]:
    return [chunks[begin : begin + size] for begin in range(0, len(chunks), size)]
