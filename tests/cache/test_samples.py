"""The learned policy of a cache takes the samples that it takes in the simulation, however a lookup
and the stores after it are divided.
"""

from collections.abc import Callable, Sequence
from itertools import chain, count

import numpy as np
import pytest
from msgspec.structs import replace

from kvhold.cache.chores import Running
from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer.commands import UsedCommand
from kvhold.core.api import Found
from kvhold.core.config import Config
from kvhold.core.keys import NAME_BYTES, Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.ghosts import TICK_S, Ghost, pack, run_of
from kvhold.tiers.policies.kinds import kind_of
from kvhold_lab.simulate import policy_replay
from tests.cache.scripted import arena_of
from tests.cache.stepping import FULL, WINDOW
from tests.tiers.learnt import Clock, samples

STEP_S = 0.3  # more than a tick of the policy
APART_S = 200.0  # pauses that are of one class

Request = tuple[float, Sequence[int]]


class SteppedCache:
    """A cache whose clock goes on with each step of a lookup, and between the parts of a store."""

    def __init__(
        self,
        layout: Layout,
        shards: int = 1,
        only: tuple[int, ...] = (),
        tiers: tuple[str, ...] = (),
    ) -> None:
        self.clock = Clock()
        self.policy = LearnedPolicy(self.clock)
        config = Config(policy="learned", tiers=tiers)
        self.state: CacheState = new_state(config, arena_of(64 << 20), self.policy)
        self.state.register(layout)
        self.space = Namespace("model", layout, shards=shards)
        self.only = only

    def prompt(self, chunks: Sequence[int]) -> Prompt:
        size = self.space.layout.tokens_per_chunk
        return self.space.prompt(np.repeat(np.array(chunks, np.int32), size))

    def look_up(self, *prompts: Prompt) -> None:
        """Look up all prompts at once, each in many steps, and store them."""
        running = [self.begin(prompt) for prompt in prompts]
        waiting, num_steps = list(running), count()
        while waiting:
            assert next(num_steps) < 10_000
            for one in list(waiting):
                self.clock.now_s += STEP_S
                if one.step():
                    waiting.remove(one)
        for one, prompt in zip(running, prompts, strict=True):
            self.state.release("reader", one.result.ticket)
            self.store(prompt)

    def begin(self, prompt: Prompt) -> Running[Found]:
        query = replace(prompt.query(), only=self.only)
        return Running(self.state.lookup_turns("reader", query))

    def store(self, prompt: Prompt) -> None:
        for first in range(0, prompt.num_whole, 100):
            names = prompt.chunks(first, last=min(first + 100, prompt.num_whole))
            for shard in reversed(self.only or range(self.space.shards)):
                self.clock.now_s += STEP_S
                granted = self.state.reserve("writer", self.space.layout, names, shard)
                self.state.commit("writer", granted.reservation, range(len(names)))


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Request]], LearnedPolicy]:
    """Return the policy after a simulation in which nothing is evicted."""
    made: list[LearnedPolicy] = []
    make = policy_replay.learned_policy

    def noted(arrivals: policy_replay.Arrivals) -> LearnedPolicy:
        made.append(make(arrivals))
        return made[-1]

    monkeypatch.setattr(policy_replay, "learned_policy", noted)

    def simulated(requests: Sequence[Request]) -> LearnedPolicy:
        prompts = [chunks for _, chunks in requests]
        parents = np.full(1 + max(chain(*prompts)), -1, np.int32)
        for chunks in prompts:
            parents[chunks[1:]] = chunks[:-1]
        policy_replay.replay_class(
            np.array(list(chain(*prompts)), np.int32),
            np.cumsum([0, *map(len, prompts)]).astype(np.int64),
            parents,
            make=LearnedPolicy,
            capacity=parents.size,
            times_s=np.array([at_s for at_s, _ in requests]),
        )
        return made[-1]

    return simulated


LONG = [*range(1000)]
LONGER = [*range(1100)]


@pytest.mark.parametrize(
    ("groups", "shards", "only"),
    [
        ((FULL,), 1, ()),
        ((FULL, WINDOW), 2, ()),
        ((WINDOW, FULL), 2, ()),
        ((FULL,), 2, (1,)),
        ((WINDOW, FULL), 4, (2, 3)),
    ],
    ids=["one row", "two groups", "a window first", "the second shard", "a window, two shards"],
)
def test_a_long_prompt_has_the_samples_of_the_simulation(
    simulate: Callable[[Sequence[Request]], LearnedPolicy],
    groups: tuple[Group, ...],
    shards: int,
    only: tuple[int, ...],
) -> None:
    """It is new, comes back, comes back longer, and comes back once more."""
    cache = SteppedCache(Layout(groups, tokens_per_chunk=2, tail_tokens=0), shards, only)
    requests: list[Request] = []
    for number, (chunks, num_samples) in enumerate(
        ((LONG, 1), (LONG, 1), (LONGER, 2), (LONGER, 2))
    ):
        requests.append((cache.clock.now_s, chunks))
        cache.look_up(cache.prompt(chunks))
        assert samples(cache.policy) == samples(simulate(requests))
        assert samples(cache.policy).total() == num_samples
        cache.clock.now_s = (number + 1) * APART_S


def test_two_lookups_in_turn_have_the_samples_of_one_after_the_other(
    simulate: Callable[[Sequence[Request]], LearnedPolicy],
) -> None:
    """They have their first 300 chunks in common."""
    cache = SteppedCache(Layout((FULL,), tokens_per_chunk=2, tail_tokens=0))
    first, second = LONG, [*range(300), *range(2000, 2700)]
    requests: list[Request] = []
    for prompts in (
        (first,),
        (second,),
        ([*first, *range(1000, 1100)], [*second, *range(2700, 2800)]),
        ([*first, *range(1000, 1100)], [*second, *range(2700, 2800)]),
    ):
        requests += [(cache.clock.now_s, chunks) for chunks in prompts]
        begun_s = cache.clock.now_s
        cache.look_up(*map(cache.prompt, prompts))
        assert samples(cache.policy) == samples(simulate(requests))
        cache.clock.now_s = begun_s + APART_S


def test_a_disk_is_told_when_the_lookup_began() -> None:
    """All chunks have that time in memory, too."""
    layout = Layout((FULL,), tokens_per_chunk=2, tail_tokens=0)
    cache = SteppedCache(layout, tiers=("disk:///x",))
    cache.state.uses.begin()
    prompt = cache.prompt(LONG)
    running, steps = cache.begin(prompt), count()
    while not running.step():
        cache.clock.now_s += 2 * TICK_S
        assert next(steps) < 10_000
    [command] = [each for each in cache.state.take_commands() if isinstance(each, UsedCommand)]
    past = pack(Ghost(command.at_s, kind_of(1, command.prompt), 1))
    names = [prompt.chunk_key(chunk)[:NAME_BYTES] for chunk in LONG]
    assert {run_of(cache.policy.ghosts.find(name)) for name in names} == {past}
    assert command.at_s < cache.policy.times.now_s - 2 * TICK_S
