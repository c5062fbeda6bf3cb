"""Lookups of several spans are done in steps, hold all or nothing, and ask each tier once."""

from itertools import count

import pytest
from msgspec.structs import replace

from kvhold.cache.chores import Running
from kvhold.cache.state import CacheState
from kvhold.cache.transfer.commands import FetchCommand, ProbeCommand
from kvhold.core.errors import ConfigError
from kvhold.core.reasons import Reason
from kvhold.testing.cache import a_prompt, check
from kvhold.testing.cache import store as store_prompt
from kvhold.tiers.stack import TierPlace
from tests.cache.below import SPACE, a_cache_over, eventually, forget, has_arrived
from tests.cache.clearing import AWAY
from tests.cache.scripted import all_of, only
from tests.cache.searching import Bench
from tests.cache.stepping import SPACES, finish_chores, new_cache, prompt_of, store
from tests.tiers.memory import a_place


@pytest.fixture
def state() -> CacheState:
    return new_cache()


@pytest.fixture(params=["all long", "all short"])
def _lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "all long":
        monkeypatch.setattr("kvhold.cache.chores._ONE_TURN_KEYS", 0)
        monkeypatch.setattr("kvhold.cache.index.pins._MOST_PINS", 7)


@pytest.mark.usefixtures("_lengths")
def test_spans_that_are_given_up_half_way_leave_nothing_held(state: CacheState) -> None:
    spans = [prompt_of(40, SPACES[0].of_spans) for _ in range(12)]
    for span in spans:
        store(state, span)
    for steps in count(1):
        running = Running(state.spans_turns("reader", [span.query() for span in spans]))
        is_done = any(running.step(1) for _ in range(steps))
        running.close()
        assert state.holdings()["tickets"] == (12 if is_done else 0)
        if is_done:
            assert [found.num_tokens for found in running.result] == [80] * 12
            break
        state.release_owner("reader")
        finish_chores(state)
        assert state.ram.num_pinned == 0
    assert steps > 10
    state.release_owner("reader")
    finish_chores(state)
    assert state.ram.num_pinned == 0


def test_a_lookup_of_spans_is_bounded(state: CacheState) -> None:
    space = SPACES[0].of_spans
    query = prompt_of(100_000, space).query()
    with pytest.raises(ConfigError, match="3 spans of 1200000 keys; the limit is 1048576"):
        state.spans("reader", [query] * 3)
    assert len(state.spans("reader", [query])) == 1


def test_all_spans_are_probed_and_read_by_one_command() -> None:
    bench, owner = Bench(), "reader"
    space = bench.space.of_spans
    spans = [space.prompt([number, number + 1, 7, 8]) for number in range(5)]
    spans[3] = spans[2]  # a document twice
    found = bench.state.spans(owner, [span.query() for span in spans])
    probe = only(bench.state.take_commands(), ProbeCommand)
    assert len(probe.all_keys) == 8
    searches = [probe.search, *(other.search for other in probe.others)]
    assert searches == [one.ticket for one in found]
    for one in (probe, *probe.others):
        bench.state.probed(one.search, {key: TierPlace(0, 100) for key in one.keys})
    fetch = only(bench.state.take_commands(), FetchCommand)
    assert {pending.entry.key for pending in fetch.pending_reads} == set(probe.all_keys)
    for pending in fetch.pending_reads:
        bench.state.fetched(pending.entry, True)
    assert [bench.state.refresh(one.ticket).num_tokens for one in found] == [4] * 5
    bench.state.release_owner(owner)
    bench.finished()


def test_spans_of_several_tiers_are_probed_apart() -> None:
    bench = Bench()
    queries = [bench.space.of_spans.prompt([number, 7]).query() for number in range(3)]
    queries[1] = replace(queries[1], tier="disk")
    bench.state.spans("reader", queries)
    probes = all_of(bench.state.take_commands(), ProbeCommand)
    assert [(probe.tier, len(probe.all_keys)) for probe in probes] == [("", 2), ("disk", 1)]
    bench.state.release_owner("reader")


def test_each_tier_is_asked_once_for_all_spans_and_read_once() -> None:
    with a_place() as first, a_place() as second, a_cache_over(first.url(), second.url()) as cache:
        cache.register(SPACE.of_spans)
        spans = [a_prompt(SPACE.of_spans, 40, seed=seed) for seed in range(100)]
        for span in spans[:60]:
            store_prompt(cache, span)
        assert cache.flush()
        for key in list(first.values)[90:]:
            del first.values[key]  # half of the spans are only in the second tier
        forget(cache)
        for place in (first, second):
            place.asked.clear()
        with cache.spans([span.query() for span in spans]) as held:
            assert sorted(one.number for one in held) == list(range(60))
            for one in held:
                lease = cache.claim(one.hit.ticket)
                assert lease is not None
                with lease:
                    check(lease, spans[one.number], 40)
        assert len(first.asked["probe"][0]) == 300, "later probes are of chunks to be written here"
        assert [len(second.asked[call]) for call in ("probe", "get")] == [1, 1]
        assert len(first.asked["get"]) == 1


def test_a_fault_of_a_tier_is_each_missing_spans_reason() -> None:
    with a_place() as place, a_cache_over(place.url()) as cache:
        cache.register(SPACE.of_spans)
        spans = [a_prompt(SPACE.of_spans, 32, seed=seed) for seed in range(3)]
        store_prompt(cache, spans[0])
        place.faults = {"probe": AWAY}
        with cache.spans([span.query() for span in spans], wait_s=0) as held:
            eventually(lambda: all(has_arrived(hit) for hit in held._hits))
            assert [hit.num_tokens for hit in held._hits] == [32, 0, 0]
            assert [hit.reason for hit in held._hits[1:]] == [Reason.TIER_DOWN] * 2
