"""The cache as a state machine: calls in, answers out, no I/O, no locks, no clock.

`LocalCache` drives it under a lock, the node from its loop. Each call names its *owner* (a caller in this process, a connection to
the node): what an owner holds, hits, loans and rooms, goes when the owner goes (`gone`), and the arena is back at its baseline. Memory
of a room is given back only then too, because its owner may be writing until then.

    lookup -> a ticket with pins -> claim (pins move to the claimer, shard by shard) -> release
    reserve -> commit / abandon
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import randbits
from typing import Any

from kvhold.cache.hits import longest_hit, needed_chunks
from kvhold.core.api import ABSENT
from kvhold.core.config import Config
from kvhold.core.errors import LayoutError, ProtocolError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, ChunkNames, Query, make_key, place_suffix
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier

Owner = Hashable

_MAX_SHARDS = 0xFFFF


@dataclass(frozen=True)
class Found:
    """Answer to a lookup. `ticket` is 0 when nothing was found (and nothing is held)."""

    ticket: int
    num_tokens: int


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
class _Holdings:
    """What one owner holds, by number."""

    tickets: set[int] = field(default_factory=set)
    loans: dict[int, list[Entry]] = field(default_factory=dict)
    rooms: dict[int, dict[int, list[Entry]]] = field(default_factory=dict)  # room -> chunk number -> one entry a group


def new_state(config: Config, arena: Arena) -> "CacheState":
    """An empty cache over an arena, with the policy that the settings name."""
    metrics = Metrics()
    return CacheState(RamTier(arena, make_policy(config.policy), metrics), metrics)


class CacheState:
    """All of one cache but its I/O."""

    def __init__(self, ram: RamTier, metrics: Metrics) -> None:
        self.ram = ram
        self.metrics = metrics
        self._layouts: dict[bytes, Layout] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._holdings: dict[Owner, _Holdings] = {}
        self._numbers = count(randbits(48) << 8 | 1)  # so that a ticket of an earlier run is never good in this one

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
        """Find the longest hit, pin it, and give it a ticket."""
        layout = self.layout(query.layout)
        _check_query(layout, query)
        probe = _Probe(self.ram, query, layout)
        whole, tail = longest_hit(layout, probe.reach(), probe.num_whole, query.tail_lengths, probe.has_chunk, probe.has_tail)
        tail_tokens = 0 if tail is None else query.tail_lengths[tail]
        num_tokens = whole * layout.tokens_per_chunk + tail_tokens
        asked = probe.num_whole * layout.tokens_per_chunk + max(query.tail_lengths, default=0)
        self._count_lookup(num_tokens, asked)
        if not num_tokens:
            return Found(0, 0)
        ticket = next(self._numbers)
        shards = {shard: self._pin_shard(layout, probe, shard, whole, tail, num_tokens) for shard in range(query.shards)}
        counts = [layout.tokens_per_chunk] * whole + ([tail_tokens] if tail_tokens else [])
        self._tickets[ticket] = _Ticket(owner, counts, shards)
        self._of(owner).tickets.add(ticket)
        return Found(ticket, num_tokens)

    def claim(self, owner: Owner, ticket: int, shard: int, first_chunk: int) -> Lent | None:
        """Move one shard's pins from the ticket to `owner`; chunks before `first_chunk` are let go. None if the ticket is not good."""
        if first_chunk < 0:
            raise ProtocolError(f"a claim from chunk {first_chunk} on; the first one is 0")
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
        if held is not None and held.owner == owner:
            self._drop_ticket(number)
        else:
            self._unpin(self._of(owner).loans.pop(number, []))

    def reserve(self, owner: Owner, layout: Layout, names: ChunkNames, shard: int) -> Granted:
        """Memory for the chunks that are missing, in order, until there is no room. A chunk gets all its groups or none."""
        _check_names(layout, names, shard)
        groups = range(len(layout.groups))
        offsets = [[ABSENT] * len(names) for _ in groups]
        taken: dict[int, list[Entry]] = {}
        first_token = names.first_token
        for chunk in range(len(names)):
            num_tokens = names.tail_tokens if names.tail_tokens and chunk == len(names) - 1 else layout.tokens_per_chunk
            chain_hash = names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            wanted = [(make_key(names.namespace, chain_hash, g, shard), layout.chunk_bytes(g, num_tokens)) for g in groups]
            if self._is_missing(wanted):
                entries = self._take(wanted, num_tokens, first_token)
                if entries is None:  # nor would what follows be of use without it
                    self.metrics.add("kvhold_store_skipped_chunks", len(names) - chunk, reason="no room")
                    break
                taken[chunk] = entries
                for g, entry in enumerate(entries):
                    offsets[g][chunk] = entry.offset
            first_token += num_tokens
        if not taken:
            return Granted(0, offsets)
        room = next(self._numbers)
        self._of(owner).rooms[room] = taken
        return Granted(room, offsets)

    def commit(self, owner: Owner, room: int, chunks: Sequence[int]) -> None:
        """Make chunks of a room visible. Last one first, so that by age a prefix never goes before its continuation."""
        taken = self._of(owner).rooms.get(room, {})
        for chunk in sorted(set(chunks), reverse=True):
            for entry in taken.pop(chunk, ()):
                self.ram.commit(entry)
                self.metrics.add("kvhold_stored_chunks")
                self.metrics.add("kvhold_stored_bytes", entry.nbytes)
        if not taken:
            self._of(owner).rooms.pop(room, None)

    def abandon(self, owner: Owner, room: int) -> None:
        """Give back what a room holds uncommitted."""
        for entries in self._of(owner).rooms.pop(room, {}).values():
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
            self._drop_ticket(ticket)
        for entries in held.loans.values():
            self._unpin(entries)
        for room in list(held.rooms):
            self.abandon(owner, room)
        del self._holdings[owner]

    def clear(self, namespace: bytes | None) -> int:
        """Forget every chunk, or those of one namespace. Returns how many."""
        if namespace is not None and len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError("the namespace to clear has an impossible size")
        entries = self.ram.entries(namespace or b"")
        for entry in entries:
            self.ram.remove(entry)
        self.metrics.add("kvhold_cleared_chunks", len(entries))
        return len(entries)

    def status(self) -> dict[str, Any]:
        """Sizes, counts and counters, for people and monitors."""
        return {
            "arena_bytes": self.ram.capacity_bytes,
            "used_bytes": self.ram.used_bytes,
            "chunks": self.ram.num_chunks,
            "pinned_chunks": self.ram.num_pinned,
            "held": self.holdings(),
            "counters": self.metrics.as_dict(),
        }

    def holdings(self) -> dict[str, int]:
        """How many tickets, loans and rooms are out, over all owners."""
        held = self._holdings.values()
        return {
            "tickets": len(self._tickets),
            "loans": sum(len(h.loans) for h in held),
            "rooms": sum(len(h.rooms) for h in held),
        }

    def _of(self, owner: Owner) -> _Holdings:
        return self._holdings.setdefault(owner, _Holdings())

    def _pin_shard(
        self, layout: Layout, probe: "_Probe", shard: int, whole: int, tail: int | None, num_tokens: int
    ) -> list[list[Entry | None]]:
        """Entries `[group][chunk]` of one shard, pinned. Last one first: see `commit`."""
        pinned: list[list[Entry | None]] = []
        for group in range(len(layout.groups)):
            needed = needed_chunks(layout, group, num_tokens)
            row: list[Entry | None] = [None] * (whole + (tail is not None))
            for chunk in reversed(needed):
                entry = probe.tail(group, shard, tail) if chunk == whole and tail is not None else probe.chunk(group, shard, chunk)
                assert entry is not None, "a hit counts only what is present"
                self.ram.pin(entry)
                row[chunk] = entry
            pinned.append(row)
        return pinned

    def _is_missing(self, wanted: list[tuple[bytes, int]]) -> bool:
        """Whether a chunk's groups are not all present, and nobody is writing them."""
        present = [self.ram.find(key) is not None for key, _ in wanted]
        if all(present):
            self.metrics.add("kvhold_store_skipped_chunks", reason="present")
            return False
        if any(self.ram.holds(key) and not there for (key, _), there in zip(wanted, present, strict=True)):
            self.metrics.add("kvhold_store_skipped_chunks", reason="in progress")
            return False
        return True

    def _take(self, wanted: list[tuple[bytes, int]], num_tokens: int, first_token: int) -> list[Entry] | None:
        """Memory for all groups of a chunk; one of which some groups were evicted is written whole again."""
        for key, _ in wanted:
            if (entry := self.ram.find(key)) is not None:
                self.ram.remove(entry)
        return self.ram.reserve_all(wanted, num_tokens, first_token)

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


class _Probe:
    """The presence of a query's chunks in RAM; each is looked for once."""

    def __init__(self, ram: RamTier, query: Query, layout: Layout) -> None:
        self._ram = ram
        self._query = query
        self._layout = layout
        self.num_whole = len(query.hashes) // HASH_BYTES
        self._suffixes = [[place_suffix(g, s) for s in range(query.shards)] for g in range(len(layout.groups))]
        self._runs: dict[tuple[int, int], list[Entry]] = {}

    def reach(self) -> int:
        """How many whole chunks from the start all full-attention groups have in all shards."""
        reach = self.num_whole
        for group, geometry in enumerate(self._layout.groups):
            if geometry.attention == "full":
                for shard in range(self._query.shards):
                    run = self._runs[group, shard] = self._run(group, shard, reach)
                    reach = len(run)
        return reach

    def chunk(self, group: int, shard: int, chunk: int) -> Entry | None:
        run = self._runs.get((group, shard))
        return self._find(self._query.hashes, group, shard, chunk) if run is None else run[chunk]

    def tail(self, group: int, shard: int, tail: int) -> Entry | None:
        return self._find(self._query.tail_hashes, group, shard, tail)

    def has_chunk(self, group: int, chunk: int) -> bool:
        return all(self.chunk(group, shard, chunk) is not None for shard in range(self._query.shards))

    def has_tail(self, group: int, tail: int) -> bool:
        return all(self.tail(group, shard, tail) is not None for shard in range(self._query.shards))

    def _run(self, group: int, shard: int, most: int) -> list[Entry]:
        find, namespace, hashes, suffix = self._ram.find, self._query.namespace, self._query.hashes, self._suffixes[group][shard]
        run = []
        for start in range(0, most * HASH_BYTES, HASH_BYTES):
            entry = find(namespace + hashes[start : start + HASH_BYTES] + suffix)
            if entry is None:
                break
            run.append(entry)
        return run

    def _find(self, hashes: bytes, group: int, shard: int, at: int) -> Entry | None:
        chain_hash = hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        return self._ram.find(self._query.namespace + chain_hash + self._suffixes[group][shard])


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
    if names.tail_tokens:
        if not names.hashes:
            raise ProtocolError("a tail without a hash")
        layout.check_tokens(names.tail_tokens)
