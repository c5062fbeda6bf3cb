"""Lookups that wait for what an engine of another host computes, and take it as it arrives."""

import math
from dataclasses import dataclass, field

import pytest

from kvhold.cache.transfer.commands import FetchCommand, ProbeCommand
from kvhold.core.api import Found
from kvhold.core.keys import HANDED_OVER, NAME_BYTES, Prompt
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.core.reasons import BEING_COMPUTED, NEVER_STORED, WHOLE
from kvhold.tiers.stack import TierPlace
from tests.cache.computing import FULL, NOTHING, PLAIN, SPACE, TEXT, Cache, cache_of
from tests.cache.laws import finish_chores
from tests.cache.scripted import all_of, only

PROMPT = SPACE.prompt(TEXT[:40])
KEYS = [PROMPT.chunk_key(chunk) for chunk in range(10)]
MARK = KEYS[-1][:NAME_BYTES] + HANDED_OVER
PEERS = "peers://127.0.0.1:1"
COST = ComputeCost("request", 40)


@dataclass
class Reader:
    """A decode engine's lookup, and what its node finds at the peers."""

    cache: Cache = field(default_factory=lambda: cache_of(PLAIN, tiers=(PEERS,)))

    def begin(
        self, timeout_s: float = 30.0, grace_s: float = 0.0, prompt: Prompt = PROMPT
    ) -> Found:
        intent = ComputeIntent(
            COST, waits=False, announces=False, handover=HandoverWait(timeout_s, grace_s)
        )
        return self.cache.lookup("b", prompt, intent)

    def answer(self, *keys: bytes) -> None:
        """Let the tiers find these keys, and read the chunks among them."""
        state = self.cache.state
        probe = only(state.take_commands(), ProbeCommand)
        assert probe.keys[0] == MARK, "the mark goes after the chunks have come"
        found = {key: TierPlace(0, FULL.head_dim * 4) for key in keys}
        state.probed(probe.search, found)
        for fetch in all_of(state.take_commands(), FetchCommand):
            for read in fetch.pending_reads:
                state.fetched(read.entry, True)

    def ask_again(self, found: Found, after_s: float = 0.0) -> Found:
        self.cache.now_s += after_s
        return self.cache.asked_again(found)

    def end(self, found: Found) -> None:
        self.cache.state.release("b", found.ticket)
        finish_chores(self.cache.state)
        assert self.cache.state.holdings() == NOTHING
        assert self.cache.state.status()["pinned_chunks"] == 0


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_chunks_are_taken_as_they_arrive(reader: Reader) -> None:
    found = reader.begin()
    reader.answer(MARK)
    found = reader.ask_again(found)
    assert (found.waits, found.num_tokens) == (True, 0)
    for num in range(1, 10):
        assert reader.ask_again(found, 1.0).arriving
        reader.answer(MARK, *KEYS[num - 1 : num])
        found = reader.ask_again(found)
        assert (found.waits, found.num_tokens) == (True, 4 * num)
    assert reader.ask_again(found, 1.0).arriving
    reader.answer(MARK, KEYS[9])
    found = reader.ask_again(found)
    assert (found.num_tokens, found.arriving, found.reason) == (40, False, WHOLE)
    assert reader.cache.waits() == {"stored": 1}
    reader.end(found)


def test_the_tail_is_awaited_while_the_prompt_is_announced(reader: Reader) -> None:
    prompt = SPACE.prompt(TEXT)
    tail = prompt.namespace.digest + prompt.tails + KEYS[0][NAME_BYTES:]
    found = reader.begin(prompt=prompt)
    reader.answer(MARK, *KEYS)
    found = reader.ask_again(found)
    assert (found.waits, found.num_tokens) == (True, 40)
    assert reader.ask_again(found, 1.0).arriving
    reader.answer(MARK, tail)
    found = reader.ask_again(found)
    assert (found.num_tokens, found.arriving) == (42, False)
    reader.end(found)


def test_a_tail_that_does_not_come_is_not_awaited(reader: Reader) -> None:
    found = reader.begin(prompt=SPACE.prompt(TEXT))
    reader.answer(MARK, *KEYS)
    found = reader.ask_again(found)
    assert reader.ask_again(found, 1.0).arriving
    reader.answer()
    found = reader.ask_again(found)
    assert (found.num_tokens, found.arriving) == (40, False)
    assert reader.cache.waits() == {"stored": 1}
    reader.end(found)


def test_between_two_questions_is_a_pause(reader: Reader) -> None:
    found = reader.begin()
    reader.answer(MARK)
    assert reader.ask_again(found).waits
    assert reader.ask_again(found, 0.001).waits
    assert reader.cache.state.take_commands() == []
    assert reader.ask_again(found, 10.0).arriving
    reader.answer(MARK)
    assert reader.ask_again(found, 0.1).waits
    assert reader.cache.state.take_commands() == [], "the longer the wait, the longer the pause"


@pytest.mark.parametrize("num", [0, 3])
def test_it_ends_when_the_other_engine_does_not_go_on(reader: Reader, num: int) -> None:
    found = reader.begin()
    reader.answer(MARK, *KEYS[:num])
    assert reader.ask_again(found).waits
    reader.ask_again(found, 1.0)
    reader.answer()
    found = reader.ask_again(found)
    assert (found.num_tokens, found.arriving, found.reason) == (4 * num, False, NEVER_STORED)
    assert reader.cache.waits() == {"ended": 1}
    reader.end(found)


def test_it_ends_at_its_deadline(reader: Reader) -> None:
    found = reader.begin(timeout_s=2.0)
    reader.answer(MARK, *KEYS[:2])
    assert reader.ask_again(found, 1.0).waits
    reader.ask_again(found, 1.0)
    reader.answer(MARK)
    found = reader.ask_again(found)
    assert (found.num_tokens, found.arriving, found.reason) == (8, False, BEING_COMPUTED)
    assert reader.cache.waits() == {"deadline": 1}
    reader.end(found)


def test_the_first_to_come_waits_for_the_mark(reader: Reader) -> None:
    found = reader.begin(grace_s=1.0)
    reader.answer()
    assert reader.ask_again(found).waits
    assert reader.ask_again(found, 0.5).arriving
    reader.answer(MARK)
    assert reader.ask_again(found, 5.0).waits, "the grace is over, the deadline is not"
    reader.ask_again(found, 1.0)
    reader.answer()
    found = reader.ask_again(found)
    assert not found.arriving, "the grace does not begin again"
    assert reader.cache.waits() == {"ended": 1}


def test_without_a_mark_it_ends_after_the_grace(reader: Reader) -> None:
    found = reader.begin(grace_s=1.0)
    reader.answer()
    assert reader.ask_again(found).waits
    reader.ask_again(found, 1.0)
    reader.answer()
    assert not reader.ask_again(found).arriving
    assert reader.cache.waits() == {"not announced": 1}


@pytest.mark.parametrize("seconds", [0.0, math.nan])
def test_without_time_it_does_not_wait(reader: Reader, seconds: float) -> None:
    found = reader.begin(seconds, seconds)
    reader.answer(MARK)
    assert not reader.ask_again(found).arriving
    assert reader.cache.waits() == {}


def test_without_a_mark_or_a_handover_nothing_is_awaited(reader: Reader) -> None:
    found = reader.begin()
    reader.answer()
    assert not reader.ask_again(found).arriving
    ordinary = reader.cache.lookup("c", PROMPT, ComputeIntent(COST, announces=False))
    probe = only(reader.cache.state.take_commands(), ProbeCommand)
    assert MARK not in probe.keys
    reader.cache.state.probed(probe.search, {})
    assert not reader.ask_again(ordinary).arriving


def test_without_peers_no_mark_is_asked_for() -> None:
    reader = Reader(cache_of(PLAIN, tiers=("memory://",)))
    reader.begin()
    assert MARK not in only(reader.cache.state.take_commands(), ProbeCommand).keys


def test_an_engine_of_this_host_is_awaited_as_before(reader: Reader) -> None:
    found = reader.begin(grace_s=1.0)
    reader.answer()
    assert reader.ask_again(found).waits
    producer = reader.cache.lookup("a", PROMPT, ComputeIntent(COST, waits=False, keep_s=30.0))
    probe = only(reader.cache.state.take_commands(), ProbeCommand)
    reader.cache.state.probed(probe.search, {})
    producer = reader.ask_again(producer)
    assert producer.announcement
    reader.ask_again(found, 0.5)
    reader.answer()
    assert reader.ask_again(found, 20.0).waits
    reader.cache.state.release("a", producer.announcement)
    reader.ask_again(found)
    reader.answer()
    assert not reader.ask_again(found).arriving, "the grace does not begin again"
    assert reader.cache.waits() == {"ended": 1}


def test_a_released_lookup_asks_no_more(reader: Reader) -> None:
    found = reader.begin()
    reader.answer(MARK, *KEYS[:3])
    assert reader.ask_again(found).waits
    reader.end(found)
    assert reader.cache.waits() == {"cut short": 1}


class TestMark:
    """Of the node whose engine computes."""

    def begin(self, cache: Cache, told: list[tuple[bytes, bool]], keep_s: float) -> Found:
        cache.state.watch_computing(lambda *change: told.append(change))
        intent = ComputeIntent(COST, waits=False, keep_s=keep_s)
        return cache.lookup("a", PROMPT, intent)

    @pytest.mark.parametrize("how", ["stored", "withdrawn", "gone", "abandoned"])
    def test_it_is_there_until_the_last_chunk_is_stored_or_will_not_come(self, how: str) -> None:
        cache, told = cache_of(PLAIN), list[tuple[bytes, bool]]()
        found, name = self.begin(cache, told, 30.0), KEYS[-1][:NAME_BYTES]
        cache.store("a", PROMPT, last=9)
        assert told == [(name, True)]
        if how == "stored":
            cache.store("a", PROMPT)
        elif how == "withdrawn":
            cache.state.release("a", found.announcement)
        elif how == "gone":
            cache.state.release_owner("a")
        else:
            cache.state.abandon("a", cache.reserve("a", PROMPT))
        assert told == [(name, True), (name, False)]

    def test_only_prompts_for_other_engines_have_one(self) -> None:
        told = list[tuple[bytes, bool]]()
        assert self.begin(cache_of(PLAIN), told, 0.0).announcement
        assert told == []

    def test_a_prompt_that_is_there_has_none(self) -> None:
        cache, told = cache_of(PLAIN), list[tuple[bytes, bool]]()
        cache.store("a", PROMPT)
        self.begin(cache, told, 30.0)
        assert told == []
