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
from hypothesis import given, settings
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

from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.leases import ClaimAnswer
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
from kvhold.core.keys import HASH_BYTES, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.planning import ComputeCost
from kvhold.core.reasons import (
    CLEARED,
    DEADLINE,
    NEVER_STORED,
    NOT_NEEDED,
    REASONS,
    TIER_DOWN,
    WHOLE,
)
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import TierPlace
from tests.cache.laws import Index, assert_counters_reconcile, finish_chores
from tests.cache.scripted import Asked, all_of, arena_of, only
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
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}


def slots(entry: Entry) -> slice:
    return slice(entry.offset // SLOT, -(-(entry.offset + entry.nbytes) // SLOT))


def needed_keys(prompt: Prompt, num_tokens: int, shards: int = SHARDS) -> set[bytes]:
    """All keys that a hit of `num_tokens` needs."""
    layout = prompt.namespace.layout
    whole, rest = divmod(num_tokens, layout.tokens_per_chunk)
    hashes = [prompt.hash_at(i) for i in range(whole)] + (
        [prompt.tails[-HASH_BYTES:]] if rest else []
    )
    return {
        make_key(prompt.namespace.digest, h, group, shard)
        for shard in range(shards)
        for group in range(len(layout.groups))
        for i, h in enumerate(hashes)
        if i in needed_chunks(layout, group, num_tokens)
    }


def all_keys(prompt: Prompt, shards: int = SHARDS) -> list[bytes]:
    layout = prompt.namespace.layout
    hashes = [prompt.hash_at(i) for i in range(prompt.num_whole)] + (
        [prompt.tails[-HASH_BYTES:]] if prompt.tail_lengths else []
    )
    return [
        make_key(prompt.namespace.digest, h, g, s)
        for h in hashes
        for g in range(len(layout.groups))
        for s in range(shards)
    ]


def longest(prompt: Prompt, present: set[bytes], shards: int = SHARDS) -> int:
    """By the definition: try every length."""
    for num_tokens in range(len(prompt.tokens), 0, -1):
        ends_with_tail = num_tokens % prompt.namespace.layout.tokens_per_chunk
        if (not ends_with_tail or num_tokens == len(prompt.tokens)) and needed_keys(
            prompt, num_tokens, shards
        ) <= present:
            return num_tokens
    return 0


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


# One law, with room for everything: what comes is the longest hit that RAM and tiers have together.

_SIZE = 3
_FULL = Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8")
_GROUPS = {
    "full": (_FULL,),
    "two full": (_FULL, Group(layers=2, planes=1, heads=1, head_dim=8, dtype="int8")),
    "sliding": (
        Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8", attention="sliding", window=4),
    ),
    "full, sliding, state": (
        _FULL,
        Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8", attention="sliding", window=5),
        Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8", attention="state"),
    ),
}


@pytest.mark.parametrize("groups", _GROUPS.values(), ids=_GROUPS)
@settings(max_examples=60)
@given(data=st.data())
def test_the_hit_is_the_longest_that_memory_and_tiers_have_together(
    groups: tuple[Group, ...], data: st.DataObject
) -> None:
    layout = Layout(groups, tokens_per_chunk=_SIZE)
    shards = data.draw(st.integers(1, 2))
    prompt = Namespace("m", layout, shards=shards).prompt(
        np.arange(data.draw(st.integers(1, 17)), dtype=np.int32)
    )
    keys = all_keys(prompt, shards)
    lost = data.draw(st.sets(st.sampled_from(keys), max_size=3))
    here = data.draw(st.sets(st.sampled_from(keys))) - lost
    below = set(keys) - here - lost
    state = new_state(Config(tiers=("disk:///x",)), arena_of(400 * SLOT))
    state.register(layout)
    for shard in range(shards):
        names = prompt.chunks()
        reservation = state.reserve("w", layout, names, shard).reservation
        state.commit("w", reservation, range(len(names)))
    for write in all_of(state.take_commands(), WriteCommand):
        state.written(write.number)
    for entry in state.ram.entries():
        if entry.key not in here:
            state.ram.remove(entry)
    found = state.lookup("a", prompt.query())
    assert found.num_tokens <= longest(prompt, here | below, shards)
    for probe in all_of(state.take_commands(), ProbeCommand):
        assert not set(probe.keys) & here, "nobody is asked for what is here"
        state.probed(probe.search, {key: TierPlace(0, 100) for key in probe.keys if key in below})
    for fetch in all_of(state.take_commands(), FetchCommand):
        for pending_read in data.draw(st.permutations(fetch.pending_reads)):
            assert state.refresh(found.ticket).arriving
            state.fetched(pending_read.entry, True)
    final = state.refresh(found.ticket)
    assert (final.num_tokens, final.arriving) == (longest(prompt, here | below, shards), False)
    assert set(state._commands) == set(), "what came from the first tier is not written there again"
    state.release_owner("a")
    assert state.status()["pinned_chunks"] == 0


# Single turns of events.


class Bench:
    """A state with one namespace of one full group, and short ways to say what happens."""

    def __init__(self, *, num_slots: int = 60, write_behind_bytes: int = 0) -> None:
        self.layout = Layout(
            (Group(layers=1, planes=1, heads=1, head_dim=1500, dtype="int8"),), tokens_per_chunk=2
        )
        self.space = Namespace("m", self.layout)
        arena = arena_of(num_slots * SLOT)
        self.state = new_state(
            Config(tiers=("disk:///x", "redis://y"), write_behind_bytes=write_behind_bytes), arena
        )
        self.state.register(self.layout)

    def prompt(self, num_tokens: int, seed: int = 0) -> Prompt:
        return self.space.prompt(np.arange(num_tokens, dtype=np.int32) + 1000 * seed)

    def arriving(
        self, prompt: Prompt, owner: str = "a", tier: int = 0
    ) -> tuple[int, list[PendingRead]]:
        """A lookup whose chunks are all on their way: its number, and the arrivals."""
        found = self.state.lookup(owner, prompt.query())
        probe = only(self.state.take_commands(), ProbeCommand)
        self.state.probed(probe.search, {key: TierPlace(tier, 100) for key in probe.keys})
        commands = all_of(self.state.take_commands(), FetchCommand)
        return found.ticket, [
            pending_read for command in commands for pending_read in command.pending_reads
        ]

    def finished(self) -> None:
        """Nothing is held, and a clear leaves nothing."""
        for command in self.state.take_commands():
            if isinstance(command, WriteCommand):
                self.state.written(command.number)
        assert self.state.holdings() == NOTHING
        assert self.state.status()["pinned_chunks"] == self.state.status()["arriving_chunks"] == 0
        self.state.clear(None)
        finish_chores(self.state)
        assert self.state.ram.used_bytes == 0


def test_a_prompt_that_memory_has_whole_asks_no_tier() -> None:
    bench = Bench()
    reservation = bench.state.reserve("w", bench.layout, bench.prompt(8).chunks(), 0).reservation
    bench.state.commit("w", reservation, range(4))
    bench.state.take_commands()
    found = bench.state.lookup("a", bench.prompt(8).query())
    assert (found.num_tokens, found.arriving, bench.state.take_commands()) == (8, False, [])


def test_the_tiers_are_asked_once_for_all_that_memory_lacks_in_the_prompt_s_order() -> None:
    bench = Bench()
    reservation = bench.state.reserve("w", bench.layout, bench.prompt(4).chunks(), 0).reservation
    bench.state.commit("w", reservation, range(2))
    bench.state.take_commands()
    prompt = bench.prompt(13)
    bench.state.lookup("a", prompt.query())
    probe = only(bench.state.take_commands(), ProbeCommand)
    assert probe.keys == all_keys(prompt, 1)[2:]


def test_reads_are_requested_from_the_start_within_memory_and_not_beyond_a_gap() -> None:
    bench = Bench(num_slots=3)
    _, pending_reads = bench.arriving(bench.prompt(10))
    assert [pending_read.entry.first_token for pending_read in pending_reads] == [0, 2, 4]
    bench = Bench()
    found = bench.state.lookup("a", bench.prompt(10).query())
    probe = only(bench.state.take_commands(), ProbeCommand)
    bench.state.probed(
        found.ticket, {key: TierPlace(0, 1) for key in probe.keys if key != probe.keys[2]}
    )
    fetch = only(bench.state.take_commands(), FetchCommand)
    assert [pending_read.entry.first_token for pending_read in fetch.pending_reads] == [0, 2]


@pytest.mark.parametrize(
    ("have", "below", "requested"),
    [(0, 5, 5), (9, 5, 5), (10, 5, 0), (11, 5, 0), (4, 2, 0), (3, 2, 2), (9, 0, 0)],
)
def test_tiers_are_read_only_if_the_hit_is_longer_than_the_engines_own_prefix(
    have: int, below: int, requested: int
) -> None:
    bench = Bench()
    found = bench.state.lookup("a", bench.prompt(10).query(), have_tokens=have)
    probe = only(bench.state.take_commands(), ProbeCommand)
    bench.state.probed(found.ticket, {key: TierPlace(0, 1) for key in probe.keys[:below]})
    pending_reads = [
        pending_read
        for command in all_of(bench.state.take_commands(), FetchCommand)
        for pending_read in command.pending_reads
    ]
    assert len(pending_reads) == requested
    if not requested:
        final = bench.state.refresh(found.ticket)
        assert (final.num_tokens, final.arriving, final.reason) == (
            0,
            False,
            NOT_NEEDED if below else NEVER_STORED,
        )


def test_what_memory_has_is_a_hit_even_where_it_is_there_already() -> None:
    bench = Bench()
    reservation = bench.state.reserve("w", bench.layout, bench.prompt(4).chunks(), 0).reservation
    bench.state.commit("w", reservation, range(2))
    bench.state.take_commands()
    found = bench.state.lookup("a", bench.prompt(10).query(), have_tokens=10)
    probe = only(bench.state.take_commands(), ProbeCommand)
    bench.state.probed(found.ticket, {key: TierPlace(0, 1) for key in probe.keys})
    assert bench.state.take_commands() == []
    final = bench.state.refresh(found.ticket)
    assert (final.num_tokens, final.arriving, final.reason, final.sources) == (
        4,
        False,
        NOT_NEEDED,
        {"ram": 4},
    )
    bench.state.release("a", final.ticket)


def test_nothing_is_read_beyond_a_chunk_that_somebody_else_is_writing() -> None:
    bench = Bench()
    names = bench.prompt(10).chunks(2, last=3, tail=False)
    reservation = bench.state.reserve("w", bench.layout, names, 0).reservation
    ticket, pending_reads = bench.arriving(bench.prompt(10))
    assert [pending_read.entry.first_token for pending_read in pending_reads] == [0, 2]
    for pending_read in pending_reads:
        bench.state.fetched(pending_read.entry, True)
    assert bench.state.refresh(ticket).num_tokens == 4
    bench.state.commit("w", reservation, [0])
    for owner in "aw":
        bench.state.release_owner(owner)
    bench.finished()


def test_of_two_clears_the_first_that_ends_lets_nothing_up_yet() -> None:
    bench = Bench()
    for _ in range(2):
        bench.state.clear(bench.space.digest)
    bench.state.take_commands()
    bench.state.cleared(bench.space.digest)
    assert not bench.state.all_done(0)
    assert not bench.state.lookup("a", bench.prompt(4).query()).arriving
    bench.state.cleared(bench.space.digest)
    assert bench.state.all_done(0)
    assert bench.state.lookup("a", bench.prompt(4).query()).arriving


def test_a_second_lookup_of_arriving_chunks_reads_none_twice_and_gets_all() -> None:
    bench = Bench()
    prompt = bench.prompt(8)
    one, pending_reads = bench.arriving(prompt, "a")
    two = bench.state.lookup("b", prompt.query())
    assert two.arriving
    assert bench.state.take_commands() == []
    for pending_read in pending_reads:
        bench.state.fetched(pending_read.entry, True)
    assert [bench.state.refresh(number).num_tokens for number in (one, two.ticket)] == [8, 8]
    for owner in "ab":
        bench.state.release_owner(owner)
    bench.finished()


def test_a_lookup_does_not_wait_for_a_chunk_whose_memory_a_given_up_read_holds() -> None:
    bench = Bench()
    prompt = bench.prompt(8)
    one, pending_reads = bench.arriving(prompt, "a")
    bench.state.given_up(pending_reads[1].entry)
    for pending_read in (pending_reads[0], *pending_reads[2:]):
        bench.state.fetched(pending_read.entry, True)
    assert bench.state.refresh(one).num_tokens == 2
    two = bench.state.lookup("b", prompt.query())
    probe = only(bench.state.take_commands(), ProbeCommand)
    bench.state.probed(probe.search, {key: TierPlace(0, 100) for key in probe.keys})
    assert bench.state.refresh(two.ticket) == Found(
        two.ticket, 2, sources={"ram": 2}, reason=DEADLINE
    )
    bench.state.let_go(pending_reads[1].entry)
    three, again = bench.arriving(prompt, "c")
    assert [pending_read.entry.key for pending_read in again] == [pending_reads[1].entry.key]
    bench.state.fetched(again[0].entry, True)
    assert bench.state.refresh(three).num_tokens == 8
    for owner in "abc":
        bench.state.release_owner(owner)
    bench.finished()


def test_a_given_up_and_cleared_chunk_can_be_read_again_before_the_first_read_ends() -> None:
    bench = Bench()
    prompt = bench.prompt(2)
    one, [first] = bench.arriving(prompt, "a")
    bench.state.given_up(first.entry)
    bench.state.clear(None)
    bench.state.take_commands()
    bench.state.cleared(b"")
    two, [second] = bench.arriving(prompt, "b")
    assert second.entry.offset != first.entry.offset
    bench.state.let_go(first.entry)
    bench.state.fetched(second.entry, True)
    assert bench.state.refresh(two).num_tokens == 2
    assert bench.state.refresh(one).num_tokens == 0
    bench.state.release_owner("b")
    bench.finished()


def test_an_early_claim_leases_the_arrived_chunks_and_the_rest_still_arrives() -> None:
    bench = Bench()
    ticket, pending_reads = bench.arriving(bench.prompt(8))
    for pending_read in pending_reads[:2]:
        bench.state.fetched(pending_read.entry, True)
    leased = bench.state.claim("b", ticket, 0, 0)
    assert leased is not None
    assert leased.num_tokens == [2, 2]
    for pending_read in pending_reads[2:]:
        bench.state.fetched(pending_read.entry, True)
    assert bench.state.lookup("c", bench.prompt(8).query()).num_tokens == 8
    for owner in "abc":
        bench.state.release_owner(owner)
    bench.finished()


def test_what_has_come_is_lent_while_the_rest_goes_on_arriving() -> None:
    bench = Bench()

    def claim(first: int = 0) -> ClaimAnswer:
        answer = bench.state.claim("b", ticket, 0, first, arriving=True)
        assert answer is not None
        return answer

    ticket, pending_reads = bench.arriving(bench.prompt(7))
    assert claim().num_tokens == []
    assert bench.state.num_arrived(ticket) == 0
    bench.state.fetched(pending_reads[1].entry, True)
    assert (
        claim().num_tokens,
        bench.state.num_arrived(ticket),
    ) == ([], 1)
    bench.state.fetched(pending_reads[0].entry, True)
    first = claim()
    assert first.num_tokens == [2, 2]
    assert first.offsets == [[pending_reads[0].entry.offset, pending_reads[1].entry.offset]]
    assert bench.state.claim("b", ticket, 1, 0, arriving=True) is None, "there is one shard"
    for pending_read in pending_reads[2:]:
        bench.state.fetched(pending_read.entry, True)
    second = claim(2)
    assert second.num_tokens == [2], "but for the tail, which may yet be another"
    assert bench.state.refresh(ticket) == Found(ticket, 7, sources={"tier-1": 7}, reason=WHOLE)
    last = claim(3)
    assert (last.num_tokens, last.offsets) == ([1], [[pending_reads[3].entry.offset]])
    bench.state.release("a", ticket)
    assert bench.state.status()["pinned_chunks"] == 4, "leases have pins of their own"
    bench.state.release_owner("b")
    bench.finished()


def test_an_arrived_chunk_without_its_prefix_is_no_hit_and_is_not_pinned() -> None:
    bench = Bench()
    ticket, pending_reads = bench.arriving(bench.prompt(8))
    bench.state.fetched(pending_reads[0].entry, False)
    for pending_read in pending_reads[1:]:
        bench.state.fetched(pending_read.entry, True)
    assert bench.state.refresh(ticket) == Found(0, 0, reason=TIER_DOWN)
    bench.finished()


def test_what_was_prefetched_is_nobody_s_ticket() -> None:
    bench = Bench()
    bench.state.prefetch("a", bench.prompt(4).query())
    probe = only(bench.state.take_commands(), ProbeCommand)
    for call in (
        lambda: bench.state.refresh(probe.search, settle=True),
        lambda: bench.state.claim("b", probe.search, 0, 0),
        lambda: bench.state.release("b", probe.search),
    ):
        call()
    assert bench.state.holdings() == NOTHING
    bench.state.probed(probe.search, {key: TierPlace(0, 1) for key in probe.keys})
    fetch = only(bench.state.take_commands(), FetchCommand)
    for pending_read in fetch.pending_reads:
        bench.state.fetched(pending_read.entry, True)
    assert bench.state.lookup("b", bench.prompt(4).query()).num_tokens == 4
    bench.state.release_owner("b")
    bench.finished()


def test_no_chunk_is_promoted_while_the_tiers_clear_its_namespace() -> None:
    bench = Bench()
    found = bench.state.lookup("a", bench.prompt(4).query())
    probe = only(bench.state.take_commands(), ProbeCommand)
    bench.state.clear(bench.space.digest)
    [clear] = bench.state.take_commands()
    assert isinstance(clear, ClearCommand)
    bench.state.probed(found.ticket, {key: TierPlace(0, 1) for key in probe.keys})
    assert bench.state.lookup("b", bench.prompt(4).query()) == Found(0, 0, reason=CLEARED)
    assert bench.state.take_commands() == []
    assert not bench.state.all_done(0)
    bench.state.cleared(clear.prefix)
    assert bench.state.all_done(0)
    assert bench.state.lookup("b", bench.prompt(4).query()).arriving
    for owner in "ab":
        bench.state.release_owner(owner)
    bench.finished()


def test_a_chunk_that_arrives_after_a_clear_is_neither_found_nor_written() -> None:
    bench = Bench()
    ticket, pending_reads = bench.arriving(bench.prompt(4), tier=1)
    bench.state.clear(None)
    bench.state.take_commands()
    for pending_read in pending_reads:
        bench.state.fetched(pending_read.entry, True)
    assert bench.state.take_commands() == []
    assert bench.state.refresh(ticket).num_tokens == 0
    assert bench.state.ram.used_bytes == 0
    bench.finished()


def test_a_chunk_from_the_second_tier_is_written_only_to_the_tiers_above_it() -> None:
    bench = Bench()
    _, pending_reads = bench.arriving(bench.prompt(4), tier=1)
    for pending_read in pending_reads:
        bench.state.fetched(pending_read.entry, True, 4_000_000_000)
    commands = all_of(bench.state.take_commands(), WriteCommand)
    assert [
        (command.entry.key, command.above, command.entry.expires_at) for command in commands
    ] == [(pending_read.entry.key, 1, 4_000_000_000) for pending_read in pending_reads]
    for command in commands:
        bench.state.written(command.number)
    bench.state.release_owner("a")
    bench.finished()
