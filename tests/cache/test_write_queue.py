"""The queue of chunks that wait to be written below: bounded, exact, and never in anybody's way."""

import logging

import numpy as np
import pytest

from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer.commands import WriteCommand
from kvhold.core.config import Config
from kvhold.core.keys import Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.store_options import StoreOptions
from tests.cache.scripted import all_of, arena_of

SLOT = 4096
LAYOUT = Layout(
    (Group(layers=1, planes=1, heads=1, head_dim=2048, dtype="int8"),), tokens_per_chunk=2
)
CHUNK_BYTES = LAYOUT.chunk_bytes(0, 2)
SPACE = Namespace("m", LAYOUT)


def new(
    *, num_slots: int = 64, chunks_in_queue: int = 4, tiers: tuple[str, ...] = ("disk:///x",)
) -> CacheState:
    config = Config(tiers=tiers, write_behind_bytes=chunks_in_queue * CHUNK_BYTES)
    state = new_state(config, arena_of(num_slots * SLOT))
    state.register(LAYOUT)
    return state


def prompt(num_chunks: int, seed: int = 0) -> Prompt:
    return SPACE.prompt(np.arange(2 * num_chunks, dtype=np.int32) + 10_000 * seed)


def commit(
    state: CacheState, num_chunks: int, seed: int = 0, ttl_s: float | None = None
) -> tuple[int, list[WriteCommand]]:
    """Store a prompt. Returns the mark and what was ordered."""
    names = prompt(num_chunks, seed).chunks()
    granted = state.reserve("a", LAYOUT, names, 0, store_options=StoreOptions(ttl_s=ttl_s))
    mark = state.commit("a", granted.reservation, range(num_chunks))
    return mark, all_of(state.take_commands(), WriteCommand)


def dropped(state: CacheState) -> float:
    return state.metrics.value("kvhold_tier_dropped_chunks", tier="all", reason="queue full")


def test_committed_chunks_are_queued_for_the_tiers_the_first_chunk_first() -> None:
    _, commands = commit(new(), 4)
    keys = [make_key(SPACE.digest, prompt(4).hash_at(i), 0, 0) for i in range(4)]
    assert [command.entry.key for command in commands] == keys
    assert all(command.above is None for command in commands)


def test_without_tiers_nothing_is_ordered_or_held() -> None:
    state = new(tiers=())
    mark, commands = commit(state, 4)
    assert (commands, state.status()["pinned_chunks"], state.all_done(mark)) == ([], 0, True)


def test_a_full_queue_drops_chunks_counts_them_logs_once_a_burst_and_they_stay_in_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = new(chunks_in_queue=3)
    with caplog.at_level(logging.WARNING):
        _, commands = commit(state, 5)
        _, more = commit(state, 4, seed=1)
    assert (len(commands), len(more)) == (3, 0)
    assert dropped(state) == 6
    assert state.status()["write_behind"] == {"chunks": 3, "bytes": 3 * CHUNK_BYTES}
    assert len(caplog.records) == 1
    assert state.lookup("b", prompt(5).query()).num_tokens == 10
    for command in commands:
        state.written(command.number)
    _, commands = commit(state, 2, seed=2)
    assert len(commands) == 2
    with caplog.at_level(logging.WARNING):
        commit(state, 3, seed=3)
    assert dropped(state) == 8
    assert len(caplog.records) == 2, "another burst"


def test_what_waits_is_not_evicted_and_what_was_written_is() -> None:
    state = new(num_slots=8, chunks_in_queue=4)
    _, commands = commit(state, 4)
    commit(state, 8, seed=1)
    assert state.lookup("b", prompt(4).query()).num_tokens == 8
    state.release_owner("b")
    for command in commands:
        state.written(command.number)
    commit(state, 8, seed=2)
    assert state.status()["chunks"] == 8
    assert all(state.ram.find(command.entry.key) is None for command in commands)


def test_a_mark_is_reached_when_all_earlier_writes_have_ended_in_any_order() -> None:
    state = new(chunks_in_queue=8)
    first, one = commit(state, 2)
    second, two = commit(state, 2, seed=1)
    assert (state.all_done(0), state.all_done(first), state.all_done(second)) == (
        True,
        False,
        False,
    )
    for command in reversed(two):
        state.written(command.number)
    assert (state.all_done(first), state.all_done(second)) == (False, False)
    state.written(one[0].number)
    assert not state.all_done(first)
    state.written(one[1].number)
    assert (state.all_done(first), state.all_done(second), state.all_done(state.mark)) == (
        True,
        True,
        True,
    )


def test_a_mark_does_not_wait_for_what_came_after_it() -> None:
    state = new(chunks_in_queue=8)
    first, one = commit(state, 2)
    commit(state, 2, seed=1)
    for command in one:
        state.written(command.number)
    assert state.all_done(first)


def test_what_was_cleared_while_it_was_filled_is_not_written() -> None:
    state = new()
    names = prompt(2).chunks()
    granted = state.reserve("a", LAYOUT, names, 0)
    state.clear(None)
    state.take_commands()
    state.commit("a", granted.reservation, [0, 1])
    assert state.take_commands() == []
    assert state.ram.used_bytes == 0


def test_a_chunk_cleared_during_its_write_keeps_its_memory_until_the_write_ends() -> None:
    state = new()
    _, commands = commit(state, 2)
    state.clear(None)
    assert state.ram.used_bytes == 2 * SLOT
    for command in commands:
        assert command.entry.doomed
        state.written(command.number)
    assert state.ram.used_bytes == 0
    assert state.status()["write_behind"] == {"chunks": 0, "bytes": 0}


@pytest.mark.parametrize("ttl_s", [None, 90])
def test_a_time_to_live_goes_with_the_chunk(ttl_s: float | None) -> None:
    state = new()
    state.ram._clock = lambda: 1000.5
    _, commands = commit(state, 2, ttl_s=ttl_s)
    assert [command.entry.expires_at for command in commands] == ([1091] * 2 if ttl_s else [0, 0])
