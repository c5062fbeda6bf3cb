"""Lookups that wait for chunks which another engine computes: what counts as being computed, who
waits, how long, and what comes of it.
"""

import pytest

from kvhold.cache import computing
from kvhold.cache.chores import Running
from kvhold.cache.transfer.commands import ProbeCommand
from kvhold.core.api import Found
from kvhold.core.keys import Namespace
from kvhold.core.planning import ComputeCost, ComputeIntent
from kvhold.core.reasons import BEING_COMPUTED, NEVER_STORED, WHOLE
from tests.cache.computing import (
    HYBRID,
    LATE,
    PLAIN,
    SPACE,
    STATES,
    STEP,
    TEXT,
    TOKEN_S,
    Cache,
    cache,
    cache_of,
    intent_of,
)
from tests.cache.laws import finish_chores, total
from tests.cache.scripted import only

__all__ = ["cache"]


def test_the_second_of_two_equal_lookups_waits_and_finds_what_the_first_has_computed(
    cache: Cache,
) -> None:
    prompt = SPACE.prompt(TEXT)
    first, second = cache.lookup("a", prompt), cache.lookup("b", prompt)
    assert (first.ticket, first.num_tokens, first.arriving) == (0, 0, False)
    assert first.announcement and not first.waits
    assert second.arriving and second.waits and second.ticket and not second.announcement
    cache.now_s += len(TEXT) * TOKEN_S
    assert cache.asked_again(second).waits
    assert not cache.state.take_news()
    cache.store("a", prompt)
    assert cache.state.take_news()
    assert cache.state.is_over(second.ticket)
    hit = cache.asked_again(second)
    assert (hit.num_tokens, hit.reason, hit.arriving) == (len(TEXT), WHOLE, False)
    assert not hit.announcement
    assert hit.sources == {"ram": len(TEXT)}
    claimed = cache.state.claim("b", hit.ticket, 0, 0)
    assert claimed is not None
    assert sum(claimed.num_tokens) == len(TEXT)
    assert cache.waits() == {"stored": 1}
    assert total(cache.state, "kvhold_announced_chunks") == 10


@pytest.mark.parametrize("ending", ["a wait", "a search"])
def test_what_ends_between_the_steps_of_a_refresh_is_not_answered_as_running(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """The news of an end come once, and only to callers that were told to wait."""
    monkeypatch.setattr("kvhold.cache.chores._ONE_TURN_KEYS", 0)
    prompt, steps, seen = SPACE.prompt(TEXT), 0, set[bool]()
    while True:
        tiers = () if ending == "a wait" else ("memory://?max_bytes=1MiB",)
        cache = cache_of(PLAIN, tiers=tiers)
        state = cache.state
        first = cache.lookup("a", prompt)
        if ending == "a wait":
            second = cache.lookup("b", prompt)
        else:
            second = first
            probe = only(state.take_commands(), ProbeCommand)
        refresh = Running(state.refresh_turns(second.ticket))
        if any(refresh.step(1) for _ in range(steps)):
            break
        if ending == "a wait":
            state.release("a", first.announcement)
        else:
            state.probed(probe.search, {})
            finish_chores(state)
        while not refresh.step(1):
            pass
        seen.add(refresh.result.arriving)
        steps += 1
    assert steps > 1
    assert seen == {False}


def test_a_lookup_without_an_intent_neither_announces_nor_waits(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    assert not cache.state.lookup("a", prompt.query()).announcement
    assert not cache.lookup("b", prompt).arriving, "nobody has announced anything"
    found = cache.state.lookup("c", prompt.query())
    assert (found.arriving, found.reason) == (False, BEING_COMPUTED)


def test_what_an_engine_only_waits_for_or_only_announces_is_its_choice(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    assert not cache.lookup("a", prompt, intent_of(announces=False)).announcement
    assert cache.lookup("b", prompt, intent_of(waits=False)).announcement
    assert cache.lookup("a", prompt, intent_of(announces=False)).waits
    assert not cache.lookup("c", prompt, intent_of(waits=False)).arriving


def test_an_engine_does_not_wait_for_itself(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    assert not cache.lookup("a", prompt).arriving


def test_the_announced_chunks_of_one_engine_have_a_limit(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "_MOST_CHUNKS", 25)  # a prompt has 10
    prompts = [SPACE.prompt([1000 * number + token for token in TEXT]) for number in range(4)]
    announced = [bool(cache.lookup("a", prompt).announcement) for prompt in prompts]
    assert announced == [True, True, True, False]
    assert cache.state.status()["announced_chunks"] == 25
    assert cache.lookup("b", prompts[3]).announcement, "another engine has a limit of its own"
    cache.store("a", prompts[0])
    assert cache.lookup("a", SPACE.prompt([9000 + token for token in TEXT])).announcement


def test_a_wait_ends_at_once_when_its_producer_leaves_and_one_waiting_lookup_takes_over(
    cache: Cache,
) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    second, third = cache.lookup("b", prompt), cache.lookup("c", prompt)
    assert second.waits and third.waits
    cache.now_s += 0.5
    cache.state.release_owner("a")
    assert cache.state.take_news()
    taken_over = cache.asked_again(second)
    assert (taken_over.ticket, taken_over.reason) == (0, NEVER_STORED)
    assert taken_over.announcement
    assert cache.asked_again(third).waits, "now for the second engine"
    cache.now_s += len(TEXT) * TOKEN_S
    cache.store("b", prompt)
    assert cache.asked_again(third).num_tokens == len(TEXT)
    assert cache.waits() == {"ended": 2, "stored": 1}


@pytest.mark.parametrize("how", ["withdrawn", "abandoned", "no room"])
def test_a_wait_ends_at_once_when_its_chunks_will_not_come(how: str) -> None:
    cache = cache_of(PLAIN, slots=4 if how == "no room" else 200)
    prompt = SPACE.prompt(TEXT)
    first = cache.lookup("a", prompt)
    waiting = cache.lookup("b", prompt)
    if how == "withdrawn":
        cache.state.release("a", first.announcement)
    elif how == "abandoned":
        cache.state.abandon("a", cache.reserve("a", prompt))
    else:
        cache.reserve("a", prompt)
    assert cache.state.is_over(waiting.ticket)
    assert not cache.asked_again(waiting).arriving
    assert cache.waits() == {"ended": 1}


def test_an_announcement_outlives_its_request_while_its_chunks_are_being_written(
    cache: Cache,
) -> None:
    """The engine answers with one token, and stores after that."""
    prompt = SPACE.prompt(TEXT)
    first, waiting = cache.lookup("a", prompt), cache.lookup("b", prompt)
    names = prompt.chunks()
    granted = cache.state.reserve("a", PLAIN, names, 0)
    cache.state.release("a", first.announcement)
    assert cache.asked_again(waiting).waits
    cache.state.commit("a", granted.reservation, list(range(len(names))))
    assert cache.asked_again(waiting).num_tokens == len(TEXT)


def test_a_withdrawn_announcement_ends_with_the_last_writer_of_its_chunk(cache: Cache) -> None:
    """Of two shards, only one is being written."""
    space = Namespace("sharded", PLAIN, shards=2)
    prompt = space.prompt(TEXT[:8])
    first = cache.lookup("a", prompt)
    granted = cache.state.reserve("c", PLAIN, prompt.chunks(), 0)
    cache.state.release("a", first.announcement)
    assert cache.state.status()["announced_chunks"] == 2
    cache.state.commit("c", granted.reservation, [0, 1])
    assert cache.state.status()["announced_chunks"] == 0


def test_a_late_producer_is_not_waited_for_any_more_and_only_one_takes_over(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    second, third = cache.lookup("b", prompt), cache.lookup("c", prompt)
    promised_s = len(TEXT) * TOKEN_S
    cache.now_s += LATE * promised_s - 0.01
    assert cache.asked_again(second).waits
    cache.now_s += 0.02
    assert cache.state.is_over(second.ticket)
    assert cache.asked_again(second).announcement
    assert cache.asked_again(third).waits
    cache.now_s += LATE * promised_s + 0.02
    assert not cache.asked_again(third).arriving, "two futile waits are enough"
    cache.store("a", prompt)  # the late one, after all
    assert cache.lookup("c", prompt).num_tokens == len(TEXT)
    assert cache.waits() == {"late": 2, "ended": 1}


def test_a_lookup_waits_where_the_wait_is_faster_and_not_elsewhere(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    slow = intent_of(announces=False)
    fast = intent_of(token_s=TOKEN_S / LATE * 0.99, announces=False)
    loads = intent_of(load_byte_s=1e-4, announces=False)  # a tenth of a second a token
    assert not cache.lookup("b", prompt, fast).arriving
    assert not cache.lookup("b", prompt, loads).arriving
    assert cache.lookup("b", prompt, slow).waits
    short = SPACE.prompt(TEXT[:9])
    brief = intent_of(9, announces=False)
    assert not cache.lookup("b", short, brief).arriving, "all come with the first's pass"
    cache.now_s += 3.5
    assert cache.lookup("b", short, brief).waits, "that is nearly over"


def test_two_estimates_of_equal_engines_may_differ(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt, intent_of(token_s=1.2 * TOKEN_S))
    assert cache.lookup("b", prompt).waits


@pytest.mark.parametrize("num_tokens", [0, 1, len(TEXT)])
def test_costs_too_small_to_be_compared_are_no_fault(cache: Cache, num_tokens: int) -> None:
    prompt = SPACE.prompt(TEXT)
    smallest = ComputeIntent(ComputeCost("request", num_tokens, pair_s=5e-324))
    cache.lookup("a", prompt, intent_of(num_tokens))
    cache.lookup("b", prompt, smallest)
    cache.lookup("c", prompt)


def test_what_is_computed_in_a_moment_is_not_waited_for(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt, intent_of(token_s=0.001))
    assert not cache.lookup("b", prompt, intent_of(token_s=0.001)).arriving


def test_a_slow_producer_is_left_when_computing_the_rest_is_faster(cache: Cache) -> None:
    """It keeps up with its promise of no pass, and is never very late."""
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt, intent_of(step=STEP))
    waiting, other = (cache.lookup(who, prompt, intent_of(step=STEP)) for who in ("b", "c"))
    cache.now_s += 1.15
    cache.store("a", prompt, last=2)
    assert cache.asked_again(waiting).waits
    cache.now_s += 1.85
    assert cache.asked_again(waiting).waits
    cache.store("a", prompt, first=2, last=4)
    found = cache.asked_again(waiting)
    assert (found.arriving, found.num_tokens) == (False, 16), "what was stored is a hit"
    assert found.announcement, "the rest is computed here"
    assert cache.asked_again(other).waits, "and waited for by others"
    assert cache.waits() == {"slower": 1, "ended": 1}


def test_a_lookup_waits_for_the_part_that_it_shares(cache: Cache) -> None:
    """A pass of the other engine ends with it."""
    prompt, other = SPACE.prompt(TEXT), SPACE.prompt(TEXT[:24] + [7] * 18)
    cache.lookup("a", prompt, intent_of(step=STEP))
    cache.now_s += STEP * TOKEN_S
    cache.store("a", prompt, last=2)
    cache.now_s += STEP * TOKEN_S
    cache.store("a", prompt, first=2, last=4)
    waiting = cache.lookup("b", other, intent_of(step=STEP))
    assert (waiting.waits, waiting.num_tokens) == (True, 16)
    cache.now_s += STEP * TOKEN_S
    cache.store("a", prompt, first=4, last=6)
    found = cache.asked_again(waiting)
    assert (found.num_tokens, found.arriving) == (24, False)
    assert found.announcement


def test_two_engines_that_announce_different_prefixes_do_not_wait_for_each_other(
    cache: Cache,
) -> None:
    one, two = SPACE.prompt(TEXT), SPACE.prompt(TEXT[::-1])
    assert cache.lookup("a", one).announcement
    assert cache.lookup("b", two).announcement
    crossed = cache.lookup("a", two), cache.lookup("b", one)
    assert all(found.waits for found in crossed)
    cache.store("a", one)
    cache.store("b", two)
    assert [cache.asked_again(found).num_tokens for found in crossed] == [len(TEXT)] * 2


def test_a_settled_or_released_wait_ends(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    one, two = cache.lookup("b", prompt), cache.lookup("b", prompt)
    settled = cache.asked_again(one, settle=True)
    assert (settled.arriving, settled.num_tokens, settled.reason) == (False, 0, BEING_COMPUTED)
    cache.state.release("b", two.ticket)
    assert cache.asked_again(two) == Found(0, 0)
    assert cache.waits() == {"cut short": 2}


@pytest.mark.parametrize("settle", [True, False])
def test_a_chunk_that_is_cleared_during_a_wait_is_not_found(cache: Cache, settle: bool) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    cache.store("a", prompt, last=3)
    waiting = cache.lookup("b", prompt)
    assert (waiting.waits, waiting.num_tokens) == (True, 12)
    cache.state.clear(None)
    if not settle:
        cache.state.release_owner("a")
    found = cache.asked_again(waiting, settle=settle)
    assert (found.arriving, found.num_tokens) == (False, 0)


def test_a_claim_ends_a_wait(cache: Cache) -> None:
    """Another process of the engine may claim the ticket before its hit is final."""
    prompt = SPACE.prompt(TEXT)
    cache.store("c", prompt, last=2)
    cache.lookup("a", prompt)
    waiting = cache.lookup("b", prompt)
    early = cache.state.claim("c", waiting.ticket, 0, 0, arriving=True)
    assert waiting.waits and waiting.num_tokens == 8
    assert early is not None and sum(early.num_tokens) == 8
    assert cache.asked_again(waiting).waits
    claimed = cache.state.claim("c", waiting.ticket, 0, 0)
    assert claimed is not None and sum(claimed.num_tokens) == 8
    assert not cache.asked_again(waiting).arriving


def test_every_shard_and_full_group_of_a_chunk_must_be_stored(cache: Cache) -> None:
    space = Namespace("sharded", HYBRID, shards=2)
    cache.state.register(HYBRID)
    prompt = space.prompt(TEXT[:40])
    cache.lookup("a", prompt, intent_of(40))
    waiting = cache.lookup("b", prompt, intent_of(40))
    cache.store("a", prompt, shard=0)
    assert cache.asked_again(waiting).waits
    cache.store("a", prompt, shard=1)
    assert cache.asked_again(waiting).num_tokens == 40


def test_a_model_without_full_attention_is_neither_announced_nor_waited_for(cache: Cache) -> None:
    prompt = Namespace("states", STATES).prompt(TEXT)
    assert not cache.lookup("a", prompt).announcement
    assert not cache.lookup("b", prompt).arriving


def test_an_engine_without_measurements_counts_as_fast_as_the_other(cache: Cache) -> None:
    prompt, unknown = SPACE.prompt(TEXT), intent_of(token_s=0.0)
    cache.lookup("a", prompt, unknown)
    assert not cache.lookup("b", prompt, unknown).arriving, "no clock"
    assert cache.lookup("c", prompt).waits
    cache.state.release_owner("a")
    cache.lookup("c", prompt)
    assert cache.lookup("b", prompt, unknown).waits


def test_tiers_are_asked_after_the_wait(cache: Cache) -> None:
    cache = cache_of(PLAIN, tiers=("disk:///x",))
    prompt = SPACE.prompt(TEXT)
    first = cache.lookup("a", prompt)
    assert first.arriving and not first.waits
    probe = only(cache.state.take_commands(), ProbeCommand)
    second = cache.lookup("b", prompt)
    other = only(cache.state.take_commands(), ProbeCommand)
    cache.state.probed(probe.search, {})
    cache.state.probed(other.search, {})
    first = cache.asked_again(first)
    assert first.announcement, "no tier has it"
    second = cache.asked_again(second)
    assert second.waits
    third = cache.lookup("c", prompt)
    assert third.waits and cache.state.take_commands() == []
    cache.state.release_owner("a")
    assert cache.asked_again(third).arriving
    again = only(cache.state.take_commands(), ProbeCommand)
    assert again.search == third.ticket
    cache.state.probed(again.search, {})
    assert cache.asked_again(third).announcement


def test_a_wait_is_explained(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.lookup("a", prompt)
    waiting = cache.lookup("b", prompt)
    [decision] = cache.state.planner.explain("request")
    assert decision.why.startswith("another engine computes the next 40 tokens")
    assert decision.found == {"computing": 40}
    cache.now_s += 2.0
    cache.store("a", prompt)
    cache.asked_again(waiting)
    [decision] = cache.state.planner.explain("request")
    assert decision.hit_tokens == len(TEXT)
    assert decision.waited_s == pytest.approx(2.0)


def test_announcements_of_an_owner_are_bounded(cache: Cache) -> None:
    for number in range(1100):
        cache.lookup("a", SPACE.prompt([number] * 4), intent_of(4))
    assert cache.state.status()["announced_chunks"] == 1024
    long = SPACE.prompt([2000] * 8000)
    found = cache.lookup("b", long, intent_of(8000))
    assert found.announcement
    assert cache.state.status()["announced_chunks"] == 2048, "of an announcement, too"
