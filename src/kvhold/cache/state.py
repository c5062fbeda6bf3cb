"""The state machine of the cache: calls and events in, answers and commands out; no I/O, no locks.

    lookup -> a ticket with pins -> claim (own pins, one shard) -> release each
    reserve -> commit / abandon

`LocalCache` drives it under a lock, the node from its loop. The *owner* of a call is this process,
or a connection to the node. Uncommitted memory is freed only by its owner or after `gone`, because
the owner may still write.
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
from kvhold.cache.index.eviction_history import EvictionHistory
from kvhold.cache.index.presence import Extent, Prefix, Presence
from kvhold.cache.planner import Planner
from kvhold.cache.reservations import MAX_SHARDS, Grant, Reservations, ReservedChunks
from kvhold.cache.transfer.commands import ClearCommand, Command
from kvhold.cache.transfer.reencodings import ReencodeRequest, Reencodings
from kvhold.cache.transfer.searches import Search, Searches, sources_turns
from kvhold.cache.transfer.writes import Writes
from kvhold.core.api import ABSENT, EventBatch, Found, ReencodeProgress
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, LayoutError, ProtocolError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, ChunkNames, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeCost
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
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.memory.arena import Arena
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier
from kvhold.tiers.stack import TierPlace

log = logging.getLogger(__name__)

Owner = Hashable
_MOST_KEYS = 1 << 20  # for one query: 100 MB of keys
# a call of up to so many keys is one turn
_ONE_TURN_KEYS = 250
_MOST_PINS = 500  # per step
_MOST_AT_ONCE = 2000  # entries unpinned per step
_MOST_ABANDONED = 300  # entries abandoned per step
_LOOKUP_ATTEMPTS = 3  # a lookup starts again after a clear


@dataclass(frozen=True)
class ClaimAnswer:
    """The answer to a claim.

    offsets:   `[group][chunk]`, or ABSENT
    checksums: `[group]`, of the present chunks
    """

    lease: int
    offsets: list[list[int]]
    num_tokens: list[int]
    checksums: list[bytes]


@dataclass(frozen=True)
class Held:
    tickets: int
    leases: int
    reservations: int
    nbytes: int


@dataclass
class _Ticket:
    """A hit that may be claimed.

    shards:   `{shard: [group][chunk]}`
    claiming: claims in progress, which need the pins
    dropped:  released; the last claim unpins
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
    number: int
    owner: Owner
    query: Query
    layout: Layout
    presence: Presence[Entry]
    extent: Extent


@dataclass
class _Holdings:
    tickets: set[int] = field(default_factory=set)
    leases: dict[int, list[Entry]] = field(default_factory=dict)
    lease_bytes: dict[int, int] = field(default_factory=dict)
    reservations: dict[int, ReservedChunks] = field(default_factory=dict)


def new_state(config: Config, arena: Arena) -> "CacheState":
    metrics = Metrics()
    ram = RamTier(
        arena, make_policy(config.policy), metrics, quota_bytes=config.namespace_quota_bytes
    )
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
        """Make an empty cache.

        write_behind_bytes: the most bytes that may wait for the tiers
        stalled_after_s:    see `Reservations`
        """
        self.ram = ram
        self.metrics = metrics
        self._has_lower = num_tiers > 0
        self._layouts: dict[bytes, Layout] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._holdings: dict[Owner, _Holdings] = {}
        # so that no ticket of an earlier run is valid
        self._numbers = count(randbits(48) << 8 | 1)
        self._commands: list[Command] = []
        self.in_use: dict[bytes, None] = {}
        """Namespaces with a reservation, added before the grant. Any thread may read it."""
        self._writes = Writes(ram, metrics, self._give_command, limit_bytes=write_behind_bytes)
        self.planner = Planner(metrics, lambda: self.tier_names, num_tiers, clock)
        self._searches = Searches(
            ram,
            self._writes,
            metrics,
            self._give_command,
            self.planner,
            run=self._run,
            unpin=self._unpin,
            is_over=self._is_over,
        )
        self.reencodings = Reencodings(self._give_command)
        self._clears = 0
        self._evictions = EvictionHistory()
        self._chores = Chores()
        self._has_news = False
        self.turn_units = TURN  # per step
        self._reservations = Reservations(
            ram,
            metrics,
            self._evictions,
            self._writes if num_tiers else None,
            stalled_after_s=stalled_after_s,
            clock=clock,
        )
        self._log = EventLog(event_buffer) if event_buffer else None
        self.tier_names = [f"tier-{number}" for number in range(1, num_tiers + 1)]
        ram.watch = self._changed

    def register(
        self, layout: Layout, namespace: bytes = b"", store_options: StoreOptions | None = None
    ) -> None:
        self._layouts[layout.fingerprint] = layout
        if len(namespace) == NAMESPACE_BYTES and store_options is not None:
            self.reencodings.learn(namespace, layout, store_options)

    def layout(self, fingerprint: bytes) -> Layout:
        layout = self._layouts.get(fingerprint)
        if layout is None:
            raise LayoutError(
                f"layout {fingerprint.hex()} was not registered; register the namespace first"
            )
        return layout

    def lookup(
        self, owner: Owner, query: Query, cost: ComputeCost | None = None, *, have_tokens: int = 0
    ) -> Found:
        """Pin the longest hit and start to load the rest. See `core.api.Cache.lookup`."""
        return finish(self.lookup_turns(owner, query, cost, have_tokens=have_tokens))

    def lookup_turns(
        self, owner: Owner, query: Query, cost: ComputeCost | None = None, *, have_tokens: int = 0
    ) -> Turns[Found]:
        layout = self.layout(query.layout)
        num_keys = _check_query(layout, query)
        turns = self._look_up(owner, query, layout, cost, have_tokens, num_keys)
        return finish(turns) if num_keys <= _ONE_TURN_KEYS else (yield from turns)

    def _look_up(
        self,
        owner: Owner,
        query: Query,
        layout: Layout,
        cost: ComputeCost | None,
        have_tokens: int,
        num_keys: int,
    ) -> Turns[Found]:
        for _ in range(_LOOKUP_ATTEMPTS):
            clears = self.ram.num_clears
            held: list[Entry] = []
            try:
                presence = Presence(query, layout, self._finder(num_keys, held))
                prefix = yield from presence.take_turns()
                extent, number, declined = prefix.extent, next(self._numbers), False
                if self._is_worth_a_search(query, presence, extent):
                    declined = cost is not None and not self.planner.pays(
                        cost, query, layout, extent
                    )
                    if not declined:
                        self._of(owner).tickets.add(number)
                        yield from self._searches.begin_turns(
                            number,
                            owner,
                            query,
                            layout,
                            prefix,
                            cost,
                            num_keys=num_keys,
                            have_tokens=have_tokens,
                        )
                        if clears == self.ram.num_clears:
                            return (yield from self._refresh(number))
                        self._forget_search(number, owner)  # its pins may have been cleared
                        continue
                pinned = yield from prefix.in_order_turns()
                yield from self._pin_turns(pinned)
                if clears == self.ram.num_clears:  # else the hit may have been cleared
                    answer = self._answer_from_ram(
                        _Looked(number, owner, query, layout, presence, extent),
                        cost,
                        declined=declined,
                    )
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

    def _answer_from_ram(
        self, looked: "_Looked", cost: ComputeCost | None, *, declined: bool
    ) -> Found:
        answer = self._answer(looked.number, looked.presence, looked.extent)
        if cost is not None:
            answer = self._if_worth_loading(
                looked.number, answer, looked.query, looked.layout, cost, declined
            )
        count_lookup(self.metrics, answer, looked.presence.asked_tokens)
        return answer

    def _finder(self, num_keys: int, held: list[Entry]) -> Callable[[bytes], Entry | None]:
        """Return a function that finds entries in RAM. In a call of several turns it holds them."""
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
        """Pin the last entry first, see `Reservations.commit_turns`."""
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
        """Unpin entries and empty the list, a long one in the background."""
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
        if num_keys <= _ONE_TURN_KEYS:
            finish(turns)
        else:
            self._chores.add(turns)

    def refresh(self, ticket: int, *, settle: bool = False) -> Found:
        """Return the current hit of a ticket; an empty `Found` if none."""
        return finish(self.refresh_turns(ticket, settle=settle))

    def refresh_turns(self, ticket: int, *, settle: bool = False) -> Turns[Found]:
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
        """Return whether nothing more will arrive. Cheap."""
        return ticket not in self._searches or self._searches[ticket].over

    def prefetch(self, owner: Owner, query: Query) -> None:
        finish(self.prefetch_turns(owner, query))

    def prefetch_turns(self, owner: Owner, query: Query) -> Turns[None]:
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
                self._unpin(present)  # now young, so not evicted next
        finally:
            self._unpin(held)

    def num_arrived(self, ticket: int) -> int:
        return len(self._searches[ticket].sources) if ticket in self._searches else 0

    def claim(
        self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, arriving: bool = False
    ) -> ClaimAnswer | None:
        """Pin one shard's entries; None for an invalid ticket. arriving: do not settle the hit."""
        return finish(self.claim_turns(owner, ticket, shard, first_chunk, arriving=arriving))

    def claim_turns(
        self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, arriving: bool = False
    ) -> Turns[ClaimAnswer | None]:
        """The ticket's pins stay until the last step."""
        if first_chunk < 0:
            raise ProtocolError(f"a claim from chunk {first_chunk} on; the first one is 0")
        while self._is_arriving(ticket):
            search = self._searches[ticket]
            if search.settling:
                yield TURN
            elif not arriving:
                yield from self.refresh_turns(ticket, settle=True)
            elif not 0 <= shard < search.query.shards:
                break
            else:
                extent = yield from search.here.extent_turns()
                if self._searches.get(ticket) is search and not search.settling:
                    return (
                        yield from self._lend_arriving(
                            owner, ticket, search, shard, first_chunk, extent
                        )
                    )
        held = self._tickets.get(ticket)
        if held is None or shard not in held.shards:
            self.metrics.add(
                "kvhold_claims_failed",
                reason="no such shard" if held or self._is_arriving(ticket) else "unknown ticket",
            )
            return None
        held.claiming += 1
        try:
            return (
                yield from self._lend(
                    owner,
                    [row[first_chunk:] for row in held.shards[shard]],
                    held.num_tokens[first_chunk:],
                )
            )
        finally:
            held.claiming -= 1
            if held.dropped and not held.claiming:
                self._unpin_ticket(held)

    def _lend_arriving(
        self,
        owner: Owner,
        ticket: int,
        search: Search,
        shard: int,
        first_chunk: int,
        extent: Extent,
    ) -> Turns[ClaimAnswer | None]:
        rows = [row[first_chunk:] for row in search.here.shard_rows(shard, extent)]
        num_tokens = [search.layout.tokens_per_chunk] * len(rows[0])
        return (
            yield from self._lend(
                owner, rows, num_tokens, may_go_on=lambda: self._searches.get(ticket) is search
            )
        )

    def _lend(
        self,
        owner: Owner,
        rows: list[list[Entry | None]],
        num_tokens: list[int],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Turns[ClaimAnswer]:
        """Pin entries. may_go_on: whether those not lent yet are still pinned."""
        lease, holdings = next(self._numbers), self._of(owner)
        leased = holdings.leases[lease] = []
        holdings.lease_bytes[lease] = 0
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
            leased += entries
            holdings.lease_bytes[lease] += _bytes_of(entries)
            count_entries(self.metrics, "leased", entries)
        return ClaimAnswer(lease, offsets, num_tokens, [b"".join(sums) for sums in checksums])

    def damaged(self, owner: Owner, lease: int, offsets: Sequence[int]) -> None:
        """Remove chunks that a reader reports. A wrong report costs only a miss."""
        reported = set(offsets)
        self.remove_damaged(
            [entry for entry in self._of(owner).leases.get(lease, []) if entry.offset in reported],
            "reader",
        )

    def remove_damaged(self, entries: Iterable[Entry], found_by: str) -> None:
        """Remove entries. found_by: reader, writer or scrubber."""
        for entry in entries:
            if self.ram.find(entry.key) is not entry:
                continue
            self.metrics.add("kvhold_damaged_chunks", found_by=found_by)
            log.error(
                "%s: bytes in memory (offset %d, %d bytes) are not those that were stored: "
                "removed; found by a %s",
                entry.key.hex(),
                entry.offset,
                entry.nbytes,
                found_by,
            )
            self.ram.remove(entry, why=DAMAGED)

    def release(self, owner: Owner, number: int) -> None:
        """Release a ticket, a lease or a re-encoding. Leases outlive their ticket."""
        held = self._tickets.get(number)
        if self.reencodings.find(owner, number) is not None:
            self.reencodings.drop(number)
        elif number in self._searches and self._searches[number].owner == owner:
            search = self._searches.take(number)
            self._of(owner).tickets.discard(number)
            self.planner.settled(number, 0, waited_s=self.planner.clock() - search.began_s)
            self._run(self._count_and_let_go(number, search), search.num_keys)
        elif held is not None and held.owner == owner:
            self._drop_ticket(number)
        else:
            self._of(owner).lease_bytes.pop(number, None)
            self._unpin(self._of(owner).leases.pop(number, []))

    def reserve(
        self,
        owner: Owner,
        layout: Layout,
        names: ChunkNames,
        shard: int,
        *,
        groups: bytes | None = None,
        store_options: StoreOptions = DEFAULT_OPTIONS,
    ) -> Grant:
        """Reserve memory for missing chunks, up to the first that does not fit.

        groups: `[group][chunk]`, one byte each, 0: not written; None: all
        """
        return finish(
            self.reserve_turns(
                owner, layout, names, shard, groups=groups, store_options=store_options
            )
        )

    def reserve_turns(
        self,
        owner: Owner,
        layout: Layout,
        names: ChunkNames,
        shard: int,
        *,
        groups: bytes | None = None,
        store_options: StoreOptions = DEFAULT_OPTIONS,
    ) -> Turns[Grant]:
        self.in_use[names.namespace] = None
        number, reservation = next(self._numbers), ReservedChunks(layout, store_options, {})
        self._of(owner).reservations[number] = reservation
        try:
            offsets = yield from self._reservations.reserve_turns(
                reservation, names, shard, groups=groups
            )
            self.reencodings.learn(names.namespace, layout, store_options)
        finally:
            if not reservation.chunks:
                self._of(owner).reservations.pop(number, None)
        return Grant(number if reservation.chunks else 0, offsets)

    def commit(
        self, owner: Owner, reservation: int, chunks: Sequence[int], checksums: bytes | None = None
    ) -> int:
        """Make chunks visible. Return the mark for `all_done`.

        checksums: see `Reservations.commit_turns`
        """
        return finish(self.commit_turns(owner, reservation, chunks, checksums))

    def commit_turns(
        self, owner: Owner, reservation: int, chunks: Sequence[int], checksums: bytes | None = None
    ) -> Turns[int]:
        reservations = self._of(owner).reservations
        if reservation in reservations:
            yield from self._reservations.commit_turns(reservations[reservation], chunks, checksums)
            if not reservations[reservation].chunks:
                del reservations[reservation]
        return self.mark

    def abandon(self, owner: Owner, reservation: int) -> None:
        finish(self.abandon_turns(owner, reservation))

    def abandon_turns(self, owner: Owner, reservation: int) -> Turns[None]:
        reservations = self._of(owner).reservations
        if reservation in reservations:
            yield from self._reservations.abandon_turns(reservations[reservation])
            del reservations[reservation]

    def touches_memory(self, owner: Owner) -> bool:
        held = self._holdings.get(owner)
        return held is not None and bool(held.leases or held.reservations)

    def held_by(self, owner: Owner) -> Held:
        held = self._holdings.get(owner, _Holdings())
        nbytes = sum(held.lease_bytes.values()) + sum(
            reservation.nbytes for reservation in held.reservations.values()
        )
        return Held(len(held.tickets), len(held.leases), len(held.reservations), nbytes)

    def give_up(self, owner: Owner) -> None:
        """Let others reserve an owner's uncommitted chunks, in other memory."""
        held = self._holdings.get(owner, _Holdings())
        for reservation in held.reservations.values():
            reservation.is_given_up = True

    def release_owner(self, owner: Owner) -> None:
        """Release the holdings of an owner that no longer touches the arena."""
        self.reencodings.drop_all(owner)
        held = self._holdings.get(owner)
        if held is None:
            return
        for ticket in list(held.tickets):
            self.release(owner, ticket)
        for entries in held.leases.values():
            self._unpin(entries)
        for reservation in held.reservations.values():
            # others may reserve the same chunks now
            reservation.is_given_up = True
            abandoning = self._reservations.abandon_turns(reservation)
            if reservation.num_entries <= _MOST_ABANDONED:
                finish(abandoning)
            else:
                self._chores.add(abandoning)
        del self._holdings[owner]

    def clear(self, namespace: bytes | None) -> int:
        """Forget all chunks, or one namespace. Return the number in RAM; lower tiers follow."""
        if namespace is not None and len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError("the namespace to clear has an impossible size")
        return self._clear(namespace or b"", learned=False)

    def cleared_elsewhere(self, prefix: bytes) -> None:
        self._clear(prefix, learned=True)

    def _clear(self, prefix: bytes, *, learned: bool) -> int:
        removed = self.ram.clear(prefix)
        self._chores.add(self.ram.sweep())
        self.step()
        if self._has_lower:
            self._searches.clear(prefix)
            self._clears += 1
            self._give_command(ClearCommand(prefix, learned))
        return removed

    def reencode(self, owner: Owner, request: ReencodeRequest) -> int:
        """Begin a re-encoding. Raises ConfigError, LayoutError, ProtocolError."""
        if request.query is not None:
            _check_query(self.layout(request.query.layout), request.query)
        number = next(self._numbers)
        self.reencodings.begin(number, owner, request, self._layouts)
        return number

    def step(self, units: int | None = None) -> bool:
        """Do background work (`chores.py`). Return whether there is more."""
        return self._chores.step(self.turn_units if units is None else units)

    @property
    def has_chores(self) -> bool:
        return len(self._chores) > 0

    def snapshot(self) -> tuple[int, Iterator[list[Entry]]]:
        """Return the last event's number, and RAM's entries in parts.

        Changes between two parts are in later events.
        """
        return self._events_log().last, self.ram.parts()

    def events(self, after: int) -> EventBatch:
        return self._events_log().after(after)

    @property
    def mark(self) -> int:
        return self._writes.mark

    def all_done(self, mark: int) -> bool:
        """Return whether every write up to `mark`, and every clear, has ended."""
        return not self._clears and self._writes.all_done(mark)

    def status(self) -> dict[str, Any]:
        return {
            "arena_bytes": self.ram.capacity_bytes,
            "used_bytes": self.ram.used_bytes,
            "chunks": self.ram.num_chunks,
            "pinned_chunks": self.ram.num_pinned,
            "clearing_chunks": self.ram.num_clearing,
            "arriving_chunks": self._searches.num_arriving,
            "reencodings": len(self.reencodings),
            "write_behind": {"chunks": len(self._writes), "bytes": self._writes.queued_bytes},
            "namespaces": {
                namespace.hex(): nbytes for namespace, nbytes in self.ram.used_by_namespace.items()
            },
            "held": self.holdings(),
            "counters": self.metrics.as_dict(),
        }

    def holdings(self) -> dict[str, int]:
        held = self._holdings.values()
        return {
            "tickets": sum(len(h.tickets) for h in held),
            "leases": sum(len(h.leases) for h in held),
            "reservations": sum(len(h.reservations) for h in held),
        }

    def take_commands(self) -> list[Command]:
        """Return each command once."""
        commands, self._commands = self._commands, []
        return commands

    # Events from the tier worker.

    def probed(self, search: int, places: dict[bytes, TierPlace], *, silent: bool = False) -> None:
        """End a probe. silent: some tier did not answer."""
        self._searches.probed(search, places, silent=silent)

    def fetched(self, entry: Entry, ok: bool, expires_at: int = 0, *, why: str = TIER_DOWN) -> None:
        """End one read of a FetchCommand. Nothing writes to its memory any more."""
        if not ok and why != TIER_DOWN:
            self._evictions.add(entry.key, why)
        self._searches.fetched(entry, ok, expires_at=expires_at, why=why)

    def given_up(self, entry: Entry) -> None:
        """End a failed read whose memory may be written to until `let_go`."""
        self._searches.given_up(entry)

    def let_go(self, entry: Entry) -> None:
        self._searches.let_go(entry)

    def reencode_progressed(self, number: int, progress: ReencodeProgress) -> None:
        self.reencodings.progressed(number, progress)

    def written(self, number: int) -> None:
        self._writes.done(number)

    def cleared(self, prefix: bytes) -> None:
        self._clears -= 1
        self._searches.cleared(prefix)

    def _give_command(self, command: Command) -> None:
        self._commands.append(command)

    def _of(self, owner: Owner) -> _Holdings:
        return self._holdings.setdefault(owner, _Holdings())

    def _is_arriving(self, ticket: int) -> bool:
        return ticket in self._searches and self._searches[ticket].owner is not None

    def _settle(self, number: int) -> Turns[Found]:
        search, is_settled = self._searches[number], False
        search.settling = True
        try:
            prefix = yield from search.here.take_turns()
            answer = yield from self._answer_turns(number, search, prefix)
            if search.cost is not None and not self.planner.is_worth_loading(
                search.cost, search.query, search.layout, prefix.extent.num_tokens
            ):
                answer = Found(0, 0, reason=SLOWER)
            pinned = (yield from self._hold_turns(prefix)) if answer.ticket else []
            is_settled = True
            # the search was released during these steps
            if self._searches.get(number) is not search:
                self._unpin(pinned)
                return Found(0, 0)
            if search.cost is not None:
                self.planner.settled(
                    number, answer.num_tokens, waited_s=self.planner.clock() - search.began_s
                )
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
        """Hold a hit's entries, before the search's pins end."""
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
        try:
            prefix = yield from Presence(
                search.query, search.layout, search.pinned.get
            ).take_turns()
            count_lookup(
                self.metrics,
                (yield from self._answer_turns(number, search, prefix)),
                search.here.asked_tokens,
            )
            yield from prefix.empty_turns()
        finally:
            self._let_go(search)

    def _let_go(self, search: Search) -> None:
        self._run(self._let_go_turns(search), search.num_keys)

    def _let_go_turns(self, search: Search) -> Turns[None]:
        for part in search.pinned.emptied():
            self.ram.unpin_all(part)
            yield len(part) // 3
        for sources in search.sources.emptied():
            yield len(sources) // 4
        yield from emptied_dicts(search.places, search.faults)

    def _is_over(self, number: int) -> None:
        if self._searches[number].owner is None:
            self._let_go(self._searches.take(number))
        self._has_news = True

    def take_news(self) -> bool:
        """Return whether a search has ended since the last call."""
        news, self._has_news = self._has_news, False
        return news

    def _if_worth_loading(
        self,
        number: int,
        answer: Found,
        query: Query,
        layout: Layout,
        cost: ComputeCost,
        declined: bool,
    ) -> Found:
        worth = self.planner.is_worth_loading(cost, query, layout, answer.num_tokens)
        self.planner.decided_here(
            number, cost, query, layout, answer.num_tokens, worth=worth, declined=declined
        )
        if answer.num_tokens and not worth:
            answer = Found(0, 0, reason=SLOWER)
        elif declined:
            answer = replace(answer, reason=SLOWER)
        return answer

    def _search_for_nobody(
        self,
        query: Query,
        layout: Layout,
        num_keys: int,
        *,
        prefix: Prefix[Entry] | None = None,
        sample: bool = False,
    ) -> Turns[None]:
        """Load chunks without a waiting request. sample: only one, to measure the tier."""
        number, clears, has_begun = next(self._numbers), self.ram.num_clears, False
        held: list[Entry] = []
        try:
            if prefix is None:
                prefix = yield from Presence(
                    query, layout, self._finder(num_keys, held)
                ).take_turns()
            yield from self._searches.begin_turns(
                number, None, query, layout, prefix, num_keys=num_keys, sample=sample
            )
            has_begun = clears == self.ram.num_clears  # else pins may have been cleared
        finally:  # the caller may leave
            if number in self._searches and not has_begun:
                self._let_go(self._searches.take(number))
            self._unpin(held)

    def _is_worth_a_search(self, query: Query, presence: Presence[Entry], extent: Extent) -> bool:
        return (
            self._has_lower
            and extent.num_tokens < presence.asked_tokens
            and self._searches.may_begin(query)
        )

    def _answer(
        self,
        number: int,
        presence: Presence[Entry],
        extent: Extent,
        search: Search | None = None,
        sources: dict[str, int] | None = None,
    ) -> Found:
        reason = self._reason(presence, extent, search)
        if not extent.num_tokens:
            return Found(0, 0, reason=reason)
        return Found(
            number, extent.num_tokens, sources=sources or {"ram": extent.num_tokens}, reason=reason
        )

    def _answer_turns(self, number: int, search: Search, prefix: Prefix[Entry]) -> Turns[Found]:
        sources = (
            (yield from sources_turns(prefix, search, self.tier_names))
            if len(search.sources)
            else None
        )
        return self._answer(number, search.here, prefix.extent, search, sources)

    def _reason(self, presence: Presence[Entry], extent: Extent, search: Search | None) -> str:
        gap = presence.gap(extent)
        if search is not None and gap is not None and search.declines(gap.key):
            return SLOWER
        if search is not None and gap is not None and search.idle and gap.key in search.places:
            return NOT_NEEDED
        if search is not None:  # a chunk that RAM or a tier has is not the reason
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
            # the tiers are being cleared, else they would have been probed
            return CLEARED
        places = search.places if search is not None else ()
        partly = any(key in places or self.ram.find(key) is not None for key in gap.siblings)
        return self._evictions.why(gap.key) or (INCOMPLETE if partly else NEVER_STORED)

    def _issue(
        self,
        answer: Found,
        owner: Owner,
        query: Query,
        layout: Layout,
        prefix: Prefix[Entry],
        pinned: list[Entry],
    ) -> None:
        shards = {
            shard: [prefix.rows[group, shard] for group in range(len(layout.groups))]
            for shard in range(query.shards)
        }
        extent = prefix.extent
        counts = [layout.tokens_per_chunk] * extent.whole + (
            [extent.tail_tokens] if extent.tail is not None else []
        )
        self._tickets[answer.ticket] = _Ticket(owner, counts, shards, pinned, answer)
        self._of(owner).tickets.add(answer.ticket)

    def _events_log(self) -> EventLog:
        if self._log is None:
            raise ConfigError(
                "event_buffer is 0: this cache keeps no events; set it to how many are to "
                "be remembered, such as 100000"
            )
        return self._log

    def _changed(self, what: str, entry: Entry) -> None:
        if self._log is not None:
            self._log.add(what, entry)
        if what in REASONS:
            self._evictions.add(entry.key, what)
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
        if len(ticket.pinned) > _MOST_AT_ONCE:
            self._chores.add(emptied(*[row for rows in ticket.shards.values() for row in rows]))
        self._unpin(ticket.pinned)


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum([entry.taken_bytes for entry in entries])


def _check_query(layout: Layout, query: Query) -> int:
    """Return the number of keys. Raises ProtocolError."""
    if (
        len(query.namespace) != NAMESPACE_BYTES
        or len(query.hashes) % HASH_BYTES
        or not 1 <= query.shards <= MAX_SHARDS
    ):
        raise ProtocolError("a query's namespace, hashes or shards have an impossible size")
    if len(query.tail_hashes) != len(query.tail_lengths) * HASH_BYTES:
        raise ProtocolError("a query's tail hashes and tail lengths do not agree")
    if not all(0 < length < layout.tokens_per_chunk for length in query.tail_lengths):
        raise ProtocolError(
            f"a query's tail is not shorter than a chunk of {layout.tokens_per_chunk} tokens"
        )
    num_keys = (
        (len(query.hashes) // HASH_BYTES + len(query.tail_lengths))
        * len(layout.groups)
        * query.shards
    )
    if num_keys > _MOST_KEYS:
        raise ProtocolError(
            f"a query of {num_keys} keys ({len(query.hashes) // HASH_BYTES} chunks, "
            f"{len(query.tail_lengths)} tails, {len(layout.groups)} "
            f"groups, {query.shards} shards); {_MOST_KEYS} is the most: look up a shorter prompt"
        )
    return num_keys
