"""Lookups that go below RAM: the length of their hits, and single turns of events."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.cache.leases import ClaimAnswer
from kvhold.cache.state import new_state
from kvhold.cache.transfer.commands import ClearCommand, FetchCommand, ProbeCommand, WriteCommand
from kvhold.core.api import Found
from kvhold.core.config import Config
from kvhold.core.keys import Namespace, spans_of
from kvhold.core.layout import Group, Layout
from kvhold.core.reasons import CLEARED, DEADLINE, NEVER_STORED, NOT_NEEDED, TIER_DOWN, WHOLE
from kvhold.tiers.stack import TierPlace
from tests.cache.scripted import all_of, arena_of, only
from tests.cache.searching import NOTHING, Bench, all_keys, longest
from tests.cache.test_state import SLOT

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
    for _ in range(2):
        bench.state.cleared(spans_of(bench.space.digest))
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
    assert list(first.offsets[0]) == [pending_reads[n].entry.offset for n in (0, 1)]
    assert bench.state.claim("b", ticket, 1, 0, arriving=True) is None, "there is one shard"
    for pending_read in pending_reads[2:]:
        bench.state.fetched(pending_read.entry, True)
    second = claim(2)
    assert second.num_tokens == [2], "but for the tail, which may yet be another"
    assert bench.state.refresh(ticket) == Found(ticket, 7, sources={"tier-1": 7}, reason=WHOLE)
    last = claim(3)
    assert (last.num_tokens, list(last.offsets[0])) == ([1], [pending_reads[3].entry.offset])
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
    clears = bench.state.take_commands()
    bench.state.probed(found.ticket, {key: TierPlace(0, 1) for key in probe.keys})
    assert bench.state.lookup("b", bench.prompt(4).query()) == Found(0, 0, reason=CLEARED)
    assert bench.state.take_commands() == []
    assert not bench.state.all_done(0)
    for clear in clears:
        assert isinstance(clear, ClearCommand)
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
