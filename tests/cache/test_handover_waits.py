"""Lookups that wait in a handover: however long computing takes, until a deadline, and first for
the announcement.
"""

import math

import pytest

from kvhold.cache.transfer.commands import ProbeCommand
from kvhold.core.api import Found
from kvhold.core.keys import Namespace
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.core.reasons import BEING_COMPUTED, NEVER_STORED, WHOLE
from tests.cache.computing import PLAIN, SPACE, STATES, TEXT, Cache, cache, cache_of
from tests.cache.scripted import only

__all__ = ["cache"]

UNKNOWN = ComputeCost("request", len(TEXT))
"""Of an engine that has measured nothing: an ordinary lookup does not wait."""

ANNOUNCES = ComputeIntent(UNKNOWN, waits=False)
ANNOUNCES_TAIL = ComputeIntent(UNKNOWN, waits=False, announces_tail=True)


def awaits(timeout_s: float = 30.0, grace_s: float = 0.0) -> ComputeIntent:
    wait = HandoverWait(timeout_s, grace_s)
    return ComputeIntent(UNKNOWN, waits=False, announces=False, handover=wait)


def begin(cache: Cache, **wait: float) -> tuple[Found, Found]:
    """An engine computes a prompt for a second one, which waits."""
    prompt = SPACE.prompt(TEXT)
    producer = cache.lookup("a", prompt, ANNOUNCES)
    waiting = cache.lookup("b", prompt, awaits(**wait))
    assert producer.announcement
    assert waiting.waits
    return producer, waiting


def test_it_waits_although_nobody_knows_what_computing_takes(cache: Cache) -> None:
    _, waiting = begin(cache)
    ordinary = ComputeIntent(UNKNOWN, announces=False)
    assert not cache.lookup("c", SPACE.prompt(TEXT), ordinary).arriving
    cache.now_s += 29.0
    assert cache.asked_again(waiting).waits
    cache.store("a", SPACE.prompt(TEXT))
    assert cache.state.take_news()
    hit = cache.asked_again(waiting)
    assert (hit.num_tokens, hit.reason, hit.announcement) == (len(TEXT), WHOLE, 0)
    assert cache.waits()["stored"] == 1


def test_it_waits_while_the_chunks_arrive_one_by_one(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    _, waiting = begin(cache)
    for chunk in range(10):
        assert cache.asked_again(waiting).waits, chunk
        cache.now_s += 1.0
        cache.store("a", prompt, first=chunk, last=chunk + 1)
    assert cache.asked_again(waiting).num_tokens == 40


def test_it_waits_for_a_tail_that_is_stored_alone(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    assert cache.lookup("a", prompt, ANNOUNCES_TAIL).announcement
    waiting = cache.lookup("b", prompt, awaits())
    cache.store("a", prompt, last=10)
    assert cache.asked_again(waiting).waits
    late = cache.lookup("c", prompt, awaits())
    assert (late.waits, late.num_tokens) == (True, 40)
    cache.store("a", prompt, first=10)
    assert cache.asked_again(waiting).num_tokens == cache.asked_again(late).num_tokens == 42
    assert cache.state.status()["announced_chunks"] == 0
    assert cache.waits() == {"stored": 2}


def test_a_prompt_of_less_than_a_chunk_is_awaited(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT[:3])
    assert not cache.lookup("a", prompt, ANNOUNCES).announcement
    producer = cache.lookup("a", prompt, ANNOUNCES_TAIL)
    waiting = cache.lookup("b", prompt, awaits())
    assert producer.announcement
    assert waiting.waits
    cache.store("a", prompt)
    assert cache.asked_again(waiting).num_tokens == 3


def test_a_tail_that_does_not_come_is_computed(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    producer = cache.lookup("a", prompt, ANNOUNCES_TAIL)
    waiting = cache.lookup("b", prompt, awaits())
    cache.store("a", prompt, last=10)
    assert cache.asked_again(waiting).waits
    cache.state.release("a", producer.announcement)
    assert cache.asked_again(waiting).num_tokens == 40
    assert cache.waits() == {"ended": 1}


def test_a_tail_that_is_there_is_not_announced(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.store("a", prompt)
    assert not cache.lookup("a", prompt, ANNOUNCES_TAIL).announcement


def test_at_its_deadline_it_gets_what_is_there(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    _, waiting = begin(cache, timeout_s=5.0)
    cache.store("a", prompt, last=3)
    cache.now_s += 4.9
    assert cache.asked_again(waiting).waits
    cache.now_s += 0.2
    assert cache.state.is_over(waiting.ticket)
    hit = cache.asked_again(waiting)
    assert (hit.num_tokens, hit.arriving, hit.reason) == (12, False, BEING_COMPUTED)
    assert cache.waits() == {"deadline": 1}


def test_the_deadline_counts_all_waits_of_a_lookup(cache: Cache) -> None:
    """The first producer leaves; the second one is awaited for the rest of the time."""
    prompt = SPACE.prompt(TEXT)
    _, waiting = begin(cache, timeout_s=5.0)
    cache.now_s += 3.0
    cache.state.release_owner("a")
    cache.lookup("c", prompt, ANNOUNCES)
    assert cache.asked_again(waiting).waits
    cache.now_s += 2.1
    assert not cache.asked_again(waiting).arriving
    assert cache.waits() == {"ended": 1, "deadline": 1}


@pytest.mark.parametrize("how", ["withdrawn", "abandoned", "gone"])
def test_it_ends_at_once_when_the_chunks_will_not_come(how: str) -> None:
    cache = cache_of(PLAIN)
    producer, waiting = begin(cache)
    if how == "withdrawn":
        cache.state.release("a", producer.announcement)
    elif how == "abandoned":
        cache.state.abandon("a", cache.reserve("a", SPACE.prompt(TEXT)))
    else:
        cache.state.release_owner("a")
    hit = cache.asked_again(waiting)
    assert (hit.ticket, hit.arriving, hit.announcement) == (0, False, 0)
    assert cache.waits() == {"ended": 1}


def test_the_first_to_come_waits_for_the_announcement(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    waiting = cache.lookup("b", prompt, awaits(grace_s=2.0))
    assert waiting.waits
    assert not waiting.num_tokens
    cache.now_s += 1.9
    assert cache.asked_again(waiting).waits
    assert not cache.state.take_news()
    assert cache.lookup("a", prompt, ANNOUNCES).announcement
    assert cache.state.take_news()
    assert cache.asked_again(waiting).waits
    cache.now_s += 20.0
    assert cache.asked_again(waiting).waits, "the grace is over, the deadline is not"
    cache.store("a", prompt)
    assert cache.asked_again(waiting).num_tokens == len(TEXT)
    assert cache.waits() == {"announced": 1, "stored": 1}


def test_without_an_announcement_it_ends_after_the_grace_and_does_not_begin_again(
    cache: Cache,
) -> None:
    waiting = cache.lookup("b", SPACE.prompt(TEXT), awaits(grace_s=2.0))
    cache.now_s += 2.0
    hit = cache.asked_again(waiting)
    assert (hit.ticket, hit.arriving, hit.reason) == (0, False, NEVER_STORED)
    assert cache.waits() == {"not announced": 1}


def test_the_grace_is_part_of_the_deadline(cache: Cache) -> None:
    waiting = cache.lookup("b", SPACE.prompt(TEXT), awaits(timeout_s=1.0, grace_s=5.0))
    cache.now_s += 1.0
    assert not cache.asked_again(waiting).arriving


def test_chunks_that_come_without_an_announcement_end_the_grace(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    waiting = cache.lookup("b", prompt, awaits(grace_s=2.0))
    cache.store("a", prompt)
    assert cache.asked_again(waiting).num_tokens == len(TEXT)
    assert cache.waits() == {"announced": 1}


def test_a_prompt_that_is_there_is_not_waited_for(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    cache.store("a", prompt)
    assert cache.lookup("b", prompt, awaits(grace_s=2.0)).num_tokens == len(TEXT)
    assert cache.waits() == {}


@pytest.mark.parametrize("grace_s", [0.0, 2.0])
def test_an_engine_does_not_wait_for_itself(cache: Cache, grace_s: float) -> None:
    cache.lookup("a", SPACE.prompt(TEXT), ANNOUNCES)
    assert not cache.lookup("a", SPACE.prompt(TEXT), awaits(grace_s=grace_s)).arriving


@pytest.mark.parametrize("text", [[], TEXT[:3]])
def test_a_prompt_without_a_whole_chunk_is_not_waited_for(cache: Cache, text: list[int]) -> None:
    """Tails are not announced."""
    assert not cache.lookup("b", SPACE.prompt(text), awaits(grace_s=2.0)).arriving


def test_a_model_whose_chunks_are_not_announced_is_not_waited_for(cache: Cache) -> None:
    prompt = Namespace("states", STATES).prompt(TEXT)
    assert not cache.lookup("b", prompt, awaits(grace_s=2.0)).arriving


@pytest.mark.parametrize("seconds", [0.0, math.nan])
def test_without_time_it_does_not_wait(cache: Cache, seconds: float) -> None:
    prompt = SPACE.prompt(TEXT)
    assert not cache.lookup("b", prompt, awaits(seconds, seconds)).arriving
    cache.lookup("a", prompt, ANNOUNCES)
    assert not cache.lookup("b", prompt, awaits(seconds, seconds)).arriving


def test_a_released_lookup_waits_no_more(cache: Cache) -> None:
    prompt = SPACE.prompt(TEXT)
    waiting = cache.lookup("b", prompt, awaits(grace_s=2.0))
    cache.state.release("b", waiting.ticket)
    cache.lookup("a", prompt, ANNOUNCES)
    assert not cache.state.take_news()
    second = cache.lookup("b", prompt, awaits())
    assert second.waits
    cache.state.release("b", second.ticket)
    assert cache.waits() == {"cut short": 2}


def test_after_the_grace_the_tiers_are_asked() -> None:
    cache = cache_of(PLAIN, tiers=("memory://",))
    waiting = cache.lookup("b", SPACE.prompt(TEXT), awaits(grace_s=2.0))
    assert cache.state.take_commands() == []
    cache.now_s += 2.0
    assert cache.asked_again(waiting).arriving
    probe = only(cache.state.take_commands(), ProbeCommand)
    cache.state.probed(probe.search, {})
    assert not cache.asked_again(waiting).arriving
    assert cache.state.holdings()["tickets"] == 0
