"""Long lookups, searches and prefetches are done in steps, and answer as in one."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvhold.cache.chores import TURN, Running
from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer.commands import FetchCommand, ProbeCommand, WriteCommand
from kvhold.core.config import Config
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Prompt, Query
from kvhold.core.layout import Layout
from kvhold.core.reasons import EVICTED, NEVER_STORED
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.ram import RamTier
from kvhold.tiers.stack import TierPlace
from tests.cache.scripted import arena_of
from tests.cache.stepping import FULL, LAYOUT, SPACES, finish_chores, new_cache, prompt_of, store


class TestLongLookups:
    @pytest.fixture(autouse=True)
    def _make_all_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvhold.cache.chores._ONE_TURN_KEYS", 0)
        monkeypatch.setattr("kvhold.cache.index.pins._MOST_PINS", 7)
        monkeypatch.setattr("kvhold.cache.leases._MOST_LEASED", 7)

    @staticmethod
    def begin(state: CacheState, prompt: Prompt) -> Running[Any]:
        return Running(state.lookup_turns("reader", prompt.query()))

    def test_answer_as_in_one_turn_and_hold_only_what_the_hit_needs(self) -> None:
        state = new_cache()
        prompt = prompt_of(2000)
        store(state, prompt.until(2 * 1700))
        running, steps = self.begin(state, prompt), 1
        while not running.step(500):
            steps += 1
        assert steps > 5
        assert running.result.num_tokens == 3400
        finish_chores(state)
        assert state.ram.num_pinned == 2 * 1700 + 2 * 3, (
            "all of full attention, the last window of the other group"
        )
        leased = state.claim("reader", running.result.ticket, 1, 0)
        assert leased is not None and len(leased.offsets[0]) == 1700
        state.release_owner("reader")
        finish_chores(state)
        assert state.ram.num_pinned == 0

    def test_given_up_half_way_leave_nothing_held(self) -> None:
        state = new_cache()
        prompt = prompt_of(2000)
        store(state, prompt)
        for steps in range(1, 30, 3):
            running = self.begin(state, prompt)
            for _ in range(steps):
                running.step(300)
            running.close()
            state.release_owner("reader")
            finish_chores(state)
            assert state.ram.num_pinned == 0

    def test_find_nothing_that_is_cleared_while_they_are_under_way(self) -> None:
        state = new_cache()
        prompt = prompt_of(2000)
        for steps in range(1, 30, 3):
            store(state, prompt)
            running = self.begin(state, prompt)
            if any(running.step(300) for _ in range(steps)):
                break
            state.clear(None)
            while not running.step(300):
                pass
            assert running.result.num_tokens == 0
            finish_chores(state)
            assert state.ram.used_bytes == 0

    def test_keep_their_chunks_while_others_store_more_than_memory_holds(self) -> None:
        state = new_state(Config(), arena_of(16 << 20))
        state.register(LAYOUT)
        prompt = prompt_of(500)
        store(state, prompt)
        running = self.begin(state, prompt)
        assert not running.step(900)
        while not running.step(100):
            store(state, prompt_of(400))
        if running.result.ticket:
            leased = state.claim("reader", running.result.ticket, 0, 0)
            assert leased is not None
            keys = {entry.offset: entry.key for entry in state.ram.entries()}
            assert (
                len({keys[offset] for offset in leased.offsets[0]})
                == running.result.num_tokens // 2
            )
        state.release_owner("reader")

    def test_a_ticket_that_is_released_while_it_is_claimed_keeps_its_pins_until_the_claim_ends(
        self,
    ) -> None:
        state = new_cache()
        prompt = prompt_of(300)
        store(state, prompt)
        found = state.lookup("reader", prompt.query())
        claiming = Running(state.claim_turns("worker", found.ticket, 0, 0))
        assert not claiming.step(20)
        state.release("reader", found.ticket)
        state.clear(None)
        finish_chores(state)
        while not claiming.step(20):
            pass
        assert claiming.result is not None
        finish_chores(state)
        assert state.ram.num_pinned == len(
            [place for row in claiming.result.offsets for place in row if place >= 0]
        )
        state.release_owner("worker")
        finish_chores(state)
        assert state.ram.used_bytes == 0


def test_the_reason_of_a_hit_in_many_groups_and_shards_takes_few_lookups_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk of 4,096 rows is no longer turn than another one."""
    layout = Layout((FULL,) * 16, tokens_per_chunk=2)
    space = Namespace("many rows", layout, shards=256)
    state = new_state(Config(), arena_of(64 << 20))
    state.register(layout)
    looked: list[bytes] = []
    find = RamTier.find

    def counted(ram: RamTier, key: bytes) -> Any:
        looked.append(key)
        return find(ram, key)

    monkeypatch.setattr(RamTier, "find", counted)
    found = state.lookup("reader", prompt_of(1, space).query())
    assert (found.num_tokens, found.reason) == (0, NEVER_STORED)
    assert len(looked) < 300


def test_a_query_of_too_many_groups_and_shards_is_refused() -> None:
    """Some steps look at all of them."""
    state = new_state(Config(), arena_of(64 << 20))
    state.register(LAYOUT)
    query = Query(SPACES[0].digest, LAYOUT.fingerprint, 2049, bytes(HASH_BYTES))
    with pytest.raises(ProtocolError, match=r"2 groups in 2049 shards.*4096 at most"):
        state.lookup("reader", query)
    assert state.lookup("reader", replace(query, shards=2048)).num_tokens == 0


def test_a_policy_that_learns_hears_of_few_chunks_in_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = new_state(Config(policy="learned"), arena_of(64 << 20))
    state.register(LAYOUT)
    heard = [0]
    for name, method in (("used", LearnedPolicy.used), ("missed", LearnedPolicy.missed)):

        def counted(
            policy: Any, keys: Any, *args: Any, method: Any = method, **kwargs: Any
        ) -> None:
            keys = list(keys)
            heard[0] += len(keys)
            method(policy, keys, *args, **kwargs)

        monkeypatch.setattr(LearnedPolicy, name, counted)
    for num_chunks, most_used, most_missed in ((15, 60, 15), (60, 120, 60), (1000, 120, 600)):
        prompt = prompt_of(num_chunks)
        for most in (most_missed, most_used):
            running, done, total = Running(state.lookup_turns("reader", prompt.query())), False, 0
            while not done:
                heard[0] = 0
                done = running.step()
                assert heard[0] <= most
                total += heard[0]
            assert total >= num_chunks
            store(state, prompt)


def test_a_long_lookup_below_memory_begins_in_steps_and_asks_for_what_is_missing() -> None:
    state = new_state(Config(tiers=("disk:///x",)), arena_of(64 << 20))
    state.register(LAYOUT)
    prompt = prompt_of(1000)
    store(state, prompt.until(2 * 300))
    state.take_commands()
    running, steps = Running(state.lookup_turns("reader", prompt.query())), 1
    while not running.step(400):
        steps += 1
    assert steps > 5
    assert running.result.arriving
    [command] = state.take_commands()
    assert isinstance(command, ProbeCommand)
    assert len(command.keys) == len(set(command.keys)) == 4 * 700
    state.probed(command.search, {})
    assert state.refresh(running.result.ticket).num_tokens == 600
    given_up = Running(state.lookup_turns("reader", prompt_of(1000).query()))
    assert not given_up.step(400)
    given_up.close()
    state.release_owner("reader")
    assert state.holdings()["tickets"] == 0


@pytest.mark.parametrize(
    "num_chunks", [62, 63, 140, 375]
)  # of 4 keys: as many as one turn finds, one more, and more turns
@pytest.mark.parametrize("units", [1, TURN])
def test_chunks_that_a_lookup_has_found_are_not_evicted_between_its_steps(
    num_chunks: int, units: int
) -> None:
    state = new_cache()
    prompt = prompt_of(num_chunks)
    store(state, prompt)
    running, steps = Running(state.lookup_turns("reader", prompt.query())), 1
    while not running.step(units):
        steps += 1
        for entry in state.ram.entries():
            if not entry.pins:
                state.ram.remove(entry, why=EVICTED)
    found_at_once = num_chunks == 62
    assert (steps == 1) == (found_at_once and units == TURN)
    assert units == TURN or (steps == 2) == found_at_once, "held, then pinned"
    leased = state.claim("reader", running.result.ticket, 0, 0) if running.result.ticket else None
    for place in (
        [place for row in leased.offsets for place in row if place >= 0]
        if leased is not None
        else []
    ):
        assert place in {entry.offset for entry in state.ram.entries() if entry.committed}
    state.release_owner("reader")
    finish_chores(state)
    assert state.ram.num_pinned == 0


@pytest.mark.parametrize("num_chunks", [62, 140])
def test_a_lookup_that_is_given_up_in_any_step_leaves_no_pin(num_chunks: int) -> None:
    state = new_cache()
    prompt = prompt_of(num_chunks)
    store(state, prompt)
    for num_steps in range(1, 1000):
        running = Running(state.lookup_turns("reader", prompt.query()))
        if any(running.step(1) for _ in range(num_steps)):
            break
        assert state.ram.num_pinned > 0 or num_steps == 1
        running.close()
        finish_chores(state)
        assert state.ram.num_pinned == 0
    assert num_steps > 1
    state.release_owner("reader")


class TestLongSearches:
    """Of a prompt of which memory has the beginning, and a tier the rest."""

    NUM_CHUNKS, IN_RAM = 200, 80

    def begin(self) -> tuple[CacheState, int]:
        """The tier has answered, and nothing is decided yet."""
        state = new_state(Config(tiers=("disk:///x",)), arena_of(64 << 20))
        state.register(LAYOUT)
        state.turn_units = 0
        prompt = prompt_of(self.NUM_CHUNKS)
        store(state, prompt.until(2 * self.IN_RAM))
        for command in state.take_commands():
            assert isinstance(command, WriteCommand)
            state.written(command.number)
        found = state.lookup("reader", prompt.query())
        assert found.arriving and found.num_tokens == 2 * self.IN_RAM
        finish_chores(state)
        [command] = state.take_commands()
        assert isinstance(command, ProbeCommand)
        state.probed(command.search, dict.fromkeys(command.keys, TierPlace(0, 1 << 40)))
        return state, found.ticket

    def fetch_all(self, state: CacheState) -> int:
        num_fetched = 0
        for command in state.take_commands():
            if isinstance(command, FetchCommand):
                for pending_read in command.pending_reads:
                    state.fetched(pending_read.entry, True)
                    num_fetched += 1
        return num_fetched

    def assert_baseline(self, state: CacheState) -> None:
        finish_chores(state)
        state.clear(None)
        for command in state.take_commands():
            if isinstance(command, FetchCommand):
                for pending_read in command.pending_reads:
                    state.fetched(pending_read.entry, False)
        finish_chores(state)
        assert (state.ram.num_pinned, state.ram.used_bytes) == (0, 0)

    def test_order_what_is_to_come_in_steps_and_are_not_over_meanwhile(self) -> None:
        state, ticket = self.begin()
        steps = 0
        while state.step(100):
            steps += 1
            assert state.refresh(ticket).arriving
            assert not state.is_over(ticket)
        assert steps > 10
        window = 3  # chunks of the group that needs no more
        num_fetched = self.fetch_all(state)
        assert num_fetched == 2 * (self.NUM_CHUNKS - self.IN_RAM) + 2 * window
        assert state.take_news(), "clients that wait are to be told"
        found = state.refresh(ticket)
        assert found.num_tokens == 2 * self.NUM_CHUNKS
        assert found.sources == {
            "ram": 2 * self.IN_RAM,
            "tier-1": 2 * (self.NUM_CHUNKS - self.IN_RAM),
        }
        leased = state.claim("worker", ticket, 1, 0)
        assert leased is not None and len(leased.num_tokens) == self.NUM_CHUNKS
        state.release_owner("worker")
        state.release_owner("reader")
        self.assert_baseline(state)

    @pytest.mark.parametrize("steps", range(0, 60, 5))
    def test_that_are_let_go_in_the_middle_leave_nothing_and_what_was_ordered_arrives(
        self, steps: int
    ) -> None:
        state, ticket = self.begin()
        for _ in range(steps):
            state.step(20)
        state.release("reader", ticket)
        finish_chores(state)
        num_fetched = self.fetch_all(state)
        finish_chores(state)
        assert state.ram.num_pinned == 0
        in_ram = len([entry for entry in state.ram.entries() if entry.committed])
        assert in_ram == 4 * self.IN_RAM + num_fetched
        self.assert_baseline(state)

    @pytest.mark.parametrize("steps", range(0, 60, 5))
    def test_that_are_cleared_in_the_middle_find_nothing_new(self, steps: int) -> None:
        state, ticket = self.begin()
        for _ in range(steps):
            state.step(20)
        state.clear(None)
        self.fetch_all(state)
        finish_chores(state)
        assert state.refresh(ticket, settle=True).num_tokens <= 2 * self.NUM_CHUNKS
        state.release("reader", ticket)
        self.assert_baseline(state)

    def test_are_made_a_hit_once_though_two_wait_for_it(self) -> None:
        state, ticket = self.begin()
        finish_chores(state)
        self.fetch_all(state)
        finish_chores(state)
        refreshing = Running(state.refresh_turns(ticket))
        claiming = Running(state.claim_turns("worker", ticket, 0, 0))
        done = [False, False]
        both: tuple[Running[Any], ...] = (refreshing, claiming)
        for _ in range(1000):
            done = [one.step(10) if not was else True for one, was in zip(both, done, strict=True)]
            if all(done):
                break
        assert refreshing.result.num_tokens == 2 * self.NUM_CHUNKS
        assert claiming.result is not None and len(claiming.result.num_tokens) == self.NUM_CHUNKS
        state.release_owner("reader")
        state.release_owner("worker")
        self.assert_baseline(state)

    def test_whose_settling_is_given_up_are_settled_by_the_next_one(self) -> None:
        state, ticket = self.begin()
        finish_chores(state)
        self.fetch_all(state)
        finish_chores(state)
        for steps in range(1, 12):
            claiming = Running(state.claim_turns("worker", ticket, 0, 0))
            for _ in range(steps):
                if claiming.step(10):
                    break
            claiming.close()
            state.release_owner("worker")
        assert state.refresh(ticket).num_tokens == 2 * self.NUM_CHUNKS
        state.release_owner("reader")
        self.assert_baseline(state)

    def test_that_arrive_are_lent_as_far_as_they_have_come(self) -> None:
        state, ticket = self.begin()
        finish_chores(state)
        lending = Running(state.claim_turns("worker", ticket, 0, 0, arriving=True))
        assert not lending.step(1)
        state.release("reader", ticket)
        finish_chores(state)
        while not lending.step(1):
            pass
        if lending.result is not None:
            assert len(lending.result.num_tokens) == len(lending.result.offsets[0]) <= self.IN_RAM
        state.release_owner("worker")
        self.assert_baseline(state)


@pytest.mark.parametrize(("num_chunks", "shards"), [(20, 65_535), (600_000, 2)])
def test_a_query_of_more_keys_than_fit_is_refused_before_it_is_looked_up(
    num_chunks: int, shards: int
) -> None:
    state = new_cache()
    with pytest.raises(ProtocolError, match="keys"):
        state.lookup(
            "reader",
            Query(SPACES[0].digest, LAYOUT.fingerprint, shards, bytes(num_chunks * HASH_BYTES)),
        )


class TestPrefetch:
    def test_of_a_long_prompt_looks_for_few_keys_in_one_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = new_state(Config(tiers=("null://",)), arena_of(64 << 20))
        state.register(LAYOUT)
        prompt = prompt_of(2000)
        looked: list[bytes] = []
        monkeypatch.setattr(state.ram, "find", lambda key: looked.append(key))
        running = Running(state.prefetch_turns("reader", prompt.query()))
        most, done = 0, False
        while not done:
            before = len(looked)
            done = running.step()
            most = max(most, len(looked) - before)
        assert len(looked) >= 8000
        assert most < 1500
        assert any(isinstance(command, ProbeCommand) for command in state.take_commands())

    @pytest.mark.parametrize("num_closed", [10, 20, 40])
    def test_that_is_given_up_between_two_steps_holds_nothing(self, num_closed: int) -> None:
        state = new_state(Config(tiers=("null://",)), arena_of(64 << 20))
        state.register(LAYOUT)
        long = prompt_of(2000)
        part = long.chunks()
        part = ChunkNames(part.namespace, part.hashes[: 1000 * HASH_BYTES])
        for shard in range(2):
            state.commit(
                "writer", state.reserve("writer", LAYOUT, part, shard).reservation, range(1000)
            )
        for command in state.take_commands():
            if isinstance(command, WriteCommand):
                state.written(command.number)
        turns, pinned = state.prefetch_turns("reader", long.query()), 0
        for num_steps, _ in enumerate(turns, 1):
            pinned = max(pinned, state.ram.num_pinned)
            if num_steps == num_closed:
                break
        assert pinned
        turns.close()
        finish_chores(state)
        assert state.ram.num_pinned == 0
