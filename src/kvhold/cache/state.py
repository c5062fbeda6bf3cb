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

from kvhold.cache.chores import TURN, Chores, Turns, emptied, emptied_dicts, finish
from kvhold.cache.counts import count_entries, count_lookup
from kvhold.cache.events import EventLog
from kvhold.cache.gone import Gone
from kvhold.cache.orders import ClearOrder, Order
from kvhold.cache.planner import Planner
from kvhold.cache.presence import Extent, Prefix, Presence
from kvhold.cache.recode import Recodings, Wish
from kvhold.cache.rooms import MAX_SHARDS, Granted, Room, Rooms
from kvhold.cache.searches import Search, Searches, sources_turns
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
_ONE_TURN_KEYS = 250  # a call for so many is done in one turn, whatever it counts, and holds nothing between two steps
_MOST_PINS = 500  # in one step
_MOST_AT_ONCE = 2000  # entries that are unpinned in one step
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
        self.in_use: dict[bytes, None] = {}
        """Namespaces that memory was ever reserved for; they are here before it is granted. To be read from any thread."""
        self._writes = Writes(ram, metrics, self._give_order, limit_bytes=write_behind_bytes)
        self.planner = Planner(metrics, lambda: self.tier_names, num_tiers, clock)
        self._searches = Searches(
            ram, self._writes, metrics, self._give_order, self.planner, run=self._run, unpin=self._unpin, is_over=self._is_over
        )
        self.recodings = Recodings(self._give_order)
        self._clears = 0
        self._gone = Gone()
        self._chores = Chores()
        self._has_news = False
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
        """As `lookup`, in steps. Entries that the first steps find are held until the last one has pinned the hit."""
        layout = self.layout(query.layout)
        num_keys = _check_query(layout, query)
        turns = self._look_up(owner, query, layout, work, have_tokens, num_keys)
        return finish(turns) if num_keys <= _ONE_TURN_KEYS else (yield from turns)

    def _look_up(self, owner: Owner, query: Query, layout: Layout, work: Work | None, have_tokens: int, num_keys: int) -> Turns[Found]:
        for _ in range(_LOOKUP_ATTEMPTS):
            clears = self.ram.num_clears
            held: list[Entry] = []
            try:
                presence = Presence(query, layout, self._finder(num_keys, held))
                prefix = yield from presence.take_turns()
                extent, number, declined = prefix.extent, next(self._numbers), False
                if self._is_worth_a_search(query, presence, extent):
                    declined = work is not None and not self.planner.pays(work, query, layout, extent)
                    if not declined:
                        self._of(owner).tickets.add(number)
                        yield from self._searches.begin_turns(
                            number, owner, query, layout, prefix, work, num_keys=num_keys, have_tokens=have_tokens
                        )
                        if clears == self.ram.num_clears:
                            return (yield from self._refresh(number))
                        self._forget_search(number, owner)  # what it has pinned may have been cleared since
                        continue
                pinned = yield from prefix.in_order_turns()
                yield from self._pin_turns(pinned)
                if clears == self.ram.num_clears:  # else what was found may have been cleared since
                    answer = self._answer_from_ram(_Looked(number, owner, query, layout, presence, extent), work, declined=declined)
                    if answer.ticket:
                        self._issue(answer, owner, query, layout, prefix, pinned)
                    else:
                        self._unpin(pinned)
                    if declined and self.planner.is_to_try():
                        yield from self._search_for_nobody(query, layout, num_keys, sample=True)
                    return answer
                self._unpin(pinned)
            finally:
                self._unpin(held)
        return Found(0, 0, reason=CLEARED)

    def _forget_search(self, number: int, owner: Owner) -> None:
        self._of(owner).tickets.discard(number)
        if number in self._searches:
            self._let_go(self._searches.take(number))

    def _answer_from_ram(self, looked: "_Looked", work: Work | None, *, declined: bool) -> Found:
        """The answer of a lookup that goes no further than RAM, counted."""
        answer = self._answer(looked.number, looked.presence, looked.extent)
        if work is not None:
            answer = self._if_worth_loading(looked.number, answer, looked.query, looked.layout, work, declined)
        count_lookup(self.metrics, answer, looked.presence.asked_tokens)
        return answer

    def _finder(self, num_keys: int, held: list[Entry]) -> Callable[[bytes], Entry | None]:
        """Return a function that finds entries in RAM, and holds each where the call takes several turns."""
        return self.ram.find if num_keys <= _ONE_TURN_KEYS else self._find_and_hold(held)

    def _find_and_hold(self, held: list[Entry]) -> Callable[[bytes], Entry | None]:

        def find(key: bytes) -> Entry | None:
            entry = self.ram.find(key)
            if entry is not None:
                self.ram.hold(entry)
                held.append(entry)
            return entry

        return find

    def _pin_turns(self, entries: list[Entry]) -> Turns[None]:
        """Pin the entries of a hit, the last one first: see `Rooms.commit`. They are held, or this is one step."""
        left = len(entries)
        try:
            while left:
                part = entries[max(0, left - _MOST_PINS) : left]
                self.ram.pin_all(part[::-1])
                left -= len(part)
                if left:
                    yield len(part)
        finally:
            if left:  # the caller has left
                self._unpin(entries[left:])

    def _unpin(self, entries: list[Entry]) -> None:
        """Unpin these and empty the list: a few at once, many in the background."""
        if len(entries) <= _MOST_AT_ONCE:
            self.ram.unpin_all(entries)
        else:
            self._chores.add(self._unpin_turns(entries))

    def _unpin_turns(self, entries: list[Entry]) -> Iterator[int]:
        while entries:
            part = entries[-_MOST_PINS:]
            del entries[-_MOST_PINS:]
            self.ram.unpin_all(part)
            yield len(part) // 3

    def _run(self, turns: Turns[None], num_keys: int) -> None:
        """Do a call for so many keys: at once, or in the background."""
        if num_keys <= _ONE_TURN_KEYS:
            finish(turns)
        else:
            self._chores.add(turns)

    def refresh(self, ticket: int, *, settle: bool = False) -> Found:
        """Return the current length of a ticket's hit. One that is final stays as it is; one that came to nothing does not exist.

        settle: it is final with the chunks that are here
        """
        return finish(self.refresh_turns(ticket, settle=settle))

    def refresh_turns(self, ticket: int, *, settle: bool = False) -> Turns[Found]:
        """As `refresh`, in steps."""
        is_short = ticket not in self._searches or self._searches[ticket].num_keys <= _ONE_TURN_KEYS
        turns = self._refresh(ticket, settle=settle)
        return finish(turns) if is_short else (yield from turns)

    def _refresh(self, ticket: int, *, settle: bool = False) -> Turns[Found]:
        while self._is_arriving(ticket):
            search = self._searches[ticket]
            if search.settling:
                yield TURN  # another caller makes the hit
                continue
            if settle or search.over:
                return (yield from self._settle(ticket))
            extent = yield from search.here.extent_turns()
            if self._is_arriving(ticket) and not search.settling:
                if not self._searches.is_too_slow(ticket, extent.num_tokens):
                    return Found(ticket, extent.num_tokens, arriving=True)
                settle = True
        held = self._tickets.get(ticket)
        return held.found if held is not None else Found(0, 0)

    def is_over(self, ticket: int) -> bool:
        """Whether nothing more will come for it. Cheap, unlike `refresh`."""
        return ticket not in self._searches or self._searches[ticket].over

    def prefetch(self, owner: Owner, query: Query) -> None:
        """Bring what lower tiers have of a prompt into RAM, without a waiting request."""
        finish(self.prefetch_turns(owner, query))

    def prefetch_turns(self, owner: Owner, query: Query) -> Turns[None]:
        """As `prefetch`, in steps. Entries that the first steps find are held until the last one."""
        layout = self.layout(query.layout)
        num_keys = _check_query(layout, query)
        turns = self._prefetch(query, layout, num_keys)
        return finish(turns) if num_keys <= _ONE_TURN_KEYS else (yield from turns)

    def _prefetch(self, query: Query, layout: Layout, num_keys: int) -> Turns[None]:
        held: list[Entry] = []
        try:
            presence = Presence(query, layout, self._finder(num_keys, held))
            prefix = yield from presence.take_turns()
            if self._is_worth_a_search(query, presence, prefix.extent):
                yield from self._search_for_nobody(query, layout, num_keys, prefix=prefix)
            else:
                present = yield from prefix.in_order_turns()
                yield from self._pin_turns(present)
                self._unpin(present)  # so that it is not the next to go
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
        while self._is_arriving(ticket):
            search = self._searches[ticket]
            if search.settling:
                yield TURN  # another caller makes the hit
            elif not arriving:
                yield from self.refresh_turns(ticket, settle=True)
            elif not 0 <= shard < search.query.shards:
                break
            else:
                extent = yield from search.here.extent_turns()
                if self._searches.get(ticket) is search and not search.settling:
                    return (yield from self._lend_arriving(owner, ticket, search, shard, first_chunk, extent))
        held = self._tickets.get(ticket)
        if held is None or shard not in held.shards:
            self.metrics.add("kvhold_claims_failed", reason="no such shard" if held or self._is_arriving(ticket) else "unknown ticket")
            return None
        held.claiming += 1
        try:
            return (yield from self._lend(owner, [row[first_chunk:] for row in held.shards[shard]], held.num_tokens[first_chunk:]))
        finally:
            held.claiming -= 1
            if held.dropped and not held.claiming:
                self._unpin_ticket(held)

    def _lend_arriving(self, owner: Owner, ticket: int, search: Search, shard: int, first_chunk: int, extent: Extent) -> Turns[Lent | None]:
        """Lend the whole chunks that have come; fewer, if the search ends meanwhile."""
        rows = [row[first_chunk:] for row in search.here.shard_rows(shard, extent)]
        num_tokens = [search.layout.tokens_per_chunk] * len(rows[0])
        return (yield from self._lend(owner, rows, num_tokens, may_go_on=lambda: self._searches.get(ticket) is search))

    def _lend(
        self, owner: Owner, rows: list[list[Entry | None]], num_tokens: list[int], may_go_on: Callable[[], bool] = lambda: True
    ) -> Turns[Lent]:
        """Pin entries for an owner, in steps. may_go_on: whether those that are not yet lent are still pinned."""
        loan, holdings = next(self._numbers), self._of(owner)
        lent = holdings.loans[loan] = []
        holdings.loan_bytes[loan] = 0
        offsets: list[list[int]] = [[] for _ in rows]
        checksums: list[list[bytes]] = [[] for _ in rows]
        size = max(1, _MOST_PINS // max(1, len(rows)))
        for begin in range(0, len(num_tokens), size):
            if begin:
                yield size * len(rows) // 2
                if not may_go_on():
                    num_tokens = num_tokens[:begin]
                    break
            entries: list[Entry] = []
            for row, places, sums in zip(rows, offsets, checksums, strict=True):
                part = row[begin : begin + size]
                there = [entry for entry in part if entry is not None]
                places += [ABSENT if entry is None else entry.offset for entry in part]
                sums += [entry.checksums for entry in there]
                entries += there
            self.ram.hold_all(entries)
            lent += entries
            holdings.loan_bytes[loan] += _bytes_of(entries)
            count_entries(self.metrics, "loaned", entries)
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
            search = self._searches.take(number)
            self._of(owner).tickets.discard(number)
            self.planner.settled(number, 0, waited_s=self.planner.clock() - search.began_s)
            self._run(self._count_and_let_go(number, search), search.num_keys)
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
        self.in_use[names.namespace] = None
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

    def fetched(self, entry: Entry, ok: bool, expires_at: int = 0, *, why: str = TIER_DOWN) -> None:
        """Of one arrival of a FetchOrder: its bytes are here and right, or not (why); nobody writes to its memory any more."""
        if not ok and why != TIER_DOWN:
            self._gone.add(entry.key, why)
        self._searches.fetched(entry, ok, expires_at=expires_at, why=why)

    def given_up(self, entry: Entry) -> None:
        """Of one arrival: it failed, but its memory may still be written to until `let_go`."""
        self._searches.given_up(entry)

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

    def _settle(self, number: int) -> Turns[Found]:
        """An arriving ticket becomes final, with the chunks that are here of it by now."""
        search, is_settled = self._searches[number], False
        search.settling = True
        try:
            prefix = yield from search.here.take_turns()
            answer = yield from self._answer_turns(number, search, prefix)
            if search.work is not None and not self.planner.is_worth_loading(
                search.work, search.query, search.layout, prefix.extent.num_tokens
            ):
                answer = Found(0, 0, reason=SLOWER)
            pinned = (yield from self._hold_turns(prefix)) if answer.ticket else []
            is_settled = True
            if self._searches.get(number) is not search:  # it was let go meanwhile
                self._unpin(pinned)
                return Found(0, 0)
            if search.work is not None:
                self.planner.settled(number, answer.num_tokens, waited_s=self.planner.clock() - search.began_s)
            count_lookup(self.metrics, answer, search.here.asked_tokens)
            self._searches.take(number)
            self._of(search.owner).tickets.discard(number)
            if answer.ticket:
                self._issue(answer, search.owner, search.query, search.layout, prefix, pinned)
            self._let_go(search)
            return answer
        finally:
            search.settling = False
            if not is_settled:  # the caller has left
                search.forget_what_is_here()

    def _hold_turns(self, prefix: Prefix[Entry]) -> Turns[list[Entry]]:
        """Hold all of a hit for its ticket, while the search still has its pins."""
        entries = yield from prefix.in_order_turns()
        num_held = 0
        try:
            while num_held < len(entries):
                part = entries[num_held : num_held + _MOST_PINS]
                self.ram.hold_all(part)
                num_held += len(part)
                yield len(part) // 4
        except GeneratorExit:  # the caller has left
            self._unpin(entries[:num_held])
            raise
        return entries

    def _count_and_let_go(self, number: int, search: Search) -> Turns[None]:
        """Of a search that was released before it was final."""
        try:
            prefix = yield from Presence(search.query, search.layout, search.pinned.get).take_turns()
            count_lookup(self.metrics, (yield from self._answer_turns(number, search, prefix)), search.here.asked_tokens)
            yield from prefix.empty_turns()
        finally:
            self._let_go(search)

    def _let_go(self, search: Search) -> None:
        """Unpin what a search has; it was taken."""
        self._run(self._let_go_turns(search), search.num_keys)

    def _let_go_turns(self, search: Search) -> Turns[None]:
        for part in search.pinned.emptied():
            self.ram.unpin_all(part)
            yield len(part) // 3
        for sources in search.sources.emptied():
            yield len(sources) // 4
        yield from emptied_dicts(search.places, search.faults)

    def _is_over(self, number: int) -> None:
        """A search is over: its owner may ask; without one it is let go."""
        if self._searches[number].owner is None:
            self._let_go(self._searches.take(number))
        self._has_news = True

    def take_news(self) -> bool:
        """Whether a search has ended since this was called last, in a step of what goes on in the background or otherwise."""
        news, self._has_news = self._has_news, False
        return news

    def _if_worth_loading(self, number: int, answer: Found, query: Query, layout: Layout, work: Work, declined: bool) -> Found:
        """The answer from memory alone; nothing, if computing is faster. declined: tiers were not asked, because it would not pay."""
        worth = self.planner.is_worth_loading(work, query, layout, answer.num_tokens)
        self.planner.decided_here(number, work, query, layout, answer.num_tokens, worth=worth, declined=declined)
        if answer.num_tokens and not worth:
            answer = Found(0, 0, reason=SLOWER)
        elif declined:
            answer = replace(answer, reason=SLOWER)
        return answer

    def _search_for_nobody(
        self, query: Query, layout: Layout, num_keys: int, *, prefix: Prefix[Entry] | None = None, sample: bool = False
    ) -> Turns[None]:
        """Bring what tiers have to memory, or, of a sample, one chunk of it. prefix: what memory has, held; None: not known."""
        number, clears, has_begun = next(self._numbers), self.ram.num_clears, False
        held: list[Entry] = []
        try:
            if prefix is None:
                prefix = yield from Presence(query, layout, self._finder(num_keys, held)).take_turns()
            yield from self._searches.begin_turns(number, None, query, layout, prefix, num_keys=num_keys, sample=sample)
            has_begun = clears == self.ram.num_clears  # else what it has pinned may have been cleared since
        finally:  # the caller may leave between two steps
            if number in self._searches and not has_begun:
                self._let_go(self._searches.take(number))
            self._unpin(held)

    def _is_worth_a_search(self, query: Query, presence: Presence[Entry], extent: Extent) -> bool:
        return self._has_lower and extent.num_tokens < presence.asked_tokens and self._searches.may_begin(query)

    def _answer(
        self, number: int, presence: Presence[Entry], extent: Extent, search: Search | None = None, sources: dict[str, int] | None = None
    ) -> Found:
        """A final answer: how far, from where, and why no further. sources: None: all of it from memory."""
        reason = self._reason(presence, extent, search)
        if not extent.num_tokens:
            return Found(0, 0, reason=reason)
        return Found(number, extent.num_tokens, sources=sources or {"ram": extent.num_tokens}, reason=reason)

    def _answer_turns(self, number: int, search: Search, prefix: Prefix[Entry]) -> Turns[Found]:
        """As `_answer` of a search, in steps."""
        sources = (yield from sources_turns(prefix, search, self.tier_names)) if len(search.sources) else None
        return self._answer(number, search.here, prefix.extent, search, sources)

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

    def _issue(self, answer: Found, owner: Owner, query: Query, layout: Layout, prefix: Prefix[Entry], pinned: list[Entry]) -> None:
        """A final ticket over entries that are pinned."""
        shards = {shard: [prefix.rows[group, shard] for group in range(len(layout.groups))] for shard in range(query.shards)}
        extent = prefix.extent
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
            self._unpin_ticket(held)

    def _unpin_ticket(self, ticket: _Ticket) -> None:
        """Nothing of a ticket is needed any more."""
        if len(ticket.pinned) > _MOST_AT_ONCE:
            self._chores.add(emptied(*[row for rows in ticket.shards.values() for row in rows]))
        self._unpin(ticket.pinned)


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
