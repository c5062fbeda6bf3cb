"""What is decided for a lookup whose engine says what computing costs it: wait for all, for a part,
for nothing; and what is told of it.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.cache.transfer.commands import (
    ClearCommand,
    Command,
    FetchCommand,
    ProbeCommand,
    WriteCommand,
)
from kvhold.core.api import Found
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import Namespace
from kvhold.core.layout import MOST_CHUNK_BYTES, MOST_LAYERS, Group, Layout
from kvhold.core.planning import ComputeCost
from kvhold.core.reasons import DEADLINE, SLOWER, WHOLE
from kvhold.tiers.stack import TierPlace
from tests.cache.scripted import only
from tests.cache.searching import Bench, all_keys

SIZE = 2
CHUNK_BYTES = 1500 * SIZE
FAST = ComputeCost("fast", 16, 0, 64, 0.0, 1e-4, 0.0, 0.0, 0.0)  # 1.6 ms in all
SLOW = ComputeCost("slow", 16, 0, 64, 0.0, 1.0, 0.0, 0.01, 0.0)  # 16 s


class World(Bench):
    """The same with a clock, and a first tier that reads each chunk in `chunk_s`."""

    def __init__(self, *, chunk_s: float = 0.01, num_slots: int = 60) -> None:
        super().__init__(num_slots=num_slots)
        self.now = 1000.0
        self.state.planner.clock = lambda: self.now
        self.chunk_s = chunk_s

    def ask(self, num_tokens: int = 16, cost: ComputeCost | None = None, seed: int = 0) -> Found:
        return self.state.lookup("a", self.prompt(num_tokens, seed).query(), cost)

    def commands(self) -> list[Command]:
        """What is wanted of the tiers' reads; what is to be written or cleared, is."""
        wanted: list[Command] = []
        for command in self.state.take_commands():
            match command:
                case WriteCommand():
                    self.state.written(command.number)
                case ClearCommand():
                    self.state.cleared(command.prefix)
                case _:
                    wanted.append(command)
        return wanted

    def store(self, chunks: int) -> None:
        """The first chunks of the prompt are in memory."""
        reservation = self.state.reserve(
            "w", self.layout, self.prompt(16).chunks(0, last=chunks), 0
        ).reservation
        self.state.commit("w", reservation, range(chunks))
        assert self.commands() == []

    def answer_probes(
        self,
        commands: list[Command],
        below: Callable[[bytes], bool] = lambda key: True,
        tier: int = 0,
    ) -> None:
        for command in commands:
            assert isinstance(command, ProbeCommand)
            self.state.probed(
                command.search, {key: TierPlace(tier, 100) for key in command.keys if below(key)}
            )

    def read(self, commands: list[Command]) -> int:
        """Every chunk in its time; returns how many."""
        pending_reads = [
            pending_read
            for command in commands
            if isinstance(command, FetchCommand)
            for pending_read in command.pending_reads
        ]
        for pending_read in pending_reads:
            self.now += self.chunk_s
            self.state.fetched(pending_read.entry, True)
        return len(pending_reads)

    def work_off(self) -> list[int]:
        """Carry out all commands. Return how many chunks were read at once, by wave."""
        waves = []
        while commands := self.commands():
            self.answer_probes(
                [command for command in commands if isinstance(command, ProbeCommand)]
            )
            if count := self.read(commands):
                waves.append(count)
        return waves

    def learn(self, rounds: int = 12) -> None:
        """Have the tiers read, until their speed is known. Both of the bench are alike."""
        for seed in range(100, 100 + rounds):
            found = self.ask(4 + seed % 7 * 2, seed=seed)
            self.answer_probes(self.commands(), tier=seed % 2)
            self.read(self.commands())
            self.state.release("a", found.ticket)
            self.now += 0.5
        self.state.clear(None)
        assert self.commands() == []

    def finish(self, found: Found) -> Found:
        final = self.state.refresh(found.ticket)
        self.state.release_owner("a")
        return final


def test_without_work_all_is_ordered_at_once() -> None:
    world = World()
    found = world.ask()
    assert world.work_off() == [8]
    assert world.finish(found).num_tokens == 16
    [story] = world.state.planner.explain("")
    assert (story.alternatives, story.why, story.found) == ({}, "", {"tier-1": 16})


def test_an_unmeasured_tier_is_read_a_little_first_and_then_more() -> None:
    world = World()
    found = world.ask(cost=SLOW)
    assert world.work_off() == [1, 7], "eight times what has come at once"
    final = world.finish(found)
    assert (final.num_tokens, final.reason) == (16, WHOLE)
    [decision] = world.state.planner.explain("")
    assert (decision.request, decision.chosen_tokens, decision.hit_tokens, decision.found) == (
        "slow",
        16,
        16,
        {"tier-1": 16},
    )
    assert decision.waited_s == pytest.approx(8 * world.chunk_s)


def test_chunks_that_load_slower_than_computing_are_neither_awaited_nor_probed() -> None:
    world = World()
    world.learn()
    found = world.ask(cost=FAST)
    assert (found.num_tokens, found.arriving, found.reason) == (0, False, SLOWER)
    assert world.commands() == []
    [decision] = world.state.planner.explain("fast")
    assert world.state.metrics.value("kvhold_plans_unasked") == 1
    assert decision.why.startswith("tiers were not asked") and decision.alternatives[
        "compute"
    ].compute_s == pytest.approx(1.6e-3)
    found = world.ask(cost=SLOW)
    world.work_off()
    assert world.finish(found).num_tokens == 16


def test_the_largest_query_is_planned_for_and_a_larger_one_is_refused() -> None:
    world = World()
    world.learn()
    largest = Group(
        layers=MOST_LAYERS,
        planes=1,
        heads=1,
        head_dim=MOST_CHUNK_BYTES // MOST_LAYERS // 16,
        dtype="uint8",
    )
    layout = Layout((largest,), tokens_per_chunk=16)
    world.state.register(layout)
    space = Namespace(model="model", layout=layout, shards=4096)
    assert (
        world.state.lookup("a", space.prompt(np.zeros(16 * 255, np.int32)).query(), FAST).reason
        == SLOWER
    )
    with pytest.raises(ProtocolError, match=rf"a query of {257 * 4096} keys"):
        world.state.lookup("a", space.prompt(np.zeros(16 * 257, np.int32)).query(), FAST)


def test_chunks_in_the_faster_tier_are_loaded_and_the_rest_is_computed() -> None:
    world = World()
    world.learn()
    cost = ComputeCost(
        "part", 16, 0, 64, 0.0, world.chunk_s, 0.0, 0.0, 0.0
    )  # twice as slow as the tiers
    found = world.ask(cost=cost)
    keys = all_keys(world.prompt(16), 1)
    probe = only(world.commands(), ProbeCommand)
    for speed in world.state.planner.speeds[1:]:
        for _ in range(3):  # meanwhile somebody else has found the second tier to be slow
            speed.requested(CHUNK_BYTES, world.now)
            world.now += 1
            speed.ended(CHUNK_BYTES, world.now)
    world.state.probed(
        probe.search, {key: TierPlace(keys.index(key) >= 5, 100) for key in probe.keys}
    )
    assert world.read(world.commands()) == 5
    final = world.finish(found)
    assert (final.num_tokens, final.reason, final.sources) == (10, SLOWER, {"tier-1": 10})
    [decision] = world.state.planner.explain("part")
    assert decision.found == {"tier-1": 10, "tier-2": 6}
    assert decision.why.startswith("loading a part takes")


def test_a_hit_in_memory_that_costs_more_to_load_than_to_compute_is_not_loaded() -> None:
    world = World()
    world.store(8)
    found = world.ask(cost=ComputeCost("small", 16, 0, 64, 0.0, 1e-4, 0.0, 0.01, 0.0))
    assert (found.num_tokens, found.ticket, found.reason) == (0, 0, SLOWER)
    assert world.state.status()["pinned_chunks"] == 0
    assert (
        world.ask(cost=ComputeCost("large", 16, 0, 64, 0.0, 1e-2, 0.0, 0.01, 0.0)).num_tokens == 16
    )
    assert (
        world.ask(cost=ComputeCost("has", 16, 16, 64, 0.0, 1e-4, 0.0, 0.01, 0.0)).num_tokens == 16
    ), "what the engine has needs no load"
    assert [decision.hit_tokens for decision in world.state.planner.explain("")] == [16, 16, 0]
    assert (
        world.state.metrics.value("kvhold_plans", choice="none")
        == world.state.metrics.value("kvhold_plans", choice="all")
        == 1
    )


def test_a_wait_that_takes_longer_than_planned_ends_with_the_arrived_chunks() -> None:
    world = World()
    world.learn()
    cost = ComputeCost("late", 16, 0, 64, 0.0, 0.05, 0.0, 0.0, 0.0)  # 0.8 s
    found = world.ask(cost=cost)
    world.answer_probes(world.commands())
    command = only(world.commands(), FetchCommand)
    assert len(command.pending_reads) == 8
    for pending_read in command.pending_reads[:3]:
        world.now += world.chunk_s
        world.state.fetched(pending_read.entry, True)
    assert world.state.refresh(found.ticket).arriving
    world.now += 0.2
    assert world.state.refresh(found.ticket).arriving, "half a second is left to be computed"
    world.now += 0.4
    final = world.state.refresh(found.ticket)
    assert (final.num_tokens, final.arriving, final.reason) == (6, False, SLOWER)
    assert world.state.metrics.value("kvhold_plans_cut_short") == 1
    [decision] = world.state.planner.explain("late")
    assert decision.hit_tokens == 6 and decision.why.startswith(
        "the reads took longer than computing"
    )
    for pending_read in command.pending_reads[3:]:
        world.state.fetched(pending_read.entry, True)
    assert world.ask(cost=cost).num_tokens == 16, "it came for the next one"
    world.state.release_owner("a")
    world.finished()


def test_a_tier_that_turns_out_to_be_slow_is_not_waited_for_to_the_end() -> None:
    world = World(chunk_s=0.3)  # all of it in 2.4 s
    # or computed in 1.6 s
    began_s, found = (
        world.now,
        world.ask(cost=ComputeCost("first", 16, 0, 64, 0.0, 0.1, 0.0, 0.0, 0.0)),
    )
    read = 0
    while world.state.refresh(found.ticket).arriving:
        commands = world.commands()
        world.answer_probes([command for command in commands if isinstance(command, ProbeCommand)])
        for pending_read in [
            pending_read
            for command in commands
            if isinstance(command, FetchCommand)
            for pending_read in command.pending_reads
        ]:
            world.now += world.chunk_s
            world.state.fetched(pending_read.entry, True)
            read += 1
            if not world.state.refresh(found.ticket).arriving:
                break
    assert read <= 3 and world.now - began_s < 1
    world.state.release_owner("a")


@pytest.mark.parametrize(("compute_s", "loads"), [(2.0, True), (0.6, False)])
def test_a_long_load_is_awaited_if_it_is_in_time_at_the_pace_of_single_chunks(
    compute_s: float, loads: bool
) -> None:
    world = World(chunk_s=0.1)
    for seed in range(100, 106):
        world.ask(SIZE, seed=seed)
        assert world.work_off() == [1]
        world.now += 1
    world.state.release_owner("a")
    found = world.ask(cost=ComputeCost("long", 16, 0, 64, 0.0, compute_s / 16, 0.0, 0.0, 0.0))
    world.answer_probes(world.commands())
    command = only(world.commands(), FetchCommand)
    assert len(command.pending_reads) == 8
    world.now += 0.55  # they come side by side
    assert world.state.refresh(found.ticket).arriving == loads, (
        "0.8 s, if it was the bytes that took so long"
    )
    assert world.read([command]) == 8
    assert world.state.refresh(found.ticket).num_tokens == (16 if loads else 0)
    world.state.release_owner("a")


def test_other_searches_reads_do_not_prolong_the_wait_for_a_hanging_read() -> None:
    world = World()
    world.learn()
    found = world.ask(cost=ComputeCost("stuck", 16, 0, 64, 0.0, 0.05, 0.0, 0.0, 0.0))
    world.answer_probes(world.commands())
    world.commands()
    began_s = world.now
    for seed in range(200, 230):
        if not world.state.refresh(found.ticket).arriving:
            break
        other = world.ask(seed=seed)
        world.work_off()
        world.state.release("a", other.ticket)
    assert 0.5 < world.now - began_s < 1.2, "as long as computing takes, and twice what was thought"
    assert not world.state.refresh(found.ticket).arriving
    world.state.release_owner("a")


def test_a_waiting_lookup_keeps_its_plan_after_many_other_decisions() -> None:
    world = World()
    world.learn()
    found = world.ask(cost=ComputeCost("first", 16, 0, 64, 0.0, 0.05, 0.0, 0.0, 0.0))
    world.answer_probes(world.commands())
    coming = world.commands()
    for number in range(600):
        world.ask(cost=ComputeCost(f"other-{number}", 16, 16, 64, 0.0, 1.0), seed=300)
    world.now += 0.01
    assert world.state.planner.explain("first") == [], "forgotten"
    assert world.state.refresh(found.ticket).arriving
    world.read(coming)
    assert world.finish(found).num_tokens > 0


def test_a_lookup_that_is_told_to_settle_has_the_reason_deadline() -> None:
    world = World()
    found = world.ask(cost=ComputeCost("unknown", 16))
    world.answer_probes(world.commands())
    world.commands()
    final = world.state.refresh(found.ticket, settle=True)
    assert (final.num_tokens, final.reason) == (0, DEADLINE)
    world.state.release_owner("a")


def test_a_probe_that_hangs_is_waited_for_no_longer_than_computing_takes() -> None:
    world = World()
    found = world.ask(cost=SLOW)
    world.now += 14
    assert world.state.refresh(found.ticket).arriving
    world.now += 6
    final = world.state.refresh(found.ticket)
    assert (final.arriving, final.reason) == (False, SLOWER)
    [decision] = world.state.planner.explain("slow")
    assert decision.why.startswith("the reads took longer than computing") and (
        decision.waited_s,
        decision.hit_tokens,
    ) == (20, 0)
    world.state.release_owner("a")


def test_a_slow_tier_is_sampled_with_one_chunk_without_a_waiting_request() -> None:
    world = World(chunk_s=0.5)
    world.learn()
    world.chunk_s = 1e-5  # it has become fast, and nobody has noticed
    tried = 0
    for seed in range(200, 220):
        world.now += 500
        found = world.ask(cost=ComputeCost("r", 16, 0, 64, 0.0, 0.01, 0.0, 0.0, 0.0), seed=seed)
        if found.arriving:
            break
        tried += sum(world.work_off())
        if not world.ask(cost=FAST, seed=seed + 100).arriving:
            assert world.commands() == [], "not twice in a moment"
    assert found.arriving, "it is used again"
    assert 1 <= tried <= 8, "a chunk each time"
    world.state.release_owner("a")


def test_reported_timings_are_remembered_and_decisions_are_bounded() -> None:
    world = World()
    for number in range(600):
        world.ask(cost=ComputeCost(f"request-{number}", 16, 16, 64, 0.0, 1.0))
        world.work_off()
    planner = world.state.planner
    planner.report_timing("request-599", load_s=0.5, compute_s=None)
    planner.report_timing("nobody's", load_s=0.5, compute_s=None)
    assert len(planner.explain("request-5")) == 20
    [last] = planner.explain("request-599")
    assert (last.load_s, last.compute_s) == (0.5, None)
    assert (
        planner.explain("request-5")[-1].request == "request-580"
        and planner.explain("request-77") == []
    ), "forgotten"
    assert planner.explain("")[0].request == "request-599"
    world.state.release_owner("a")


@settings(max_examples=150, deadline=None)
@given(
    token_s=st.floats(1e-6, 1.0),
    load_s=st.floats(0, 0.5),
    chunk_s=st.floats(1e-4, 1.0),
    in_memory=st.integers(0, 8),
    engine_has=st.integers(0, 16),
)
def test_no_decision_is_worse_than_the_better_of_loading_all_and_computing_all(
    token_s: float, load_s: float, chunk_s: float, in_memory: int, engine_has: int
) -> None:
    """With the tiers' speed known, as it then turns out to be."""
    world = World(chunk_s=chunk_s)
    world.learn()
    if in_memory:
        world.store(in_memory)
    cost = ComputeCost("r", 16, engine_has, 64, 0.0, token_s, 0.0, load_s, 0.0)

    def total_s(hit_tokens: int, waited_s: float) -> float:
        left = max(1, 16 - max(hit_tokens, engine_has))
        return waited_s + (load_s if hit_tokens > engine_has else 0) + left * token_s

    began_s, found = world.now, world.ask(cost=cost)
    world.work_off()
    final = world.finish(found) if found.ticket else found
    waited_s = world.now - began_s if found.arriving else 0.0
    load_all = total_s(16, (8 - in_memory) * chunk_s)
    compute_all = total_s(0, 0.0)
    assert total_s(final.num_tokens, waited_s) <= 1.08 * min(load_all, compute_all) + 1e-9
    assert not math.isnan(waited_s) and np.isfinite(load_all)
