"""The holdings of owners: tickets of settled hits, leases to read, reservations to write.

    ticket -> claim_turns (own pins, one shard) -> release each
    reserve_turns -> commit_turns / abandon_turns

An *owner* is this process or a connection to the node. Only the owner or `release_owner` frees
uncommitted memory: the owner may still write.
"""

import logging
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvhold.cache.chores import Chores, Turns, emptied, finish
from kvhold.cache.counts import count_entries
from kvhold.cache.index.pins import Pins
from kvhold.cache.index.presence import Prefix
from kvhold.cache.reservations import Grant, Reservations, ReservedChunks
from kvhold.core.api import ABSENT, Found
from kvhold.core.keys import ChunkNames, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import DAMAGED
from kvhold.core.status import HeldStatus
from kvhold.core.store_options import StoreOptions
from kvhold.tiers.ram import Entry, RamTier

log = logging.getLogger(__name__)

Owner = Hashable
_MOST_LEASED = 125  # per step
_MOST_AT_ONCE = 2000  # longer lists are freed in the background
_MOST_ABANDONED = 300  # per step


@dataclass(frozen=True)
class ClaimAnswer:
    """offsets:    `[group][chunk]`; ABSENT: missing
    num_tokens: `[chunk]`
    checksums:  `[group]`; packed, of the present chunks
    """

    lease: int
    offsets: list["array[int]"]
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
    """shards:   `{shard: [group][chunk]}`
    claiming: claims in progress, which need the pins
    dropped:  released; the last claim unpins the entries
    """

    owner: Owner
    num_tokens: list[int]
    shards: dict[int, list[list[Entry | None]]]
    pinned: list[Entry]
    found: Found
    claiming: int = 0
    dropped: bool = False


@dataclass
class _Holdings:
    tickets: set[int] = field(default_factory=set)
    leases: dict[int, list[Entry]] = field(default_factory=dict)
    lease_bytes: dict[int, int] = field(default_factory=dict)
    reservations: dict[int, ReservedChunks] = field(default_factory=dict)
    numa_node: int | None = None


class Leases:
    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        chores: Chores,
        pins: Pins,
        reservations: Reservations,
        numbers: Iterator[int],
    ) -> None:
        self._ram = ram
        self._metrics = metrics
        self._chores = chores
        self._pins = pins
        self._reservations = reservations
        self._numbers = numbers
        self._tickets: dict[int, _Ticket] = {}
        self._holdings: dict[Owner, _Holdings] = {}

    def tickets_of(self, owner: Owner) -> list[int]:
        held = self._holdings.get(owner)
        return list(held.tickets) if held is not None else []

    def promise(self, owner: Owner, number: int) -> None:
        self._of(owner).tickets.add(number)

    def withdraw(self, owner: Owner, number: int) -> None:
        self._of(owner).tickets.discard(number)

    def issue(
        self,
        owner: Owner,
        hit: Found,
        query: Query,
        layout: Layout,
        prefix: Prefix[Entry],
        pinned: list[Entry],
    ) -> None:
        """The ticket takes over the pins."""
        shards = {
            shard: [prefix.rows[group, shard] for group in range(len(layout.groups))]
            for shard in query.shard_numbers
        }
        extent = prefix.extent
        counts = [layout.tokens_per_chunk] * extent.whole + (
            [extent.tail_tokens] if extent.tail is not None else []
        )
        self._tickets[hit.ticket] = _Ticket(owner, counts, shards, pinned, hit)
        self._of(owner).tickets.add(hit.ticket)

    def pinned_by(self, ticket: int) -> list[Entry]:
        held = self._tickets.get(ticket)
        return list(held.pinned) if held is not None else []

    def found(self, ticket: int) -> Found | None:
        held = self._tickets.get(ticket)
        return held.found if held is not None else None

    def claim_turns(
        self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, is_arriving: bool = False
    ) -> Turns[ClaimAnswer | None]:
        """None: invalid ticket or shard. The ticket's pins stay until the last step.

        is_arriving: the ticket is not settled; for the metric's reason
        """
        held = self._tickets.get(ticket)
        if held is None or shard not in held.shards:
            self._metrics.add(
                "kvhold_claims_failed",
                reason="no such shard" if held or is_arriving else "unknown ticket",
            )
            return None
        held.claiming += 1
        try:
            return (
                yield from self.lend_turns(
                    owner, held.shards[shard], held.num_tokens[first_chunk:], first_chunk
                )
            )
        finally:
            held.claiming -= 1
            if held.dropped and not held.claiming:
                self._unpin_ticket(held)

    def lend_turns(
        self,
        owner: Owner,
        rows: list[list[Entry | None]],
        num_tokens: list[int],
        first_chunk: int,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Turns[ClaimAnswer]:
        """rows:      `[group][chunk]`, from the hit's first chunk on; a copy would take long
        num_tokens: from `first_chunk` on
        may_go_on:  False ends the lease early, because the caller no longer pins the rest
        """
        lease, holdings = next(self._numbers), self._of(owner)
        leased = holdings.leases[lease] = []
        holdings.lease_bytes[lease] = 0
        offsets = [array("q") for _ in rows]
        checksums = [bytearray() for _ in rows]
        size = max(1, _MOST_LEASED // max(1, len(rows)))
        for begin in range(0, len(num_tokens), size):
            if begin:
                yield size * len(rows) // 2
                if not may_go_on():
                    num_tokens = num_tokens[:begin]
                    break
            entries: list[Entry] = []
            for row, places, sums in zip(rows, offsets, checksums, strict=True):
                part = row[first_chunk + begin : first_chunk + begin + size]
                there = [entry for entry in part if entry is not None]
                places.extend([ABSENT if entry is None else entry.offset for entry in part])
                sums += b"".join([entry.checksums for entry in there])
                entries += there
            self._ram.hold_all(entries)
            leased += entries
            holdings.lease_bytes[lease] += _bytes_of(entries)
            count_entries(self._metrics, "leased", entries)
        return ClaimAnswer(lease, offsets, num_tokens, [bytes(sums) for sums in checksums])

    def damaged(self, owner: Owner, lease: int, offsets: Sequence[int]) -> None:
        """A wrong report only costs a miss."""
        reported = set(offsets)
        self.remove_damaged(
            [entry for entry in self._of(owner).leases.get(lease, []) if entry.offset in reported],
            "reader",
        )

    def remove_damaged(self, entries: Iterable[Entry], found_by: str) -> None:
        """found_by: reader, writer or scrubber"""
        for entry in entries:
            if self._ram.find(entry.key) is not entry:
                continue
            self._metrics.add("kvhold_damaged_chunks", found_by=found_by)
            log.error(
                "chunk %s: its bytes in memory (offset %d, %d bytes) are not those that were "
                "stored; the chunk was removed; found by a %s",
                entry.key.hex(),
                entry.offset,
                entry.nbytes,
                found_by,
            )
            self._ram.remove(entry, why=DAMAGED)

    def release(self, owner: Owner, number: int) -> None:
        """Leases outlive their ticket."""
        held = self._tickets.get(number)
        if held is not None and held.owner == owner:
            self._drop_ticket(number)
        else:
            self._of(owner).lease_bytes.pop(number, None)
            self._pins.unpin(self._of(owner).leases.pop(number, []))

    def reserve_turns(
        self,
        owner: Owner,
        layout: Layout,
        names: ChunkNames,
        shard: int,
        *,
        groups: bytes | None,
        store_options: StoreOptions,
    ) -> Turns[Grant]:
        """Reserve memory up to the first chunk that does not fit.

        groups: `[group][chunk]`, one byte each; 0: do not reserve. None: all
        """
        held, number = self._of(owner), next(self._numbers)
        reservation = ReservedChunks(layout, store_options, {}, held.numa_node)
        held.reservations[number] = reservation
        try:
            offsets = yield from self._reservations.reserve_turns(
                reservation, names, shard, groups=groups
            )
        finally:
            if not reservation.chunks:
                self._of(owner).reservations.pop(number, None)
        return Grant(number if reservation.chunks else 0, offsets)

    def commit_turns(
        self, owner: Owner, reservation: int, chunks: Sequence[int], checksums: bytes | None
    ) -> Turns[None]:
        reservations = self._of(owner).reservations
        if (reserved := reservations.get(reservation)) is not None:
            yield from self._reservations.commit_turns(reserved, chunks, checksums)
            if not reserved.chunks:
                reservations.pop(reservation, None)

    def abandon_turns(self, owner: Owner, reservation: int) -> Turns[None]:
        reservations = self._of(owner).reservations
        if (reserved := reservations.get(reservation)) is not None:
            yield from self._reservations.abandon_turns(reserved)
            reservations.pop(reservation, None)

    def place_near(self, owner: Owner, numa_node: int | None) -> None:
        self._of(owner).numa_node = numa_node

    def touches_memory(self, owner: Owner) -> bool:
        held = self._holdings.get(owner)
        return held is not None and bool(held.leases or held.reservations)

    def held_by(self, owner: Owner) -> Held:
        held = self._holdings.get(owner, _Holdings())
        nbytes = sum(held.lease_bytes.values()) + sum(
            reservation.nbytes for reservation in held.reservations.values()
        )
        return Held(len(held.tickets), len(held.leases), len(held.reservations), nbytes)

    def holdings(self) -> HeldStatus:
        held = self._holdings.values()
        return {
            "tickets": sum(len(h.tickets) for h in held),
            "leases": sum(len(h.leases) for h in held),
            "reservations": sum(len(h.reservations) for h in held),
        }

    def give_up(self, owner: Owner) -> None:
        """Others may reserve the owner's uncommitted chunks, in other memory."""
        held = self._holdings.get(owner, _Holdings())
        for reservation in held.reservations.values():
            reservation.is_given_up = True

    def release_owner(self, owner: Owner) -> None:
        """Its tickets were released before."""
        held = self._holdings.get(owner)
        if held is None:
            return
        for entries in held.leases.values():
            self._pins.unpin(entries)
        for reservation in held.reservations.values():
            reservation.is_given_up = True
            abandoning = self._reservations.abandon_turns(reservation)
            if reservation.num_entries <= _MOST_ABANDONED:
                finish(abandoning)
            else:
                self._chores.add(abandoning)
        del self._holdings[owner]

    def _of(self, owner: Owner) -> _Holdings:
        return self._holdings.setdefault(owner, _Holdings())

    def _drop_ticket(self, ticket: int) -> None:
        held = self._tickets.pop(ticket)
        self._of(held.owner).tickets.discard(ticket)
        held.dropped = True
        if not held.claiming:
            self._unpin_ticket(held)

    def _unpin_ticket(self, ticket: _Ticket) -> None:
        if len(ticket.pinned) > _MOST_AT_ONCE:
            self._chores.add(emptied(*[row for rows in ticket.shards.values() for row in rows]))
        self._pins.unpin(ticket.pinned)


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum([entry.taken_bytes for entry in entries])
