"""What tests of lookups below RAM share: the keys of a hit, and a state with short ways to say what
happens.
"""

import numpy as np

from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.state import new_state
from kvhold.cache.transfer.commands import FetchCommand, PendingRead, ProbeCommand, WriteCommand
from kvhold.core.config import Config
from kvhold.core.keys import HASH_BYTES, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.tiers.stack import TierPlace
from tests.cache.laws import finish_chores
from tests.cache.scripted import all_of, arena_of, only
from tests.cache.test_state import SHARDS, SLOT

NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}


def needed_keys(prompt: Prompt, num_tokens: int, shards: int = SHARDS) -> set[bytes]:
    """All keys that a hit of `num_tokens` needs."""
    layout = prompt.namespace.layout
    whole, rest = divmod(num_tokens, layout.tokens_per_chunk)
    hashes = [prompt.hash_at(i) for i in range(whole)] + (
        [prompt.tails[-HASH_BYTES:]] if rest else []
    )
    return {
        make_key(prompt.namespace.digest, h, group, shard)
        for shard in range(shards)
        for group in range(len(layout.groups))
        for i, h in enumerate(hashes)
        if i in needed_chunks(layout, group, num_tokens)
    }


def all_keys(prompt: Prompt, shards: int = SHARDS) -> list[bytes]:
    layout = prompt.namespace.layout
    hashes = [prompt.hash_at(i) for i in range(prompt.num_whole)] + (
        [prompt.tails[-HASH_BYTES:]] if prompt.tail_lengths else []
    )
    return [
        make_key(prompt.namespace.digest, h, g, s)
        for h in hashes
        for g in range(len(layout.groups))
        for s in range(shards)
    ]


def longest(prompt: Prompt, present: set[bytes], shards: int = SHARDS) -> int:
    """By the definition: try every length."""
    for num_tokens in range(len(prompt.tokens), 0, -1):
        ends_with_tail = num_tokens % prompt.namespace.layout.tokens_per_chunk
        if (not ends_with_tail or num_tokens == len(prompt.tokens)) and needed_keys(
            prompt, num_tokens, shards
        ) <= present:
            return num_tokens
    return 0


class Bench:
    """A state with one namespace of one full group, and short ways to say what happens."""

    def __init__(self, *, num_slots: int = 60, write_behind_bytes: int = 0) -> None:
        self.layout = Layout(
            (Group(layers=1, planes=1, heads=1, head_dim=1500, dtype="int8"),), tokens_per_chunk=2
        )
        self.space = Namespace("m", self.layout)
        arena = arena_of(num_slots * SLOT)
        self.state = new_state(
            Config(tiers=("disk:///x", "redis://y"), write_behind_bytes=write_behind_bytes), arena
        )
        self.state.register(self.layout)

    def prompt(self, num_tokens: int, seed: int = 0) -> Prompt:
        return self.space.prompt(np.arange(num_tokens, dtype=np.int32) + 1000 * seed)

    def arriving(
        self, prompt: Prompt, owner: str = "a", tier: int = 0
    ) -> tuple[int, list[PendingRead]]:
        """A lookup whose chunks are all on their way: its number, and the arrivals."""
        found = self.state.lookup(owner, prompt.query())
        probe = only(self.state.take_commands(), ProbeCommand)
        self.state.probed(probe.search, {key: TierPlace(tier, 100) for key in probe.keys})
        commands = all_of(self.state.take_commands(), FetchCommand)
        return found.ticket, [
            pending_read for command in commands for pending_read in command.pending_reads
        ]

    def finished(self) -> None:
        """Nothing is held, and a clear leaves nothing."""
        for command in self.state.take_commands():
            if isinstance(command, WriteCommand):
                self.state.written(command.number)
        assert self.state.holdings() == NOTHING
        assert self.state.status()["pinned_chunks"] == self.state.status()["arriving_chunks"] == 0
        self.state.clear(None)
        finish_chores(self.state)
        assert self.state.ram.used_bytes == 0
