"""Lookups of several spans are done in steps, and hold all or nothing."""

from itertools import count

import pytest

from kvhold.cache.chores import Running
from kvhold.cache.state import CacheState
from kvhold.core.errors import ConfigError
from tests.cache.stepping import SPACES, finish_chores, new_cache, prompt_of, store


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
