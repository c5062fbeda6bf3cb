"""The cache as a state machine: calls and events in, answers and orders out, no I/O, no locks.

`LocalCache` drives it under a lock, the node from its loop. Each call names its *owner* (a caller in this process, a connection to
the node): what an owner holds, hits, loans and rooms, goes when the owner goes (`gone`), and the arena is back at its baseline. Memory
of a room is given back only then too, because its owner may be writing until then.

    lookup -> a ticket with pins -> claim (pins move to the claimer, shard by shard) -> release
    reserve -> commit / abandon

Where there are tiers below RAM, a lookup that RAM does not answer in full is *arriving*: its ticket is good already, and grows while
chunks are brought up (`searches.py`), until `refresh` says that it is final, or it is claimed. What is committed waits to be written below
(`writes.py`). What the state wants done stands in `take_orders`; the mover does it and answers with the events at the end of this class.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from secrets import randbits
from typing import Any

from kvhold.cache.orders import ClearOrder, Order
from kvhold.cache.presence import Extent, Presence
from kvhold.cache.searches import Searches
from kvhold.cache.writes import Writes
from kvhold.core.api import ABSENT
from kvhold.core.config import Config
from kvhold.core.errors import LayoutError, ProtocolError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, ChunkNames, Query, make_key
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier, Wanted
from kvhold.tiers.stack import Place

Owner = Hashable

_MAX_SHARDS = 0xFFFF


@dataclass(frozen=True)
class Found:
    """Answer to a lookup. `ticket` is 0 when nothing was found (and nothing is held). arriving: it may grow yet; ask again."""

    ticket: int
    num_tokens: int
    arriving: bool = False


@dataclass(frozen=True)
class Lent:
    """Answer to a claim: offsets `[group][chunk]` into the arena, ABSENT where the hit does not need the chunk; tokens `[chunk]`."""

    loan: int
    offsets: list[list[int]]
    num_tokens: list[int]


@dataclass(frozen=True)
class Granted:
    """Answer to a reserve: offsets `[group][chunk]`, ABSENT for chunks that got none. `room` is 0 when none did."""

    room: int
    offsets: list[list[int]]


@dataclass
class _Ticket:
    """A hit that waits to be claimed: for each shard not yet claimed, entries `[group][chunk]`, None where not needed."""

    owner: Owner
    num_tokens: list[int]
    shards: dict[int, list[list[Entry | None]]]


@dataclass
class _Room:
    """Reserved chunks: chunk number -> one entry a group."""

    layout: Layout
    chunks: dict[int, list[Entry]]


@dataclass
class _Holdings:
    """What one owner holds, by number. Among the tickets are those that are still arriving."""

    tickets: set[int] = field(default_factory=set)
    loans: dict[int, list[Entry]] = field(default_factory=dict)
    rooms: dict[int, _Room] = field(default_factory=dict)


def new_state(config: Config, arena: Arena) -> "CacheState":
    """An empty cache over an arena, with the policy that the settings name."""
    metrics = Metrics()
    ram = RamTier(arena, make_policy(config.policy), metrics, quota_bytes=config.namespace_quota_bytes)
    write_behind_bytes = config.write_behind_bytes or arena.nbytes // 4
    return CacheState(ram, metrics, num_tiers=len(config.tiers), write_behind_bytes=write_behind_bytes)


class CacheState:
    """All of one cache but its I/O."""

    def __init__(self, ram: RamTier, metrics: Metrics, *, num_tiers: int = 0, write_behind_bytes: int = 0) -> None:
        """num_tiers: below RAM. write_behind_bytes: the most that may wait to be written there."""
        self.ram = ram
        self.metrics = metrics
        self._has_lower = num_tiers > 0
        self._layouts: dict[bytes, Layout] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._holdings: dict[Owner, _Holdings] = {}
        self._numbers = count(randbits(48) << 8 | 1)  # so that a ticket of an earlier run is never good in this one
        self._orders: list[Order] = []
        self._writes = Writes(ram, metrics, self._give_order, limit_bytes=write_behind_bytes)
        self._searches = Searches(ram, self._writes, metrics, self._give_order)
        self._clears = 0

    def register(self, layout: Layout) -> None:
        """Make a layout known by its fingerprint."""
        self._layouts[layout.fingerprint] = layout

    def layout(self, fingerprint: bytes) -> Layout:
        """The registered layout. Raises LayoutError for one that never was."""
        layout = self._layouts.get(fingerprint)
        if layout is None:
            raise LayoutError(f"layout {fingerprint.hex()} was not registered; register the namespace first")
        return layout

    def lookup(self, owner: Owner, query: Query) -> Found:
        """Find the longest hit, pin it, and give it a ticket. What lower tiers may have beyond it begins to arrive."""
        layout = self.layout(query.layout)
        _check_query(layout, query)
        presence = Presence(query, layout, self.ram.find)
        extent = presence.extent()
        if self._has_lower and extent.num_tokens < presence.asked_tokens and self._searches.may_begin(query):
            number = next(self._numbers)
            self._of(owner).tickets.add(number)
            self._searches.begin(number, owner, query, layout)
            return self.refresh(number)
        self._count_lookup(extent.num_tokens, presence.asked_tokens)
        if not extent.num_tokens:
            return Found(0, 0)
        ticket = next(self._numbers)
        found = presence.found(extent)
        for entry in reversed(found.values()):  # last one first: see `commit`
            self.ram.pin(entry)
        self._issue(ticket, owner, query, layout, extent, found)
        return Found(ticket, extent.num_tokens)

    def refresh(self, ticket: int, *, settle: bool = False) -> Found:
        """How far a ticket goes now. One that is final stays as it is; one that came to nothing is no more.

        settle: it is final with what is here by now
        """
        if self._is_arriving(ticket):
            search = self._searches[ticket]
            if not settle and not search.over:
                return Found(ticket, search.presence().extent().num_tokens, arriving=True)
            self._settle(ticket)
        held = self._tickets.get(ticket)
        return Found(ticket, sum(held.num_tokens)) if held is not None else Found(0, 0)

    def is_over(self, ticket: int) -> bool:
        """Whether nothing more will come for it. Cheap, unlike `refresh`."""
        return ticket not in self._searches or self._searches[ticket].over

    def prefetch(self, owner: Owner, query: Query) -> None:
        """Bring what lower tiers have of a prompt into RAM, for nobody in particular yet."""
        found = self.lookup(owner, query)
        if found.arriving:
            self._searches.orphan(found.ticket)
            self._of(owner).tickets.discard(found.ticket)
        elif found.ticket:
            self.release(owner, found.ticket)

    def claim(self, owner: Owner, ticket: int, shard: int, first_chunk: int) -> Lent | None:
        """Move one shard's pins from the ticket to `owner`; chunks before `first_chunk` are let go. None if the ticket is not good."""
        if first_chunk < 0:
            raise ProtocolError(f"a claim from chunk {first_chunk} on; the first one is 0")
        if self._is_arriving(ticket):  # whoever claims waits no longer
            self._settle(ticket)
        held = self._tickets.get(ticket)
        if held is None or shard not in held.shards:
            self.metrics.add("kvhold_claims_failed", reason="unknown ticket" if held is None else "claimed already")
            return None
        groups = held.shards.pop(shard)
        if not held.shards:
            self._forget_ticket(ticket)
        for chunks in groups:
            self._unpin(chunks[:first_chunk])
        lent = [entry for chunks in groups for entry in chunks[first_chunk:] if entry is not None]
        loan = next(self._numbers)
        self._of(owner).loans[loan] = lent
        self.metrics.add("kvhold_loaned_chunks", len(lent))
        self.metrics.add("kvhold_loaned_bytes", sum(entry.nbytes for entry in lent))
        offsets = [[ABSENT if entry is None else entry.offset for entry in chunks[first_chunk:]] for chunks in groups]
        return Lent(loan, offsets, held.num_tokens[first_chunk:])

    def release(self, owner: Owner, number: int) -> None:
        """Let go of a ticket (what was not claimed of it) or of a loan. Unknown numbers are ignored: it may be gone already."""
        held = self._tickets.get(number)
        if number in self._searches and self._searches[number].owner == owner:
            self._of(owner).tickets.discard(number)
            self._searches.drop(number)
        elif held is not None and held.owner == owner:
            self._drop_ticket(number)
        else:
            self._unpin(self._of(owner).loans.pop(number, []))

    def reserve(self, owner: Owner, layout: Layout, names: ChunkNames, shard: int, *, ttl_s: float | None = None) -> Granted:
        """Memory for the chunks that are missing, in order, until there is no room. A chunk gets all its groups or none."""
        _check_names(layout, names, shard)
        expires_at = 0 if ttl_s is None else ceil(self.ram.now() + ttl_s)
        groups = range(len(layout.groups))
        offsets = [[ABSENT] * len(names) for _ in groups]
        taken: dict[int, list[Entry]] = {}
        first_token, parent = names.first_token, names.parent
        for chunk in range(len(names)):
            num_tokens = names.tail_tokens if names.tail_tokens and chunk == len(names) - 1 else layout.tokens_per_chunk
            chain_hash = names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            wanted = [_wanted(layout, names.namespace, chain_hash, parent, g, shard, num_tokens) for g in groups]
            if self._is_missing(wanted):
                entries = self.ram.reserve_all(wanted, num_tokens=num_tokens, first_token=first_token, expires_at=expires_at)
                if entries is None:  # nor would what follows be of use without it
                    self.metrics.add("kvhold_store_skipped_chunks", len(names) - chunk, reason="no room")
                    break
                taken[chunk] = entries
                for g, entry in enumerate(entries):
                    offsets[g][chunk] = entry.offset
            first_token, parent = first_token + num_tokens, chain_hash
        if not taken:
            return Granted(0, offsets)
        room = next(self._numbers)
        self._of(owner).rooms[room] = _Room(layout, taken)
        return Granted(room, offsets)

    def commit(self, owner: Owner, room: int, chunks: Sequence[int]) -> int:
        """Make chunks of a room visible. Last one first, so that by age a prefix never goes before its continuation.

        Returns the mark that stands for their being written below (`all_done`).
        """
        held = self._of(owner).rooms.get(room)
        if held is None:
            return self.mark
        committed = [(chunk, held.chunks.pop(chunk)) for chunk in sorted(set(chunks), reverse=True) if chunk in held.chunks]
        for _, entries in committed:
            for entry in entries:
                self.ram.commit(entry)
                self.metrics.add("kvhold_stored_chunks")
                self.metrics.add("kvhold_stored_bytes", entry.nbytes)
        if self._has_lower:
            for _, entries in reversed(committed):  # below, the beginning first: without it the rest is of no use
                for entry in entries:
                    self._writes.add(entry, held.layout)
        if not held.chunks:
            del self._of(owner).rooms[room]
        return self.mark

    def abandon(self, owner: Owner, room: int) -> None:
        """Give back what a room holds uncommitted."""
        held = self._of(owner).rooms.pop(room, None)
        for entries in held.chunks.values() if held is not None else ():
            for entry in entries:
                self.ram.abandon(entry)
                self.metrics.add("kvhold_abandoned_chunks")

    def touches_memory(self, owner: Owner) -> bool:
        """Whether `owner` has a loan or a room: it may be reading or writing the arena now."""
        held = self._holdings.get(owner)
        return held is not None and bool(held.loans or held.rooms)

    def gone(self, owner: Owner) -> None:
        """The owner is no more and touches no memory any longer: give back all it held."""
        held = self._holdings.get(owner)
        if held is None:
            return
        for ticket in list(held.tickets):
            self.release(owner, ticket)
        for entries in held.loans.values():
            self._unpin(entries)
        for room in list(held.rooms):
            self.abandon(owner, room)
        del self._holdings[owner]

    def clear(self, namespace: bytes | None) -> int:
        """Forget every chunk, or those of one namespace. Returns how many RAM had; lower tiers are cleared by and by (`all_done`)."""
        if namespace is not None and len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError("the namespace to clear has an impossible size")
        removed = self._clear_ram(namespace or b"")
        if self._has_lower:
            self._searches.clear(namespace or b"")
            self._clears += 1
            self._give_order(ClearOrder(namespace or b""))
        return removed

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
            "arriving_chunks": self._searches.num_arriving,
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

    def probed(self, search: int, places: dict[bytes, Place]) -> None:
        """Of a ProbeOrder."""
        self._searches.probed(search, places)
        if search in self._searches and self._searches[search].over:
            self._settle_orphans([search])

    def fetched(self, entry: Entry, ok: bool, expires_at: int = 0) -> None:
        """Of one arrival of a FetchOrder: its bytes are here and right, or not; nobody writes to its memory any more."""
        self._settle_orphans(self._searches.fetched(entry, ok, expires_at=expires_at))

    def given_up(self, entry: Entry) -> None:
        """Of one arrival: it failed, but its memory may still be written to until `let_go`."""
        self._settle_orphans(self._searches.given_up(entry))

    def let_go(self, entry: Entry) -> None:
        """Of one arrival that was given up."""
        self._searches.let_go(entry)

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

    def _settle(self, number: int) -> None:
        """An arriving ticket becomes final, with what is here of it by now."""
        search, extent = self._searches.finish(number)
        presence = search.presence()
        self._count_lookup(extent.num_tokens, presence.asked_tokens)
        if extent.num_tokens:
            self._issue(number, search.owner, search.query, search.layout, extent, presence.found(extent))
        else:
            self._of(search.owner).tickets.discard(number)

    def _settle_orphans(self, over: Iterable[int]) -> None:
        for number in over:
            if self._searches[number].owner is None:
                self._searches.drop(number)

    def _issue(
        self, ticket: int, owner: Owner, query: Query, layout: Layout, extent: Extent, found: dict[tuple[int, int, int], Entry]
    ) -> None:
        """A final ticket over entries that are pinned: `found[shard, group, chunk]`."""
        groups, chunks = range(len(layout.groups)), range(extent.chunks)
        shards = {shard: [[found.get((shard, group, chunk)) for chunk in chunks] for group in groups] for shard in range(query.shards)}
        counts = [layout.tokens_per_chunk] * extent.whole + ([extent.tail_tokens] if extent.tail is not None else [])
        self._tickets[ticket] = _Ticket(owner, counts, shards)
        self._of(owner).tickets.add(ticket)

    def _clear_ram(self, prefix: bytes) -> int:
        entries = self.ram.entries(prefix)
        for entry in entries:
            self.ram.remove(entry)
        self.metrics.add("kvhold_cleared_chunks", len(entries))
        return len(entries)

    def _is_missing(self, wanted: list[Wanted]) -> bool:
        """Whether a chunk's groups are not all present, and nobody is writing them."""
        present = [self.ram.find(one.key) is not None for one in wanted]
        if all(present):
            self.metrics.add("kvhold_store_skipped_chunks", reason="present")
            return False
        if any(self.ram.holds(one.key) and not there for one, there in zip(wanted, present, strict=True)):
            self.metrics.add("kvhold_store_skipped_chunks", reason="in progress")
            return False
        return True

    def _drop_ticket(self, ticket: int) -> None:
        held = self._forget_ticket(ticket)
        for groups in held.shards.values():
            for chunks in groups:
                self._unpin(chunks)

    def _forget_ticket(self, ticket: int) -> _Ticket:
        held = self._tickets.pop(ticket)
        self._of(held.owner).tickets.discard(ticket)
        return held

    def _unpin(self, entries: Iterable[Entry | None]) -> None:
        for entry in entries:
            if entry is not None:
                self.ram.unpin(entry)

    def _count_lookup(self, found: int, asked: int) -> None:
        result = "miss" if not found else "hit" if found == asked else "partial"
        self.metrics.add("kvhold_lookup_requests", result=result)
        self.metrics.add("kvhold_lookup_tokens", found, result="hit")
        self.metrics.add("kvhold_lookup_tokens", asked - found, result="miss")


def _wanted(layout: Layout, namespace: bytes, chain_hash: bytes, parent: bytes, group: int, shard: int, num_tokens: int) -> Wanted:
    before = make_key(namespace, parent, group, shard) if parent else None
    return Wanted(make_key(namespace, chain_hash, group, shard), layout.chunk_bytes(group, num_tokens), before)


def _check_query(layout: Layout, query: Query) -> None:
    if len(query.namespace) != NAMESPACE_BYTES or len(query.hashes) % HASH_BYTES or not 1 <= query.shards <= _MAX_SHARDS:
        raise ProtocolError("a query's namespace, hashes or shards have an impossible size")
    if len(query.tail_hashes) != len(query.tail_lengths) * HASH_BYTES:
        raise ProtocolError("a query's tail hashes and tail lengths do not agree")
    if not all(0 < length < layout.tokens_per_chunk for length in query.tail_lengths):
        raise ProtocolError(f"a query's tail is not shorter than a chunk of {layout.tokens_per_chunk} tokens")


def _check_names(layout: Layout, names: ChunkNames, shard: int) -> None:
    if len(names.namespace) != NAMESPACE_BYTES or len(names.hashes) % HASH_BYTES or not 0 <= shard < _MAX_SHARDS:
        raise ProtocolError("the chunks' namespace, hashes or shard have an impossible size")
    if len(names.parent) not in (0, HASH_BYTES):
        raise ProtocolError("the hash before the chunks has an impossible size")
    if names.tail_tokens:
        if not names.hashes:
            raise ProtocolError("a tail without a hash")
        layout.check_tokens(names.tail_tokens)
