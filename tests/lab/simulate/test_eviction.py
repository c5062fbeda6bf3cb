"""The compiled replay is what the cache does: event for event beside the policies that ship, and
beside the state machine with them.
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="no numba in this environment")

from kvhold.cache.state import CacheState
from kvhold.cache.transfer.commands import FetchCommand, ProbeCommand, WriteCommand
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import EVICTED
from kvhold.memory.arena import Arena
from kvhold.tiers.disk.index import Index
from kvhold.tiers.policies import POLICIES, make_policy
from kvhold.tiers.ram import RamTier
from kvhold.tiers.stack import TierPlace
from kvhold_lab.simulate import numba_eviction
from kvhold_lab.simulate.numba_eviction import replay
from kvhold_lab.simulate.policy_replay import Replayed, replay_class
from kvhold_lab.simulate.trace import Ids, Starts
from tests.lab.simulate.traces import paths

SLOT = 4096
LAYOUT = Layout(
    (Group(layers=1, planes=1, heads=1, head_dim=SLOT, dtype="int8"),),
    tokens_per_chunk=1,
    tail_tokens=0,
)
SPACE = Namespace("model", LAYOUT)

Requests = list[list[int]]

# a class without a model is replayed itself
MODELLED = [name for name in POLICIES if name in numba_eviction.POLICIES]


class Node:
    """The real state machine over an arena of so many chunks, and the account of a real disk below
    it, served a request at a time.
    """

    def __init__(self, policy: str, capacity: int, lower_capacity: int) -> None:
        arena = cast("Arena", SimpleNamespace(nbytes=capacity * SLOT))
        metrics = Metrics()
        self.index = Index(policy, lower_capacity * SLOT, SLOT)
        ram = RamTier(arena, make_policy(policy), metrics)
        self.state = CacheState(
            ram,
            metrics,
            num_tiers=int(lower_capacity > 0),
            write_behind_bytes=1 << 50,
            event_buffer=1_000_000,
        )
        self.state.register(LAYOUT)
        self.begun_at, _ = self.state.snapshot()
        self.numbers: dict[bytes, int] = {}
        self.time_ns = count(1)

    def serve(self, chunks: list[int]) -> tuple[int, int]:
        prompt, state = SPACE.prompt(np.array(chunks, np.int32)), self.state
        self.numbers |= {prompt.chunk_key(place): chunk for place, chunk in enumerate(chunks)}
        found = state.lookup("engine", prompt.query())
        while found.arriving:
            self.obey()
            found = state.refresh(found.ticket)
        state.release("engine", found.ticket)
        granted = state.reserve("engine", LAYOUT, prompt.chunks(first=found.num_tokens), 0)
        state.commit("engine", granted.reservation, range(len(chunks)))
        self.obey()
        return found.sources.get("ram", 0), found.num_tokens - found.sources.get("ram", 0)

    def obey(self) -> None:
        """What a tier worker does, at once."""
        writes = []
        for command in self.state.take_commands():
            match command:
                case ProbeCommand():
                    self.state.probed(
                        command.search,
                        {key: TierPlace(0, SLOT) for key in command.keys if self.index.find(key)},
                    )
                case FetchCommand():
                    for pending_read in command.pending_reads:
                        here = self.index.find(pending_read.entry.key)
                        assert here is not None
                        self.index.read(here, next(self.time_ns))
                        self.index.unread(here)
                    for pending_read in command.pending_reads:
                        self.state.fetched(pending_read.entry, True)
                case WriteCommand():
                    writes.append(command)
        self.write([command.entry.key for command in writes])
        for command in writes:
            self.state.written(command.number)
        if writes:
            self.obey()

    def write(self, keys: list[bytes]) -> None:
        missing = [key for key in keys if self.index.find(key) is None]
        plans = [self.index.reserve(key, next(self.time_ns), SLOT) for key in missing]
        for plan in filter(None, plans):
            for victim in plan.victims:
                self.index.finish(victim)
        for plan in filter(None, plans):
            self.index.commit(plan.entry, SLOT)

    def victims(self) -> list[int]:
        """All that went from memory, in order."""
        went: list[int] = []
        after = self.begun_at
        while True:
            batch = self.state.events(after)
            went += [self.numbers[event.key] for event in batch.events if event.kind == EVICTED]
            if batch.next == after:
                return went
            after = batch.next


def run(requests: Requests, parents: Sequence[int], **setup: Any) -> Replayed:
    return replay(*arrays(requests, parents), num_victims=sum(map(len, requests)), **setup)


def run_class(requests: Requests, parents: Sequence[int], *, policy: str, **setup: Any) -> Replayed:
    return replay_class(
        *arrays(requests, parents),
        make=POLICIES[policy],
        num_victims=sum(map(len, requests)),
        **setup,
    )


def arrays(requests: Requests, parents: Sequence[int]) -> tuple[Ids, Starts, Ids]:
    starts = np.cumsum([0, *map(len, requests)])
    chunks = np.array([chunk for request in requests for chunk in request], np.int32)
    return chunks, starts.astype(np.int64), np.array(parents, np.int32)


def assert_same(one: Replayed, other: Replayed) -> None:
    """The hits of each request, the victims in their order, and all counts."""
    assert one.found.tolist() == other.found.tolist()
    assert one.victims.tolist() == other.victims.tolist()
    counts = [
        (each.stored, each.promoted, each.written, each.evicted, each.evicted_below)
        for each in (one, other)
    ]
    assert counts[0] == counts[1]


@st.composite
def forests(
    draw: st.DrawFn, most_ids: int = 24, most_requests: int = 60
) -> tuple[list[int], Requests]:
    """Parents, each before its continuations, and requests: each some path from a first
    chunk on.
    """
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, most_ids)))]
    ends = draw(st.lists(st.integers(0, len(parents) - 1), max_size=most_requests))
    return parents, list(paths(parents, ends))


@pytest.mark.parametrize("policy", MODELLED)
@given(forest=forests(), capacity=st.integers(0, 12), lower=st.integers(0, 20))
@settings(max_examples=150)
def test_the_model_and_the_class_find_and_evict_the_same(
    policy: str, forest: tuple[list[int], Requests], capacity: int, lower: int
) -> None:
    parents, requests = forest
    assert_same(
        run(requests, parents, policy=policy, capacity=capacity, lower_capacity=lower),
        run_class(requests, parents, policy=policy, capacity=capacity, lower_capacity=lower),
    )


@pytest.mark.parametrize("policy", MODELLED)
@given(forest=forests(), capacity=st.integers(1, 12))
@settings(max_examples=150)
def test_memory_finds_and_evicts_what_the_real_one_does(
    policy: str, forest: tuple[list[int], Requests], capacity: int
) -> None:
    parents, requests = forest
    node = Node(policy, capacity, 0)
    found = [node.serve(request) for request in requests]
    replayed = run(requests, parents, policy=policy, capacity=capacity)
    assert [tuple(row) for row in replayed.found.tolist()] == found
    assert replayed.victims.tolist() == node.victims()
    assert replayed.evicted == len(node.victims())


@pytest.mark.parametrize("policy", MODELLED)
@given(forest=forests(), capacity=st.integers(1, 8), lower=st.integers(1, 20))
@settings(max_examples=150)
def test_with_a_tier_below_too(
    policy: str, forest: tuple[list[int], Requests], capacity: int, lower: int
) -> None:
    parents, requests = forest
    node = Node(policy, capacity, lower)
    found = [node.serve(request) for request in requests]
    replayed = run(requests, parents, policy=policy, capacity=capacity, lower_capacity=lower)
    assert [tuple(row) for row in replayed.found.tolist()] == found
    assert replayed.victims.tolist() == node.victims()
    assert replayed.written - replayed.evicted_below == len(node.index)


@pytest.mark.parametrize(("capacity", "lower"), [(300, 0), (60, 300)])
@pytest.mark.parametrize("policy", MODELLED)
def test_thousands_of_requests_drift_nowhere(policy: str, capacity: int, lower: int) -> None:
    chance = np.random.default_rng(7)
    parents = [int(chance.integers(max(-1, i - 40), i)) if i else -1 for i in range(3_000)]
    requests = list(paths(parents, [int(end) % 3_000 for end in chance.zipf(1.3, 1_500)]))
    node = Node(policy, capacity, lower)
    found = [node.serve(request) for request in requests]
    replayed = run(requests, parents, policy=policy, capacity=capacity, lower_capacity=lower)
    assert [tuple(row) for row in replayed.found.tolist()] == found
    assert replayed.victims.tolist() == node.victims()
    assert replayed.evicted > 300 and (
        not lower or (replayed.evicted_below > 300 and replayed.promoted > 300)
    ), "or nothing was tried"
    assert_same(
        replayed,
        run_class(requests, parents, policy=policy, capacity=capacity, lower_capacity=lower),
    )


class Arc:
    """ARC as its paper has it, over chunks that nothing continues, with lists; the oldest first."""

    def __init__(self, parents: Sequence[int], capacity: int) -> None:
        self.parents, self.capacity, self.target = parents, capacity, 0
        self.once: list[int] = []
        self.often: list[int] = []
        self.once_gone: list[int] = []
        self.often_gone: list[int] = []
        self.went: list[int] = []

    def serve(self, chunks: list[int]) -> int:
        hit = next(
            (i for i, chunk in enumerate(chunks) if chunk not in self.once + self.often),
            len(chunks),
        )
        for chunk in reversed(chunks[:hit]):
            (self.once if chunk in self.once else self.often).remove(chunk)
            self.often.append(chunk)
        written: list[tuple[int, list[int]]] = []
        for chunk in chunks[hit:]:
            before = self.remembered(chunk)
            if len(self.once) + len(self.often) + len(written) >= self.capacity:
                continued = {
                    self.parents[each]
                    for each in [*self.once, *self.often, *(each for each, _ in written), chunk]
                }
                if not self.evict(continued, was_often=before == "often"):
                    break
            written.append((chunk, self.often if before else self.once))
        for chunk, queue in reversed(written):
            queue.append(chunk)
        return hit

    def remembered(self, chunk: int) -> str:
        once, often = len(self.once_gone), len(self.often_gone)
        if chunk in self.once_gone:
            self.target = min(self.capacity, self.target + max(1, often // once))
            self.once_gone.remove(chunk)
            return "once"
        if chunk in self.often_gone:
            self.target = max(0, self.target - max(1, once // often))
            self.often_gone.remove(chunk)
            return "often"
        return ""

    def evict(self, continued: set[int], *, was_often: bool) -> bool:
        from_once = bool(self.once) and (
            len(self.once) > self.target or (was_often and len(self.once) == self.target)
        )
        queues = [(self.once, self.once_gone), (self.often, self.often_gone)]
        for queue, gone in queues if from_once else reversed(queues):
            for chunk in queue:
                if chunk not in continued:
                    queue.remove(chunk)
                    gone.append(chunk)
                    self.went.append(chunk)
                    del self.once_gone[
                        : max(0, len(self.once_gone) - (self.capacity - len(self.once)))
                    ]
                    most = (
                        2 * self.capacity - len(self.once) - len(self.often) - len(self.once_gone)
                    )
                    del self.often_gone[: max(0, len(self.often_gone) - most)]
                    return True
        return False


@given(forest=forests(), capacity=st.integers(1, 12))
@settings(max_examples=300)
def test_arc_is_that_of_its_paper_over_leaves(
    forest: tuple[list[int], Requests], capacity: int
) -> None:
    parents, requests = forest
    arc = Arc(parents, capacity)
    found = [arc.serve(request) for request in requests]
    replayed = run(requests, parents, policy="arc", capacity=capacity)
    assert replayed.found[:, 0].tolist() == found
    assert replayed.victims.tolist() == arc.went


@given(forest=forests(most_ids=5, most_requests=7), capacity=st.integers(1, 3))
@settings(max_examples=150)
def test_belady_finds_as_much_as_any_order_of_eviction_can(
    forest: tuple[list[int], Requests], capacity: int
) -> None:
    parents, requests = forest

    @cache
    def most(request: int, held: frozenset[int]) -> int:
        if request == len(requests):
            return 0
        chunks = requests[request]
        hit = next((i for i, chunk in enumerate(chunks) if chunk not in held), len(chunks))
        choices = sorted(held | set(chunks))
        sizes = range(min(capacity, len(choices)) + 1)
        return hit + max(
            most(request + 1, frozenset(kept))
            for size in sizes
            for kept in combinations(choices, size)
        )

    assert int(run(requests, parents, policy="belady", capacity=capacity).found.sum()) == most(
        0, frozenset()
    )


@given(forest=forests(), capacity=st.integers(0, 12), lower=st.integers(0, 12))
def test_nothing_finds_more_than_belady_in_as_much_room(
    forest: tuple[list[int], Requests], capacity: int, lower: int
) -> None:
    parents, requests = forest
    bound = run(requests, parents, policy="belady", capacity=capacity + lower)
    for policy in (*MODELLED, "arc"):
        replayed = run(requests, parents, policy=policy, capacity=capacity, lower_capacity=lower)
        assert replayed.found.sum() <= bound.found.sum()


@pytest.mark.parametrize("policy", [name for name in numba_eviction.POLICIES if name != "belady"])
def test_what_all_fits_into_is_found_as_soon_as_it_was_seen(policy: str) -> None:
    replayed = run([[0, 1, 2], [0, 1, 3], [0, 1, 2]], [-1, 0, 1, 1], policy=policy, capacity=4)
    assert (replayed.found[:, 0].tolist(), replayed.stored, replayed.evicted) == ([0, 2, 3], 4, 0)


@pytest.mark.parametrize("policy", numba_eviction.POLICIES)
def test_a_memory_of_nothing_holds_nothing(policy: str) -> None:
    replayed = run([[0, 1], [0, 1]], [-1, 0], policy=policy, capacity=0)
    assert (replayed.found.sum(), replayed.stored, replayed.evicted) == (0, 0, 0)


def test_no_requests_are_no_trouble() -> None:
    assert run([], [], policy="lru", capacity=3).found.shape == (0, 2)
