"""A cache whose long commands are done in steps, for tests."""

from itertools import count

import numpy as np

from kvhold.cache.state import CacheState, new_state
from kvhold.core.config import Config
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from tests.cache.scripted import arena_of

FULL = Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8")
WINDOW = Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8", attention="sliding", window=5)
LAYOUT = Layout((FULL, WINDOW), tokens_per_chunk=2)
SPACES = [Namespace(f"model {number}", LAYOUT, shards=2) for number in range(2)]
_numbers = count()


def new_cache() -> CacheState:
    """One that frees nothing until `step` is called with some units."""
    state = new_state(Config(event_buffer=100_000), arena_of(64 << 20))
    state.register(LAYOUT)
    state.turn_units = 0
    return state


def prompt_of(num_chunks: int, space: Namespace = SPACES[0]) -> Prompt:
    return space.prompt(np.arange(2 * num_chunks, dtype=np.int32) + 1_000_000 * next(_numbers))


def store(state: CacheState, prompt: Prompt) -> None:
    names = prompt.chunks()
    for shard in range(2):
        granted = state.reserve("writer", LAYOUT, names, shard)
        state.commit("writer", granted.reservation, range(len(names)))


def hit(state: CacheState, prompt: Prompt) -> int:
    found = state.lookup("reader", prompt.query())
    state.release("reader", found.ticket)
    return found.num_tokens


def finish_chores(state: CacheState) -> None:
    while state.step(1000):
        pass
