"""Which chunks a lookup uses, for a policy that learns from uses."""

from typing import get_args

import numpy as np
import pytest

from kvhold.cache.chores import Running
from kvhold.cache.state import CacheState, new_state
from kvhold.core.api import Uses
from kvhold.core.config import Config
from kvhold.core.keys import NAME_BYTES, Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.ghosts import uses_of
from tests.cache.scripted import arena_of

GROUP = Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8")
LAYOUT = Layout((GROUP,), tokens_per_chunk=2)
SPACE, OTHER = (Namespace(f"model {number}", LAYOUT) for number in range(2))


@pytest.fixture
def state() -> CacheState:
    state = new_state(Config(policy="learned"), arena_of(64 << 20))
    for space in (SPACE, OTHER):
        state.register(LAYOUT, space.digest)
    return state


def prompt_of(num_chunks: int) -> Prompt:
    return SPACE.prompt(np.arange(2 * num_chunks, dtype=np.int32))


def store(state: CacheState, prompt: Prompt) -> None:
    names = prompt.chunks()
    granted = state.reserve("writer", LAYOUT, names, 0)
    state.commit("writer", granted.reservation, range(len(names)))


def look_up(state: CacheState, prompt: Prompt, uses: Uses = "all") -> None:
    state.release("reader", state.lookup("reader", prompt.query(), uses=uses).ticket)


def counts(state: CacheState, prompt: Prompt) -> list[int]:
    """Return how often each chunk was used."""
    policy = state.ram.policy
    assert isinstance(policy, LearnedPolicy)
    keys = [prompt.chunk_key(number) for number in range(len(prompt.chunks()))]
    return [
        uses_of(policy.ghosts.find(key[:NAME_BYTES]))
        if (chunk := policy._chunks.get(key)) is None
        else chunk.uses
        for key in keys
    ]


@pytest.mark.parametrize("uses", get_args(Uses))
def test_of_a_prompt_that_memory_has_a_part_of(state: CacheState, uses: Uses) -> None:
    """One chunk is in memory, one was missing before, and one is new."""
    prompt = prompt_of(3)
    look_up(state, prompt.until(4))
    store(state, prompt.until(2))
    assert counts(state, prompt) == [1, 1, 0]
    look_up(state, prompt, uses)
    expected = {"all": [2, 2, 1], "known": [2, 2, 0], "none": [1, 1, 0]}
    assert counts(state, prompt) == expected[uses]


def test_a_lookup_that_begins_again_after_a_clear_is_one_use(state: CacheState) -> None:
    prompt, restarts = prompt_of(1000), 0
    look_up(state, prompt)
    store(state, prompt)
    for num_steps in range(1, 16):
        before, clears = counts(state, prompt), state.ram.num_clears
        running = Running(state.lookup_turns("reader", prompt.query()))
        if any(running.step(1000) for _ in range(num_steps)):
            break
        state.clear(OTHER.digest)
        assert state.ram.num_clears > clears
        restarts += 1
        while not running.step(1000):
            pass
        assert running.result.num_tokens == 2000
        state.release("reader", running.result.ticket)
        assert counts(state, prompt) == [uses + 1 for uses in before]
    assert restarts > 5
