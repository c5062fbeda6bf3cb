"""Lookups that go below RAM, as a state machine over a scripted world: it answers commands in any
order, late, never, wrongly or well.

The arena is a model of one: for each slot, what was written there last. What a tier reads into
memory is written there at once, as the worst of tiers would, so memory that is handed on too early
shows up as somebody else's bytes.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvhold.cache.state import new_state
from kvhold.cache.transfer.commands import (
    ClearCommand,
    FetchCommand,
    PendingRead,
    ProbeCommand,
    WriteCommand,
)
from kvhold.core.api import Found
from kvhold.core.config import Config
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import HASH_BYTES, make_key
from kvhold.core.planning import ComputeCost
from kvhold.core.reasons import REASONS, WHOLE
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import TierPlace
from tests.cache.laws import Index, assert_counters_reconcile, finish_chores
from tests.cache.scripted import Asked, arena_of
from tests.cache.searching import NOTHING, all_keys, longest, needed_keys
from tests.cache.test_state import LAYOUT, SHARDS, SLOT, SPACES, TEXTS, prompt_of

OWNERS = ("a", "b", "c")
# what computing costs an engine: nobody says; it does not know; hardly anything; a lot, and loads
# something; it has most already
COSTS = (
    None,
    None,
    ComputeCost("unknown", 9),
    ComputeCost("fast", 9, 0, 4, 1e-9, 1e-9, 0.0, 1.0, 0.0),
    ComputeCost("slow", 9, 0, 4, 0.1, 1.0, 0.1, 0.01, 1e-9),
    ComputeCost("has", 9, 5, 4, 0.1, 1.0, 0.1, 0.01, 1e-9),
)
HOLDS = 1_000_000_000_000  # bytes that a tier says a value has; the state does not look at them


def slots(entry: Entry) -> slice:
    return slice(entry.offset // SLOT, -(-(entry.offset + entry.nbytes) // SLOT))


@dataclass(eq=False)
class Read:
    """An arrival that was not answered; or was given up, and has not let go."""

    pending_read: PendingRead
    garbage: int
    given_up: bool = False


class World(RuleBasedStateMachine):
    """A cache with one tier below, which holds whatever the machine says it does."""

    slots_in_all = 60
    write_behind_bytes = 8 * SLOT

    numbers = Bundle("numbers")
    spaces = st.integers(0, len(SPACES) - 1)
    prompts = st.tuples(spaces, st.integers(0, len(TEXTS) - 1), st.integers(1, 9))
    owners = st.sampled_from(OWNERS)
    any_of = st.integers(0, 10_000)

    @initialize(target=numbers)
    def begin(self) -> MultipleResults[int]:
        arena = arena_of(self.slots_in_all * SLOT)
        config = Config(
            tiers=("disk:///x", "redis://y"),
            write_behind_bytes=self.write_behind_bytes,
            event_buffer=10_000,
        )
        self.state = new_state(config, arena)
        self.index = Index(self.state)
        self.now = 1_000_000.0
        self.state.ram._clock = lambda: self.now
        self.state.planner.clock = lambda: self.now
        self.state.register(LAYOUT)
        self.memory = np.zeros(self.slots_in_all, dtype=np.int64)
        self.ids = count(1)
        self.content: dict[
            int, bytes
        ] = {}  # what stands in memory -> the key whose bytes these are
        self.below = {
            key
            for space in SPACES
            for text in TEXTS
            for n in range(1, 10)
            for key in all_keys(space.prompt(text[:n]))
        }
        self.probes: list[ProbeCommand] = []
        self.reads: list[Read] = []
        self.writes: dict[int, WriteCommand] = {}
        self.clears: list[ClearCommand] = []
        self.searched: dict[int, tuple[str, Asked]] = {}  # number -> (owner, prompt)
        self.lent_bytes = 0
        self.leases: dict[
            int, tuple[str, list[tuple[bytes, int, int]]]
        ] = {}  # number -> (owner, [(key, offset, nbytes)])
        self.entered: Counter[int] = Counter()
        return multiple()

    # Owners

    @rule(owner=owners, prompt=prompts, shards=st.sampled_from([(0, 1), (0, 1), (1,)]))
    def store(self, owner: str, prompt: Asked, shards: tuple[int, ...]) -> None:
        for shard in shards:
            names = prompt_of(*prompt).chunks()
            granted = self.state.reserve(owner, LAYOUT, names, shard)
            self.take_commands()
            got = [
                (chunk, g)
                for g, row in enumerate(granted.offsets)
                for chunk, at in enumerate(row)
                if at != ABSENT
            ]
            chunks = sorted({chunk for chunk, _ in got})
            for chunk, g in got:
                chain_hash = names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
                self.write(
                    self.state.ram._entries[make_key(names.namespace, chain_hash, g, shard)],
                    good=True,
                )
            self.nothing_in_use_was_written_by_others()
            self.state.commit(owner, granted.reservation, chunks)
            self.take_commands()

    @rule(
        target=numbers,
        owner=owners,
        prompt=prompts,
        cost=st.sampled_from(COSTS),
        have_tokens=st.sampled_from([0, 0, 3, 9]),
    )
    def lookup(
        self, owner: str, prompt: Asked, cost: ComputeCost | None = None, have_tokens: int = 0
    ) -> int | MultipleResults[int]:
        asked_before = self.state.metrics.value("kvhold_lookup_tokens")
        found = self.state.lookup(owner, prompt_of(*prompt).query(), cost, have_tokens=have_tokens)
        self.take_commands()
        asked = self.state.metrics.value("kvhold_lookup_tokens") - asked_before
        assert asked == (
            0
            if found.arriving
            else prompt[2]
            if prompt[2] <= len(TEXTS[prompt[1]])
            else len(TEXTS[prompt[1]])
        )
        if not found.arriving:
            assert (found.reason == WHOLE) == (found.num_tokens == asked)
            assert sum(found.sources.values()) == found.num_tokens
        if not found.ticket:
            assert found.num_tokens == 0 and not found.arriving
            return multiple()
        self.searched[found.ticket] = (owner, prompt)
        return found.ticket

    @rule(owner=owners, prompt=prompts)
    def prefetch(self, owner: str, prompt: Asked) -> None:
        before = self.state.holdings()
        self.state.prefetch(owner, prompt_of(*prompt).query())
        self.take_commands()
        assert self.state.holdings() == before, "nobody holds what was prefetched"

    @rule(number=numbers, settle=st.booleans())
    def refresh(self, number: int, settle: bool) -> None:
        search = self.state._searches._searches.get(number)
        present = {entry.key for entry in search.pinned.values()} if search is not None else set()
        over = search is not None and search.over
        found = self.state.refresh(number, settle=settle)
        if search is not None and search.cost is not None:
            assert found.num_tokens in (0, longest(prompt_of(*self.searched[number][1]), present))
            assert not found.arriving or not (over or settle)
            assert search.cost.is_known or found.arriving == (not over and not settle), (
                "who knows nothing waits for all"
            )
        elif search is not None:
            assert found.num_tokens == longest(prompt_of(*self.searched[number][1]), present)
            assert found.arriving == (not over and not settle)
            assert found.ticket == (number if found.num_tokens or found.arriving else 0)
        assert not (settle and found.arriving)
        self.answers_for_itself(number, found)

    @rule(
        owner=owners,
        number=numbers,
        shard=st.integers(0, SHARDS),
        first=st.integers(0, 3),
        arriving=st.booleans(),
    )
    def claim(
        self, owner: str, number: int, shard: int, first: int, arriving: bool = False
    ) -> None:
        waits = number in self.state._searches and self.state._searches[number].owner is not None
        leased = self.state.claim(owner, number, shard, first, arriving=arriving)
        assert (number in self.state._searches) == (waits and arriving)
        if leased is not None:
            prompt = prompt_of(*self.searched[number][1])
            entries = self.state._leases._holdings[owner].leases[leased.lease]
            num_tokens = (
                sum(leased.num_tokens) + first * LAYOUT.tokens_per_chunk if leased.num_tokens else 0
            )
            assert {entry.key for entry in entries} <= needed_keys(prompt, num_tokens)
            self.lent_bytes += sum(entry.nbytes for entry in entries)
            self.leases[leased.lease] = (
                owner,
                [(entry.key, entry.offset, entry.nbytes) for entry in entries],
            )

    @rule(number=numbers)
    def release(self, number: int) -> None:
        self.state.release(self.searched[number][0], number)

    @rule(which=any_of)
    def return_lease(self, which: int) -> None:
        if self.leases:
            number = sorted(self.leases)[which % len(self.leases)]
            self.state.release(self.leases.pop(number)[0], number)

    @rule(owner=owners, seldom=st.integers(0, 3))
    def vanish(self, owner: str, seldom: int) -> None:
        if not seldom:
            self.state.release_owner(owner)
            self.leases = {
                number: lease for number, lease in self.leases.items() if lease[0] != owner
            }
            self.take_commands()

    @rule(space=st.none() | spaces, seldom=st.integers(0, 2))
    def clear(self, space: int | None, seldom: int) -> None:
        if not seldom:
            namespace = None if space is None else SPACES[space].digest
            self.state.clear(namespace)
            assert self.state.ram.entries(namespace or b"") == []
            finish_chores(self.state)
            self.take_commands()

    # The world below

    @rule(prompt=prompts, left_out=st.sets(any_of, max_size=2))
    def has_below(self, prompt: Asked, left_out: set[int]) -> None:
        keys = all_keys(prompt_of(*prompt))
        self.below |= set(keys)
        self.below -= {keys[number % len(keys)] for number in left_out}

    @rule(target=numbers, owner=owners, prompt=prompts, given_up=st.booleans())
    def is_on_its_way(
        self, owner: str, prompt: Asked, given_up: bool
    ) -> int | MultipleResults[int]:
        """A lookup that is a step further; perhaps what it waits for hangs."""
        found = self.lookup(owner, prompt)
        for command in [command for command in self.probes if command.search == found]:
            self.probes.remove(command)
            self.state.probed(
                command.search,
                {key: TierPlace(key[9] % 2, HOLDS) for key in command.keys if key in self.below},
            )
            self.take_commands()
        for read in [read for read in self.reads if given_up and not read.given_up][:1]:
            read.given_up = True
            self.state.given_up(read.pending_read.entry)
            self.take_commands()
        return found

    @rule(which=any_of, lost=st.booleans())
    def answer_probe(self, which: int, lost: bool) -> None:
        if self.probes:
            command = self.probes.pop(which % len(self.probes))
            assert command.keys and len(set(command.keys)) == len(command.keys)
            places = (
                {}
                if lost
                else {
                    key: TierPlace(key[9] % 2, HOLDS) for key in command.keys if key in self.below
                }
            )
            self.state.probed(command.search, places)
            self.take_commands()

    @rule(
        which=any_of,
        answer=st.sampled_from(["well", "well", "well", "fails", "expires", "given up"]),
    )
    def answer_read(self, which: int, answer: str) -> None:
        if self.reads:
            read = self.reads[which % len(self.reads)]
            entry = read.pending_read.entry
            if not read.given_up and answer == "given up":
                read.given_up = True
                self.state.given_up(entry)
            else:
                self.reads.remove(read)
                self.end_read(read, answer)
            self.take_commands()

    @rule(prompt=prompts, owner=owners)
    def everything_is_answered_well(self, prompt: Asked, owner: str) -> None:
        """What a quick world does; so that deeper states are met more often."""
        while self.probes or any(not read.given_up for read in self.reads):
            while self.probes:
                self.answer_probe(0, False)
            for read in [read for read in self.reads if not read.given_up]:
                self.reads.remove(read)
                self.end_read(read, "well")
                self.take_commands()

    @rule(which=any_of)
    def answer_write(self, which: int) -> None:
        if self.writes:
            self.state.written(
                self.writes.pop(sorted(self.writes)[which % len(self.writes)]).number
            )
            self.take_commands()

    @rule(which=any_of)
    def answer_clear(self, which: int) -> None:
        if self.clears:
            command = self.clears.pop(which % len(self.clears))
            self.below = {key for key in self.below if not key.startswith(command.prefix)}
            self.state.cleared(command.prefix)
            self.take_commands()

    @rule(step=st.sampled_from([0, 0, 0.002, 0.1, 3, 40]))
    def time_passes(self, step: float) -> None:
        self.now += step

    def answers_for_itself(self, number: int, found: Found) -> None:
        """Of an answer, when it is final: its tokens by source, and a reason."""
        if found.arriving or not found.ticket:
            return
        assert sum(found.sources.values()) == found.num_tokens
        assert (found.reason == WHOLE) == (
            found.num_tokens == len(prompt_of(*self.searched[number][1]).tokens)
        )
        assert found.reason in REASONS

    def end_read(self, read: Read, answer: str) -> None:
        entry = read.pending_read.entry
        assert (self.memory[slots(entry)] == read.garbage).all(), (
            "somebody wrote where a tier was still writing"
        )
        if read.given_up:
            self.state.let_go(entry)
        elif answer == "fails" or entry.key not in self.below:
            self.state.fetched(entry, False)
        else:
            self.write(entry, good=True)
            self.state.fetched(entry, True, int(self.now) + 30 if answer == "expires" else 0)

    def write(self, entry: Entry, *, good: bool) -> int:
        number = next(self.ids)
        self.content[number] = entry.key if good else b""
        self.memory[slots(entry)] = number
        return number

    def take_commands(self) -> None:
        for command in self.state.take_commands():
            match command:
                case ProbeCommand():
                    self.probes.append(command)
                case FetchCommand():
                    for pending_read in command.pending_reads:
                        self.reads.append(
                            Read(pending_read, self.write(pending_read.entry, good=False))
                        )
                case WriteCommand():
                    assert command.number not in self.writes
                    self.writes[command.number] = command
                case ClearCommand():
                    self.clears.append(command)
        assert self.state.take_commands() == [], "each command is given once"

    # What must hold at every step

    @invariant()
    def nothing_in_use_was_written_by_others(self) -> None:
        for owner, pieces in self.leases.values():
            for key, offset, nbytes in pieces:
                there = self.memory[offset // SLOT : -(-(offset + nbytes) // SLOT)]
                assert all(self.content[int(number)] == key for number in there), (
                    f"what {owner} reads is another's"
                )
        for entry in self.state.ram.entries():
            if entry.committed:
                assert all(
                    self.content[int(number)] == entry.key for number in self.memory[slots(entry)]
                )
        for command in self.writes.values():
            assert all(
                self.content[int(number)] == command.entry.key
                for number in self.memory[slots(command.entry)]
            )

    @invariant()
    def every_pin_is_somebody_s(self) -> None:
        pins: Counter[int] = Counter()
        for search in self.state._searches._searches.values():
            pins.update(map(id, search.pinned.values()))
        for ticket in self.state._leases._tickets.values():
            pins.update(
                id(entry)
                for groups in ticket.shards.values()
                for row in groups
                for entry in row
                if entry is not None
            )
        for held in self.state._leases._holdings.values():
            pins.update(id(entry) for entries in held.leases.values() for entry in entries)
        pins.update(id(command.entry) for command in self.writes.values())
        in_use = {id(entry): entry for entry in self.state.ram.entries()}
        for entry in in_use.values():
            assert entry.pins == pins[id(entry)]
        doomed = self.state.ram.num_pinned - sum(entry.pins > 0 for entry in in_use.values())
        writing_doomed = sum(read.pending_read.entry.doomed for read in self.reads)
        assert doomed == len(pins.keys() - in_use.keys()) + writing_doomed

    @invariant()
    def memory_is_in_use_for_what_is_here_read_or_on_its_way_and_nothing_else(self) -> None:
        used = {entry.offset: entry.nbytes for entry in self.state.ram.entries()}
        used |= {
            read.pending_read.entry.offset: read.pending_read.entry.nbytes for read in self.reads
        }
        used |= {command.entry.offset: command.entry.nbytes for command in self.writes.values()}
        for search in self.state._searches._searches.values():
            used |= {entry.offset: entry.nbytes for entry in search.pinned.values()}
        for ticket in self.state._leases._tickets.values():
            for groups in ticket.shards.values():
                used |= {
                    entry.offset: entry.nbytes
                    for row in groups
                    for entry in row
                    if entry is not None
                }
        for _, pieces in self.leases.values():
            used |= {offset: nbytes for _, offset, nbytes in pieces}
        assert self.state.ram.used_bytes == sum(
            -(-nbytes // SLOT) * SLOT for nbytes in used.values()
        )
        assert self.state.status()["arriving_chunks"] == len(self.reads)

    @invariant()
    def what_is_counted_adds_up(self) -> None:
        assert_counters_reconcile(self.state)
        self.index.assert_right()
        assert self.state.metrics.value("kvhold_leased_bytes") == self.lent_bytes

    @invariant()
    def whoever_waits_waits_for_something(self) -> None:
        probing = [command.search for command in self.probes]
        on_their_way = {read.pending_read.entry.key for read in self.reads if not read.given_up}
        assert len(on_their_way) == sum(not read.given_up for read in self.reads), (
            "a chunk is read once at a time"
        )
        for number, search in self.state._searches._searches.items():
            assert search.probing == (number in probing)
            assert search.awaited <= on_their_way
            assert search.owner is not None or not search.over, (
                "what nobody waits for goes when it is over"
            )

    @invariant()
    def what_waits_to_be_written_is_counted_exactly_and_bounded(self) -> None:
        queued = sum(command.entry.nbytes for command in self.writes.values())
        assert self.state.status()["write_behind"] == {"chunks": len(self.writes), "bytes": queued}
        assert queued <= self.write_behind_bytes
        assert self.state.all_done(self.state.mark) == (not self.writes and not self.clears)

    @invariant()
    def nothing_of_what_is_being_cleared_is_fetched_or_here(self) -> None:
        if not self.clears:
            return
        for read in self.reads:
            if not read.given_up and any(
                read.pending_read.entry.key.startswith(command.prefix) for command in self.clears
            ):
                assert read.pending_read.entry.doomed

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for owner in OWNERS:
            self.state.release_owner(owner)
        self.leases.clear()
        while self.probes or self.reads or self.writes or self.clears:
            self.answer_write(0)
            self.answer_read(len(self.reads) // 2, "well")
            self.answer_probe(0, False)
            self.answer_clear(0)
        assert self.state.holdings() == NOTHING
        assert self.state.status()["pinned_chunks"] == 0
        assert not self.state._searches._searches
        self.state.clear(None)
        finish_chores(self.state)
        self.take_commands()
        self.answer_clear(0)
        assert (
            self.state.ram.used_bytes == self.state.ram.num_chunks == self.state.ram.num_pinned == 0
        )
        assert self.state.all_done(self.state.mark)


class TightWorld(World):
    """A smaller arena than two prompts need."""

    slots_in_all = 22
    write_behind_bytes = 3 * SLOT


@pytest.mark.parametrize("world", [World, TightWorld])
def test_with_answers_in_any_order_each_caller_gets_its_own_and_nothing_is_left(
    world: type[World],
) -> None:
    run_state_machine_as_test(world, settings=settings(max_examples=100, stateful_step_count=50))
