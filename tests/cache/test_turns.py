"""Long commands are done in steps: what each step leaves is right, and no step is long."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvhold.cache.chores import Chores, Running, finish
from kvhold.cache.state import new_state
from kvhold.cache.transfer.commands import WriteCommand
from kvhold.core.config import Config
from kvhold.core.keys import ChunkNames
from kvhold.core.reasons import CLEARED
from kvhold.tiers.ram import RamTier
from tests.cache.scripted import arena_of
from tests.cache.stepping import LAYOUT, SPACES, finish_chores, hit, new_cache, prompt_of, store


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of all entries that were taken out of memory's index."""
    keys: list[bytes] = []
    remove = RamTier.remove

    def counted(tier: RamTier, entry: Any, **why: str) -> None:
        keys.append(entry.key)
        remove(tier, entry, **why)

    monkeypatch.setattr(RamTier, "remove", counted)
    return keys


class TestCommit:
    def test_memory_of_chunks_that_go_between_two_steps_is_not_written_below(self) -> None:
        state = new_state(Config(tiers=("null://",)), arena_of(64 << 20))
        state.register(LAYOUT)
        names = prompt_of(40).chunks()
        granted = state.reserve("writer", LAYOUT, names, 0)
        turns = state.commit_turns("writer", granted.reservation, range(len(names)))
        next(turns)
        assert state.ram.num_pinned, "what is visible and not among the writes is held"
        state.clear(None)
        finish_chores(state)
        finish(turns)
        assert [
            command for command in state.take_commands() if isinstance(command, WriteCommand)
        ] == []
        assert state.ram.used_bytes == 0

    def test_a_commit_that_is_given_up_between_two_steps_holds_nothing(self) -> None:
        state = new_state(Config(tiers=("null://",)), arena_of(64 << 20))
        state.register(LAYOUT)
        names = prompt_of(40).chunks()
        turns = state.commit_turns(
            "writer", state.reserve("writer", LAYOUT, names, 0).reservation, range(len(names))
        )
        next(turns)
        turns.close()
        state.release_owner("writer")
        assert state.ram.num_pinned == 0

    def test_chunks_that_are_abandoned_between_two_steps_are_not_committed(self) -> None:
        state = new_cache()
        prompt = prompt_of(40)
        names = prompt.chunks()
        reservation = state.reserve("writer", LAYOUT, names, 0).reservation
        committing = state.commit_turns("writer", reservation, range(len(names)))
        next(committing)
        abandoning = state.abandon_turns("writer", reservation)
        next(abandoning)
        finish(committing)
        finish(abandoning)
        assert state.ram.num_chunks < 2 * len(names)
        assert all(entry.committed for entry in state.ram.entries())
        state.clear(None)
        finish_chores(state)
        assert state.ram.used_bytes == 0


class TestClear:
    def test_touches_few_entries_in_one_step_and_nothing_is_found_after_it(
        self, removed: list[bytes]
    ) -> None:
        state = new_state(Config(), arena_of(64 << 20))
        state.register(LAYOUT)
        prompts = [prompt_of(500) for _ in range(3)]
        for prompt in prompts:
            store(state, prompt)
        assert state.clear(SPACES[0].digest) == 6000
        assert len(removed) < 300
        assert [hit(state, prompt) for prompt in prompts] == [0, 0, 0]

    def test_frees_all_of_it_in_the_background_and_tells_of_each_chunk(self) -> None:
        state = new_cache()
        store(state, prompt_of(100))
        kept = prompt_of(100, SPACES[1])
        store(state, kept)
        number = state.snapshot()[0]
        assert state.clear(SPACES[0].digest) == 400
        assert state.status()["clearing_chunks"] == 400
        steps = 0
        while state.step(50):
            steps += 1
        assert steps > 10
        assert state.status()["clearing_chunks"] == 0
        assert state.status()["chunks"] == 400
        assert state.metrics.value("kvhold_cleared_chunks") == 400
        events = state.events(number).events
        assert {event.kind for event in events} == {CLEARED}
        assert len({event.key for event in events}) == 400
        assert hit(state, kept) == 200

    def test_keeps_what_is_stored_after_it_though_memory_is_not_free_yet(self) -> None:
        state = new_cache()
        prompt, other = prompt_of(50), prompt_of(50)
        store(state, prompt)
        assert state.clear(None) == 200
        store(state, prompt)  # the same chunks again
        store(state, other)
        finish_chores(state)
        assert (hit(state, prompt), hit(state, other)) == (100, 100)
        assert state.clear(None) == 400
        finish_chores(state)
        assert state.ram.used_bytes == state.ram.num_chunks == 0

    def test_dooms_what_is_being_written(self) -> None:
        state = new_cache()
        names = prompt_of(50).chunks()
        granted = state.reserve("writer", LAYOUT, names, 0)
        state.clear(SPACES[0].digest)
        state.commit("writer", granted.reservation, range(len(names)))
        assert state.metrics.value("kvhold_stored_chunks") == 0
        finish_chores(state)
        assert state.ram.used_bytes == 0

    def test_leaves_memory_to_its_readers(self) -> None:
        state = new_cache()
        prompt = prompt_of(50)
        store(state, prompt)
        found = state.lookup("reader", prompt.query())
        used_bytes = state.ram.used_bytes
        state.clear(None)
        finish_chores(state)
        assert state.ram.used_bytes > used_bytes // 2
        leased = state.claim("reader", found.ticket, 0, 0)
        assert leased is not None
        state.release_owner("reader")
        assert state.ram.used_bytes == 0

    def test_is_not_undone_by_an_eviction_or_a_second_clear_before_memory_is_free(self) -> None:
        state = new_cache()
        for _ in range(3):
            store(state, prompt_of(20))
            store(state, prompt_of(20, SPACES[1]))
            state.clear(SPACES[0].digest)
            state.step(30)
        assert state.ram.num_clearing > 0
        state.ram._evict(1 << 20)
        assert state.clear(None) == 0 or state.ram.num_clearing > 0
        finish_chores(state)
        assert state.ram.used_bytes == state.ram.num_clearing == 0


def test_a_store_of_many_chunks_is_done_in_steps_and_one_given_up_leaves_nothing() -> None:
    state = new_cache()
    names = prompt_of(1000).chunks()
    reserving = Running(state.reserve_turns("writer", LAYOUT, names, 0))
    assert not reserving.step(1000)
    reserving.close()
    state.release_owner("writer")
    finish_chores(state)
    assert state.ram.used_bytes == 0
    granted = state.reserve("writer", LAYOUT, names, 0)
    committing = Running(state.commit_turns("writer", granted.reservation, range(1000)))
    assert not committing.step(1000)
    committing.close()
    state.release_owner("writer")
    finish_chores(state)
    assert all(entry.committed for entry in state.ram.entries())
    state.clear(None)
    finish_chores(state)
    assert state.ram.used_bytes == 0


def test_a_snapshot_in_parts_has_all_chunks_that_stay_while_others_change() -> None:
    state = new_cache()
    stays, goes = prompt_of(300), prompt_of(300, SPACES[1])
    store(state, stays)
    store(state, goes)
    _, parts = state.snapshot()
    keys = {entry.key for entry in next(parts)}
    state.clear(SPACES[1].digest)
    finish_chores(state)
    store(state, prompt_of(300, SPACES[1]))
    for part in parts:
        new = {entry.key for entry in part}
        assert not new & keys
        keys |= new
    assert len([key for key in keys if key.startswith(SPACES[0].digest)]) == 1200


def test_chores_are_done_in_order_some_units_at_a_time() -> None:
    chores, log = Chores(), []

    def work(name: str) -> Iterator[int]:
        for number in range(3):
            log.append((name, number))
            yield 10

    chores.add(work("a"))
    chores.add(work("b"))
    assert chores.step(20)
    assert log == [("a", 0), ("a", 1)]
    assert not chores.step(1000)
    assert [name for name, _ in log] == ["a"] * 3 + ["b"] * 3


def test_a_step_ends_when_its_time_is_over() -> None:
    def work() -> Iterator[int]:
        for _ in range(3):
            time.sleep(0.002)
            yield 1

    chores = Chores()
    chores.add(work())
    running = Running((answer for answer in work()), most_s=0.001)
    for _ in range(3):
        assert chores.step(1000, most_s=0.001)
        assert not running.step(1000)
    assert not chores.step(1000)
    assert running.step(1000)


def test_names_of_more_chunks_than_one_step_takes_are_reserved_once_each() -> None:
    state = new_cache()
    names: ChunkNames = prompt_of(400).chunks()
    first = Running(state.reserve_turns("one", LAYOUT, names, 0))
    assert not first.step(500)
    second = state.reserve("two", LAYOUT, names, 0)
    while not first.step(500):
        pass
    offsets = [*first.result.offsets[0], *second.offsets[0]]
    assert len({place for place in offsets if place >= 0}) == 400
    for owner in ("one", "two"):
        state.release_owner(owner)
        finish_chores(state)
    assert state.ram.used_bytes == 0


class TestLeaving:
    def test_a_large_reservation_is_released_in_small_steps_and_others_may_write_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        abandoned: list[bytes] = []
        abandon = RamTier.abandon

        def counted(tier: RamTier, entry: Any) -> None:
            abandoned.append(entry.key)
            abandon(tier, entry)

        monkeypatch.setattr(RamTier, "abandon", counted)
        state = new_cache()
        names = prompt_of(500).chunks()
        state.reserve("writer", LAYOUT, names, 0)
        nbytes = state.held_by("writer").nbytes
        assert nbytes == state.ram.used_bytes
        state.release_owner("writer")
        assert len(abandoned) < 300
        again = state.reserve("other", LAYOUT, names, 0)
        assert all(offset >= 0 for offsets in again.offsets for offset in offsets), (
            "in memory of its own"
        )
        finish_chores(state)
        assert len(abandoned) == 1000
        assert state.ram.used_bytes == nbytes
        state.abandon("other", again.reservation)
        assert state.ram.used_bytes == 0

    def test_while_a_large_room_is_abandoned_keeps_nothing(self) -> None:
        state = new_cache()
        reservation = state.reserve("writer", LAYOUT, prompt_of(500).chunks(), 0).reservation
        turns = state.abandon_turns("writer", reservation)
        next(turns)
        assert state.held_by("writer").nbytes == state.ram.used_bytes > 0, (
            "the rest is still its own"
        )
        turns.close()
        state.release_owner("writer")
        finish_chores(state)
        assert state.ram.used_bytes == 0
