"""Owners come, reserve, write, commit, look up, claim and vanish in any order: the state machine
keeps its promises at every step.

The arena here is a model of one: for each slot, who wrote it last. A reader must find what the
committed writer of its key left there, a writer what it wrote itself, whatever happened in between;
so no two pieces of memory in use ever overlap.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.state import new_state
from kvhold.core.config import Config
from kvhold.core.errors import LayoutError
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import HASH_BYTES, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.tiers.policies import LearnedPolicy
from tests.cache.laws import Index, assert_counters_reconcile, finish_chores
from tests.cache.scripted import Asked, arena_of
from tests.tiers.learnt import Clock

SLOT = 4096
SLOTS = 60
SHARDS = 2

GROUPS = (
    Group(layers=1, planes=1, heads=1, head_dim=1500, dtype="int8"),  # a slot a chunk
    Group(
        layers=1, planes=1, heads=1, head_dim=3000, dtype="int8", attention="sliding", window=4
    ),  # two slots
    Group(layers=1, planes=1, heads=1, head_dim=10, dtype="float32", attention="state"),
)
LAYOUT = Layout(groups=GROUPS, tokens_per_chunk=2)
TEXTS = [np.array(text, dtype=np.int32) for text in ([1] * 7, [1] * 4 + [2] * 5, [3] * 6)]
SPACES = [
    Namespace(model="m", layout=LAYOUT, shards=SHARDS, cache_salt=salt) for salt in ("", "other")
]


@dataclass(frozen=True)
class Piece:
    """A chunk's memory, and the number of the write that must be found there."""

    key: bytes
    offset: int
    nbytes: int
    write: int

    @property
    def slots(self) -> slice:
        return slice(self.offset // SLOT, -(-(self.offset + self.nbytes) // SLOT))


@dataclass(eq=False)
class Reservation:
    owner: str
    number: int
    chunks: dict[int, list[Piece]]
    stalled: bool = False  # others may write the same


@dataclass(eq=False)
class Lease:
    owner: str
    number: int
    pieces: list[Piece]


@dataclass(eq=False)
class Ticket:
    owner: str
    number: int
    num_tokens: int
    shards: dict[int, list[list[Piece | None]]] = field(default_factory=dict)


def prompt_of(space: int, text: int, num_tokens: int) -> Prompt:
    return SPACES[space].prompt(TEXTS[text][:num_tokens])


class Life(RuleBasedStateMachine):
    policy = "lru"

    owners = Bundle("owners")
    reservations = Bundle("reservations")
    tickets = Bundle("tickets")
    leases = Bundle("leases")
    spaces = st.integers(0, len(SPACES) - 1)
    prompts = st.tuples(spaces, st.integers(0, len(TEXTS) - 1), st.integers(1, 9))

    @initialize(target=owners)
    def begin(self) -> MultipleResults[str]:
        arena = arena_of(SLOTS * SLOT)
        self.clock = Clock()
        self.state = new_state(
            Config(policy=self.policy, event_buffer=10_000),
            arena,
            LearnedPolicy(self.clock) if self.policy == "learned" else None,
        )
        self.index = Index(self.state)
        self.state.register(LAYOUT)
        self.memory = np.zeros(SLOTS, dtype=np.int64)
        self.writes = count(1)
        self.committed: dict[int, bytes] = {}  # write -> key
        self.live_reservations: set[Reservation] = set()
        self.live_tickets: set[Ticket] = set()
        self.live_leases: set[Lease] = set()
        return multiple("a", "b", "c")

    @rule(seconds=st.sampled_from((0.3, 2.0, 60.0)))
    def wait(self, seconds: float) -> None:
        """The clock of a policy that learns."""
        self.clock.now_s += seconds

    # What owners do

    @rule(
        target=reservations,
        owner=owners,
        prompt=prompts,
        shard=st.integers(0, SHARDS - 1),
        first=st.integers(0, 2),
        tail=st.booleans(),
        unwanted=st.none() | st.sets(st.tuples(st.integers(0, len(GROUPS) - 1), st.integers(0, 4))),
    )
    def reserve(
        self,
        owner: str,
        prompt: Asked,
        shard: int,
        first: int,
        tail: bool,
        unwanted: set[tuple[int, int]] | None,
    ) -> Reservation | MultipleResults[Reservation]:
        reservation = self.reserved(owner, prompt_of(*prompt), shard, first, tail, unwanted)
        return multiple() if reservation is None else reservation

    @rule(reservation=reservations, chosen=st.none() | st.sets(st.integers(0, 4)))
    def commit(self, reservation: Reservation, chosen: set[int] | None) -> None:
        self.committed_of(reservation, set(reservation.chunks) if chosen is None else chosen)

    @rule(owner=owners, prompt=prompts)
    def store(self, owner: str, prompt: Asked) -> None:
        """A whole prompt in all its shards, as engines do; so that there is something to find."""
        for shard in range(SHARDS):
            if (reservation := self.reserved(owner, prompt_of(*prompt), shard)) is not None:
                self.committed_of(reservation, set(reservation.chunks))

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation: Reservation) -> None:
        self.state.abandon(reservation.owner, reservation.number)
        self.live_reservations.discard(reservation)

    @rule(owner=owners)
    def stall(self, owner: str) -> None:
        """Nobody waits for its writing any more; it goes on writing all the same."""
        self.state.give_up(owner)
        for reservation in self.live_reservations:
            reservation.stalled |= reservation.owner == owner

    @rule(reservation=reservations, stranger=owners)
    def commit_what_another_owns(self, reservation: Reservation, stranger: str) -> None:
        if stranger != reservation.owner:
            self.state.commit(stranger, reservation.number, list(reservation.chunks))
            self.state.abandon(stranger, reservation.number)

    @rule(target=tickets, owner=owners, prompt=prompts)
    def lookup(self, owner: str, prompt: Asked) -> Ticket | MultipleResults[Ticket]:
        ticket = self.found(owner, prompt)
        return multiple() if ticket is None else ticket

    @rule(
        target=leases,
        owner=owners,
        ticket=tickets,
        shard=st.integers(0, SHARDS),
        first=st.integers(0, 3),
    )
    def claim(
        self, owner: str, ticket: Ticket, shard: int, first: int
    ) -> Lease | MultipleResults[Lease]:
        lease = self.leased(owner, ticket, shard, first)
        return multiple() if lease is None else lease

    @rule(owner=owners, ticket=tickets)
    def release_ticket(self, owner: str, ticket: Ticket) -> None:
        self.state.release(owner, ticket.number)
        if owner == ticket.owner:
            self.live_tickets.discard(ticket)

    @rule(owner=owners, lease=leases)
    def release_lease(self, owner: str, lease: Lease) -> None:
        self.state.release(owner, lease.number)
        if owner == lease.owner:
            self.live_leases.discard(lease)

    @rule(owner=owners, prompts=st.lists(prompts, min_size=1, max_size=4))
    def read_one_while_others_are_stored(self, owner: str, prompts: list[Asked]) -> None:
        self.store(owner, prompts[0])
        ticket = self.found(owner, prompts[0])
        leases = (
            []
            if ticket is None
            else [self.leased(owner, ticket, shard, 0) for shard in range(SHARDS)]
        )
        for prompt in prompts[1:]:
            self.store(owner, prompt)
            self.memory_in_use_holds_what_its_user_put_there()
        for lease in leases:
            self.release_lease(owner, lease)

    @rule(owner=owners, seldom=st.integers(0, 3))
    def vanish(self, owner: str, seldom: int) -> None:
        if seldom:
            return
        self.state.release_owner(owner)
        for live in (self.live_reservations, self.live_tickets, self.live_leases):
            live -= {holding for holding in live if holding.owner == owner}

    @rule(space=st.none() | spaces, seldom=st.integers(0, 3))
    def clear(self, space: int | None, seldom: int) -> None:
        if seldom:
            return
        namespace = None if space is None else SPACES[space].digest
        before = self.state.ram.entries(namespace or b"")
        assert self.state.clear(namespace) == len(before)
        assert self.state.ram.entries(namespace or b"") == []
        finish_chores(self.state)

    def reserved(
        self,
        owner: str,
        prompt: Prompt,
        shard: int,
        first: int = 0,
        tail: bool = True,
        unwanted: set[tuple[int, int]] | None = None,
    ) -> Reservation | None:
        """unwanted: groups of chunks that are not asked for; None: `groups` is not given."""
        names = prompt.chunks(min(first, prompt.num_whole), tail=tail)
        sizes = names.num_tokens(LAYOUT)
        asked = [
            (g, i) not in (unwanted or ()) for g in range(len(GROUPS)) for i in range(len(names))
        ]
        keys = [
            [
                make_key(
                    names.namespace, names.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES], g, shard
                )
                for i in range(len(names))
            ]
            for g in range(len(GROUPS))
        ]
        stalled = {
            p.offset
            for reservation in self.live_reservations
            if reservation.stalled
            for pieces in reservation.chunks.values()
            for p in pieces
        }
        entries = self.state.ram.entries()
        held = {entry.key for entry in entries if entry.committed or entry.offset not in stalled}
        evicted = self.evicted
        granted = self.state.reserve(
            owner, LAYOUT, names, shard, groups=None if unwanted is None else bytes(asked)
        )
        chunks, full = {}, False
        last = max(
            (i for row in granted.offsets for i, at in enumerate(row) if at != ABSENT), default=0
        )
        for chunk in range(len(names)):
            missing = {
                g
                for g in range(len(GROUPS))
                if asked[g * len(names) + chunk] and keys[g][chunk] not in held
            }
            got = {g for g, row in enumerate(granted.offsets) if row[chunk] != ABSENT}
            asked_of_it = {g for g in range(len(GROUPS)) if asked[g * len(names) + chunk]}
            if got:
                assert not full, "nothing after what found no room"
                assert missing <= got <= asked_of_it, "all that a chunk is missing or none"
                assert got == missing or self.evicted > evicted, (
                    "and only what is missing, or had to go meanwhile"
                )
                here = {entry.key for entry in self.state.ram.entries()}
                assert {keys[g][chunk] for g in asked_of_it} <= here or chunk < last, (
                    "nothing of it went for the rest of it"
                )
            full = full or (bool(missing) and not got)
            if not got:
                continue
            chunks[chunk] = [
                Piece(
                    keys[g][chunk],
                    granted.offsets[g][chunk],
                    LAYOUT.chunk_bytes(g, int(sizes[chunk])),
                    next(self.writes),
                )
                for g in sorted(got)
            ]
            for piece in chunks[chunk]:
                assert 0 <= piece.offset <= piece.offset + piece.nbytes <= SLOTS * SLOT
                self.memory[piece.slots] = piece.write  # at once, as the worst of writers would
        if not chunks:
            assert granted.reservation == 0
            return None
        reservation = Reservation(owner, granted.reservation, chunks)
        self.live_reservations.add(reservation)
        return reservation

    def found(self, owner: str, asked: Asked) -> Ticket | None:
        prompt = prompt_of(*asked)
        expected = self.longest(prompt)
        found = self.state.lookup(owner, prompt.query())
        assert found.num_tokens == expected
        if not expected:
            assert found.ticket == 0
            return None
        ticket = Ticket(owner, found.ticket, expected)
        for shard in range(SHARDS):
            ticket.shards[shard] = [
                [None if key is None else self.visible(key) for key in row]
                for row in self.needed_keys(prompt, expected, shard)
            ]
        self.live_tickets.add(ticket)
        return ticket

    def leased(self, owner: str, ticket: Ticket, shard: int, first: int) -> Lease | None:
        leased = self.state.claim(owner, ticket.number, shard, first)
        if ticket not in self.live_tickets or shard not in ticket.shards:
            assert leased is None
            return None
        assert leased is not None
        groups = ticket.shards[shard]
        assert [list(row) for row in leased.offsets] == [
            [ABSENT if piece is None else piece.offset for piece in row[first:]] for row in groups
        ]
        assert sum(leased.num_tokens) == max(0, ticket.num_tokens - first * LAYOUT.tokens_per_chunk)
        lease = Lease(
            owner,
            leased.lease,
            [piece for row in groups for piece in row[first:] if piece is not None],
        )
        self.live_leases.add(lease)
        return lease

    def committed_of(self, reservation: Reservation, chosen: set[int]) -> None:
        self.state.commit(reservation.owner, reservation.number, sorted(chosen))
        if reservation not in self.live_reservations:
            return
        for chunk in chosen & reservation.chunks.keys():
            for piece in reservation.chunks.pop(chunk):
                entry = self.state.ram.find(piece.key)
                # not cleared while it was written
                if entry is not None and entry.offset == piece.offset:
                    self.committed[piece.write] = piece.key
        if not reservation.chunks:
            self.live_reservations.discard(reservation)

    # What must hold at every step

    @invariant()
    def memory_in_use_holds_what_its_user_put_there(self) -> None:
        for reservation in self.live_reservations:
            for pieces in reservation.chunks.values():
                for piece in pieces:
                    assert (self.memory[piece.slots] == piece.write).all(), (
                        "a reservation was overwritten"
                    )
        for piece in self.pinned():
            assert (self.memory[piece.slots] == piece.write).all(), "what is lent was overwritten"
            assert self.committed[piece.write] == piece.key, "what is lent was never committed"

    @invariant()
    def what_is_visible_was_committed_and_is_pinned_by_its_readers_alone(self) -> None:
        pins: dict[tuple[bytes, int], int] = {}
        for piece in self.pinned():
            pins[piece.key, piece.offset] = pins.get((piece.key, piece.offset), 0) + 1
        writing = {
            (p.key, p.offset)
            for reservation in self.live_reservations
            for pieces in reservation.chunks.values()
            for p in pieces
        }
        for entry in self.state.ram.entries():
            if entry.committed:
                assert self.committed[self.memory[entry.offset // SLOT]] == entry.key
            else:
                assert (entry.key, entry.offset) in writing
            assert entry.pins == pins.get((entry.key, entry.offset), 0)

    @invariant()
    def what_is_counted_adds_up(self) -> None:
        assert_counters_reconcile(self.state)
        self.index.assert_right()

    @invariant()
    def what_is_out_is_counted(self) -> None:
        assert self.state.holdings() == {
            "tickets": len(self.live_tickets),
            "leases": len(self.live_leases),
            "reservations": len(self.live_reservations),
        }
        for owner in "abc":
            writes_or_reads = any(
                holding.owner == owner for holding in self.live_reservations | self.live_leases
            )
            assert self.state.touches_memory(owner) == writes_or_reads

    @invariant()
    def memory_is_used_for_what_is_visible_written_or_read_and_for_nothing_else(self) -> None:
        used = {
            (entry.key, entry.offset): -(-entry.nbytes // SLOT)
            for entry in self.state.ram.entries()
        }
        writing = [
            p
            for reservation in self.live_reservations
            for pieces in reservation.chunks.values()
            for p in pieces
        ]
        for piece in [*self.pinned(), *writing]:
            used[piece.key, piece.offset] = -(-piece.nbytes // SLOT)
        assert self.state.ram.used_bytes == SLOT * sum(used.values())

    def teardown(self) -> None:
        if hasattr(self, "state"):
            for owner in "abc":
                self.state.release_owner(owner)
            assert self.state.holdings() == {"tickets": 0, "leases": 0, "reservations": 0}
            self.state.clear(None)
            finish_chores(self.state)
            assert (
                self.state.ram.used_bytes
                == self.state.ram.num_chunks
                == self.state.ram.num_pinned
                == 0
            )

    # The definition

    @property
    def evicted(self) -> float:
        return self.state.metrics.value("kvhold_evicted_chunks", tier="ram")

    def pinned(self) -> Iterator[Piece]:
        for ticket in self.live_tickets:
            for groups in ticket.shards.values():
                yield from (piece for row in groups for piece in row if piece is not None)
        for lease in self.live_leases:
            yield from lease.pieces

    def visible(self, key: bytes) -> Piece | None:
        entry = self.state.ram.find(key)
        return (
            None
            if entry is None
            else Piece(key, entry.offset, entry.nbytes, int(self.memory[entry.offset // SLOT]))
        )

    def needed_keys(self, prompt: Prompt, num_tokens: int, shard: int) -> list[list[bytes | None]]:
        """[group][chunk], None where a hit of `num_tokens` does not need the chunk."""
        whole, rest = divmod(num_tokens, LAYOUT.tokens_per_chunk)
        hashes = [prompt.hash_at(i) for i in range(whole)] + (
            [prompt.tails[-HASH_BYTES:]] if rest else []
        )
        return [
            [
                make_key(prompt.namespace.digest, h, g, shard)
                if i in needed_chunks(LAYOUT, g, num_tokens)
                else None
                for i, h in enumerate(hashes)
            ]
            for g in range(len(GROUPS))
        ]

    def longest(self, prompt: Prompt) -> int:
        for num_tokens in range(len(prompt.tokens), 0, -1):
            if num_tokens % LAYOUT.tokens_per_chunk and num_tokens != len(prompt.tokens):
                continue
            keys = [
                key
                for shard in range(SHARDS)
                for row in self.needed_keys(prompt, num_tokens, shard)
                for key in row
                if key
            ]
            if all(self.visible(key) for key in keys):
                return num_tokens
        return 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "learned"])
def test_owners_in_any_order_get_their_own_chunks_and_leave_nothing_held(
    policy: str,
) -> None:
    machine = type(f"Life_{policy}", (Life,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.parametrize("space", SPACES)
def test_a_layout_that_was_never_registered_is_refused(space: Namespace) -> None:
    state = new_state(Config(), arena_of(SLOT))
    with pytest.raises(LayoutError, match="not registered"):
        state.lookup("owner", space.prompt(TEXTS[0]).query())


def test_a_policy_of_the_caller_is_used_instead_of_the_named_one() -> None:
    """Such as one with another clock."""
    policy = LearnedPolicy(lambda: 7.0)
    state = new_state(Config(policy="lru"), arena_of(SLOT), policy)
    assert state.ram.policy is policy
