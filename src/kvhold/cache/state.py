"""The cache as a state machine: calls and events in, answers and orders out, no I/O, no locks.

`LocalCache` drives it under a lock, the node from its loop. Each call names its *owner* (a caller in this process, a connection to
the node): what an owner holds, hits, loans and rooms, goes when the owner goes (`gone`), and the arena is back at its baseline. Memory
of a room is given back only then too, because its owner may be writing until then.

    lookup -> a ticket with pins -> claim (the claimer's own pins on a shard, by as many claimers as there are) -> release, of each
    reserve -> commit / abandon

Where there are tiers below RAM, a lookup that RAM does not answer in full is *arriving*: its ticket is good already, and grows while
chunks are brought up (`searches.py`), until `refresh` says that it is final, or it is claimed. What is written into rooms (`rooms.py`) and
committed waits to be written below (`writes.py`). What the state wants done stands in `take_orders`; the mover does it and answers with the
events at the end of this class.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from secrets import randbits
from typing import Any

from kvhold.cache.chores import TURN, Chores, Turns, finish
from kvhold.cache.counts import count_entries, count_lookup
from kvhold.cache.events import EventLog
from kvhold.cache.gone import Gone
from kvhold.cache.orders import ClearOrder, Order
from kvhold.cache.planner import Planner
from kvhold.cache.presence import Extent, Presence, in_order, in_order_turns
from kvhold.cache.recode import Recodings, Wish
from kvhold.cache.rooms import MAX_SHARDS, Granted, Room, Rooms
from kvhold.cache.searches import Search, Searches, sources_of
from kvhold.cache.writes import Writes
from kvhold.core.api import ABSENT, EventBatch, Found, Recoded
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, LayoutError, ProtocolError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, ChunkNames, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import Work
from kvhold.core.reasons import (
    BEING_WRITTEN,
    CLEARED,
    DAMAGED,
    DEADLINE,
    INCOMPLETE,
    NEVER_STORED,
    NOT_NEEDED,
    REASONS,
    SLOWER,
    TIER_DOWN,
    WHOLE,
)
from kvhold.core.terms import FREE, Terms
from kvhold.memory.arena import Arena
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier
from kvhold.tiers.stack import Place

log = logging.getLogger(__name__)

Owner = Hashable
_MOST_KEYS = 1 << 20  # of one query: 100 MB of keys
_ONE_TURN_KEYS = 1500  # so many are looked up in one turn, and what is found needs no holding until the end
_MOST_PINS = 500  # in one step
_MOST_ABANDONED = 300  # entries of a room, in one step
_LOOKUP_ATTEMPTS = 3  # of one that takes several turns, each ended by a clear


@dataclass(frozen=True)
class Lent:
    """Answer to a claim.

    offsets:    `[group][chunk]` into the arena, ABSENT where the hit does not need the chunk
    num_tokens: `[chunk]`
    checksums:  `[group]`, of the chunks that are not ABSENT, as they were committed
    """

    loan: int
    offsets: list[list[int]]
    num_tokens: list[int]
    checksums: list[bytes]


@dataclass(frozen=True)
class Held:
    """How much one owner holds. nbytes: of the arena, in loans and rooms; chunks that several hold count for each."""

    tickets: int
    loans: int
    rooms: int
    nbytes: int


@dataclass
class _Ticket:
    """A hit that may be claimed: for each shard entries `[group][chunk]`, None where not needed.

    pinned:   all of them
    claiming: claims that are under way: they need the pins
    dropped:  it was released, and its pins fall with the last of those claims
    """

    owner: Owner
    num_tokens: list[int]
    shards: dict[int, list[list[Entry | None]]]
    pinned: list[Entry]
    found: Found
    claiming: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class _Looked:
    """A lookup that has looked into RAM."""

    number: int
    owner: Owner
    query: Query
    layout: Layout
    presence: Presence[Entry]
    extent: Extent


@dataclass
class _Holdings:
    """What one owner holds, by number. Among the tickets are those that are still arriving.

    loan_bytes: of the arena, by loan
    """

    tickets: set[int] = field(default_factory=set)
    loans: dict[int, list[Entry]] = field(default_factory=dict)
    loan_bytes: dict[int, int] = field(default_factory=dict)
    rooms: dict[int, Room] = field(default_factory=dict)


def new_state(config: Config, arena: Arena) -> "CacheState":
    """An empty cache over an arena, with the policy that the settings name."""
    metrics = Metrics()
    ram = RamTier(arena, make_policy(config.policy), metrics, quota_bytes=config.namespace_quota_bytes)
    write_behind_bytes = config.write_behind_bytes or arena.nbytes // 4
    return CacheState(
        ram,
        metrics,
        num_tiers=len(config.tiers),
        write_behind_bytes=write_behind_bytes,
        event_buffer=config.event_buffer,
        stalled_after_s=config.node.reservation_timeout_s,
    )


class CacheState:
    """All of one cache but its I/O."""

    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        *,
        num_tiers: int = 0,
        write_behind_bytes: int = 0,
        event_buffer: int = 0,
        stalled_after_s: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_tiers: below RAM. write_behind_bytes: the most that may wait to be written there. event_buffer: events remembered.

        stalled_after_s: from then on what was reserved and not committed may be reserved by another owner, in other memory

        clock: monotonic, in seconds
        """
        self.ram = ram
        self.metrics = metrics
        self._has_lower = num_tiers > 0
        self._layouts: dict[bytes, Layout] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._holdings: dict[Owner, _Holdings] = {}
        self._numbers = count(randbits(48) << 8 | 1)  # so that a ticket of an earlier run is never good in this one
        self._orders: list[Order] = []
        self._writes = Writes(ram, metrics, self._give_order, limit_bytes=write_behind_bytes)
        self.planner = Planner(metrics, lambda: self.tier_names, num_tiers, clock)
        self._searches = Searches(ram, self._writes, metrics, self._give_order, self.planner)
        self.recodings = Recodings(self._give_order)
        self._clears = 0
        self._gone = Gone()
        self._chores = Chores()
        self.turn_units = TURN  # of one step
        self._rooms = Rooms(ram, metrics, self._gone, self._writes if num_tiers else None, stalled_after_s=stalled_after_s, clock=clock)
        self._log = EventLog(event_buffer) if event_buffer else None
        self.tier_names = [f"tier-{number}" for number in range(1, num_tiers + 1)]
        ram.watch = self._changed

    def register(self, layout: Layout, namespace: bytes = b"", terms: Terms | None = None) -> None:
        """Make a layout known by its fingerprint, and of a namespace of it the terms that its tags name; None: nobody knows."""
        self._layouts[layout.fingerprint] = layout
        if len(namespace) == NAMESPACE_BYTES and terms is not None:
            self.recodings.learn(namespace, layout, terms)

    def layout(self, fingerprint: bytes) -> Layout:
        """The registered layout. Raises LayoutError for one that never was."""
        layout = self._layouts.get(fingerprint)
        if layout is None:
            raise LayoutError(f"layout {fingerprint.hex()} was not registered; register the namespace first")
        return layout

    def lookup(self, owner: Owner, query: Query, work: Work | None = None, *, have_tokens: int = 0) -> Found:
        """Find the longest hit, pin it, and give it a ticket. What lower tiers may have beyond it begins to arrive.

        work: what computing costs whoever asks; then the hit is as long as is faster than that. None: as long as can be
        have_tokens: that whoever asks has already: where tiers have no more, nothing is brought up
        """
        return finish(self.lookup_turns(owner, query, work, have_tokens=have_tokens))

    def lookup_turns(self, owner: Owner, query: Query, work: Work | None = None, *, have_tokens: int = 0) -> Turns[Found]:
        """As `lookup`, in steps. What the first steps find is held until the last one has pinned the hit."""
        layout = self.layout(query.layout)
        is_long = _check_query(layout, query) > _ONE_TURN_KEYS
        for _ in range(_LOOKUP_ATTEMPTS):
            clears = self.ram.num_clears
            held: list[Entry] = []
            try:
                presence = Presence(query, layout, self._find_and_hold(held) if is_long else self.ram.find)
                extent = yield from presence.extent_turns()
                number, declined = next(self._numbers), False
                if self._is_worth_a_search(query, presence, extent):
                    declined = work is not None and not self.planner.pays(work, query, layout, extent)
                    if not declined:
                        self._of(owner).tickets.add(number)
                        yield from self._searches.begin_turns(number, owner, query, layout, work, have_tokens=have_tokens)
                        if clears == self.ram.num_clears:
                            return self.refresh(number)
                        self._forget_search(number, owner)  # what it has pinned may have been cleared since
                        continue
                rows = yield from presence.found_turns(extent)
                needed = yield from in_order_turns(rows)
                pinned = yield from self._pin_turns(needed, held)
                if clears == self.ram.num_clears:  # else what was found may have been cleared since
                    answer = self._answer_from_ram(_Looked(number, owner, query, layout, presence, extent), work, declined=declined)
                    if answer.ticket:
                        self._issue(answer, owner, query, layout, extent, rows, pinned)
                    else:
                        self._unpin(pinned)
                    if declined and self.planner.is_to_try():
                        yield from self._search_for_nobody_turns(query, layout, sample=True)
                    return answer
                self._unpin(pinned)
            finally:
                self._unpin(held)
        return Found(0, 0, reason=CLEARED)

    def _forget_search(self, number: int, owner: Owner) -> None:
        self._of(owner).tickets.discard(number)
        if number in self._searches:
            self._searches.drop(number)

    def _answer_from_ram(self, looked: "_Looked", work: Work | None, *, declined: bool) -> Found:
        """The answer of a lookup that goes no further than RAM, counted."""
        answer = self._answer(looked.number, looked.presence, looked.extent, None)
        if work is not None:
            answer = self._if_worth_loading(looked.number, answer, looked.query, looked.layout, work, declined)
        count_lookup(self.metrics, answer, looked.presence.asked_tokens)
        return answer

    def _find_and_hold(self, held: list[Entry]) -> Callable[[bytes], Entry | None]:
        """What finds entries in RAM, and holds each that it has found."""

        def find(key: bytes) -> Entry | None:
            entry = self.ram.find(key)
            if entry is not None:
                self.ram.hold(entry)
                held.append(entry)
            return entry

        return find

    def _pin_turns(self, needed: list[Entry], held: list[Entry]) -> Turns[list[Entry]]:
        """Pin the entries of a hit, the last one first: see `Rooms.commit`. Until all of them are pinned, the pins are `held`."""
        if len(needed) <= _MOST_PINS:
            self.ram.pin_all(needed[::-1])  # before RAM is looked at again, which ends what has expired
            return needed
        num_held = len(held)
        for end in range(len(needed), 0, -_MOST_PINS):
            part = needed[max(0, end - _MOST_PINS) : end]
            self.ram.pin_all(part[::-1])
            held += part
            yield len(part)
        del held[num_held:]
        return needed

    def _unpin(self, entries: list[Entry]) -> None:
        """Unpin these: a few at once, many in the background."""
        if len(entries) <= 4 * _MOST_PINS:
            self.ram.unpin_all(entries)
        else:
            self._chores.add(self._unpin_turns(entries))

    def _unpin_turns(self, entries: list[Entry]) -> Iterator[int]:
        for begin in range(0, len(entries), _MOST_PINS):
            part = entries[begin : begin + _MOST_PINS]
            self.ram.unpin_all(part)
            yield len(part) // 3

    def refresh(self, ticket: int, *, settle: bool = False) -> Found:
        """How far a ticket goes now. One that is final stays as it is; one that came to nothing is no more.

        settle: it is final with what is here by now
        """
        if self._is_arriving(ticket):
            search = self._searches[ticket]
            if not settle and not search.over:
                here = search.presence().extent().num_tokens
                if not self._searches.is_too_slow(ticket, here):
                    return Found(ticket, here, arriving=True)
            return self._settle(ticket)
        held = self._tickets.get(ticket)
        return held.found if held is not None else Found(0, 0)

    def is_over(self, ticket: int) -> bool:
        """Whether nothing more will come for it. Cheap, unlike `refresh`."""
        return ticket not in self._searches or self._searches[ticket].over

    def prefetch(self, owner: Owner, query: Query) -> None:
        """Bring what lower tiers have of a prompt into RAM, for nobody in particular yet."""
        finish(self.prefetch_turns(owner, query))

    def prefetch_turns(self, owner: Owner, query: Query) -> Turns[None]:
        """As `prefetch`, in steps. What the first steps find is held until the last one."""
        layout = self.layout(query.layout)
        is_long = _check_query(layout, query) > _ONE_TURN_KEYS
        held: list[Entry] = []
        try:
            presence = Presence(query, layout, self._find_and_hold(held) if is_long else self.ram.find)
            extent = yield from presence.extent_turns()
            if self._is_worth_a_search(query, presence, extent):
                yield from self._search_for_nobody_turns(query, layout)
            else:
                needed = yield from in_order_turns((yield from presence.found_turns(extent)))
                self._unpin((yield from self._pin_turns(needed, held)))  # so that it is not the next to go
        finally:
            self._unpin(held)

    def num_come(self, ticket: int) -> int:
        """How much has come for one that is arriving, as a number that grows. Cheap, unlike `refresh`."""
        return len(self._searches[ticket].sources) if ticket in self._searches else 0

    def claim(self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, arriving: bool = False) -> Lent | None:
        """Pin one shard's entries from `first_chunk` on for `owner`, beside the ticket's own pins. None if the ticket is not good.

        arriving: while it is arriving, the whole chunks that have come; else, whoever claims waits no longer
        """
        return finish(self.claim_turns(owner, ticket, shard, first_chunk, arriving=arriving))

    def claim_turns(self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, arriving: bool = False) -> Turns[Lent | None]:
        """As `claim`, in steps. The ticket's own pins stay until the last one, released or not."""
        if first_chunk < 0:
            raise ProtocolError(f"a claim from chunk {first_chunk} on; the first one is 0")
        if self._is_arriving(ticket) and not arriving:
            self._settle(ticket)
        held: _Ticket | None = None
        if self._is_arriving(ticket):
            shards, num_tokens = self._come_so_far(self._searches[ticket], shard)
        elif ticket in self._tickets:
            held = self._tickets[ticket]
            shards, num_tokens = held.shards, held.num_tokens
        else:
            self.metrics.add("kvhold_claims_failed", reason="unknown ticket")
            return None
        if shard not in shards:
            self.metrics.add("kvhold_claims_failed", reason="no such shard")
            return None
        rows = [chunks[first_chunk:] for chunks in shards[shard]]
        if held is None or len(rows) * len(num_tokens) <= _ONE_TURN_KEYS:
            return self._lend(owner, rows, num_tokens[first_chunk:])
        return (yield from self._lend_turns(owner, held, rows, num_tokens[first_chunk:]))

    def _lend(self, owner: Owner, rows: list[list[Entry | None]], num_tokens: list[int]) -> Lent:
        lent = [entry for row in rows for entry in row if entry is not None]
        self.ram.hold_all(lent)
        loan = next(self._numbers)
        self._of(owner).loans[loan] = lent
        self._of(owner).loan_bytes[loan] = _bytes_of(lent)
        count_entries(self.metrics, "loaned", lent)
        offsets = [[ABSENT if entry is None else entry.offset for entry in row] for row in rows]
        checksums = [b"".join([entry.checksums for entry in row if entry is not None]) for row in rows]
        return Lent(loan, offsets, num_tokens, checksums)

    def _lend_turns(self, owner: Owner, ticket: _Ticket, rows: list[list[Entry | None]], num_tokens: list[int]) -> Turns[Lent]:
        loan = next(self._numbers)
        holdings = self._of(owner)
        lent = holdings.loans[loan] = []
        holdings.loan_bytes[loan] = 0
        offsets: list[list[int]] = [[] for _ in rows]
        checksums: list[list[bytes]] = [[] for _ in rows]
        ticket.claiming += 1
        try:
            for row, places, sums in zip(rows, offsets, checksums, strict=True):
                for begin in range(0, len(row), _MOST_PINS):
                    part = row[begin : begin + _MOST_PINS]
                    entries = [entry for entry in part if entry is not None]
                    self.ram.hold_all(entries)
                    lent += entries
                    holdings.loan_bytes[loan] += _bytes_of(entries)
                    count_entries(self.metrics, "loaned", entries)
                    places += [ABSENT if entry is None else entry.offset for entry in part]
                    sums += [entry.checksums for entry in entries]
                    yield len(part) // 2
        finally:
            ticket.claiming -= 1
            if ticket.dropped and not ticket.claiming:
                self._unpin(ticket.pinned)
        return Lent(loan, offsets, num_tokens, [b"".join(sums) for sums in checksums])

    def damaged(self, owner: Owner, loan: int, offsets: Sequence[int]) -> None:
        """A reader found chunks of its loan that are not as they were committed. They are removed; pins keep their memory.

        Nobody checks what the reader says: a wrong report costs a miss.
        """
        reported = set(offsets)
        self.remove_damaged([entry for entry in self._of(owner).loans.get(loan, []) if entry.offset in reported], "reader")

    def remove_damaged(self, entries: Iterable[Entry], found_by: str) -> None:
        """Remove entries that are not as they were committed. found_by: reader, writer (of lower tiers) or scrubber."""
        for entry in entries:
            if self.ram.find(entry.key) is not entry:
                continue  # removed already
            self.metrics.add("kvhold_damaged_chunks", found_by=found_by)
            log.error(
                "%s: bytes in memory (offset %d, %d bytes) are not those that were stored: removed; found by a %s",
                entry.key.hex(),
                entry.offset,
                entry.nbytes,
                found_by,
            )
            self.ram.remove(entry, why=DAMAGED)

    def release(self, owner: Owner, number: int) -> None:
        """Let go of a ticket (loans of it go on), a loan or a recoding. Unknown numbers are ignored: it may be gone already."""
        held = self._tickets.get(number)
        if self.recodings.find(owner, number) is not None:
            self.recodings.drop(number)
        elif number in self._searches and self._searches[number].owner == owner:
            search = self._searches[number]
            presence = search.presence()
            count_lookup(self.metrics, self._answer(number, presence, presence.extent(), search), presence.asked_tokens)
            self.planner.settled(number, 0, waited_s=self.planner.clock() - search.began_s)
            self._of(owner).tickets.discard(number)
            self._searches.drop(number)
        elif held is not None and held.owner == owner:
            self._drop_ticket(number)
        else:
            self._of(owner).loan_bytes.pop(number, None)
            self._unpin(self._of(owner).loans.pop(number, []))

    def reserve(
        self, owner: Owner, layout: Layout, names: ChunkNames, shard: int, *, groups: bytes | None = None, terms: Terms = FREE
    ) -> Granted:
        """Memory for what is missing, in order, until there is no room for all that a chunk is missing.

        groups: `[group][chunk]`, a byte each, not 0 where it is to be written; None: all
        """
        return finish(self.reserve_turns(owner, layout, names, shard, groups=groups, terms=terms))

    def reserve_turns(
        self, owner: Owner, layout: Layout, names: ChunkNames, shard: int, *, groups: bytes | None = None, terms: Terms = FREE
    ) -> Turns[Granted]:
        """As `reserve`, in steps. Chunks that are reserved are the owner's from the first one on."""
        number, room = next(self._numbers), Room(layout, terms, {})
        self._of(owner).rooms[number] = room
        try:
            offsets = yield from self._rooms.reserve_turns(room, names, shard, groups=groups)
            self.recodings.learn(names.namespace, layout, terms)
        finally:
            if not room.chunks:
                self._of(owner).rooms.pop(number, None)
        return Granted(number if room.chunks else 0, offsets)

    def commit(self, owner: Owner, room: int, chunks: Sequence[int], checksums: bytes | None = None) -> int:
        """Make chunks of a room visible. Returns the mark that stands for their being written below (`all_done`).

        checksums: see `Rooms.commit_turns`; None: this cache has no readers, as in simulations
        """
        return finish(self.commit_turns(owner, room, chunks, checksums))

    def commit_turns(self, owner: Owner, room: int, chunks: Sequence[int], checksums: bytes | None = None) -> Turns[int]:
        """As `commit`, in steps. A chunk is visible after its own."""
        rooms = self._of(owner).rooms
        if room in rooms:
            yield from self._rooms.commit_turns(rooms[room], chunks, checksums)
            if not rooms[room].chunks:
                del rooms[room]
        return self.mark

    def abandon(self, owner: Owner, room: int) -> None:
        """Give back what a room holds uncommitted."""
        finish(self.abandon_turns(owner, room))

    def abandon_turns(self, owner: Owner, room: int) -> Turns[None]:
        """As `abandon`, in steps. What is not yet given back is the owner's."""
        rooms = self._of(owner).rooms
        if room in rooms:
            yield from self._rooms.abandon_turns(rooms[room])
            del rooms[room]

    def touches_memory(self, owner: Owner) -> bool:
        """Whether `owner` has a loan or a room: it may be reading or writing the arena now."""
        held = self._holdings.get(owner)
        return held is not None and bool(held.loans or held.rooms)

    def held_by(self, owner: Owner) -> Held:
        """How much an owner holds."""
        held = self._holdings.get(owner, _Holdings())
        nbytes = sum(held.loan_bytes.values()) + sum(room.nbytes for room in held.rooms.values())
        return Held(len(held.tickets), len(held.loans), len(held.rooms), nbytes)

    def give_up(self, owner: Owner) -> None:
        """The owner is not waited for: others may write what it has reserved, in other memory. What it holds stays its own."""
        held = self._holdings.get(owner, _Holdings())
        for room in held.rooms.values():
            room.is_given_up = True

    def gone(self, owner: Owner) -> None:
        """The owner is no more and touches no memory any longer: give back all it held."""
        self.recodings.drop_all(owner)
        held = self._holdings.get(owner)
        if held is None:
            return
        for ticket in list(held.tickets):
            self.release(owner, ticket)
        for entries in held.loans.values():
            self._unpin(entries)
        for room in held.rooms.values():
            room.is_given_up = True  # others may write the same chunks before all its memory is back
            abandoning = self._rooms.abandon_turns(room)
            if room.num_entries <= _MOST_ABANDONED:
                finish(abandoning)
            else:
                self._chores.add(abandoning)
        del self._holdings[owner]

    def clear(self, namespace: bytes | None) -> int:
        """Forget every chunk, or those of one namespace. Returns how many RAM had; lower tiers are cleared by and by (`all_done`)."""
        if namespace is not None and len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError("the namespace to clear has an impossible size")
        return self._clear(namespace or b"", learned=False)

    def cleared_elsewhere(self, prefix: bytes) -> None:
        """Another host has cleared a tier that it shares with this one: what is older goes here, too."""
        self._clear(prefix, learned=True)

    def _clear(self, prefix: bytes, *, learned: bool) -> int:
        removed = self.ram.clear(prefix)
        self._chores.add(self.ram.sweep())
        self.step()  # a few chunks go at once
        if self._has_lower:
            self._searches.clear(prefix)
            self._clears += 1
            self._give_order(ClearOrder(prefix, learned))
        return removed

    def recode(self, owner: Owner, wish: Wish) -> int:
        """Have what a tier holds written anew. Returns the number to ask and to release. Raises ConfigError, LayoutError, ProtocolError."""
        if wish.query is not None:
            _check_query(self.layout(wish.query.layout), wish.query)
        number = next(self._numbers)
        self.recodings.begin(number, owner, wish, self._layouts)
        return number

    def step(self, units: int | None = None) -> bool:
        """Do some of what goes on in the background (`chores.py`). Returns whether there is more. Its driver calls it between others."""
        return self._chores.step(self.turn_units if units is None else units)

    @property
    def has_chores(self) -> bool:
        """Whether `step` has something to do."""
        return len(self._chores) > 0

    def snapshot(self) -> tuple[int, Iterator[list[Entry]]]:
        """The number of the last event, and all that is visible in RAM, in parts.

        The cache may change between two parts: what comes and goes then may be in a part or not, and is in the events after that number.
        """
        return self._events_log().last, self.ram.parts()

    def events(self, after: int) -> EventBatch:
        """What has happened in RAM since event number `after`."""
        return self._events_log().after(after)

    @property
    def mark(self) -> int:
        """Stands for all that was committed so far; see `all_done`."""
        return self._writes.mark

    def all_done(self, mark: int) -> bool:
        """Whether all that was committed before `mark` was taken has been written below, or given up; and nothing is being cleared."""
        return not self._clears and self._writes.all_done(mark)

    def status(self) -> dict[str, Any]:
        """Sizes, counts and counters, for people and monitors."""
        return {
            "arena_bytes": self.ram.capacity_bytes,
            "used_bytes": self.ram.used_bytes,
            "chunks": self.ram.num_chunks,
            "pinned_chunks": self.ram.num_pinned,
            "clearing_chunks": self.ram.num_clearing,
            "arriving_chunks": self._searches.num_arriving,
            "recodings": len(self.recodings),
            "write_behind": {"chunks": len(self._writes), "bytes": self._writes.queued_bytes},
            "namespaces": {namespace.hex(): nbytes for namespace, nbytes in self.ram.used_by_namespace.items()},
            "held": self.holdings(),
            "counters": self.metrics.as_dict(),
        }

    def holdings(self) -> dict[str, int]:
        """How many tickets, loans and rooms are out, over all owners."""
        held = self._holdings.values()
        return {
            "tickets": sum(len(h.tickets) for h in held),
            "loans": sum(len(h.loans) for h in held),
            "rooms": sum(len(h.rooms) for h in held),
        }

    def take_orders(self) -> list[Order]:
        """What the mover is to do; each order is given once."""
        orders, self._orders = self._orders, []
        return orders

    # Events: what came of the orders.

    def probed(self, search: int, places: dict[bytes, Place], *, silent: bool = False) -> None:
        """Of a ProbeOrder. silent: some tier did not answer."""
        self._searches.probed(search, places, silent=silent)
        if search in self._searches and self._searches[search].over:
            self._settle_orphans([search])

    def fetched(self, entry: Entry, ok: bool, expires_at: int = 0, *, why: str = TIER_DOWN) -> None:
        """Of one arrival of a FetchOrder: its bytes are here and right, or not (why); nobody writes to its memory any more."""
        if not ok and why != TIER_DOWN:
            self._gone.add(entry.key, why)
        self._settle_orphans(self._searches.fetched(entry, ok, expires_at=expires_at, why=why))

    def given_up(self, entry: Entry) -> None:
        """Of one arrival: it failed, but its memory may still be written to until `let_go`."""
        self._settle_orphans(self._searches.given_up(entry))

    def let_go(self, entry: Entry) -> None:
        """Of one arrival that was given up."""
        self._searches.let_go(entry)

    def recoded(self, number: int, recoded: Recoded) -> None:
        """Of a RecodeOrder: how far it has come."""
        self.recodings.progressed(number, recoded)

    def written(self, number: int) -> None:
        """Of a WriteOrder."""
        self._writes.done(number)

    def cleared(self, prefix: bytes) -> None:
        """Of a ClearOrder. Nothing came up from below meanwhile: what was on its way was doomed, and nothing new was begun."""
        self._clears -= 1
        self._searches.cleared(prefix)

    def _give_order(self, order: Order) -> None:
        self._orders.append(order)

    def _of(self, owner: Owner) -> _Holdings:
        return self._holdings.setdefault(owner, _Holdings())

    def _is_arriving(self, ticket: int) -> bool:
        """Whether somebody waits for it: one that was prefetched is nobody's ticket."""
        return ticket in self._searches and self._searches[ticket].owner is not None

    def _come_so_far(self, search: Search, shard: int) -> tuple[dict[int, list[list[Entry | None]]], list[int]]:
        """Of a hit that is arriving, as of a ticket: a shard's entries, if there is such a shard, and tokens; but for a tail."""
        presence = search.presence()
        extent = presence.extent()
        rows = presence.found(extent)
        groups = range(len(search.layout.groups))
        shards = {shard: [rows[group, shard][: extent.whole] for group in groups]} if 0 <= shard < search.query.shards else {}
        return shards, [search.layout.tokens_per_chunk] * extent.whole

    def _settle(self, number: int) -> Found:
        """An arriving ticket becomes final, with what is here of it by now."""
        search = self._searches[number]
        presence = search.presence()
        extent = presence.extent()
        answer = self._answer(number, presence, extent, search)
        if search.work is not None:
            if not self.planner.is_worth_loading(search.work, search.query, search.layout, extent.num_tokens):
                answer = Found(0, 0, reason=SLOWER)
            self.planner.settled(number, answer.num_tokens, waited_s=self.planner.clock() - search.began_s)
        rows = presence.found(extent) if answer.ticket else {}
        pinned = list(dict.fromkeys(in_order(rows)))  # once each, as the search has them, though a query may name a chunk twice
        count_lookup(self.metrics, answer, presence.asked_tokens)
        self._searches.finish(number, pinned)
        if answer.ticket:
            self._issue(answer, search.owner, search.query, search.layout, extent, rows, pinned)
        else:
            self._of(search.owner).tickets.discard(number)
        return answer

    def _if_worth_loading(self, number: int, answer: Found, query: Query, layout: Layout, work: Work, declined: bool) -> Found:
        """The answer from memory alone; nothing, if computing is faster. declined: tiers were not asked, because it would not pay."""
        worth = self.planner.is_worth_loading(work, query, layout, answer.num_tokens)
        self.planner.decided_here(number, work, query, layout, answer.num_tokens, worth=worth, declined=declined)
        if answer.num_tokens and not worth:
            answer = Found(0, 0, reason=SLOWER)
        elif declined:
            answer = replace(answer, reason=SLOWER)
        return answer

    def _search_for_nobody_turns(self, query: Query, layout: Layout, *, sample: bool = False) -> Turns[None]:
        """What is found comes to memory, or, of a sample, one chunk of it."""
        number, clears, has_begun = next(self._numbers), self.ram.num_clears, False
        try:
            yield from self._searches.begin_turns(number, None, query, layout, sample=sample)
            has_begun = clears == self.ram.num_clears  # else what it has pinned may have been cleared since
        finally:  # whoever asked may leave between two steps
            if number in self._searches and not has_begun:
                self._searches.drop(number)
        if number in self._searches:
            self._settle_orphans([number] if self.is_over(number) else [])

    def _is_worth_a_search(self, query: Query, presence: Presence[Entry], extent: Extent) -> bool:
        return self._has_lower and extent.num_tokens < presence.asked_tokens and self._searches.may_begin(query)

    def _answer(self, number: int, presence: Presence[Entry], extent: Extent, search: Search | None) -> Found:
        """A final answer: how far, from where, and why no further."""
        if not extent.num_tokens:
            return Found(0, 0, reason=self._reason(presence, extent, search))
        sources = {"ram": extent.num_tokens}
        if search is not None and search.sources:
            sources = sources_of(presence.needed(extent), extent.num_tokens, search.sources, self.tier_names)
        return Found(number, extent.num_tokens, sources=sources, reason=self._reason(presence, extent, search))

    def _reason(self, presence: Presence[Entry], extent: Extent, search: Search | None) -> str:
        gap = presence.gap(extent)
        if search is not None and gap is not None and search.declines(gap.key):
            return SLOWER
        if search is not None and gap is not None and search.idle and gap.key in search.places:
            return NOT_NEEDED
        if search is not None:  # what is there for the asking keeps no hit from being longer
            gap = search.would_have(self.ram.find).gap(extent) or gap
        if gap is None:
            return WHOLE
        if search is not None and (fault := search.faults.get(gap.key)):
            return fault
        if search is not None and (search.probing or gap.key in search.awaited):
            return DEADLINE
        if self.ram.holds(gap.key):
            return BEING_WRITTEN
        if search is not None and search.silent:
            return TIER_DOWN
        if self._has_lower and search is None:
            return CLEARED  # it is being cleared below, or would have been looked for there
        places = search.places if search is not None else ()
        partly = any(key in places or self.ram.find(key) is not None for key in gap.siblings)
        return self._gone.why(gap.key) or (INCOMPLETE if partly else NEVER_STORED)

    def _settle_orphans(self, over: Iterable[int]) -> None:
        for number in over:
            if self._searches[number].owner is None:
                self._searches.drop(number)

    def _issue(
        self,
        answer: Found,
        owner: Owner,
        query: Query,
        layout: Layout,
        extent: Extent,
        rows: dict[tuple[int, int], list[Entry | None]],
        pinned: list[Entry],
    ) -> None:
        """A final ticket over entries that are pinned: `rows[group, shard][chunk]`."""
        shards = {shard: [rows[group, shard] for group in range(len(layout.groups))] for shard in range(query.shards)}
        counts = [layout.tokens_per_chunk] * extent.whole + ([extent.tail_tokens] if extent.tail is not None else [])
        self._tickets[answer.ticket] = _Ticket(owner, counts, shards, pinned, answer)
        self._of(owner).tickets.add(answer.ticket)

    def _events_log(self) -> EventLog:
        if self._log is None:
            raise ConfigError("event_buffer is 0: this cache keeps no events; set it to how many are to be remembered, such as 100000")
        return self._log

    def _changed(self, what: str, entry: Entry) -> None:
        """In RAM, something that was visible has gone, or something has become visible."""
        if self._log is not None:
            self._log.add(what, entry)
        if what in REASONS:
            self._gone.add(entry.key, what)
        if what == CLEARED:
            self.metrics.add("kvhold_cleared_chunks")
            self.metrics.add("kvhold_cleared_bytes", entry.nbytes)

    def _drop_ticket(self, ticket: int) -> None:
        held = self._tickets.pop(ticket)
        self._of(held.owner).tickets.discard(ticket)
        held.dropped = True
        if not held.claiming:
            self._unpin(held.pinned)


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum([entry.taken_bytes for entry in entries])


def _check_query(layout: Layout, query: Query) -> int:
    """How many keys it asks for. Raises ProtocolError for a query that makes no sense, or is too large."""
    if len(query.namespace) != NAMESPACE_BYTES or len(query.hashes) % HASH_BYTES or not 1 <= query.shards <= MAX_SHARDS:
        raise ProtocolError("a query's namespace, hashes or shards have an impossible size")
    if len(query.tail_hashes) != len(query.tail_lengths) * HASH_BYTES:
        raise ProtocolError("a query's tail hashes and tail lengths do not agree")
    if not all(0 < length < layout.tokens_per_chunk for length in query.tail_lengths):
        raise ProtocolError(f"a query's tail is not shorter than a chunk of {layout.tokens_per_chunk} tokens")
    num_keys = (len(query.hashes) // HASH_BYTES + len(query.tail_lengths)) * len(layout.groups) * query.shards
    if num_keys > _MOST_KEYS:
        raise ProtocolError(
            f"a query of {num_keys} keys ({len(query.hashes) // HASH_BYTES} chunks, {len(query.tail_lengths)} tails, {len(layout.groups)} "
            f"groups, {query.shards} shards); {_MOST_KEYS} is the most: look up a shorter prompt"
        )
    return num_keys
