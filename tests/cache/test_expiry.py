"""What is kept for a time only may expire between any two looks of one call: a hit has all it
needs, and its memory is nobody else's.
"""

import math
from collections.abc import Collection

import msgspec
import numpy as np
import pytest

from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.reservations import Grant
from kvhold.cache.state import CacheState
from kvhold.cache.transfer.commands import ClearCommand, FetchCommand, ProbeCommand, WriteCommand
from kvhold.core.api import Found
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import HASH_BYTES, Namespace, Prompt
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeCost
from kvhold.core.store_options import StoreOptions
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import RamTier
from kvhold.tiers.stack import TierPlace
from tests.cache.scripted import arena_of
from tests.cache.test_state import GROUPS, SLOT, SLOTS

LAYOUTS = {
    "full": Layout(GROUPS[:1], tokens_per_chunk=2),
    "hybrid": Layout(GROUPS, tokens_per_chunk=2),
}
COSTS = {
    "unplanned": None,
    "declined": ComputeCost("declined", 9, 0, 64, 1e-9, 1e-9, 0.0, 0.0, 0.0),
    "planned": ComputeCost("planned", 9, 0, 64, 0.1, 1.0, 0.1, 0.01, 1e-9),
}
MOST_LOOKS = 120  # in any of these calls


class Clock:
    """Unix time, in which everything expires after so many looks."""

    def __init__(self) -> None:
        self.looks = math.inf

    def __call__(self) -> float:
        self.looks -= 1
        return 0.0 if self.looks >= 0 else 100.0


class Bench:
    def __init__(self, layout: Layout, *, num_tiers: int) -> None:
        self.clock, self.layout, self.space = Clock(), layout, Namespace("m", layout)
        metrics = Metrics()
        ram = RamTier(arena_of(SLOTS * SLOT), make_policy("lru"), metrics, clock=self.clock)
        self.state = CacheState(ram, metrics, num_tiers=num_tiers, write_behind_bytes=1 << 40)
        self.state.tier_names = ["below"][:num_tiers]
        self.state.register(layout)

    def prompt(self, seed: int) -> Prompt:
        return self.space.prompt(np.arange(7, dtype=np.int32) + 100 * seed)

    def reserve(self, seed: int, first: int, store_options: StoreOptions) -> Grant:
        """From a chunk on, to the tail."""
        return self.state.reserve(
            "w", self.layout, self.prompt(seed).chunks(first), 0, store_options=store_options
        )

    def store(self, first: int = 0) -> None:
        self.state.commit(
            "w", self.reserve(0, first, StoreOptions(ttl_s=50)).reservation, range(4 - first)
        )
        self.commands()

    def commands(self, below: Collection[bytes] = ()) -> None:
        """All that is wanted is done; tiers have the keys in `below`."""
        while commands := self.state.take_commands():
            for command in commands:
                match command:
                    case WriteCommand():
                        self.state.written(command.number)
                    case ProbeCommand():
                        self.state.probed(
                            command.search,
                            {key: TierPlace(0, 1) for key in command.keys if key in below},
                        )
                    case ClearCommand():
                        self.state.cleared(command.prefix)
                    case _:
                        assert isinstance(command, FetchCommand)
                        for pending_read in command.pending_reads:
                            self.state.fetched(pending_read.entry, True)

    def check(self, found: Found) -> None:
        """What the hit needs is there, and what is reserved now lies elsewhere."""
        taken = set()
        if found.ticket:
            leased = self.state.claim("a", found.ticket, 0, 0)
            assert leased is not None
            for group, offsets in enumerate(leased.offsets):
                needed = [
                    offsets[chunk] for chunk in needed_chunks(self.layout, group, found.num_tokens)
                ]
                assert ABSENT not in needed
                taken |= set(needed)
        self.clock.looks = 0
        granted = self.reserve(1, 0, StoreOptions())
        assert not taken & {offset for offsets in granted.offsets for offset in offsets}
        self.state.release_owner("w")
        self.state.release_owner("a")
        self.commands()
        assert self.state.status()["pinned_chunks"] == self.state.status()["arriving_chunks"] == 0
        self.state.clear(None)
        self.commands()
        assert self.state.ram.used_bytes == 0


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("num_tiers", [0, 1])
def test_a_chunk_that_expires_during_a_lookup_is_not_in_the_hit_or_stays(
    layout: Layout, num_tiers: int, cost: ComputeCost | None
) -> None:
    hits = set()
    for looks in range(MOST_LOOKS):
        bench = Bench(layout, num_tiers=num_tiers)
        bench.store()
        bench.clock.looks = looks
        found = bench.state.lookup("a", bench.prompt(0).query(), cost)
        while found.arriving:
            bench.commands()
            found = bench.state.refresh(found.ticket)
        hits.add(found.num_tokens)
        bench.check(found)
    assert bench.clock.looks < 0 or looks == MOST_LOOKS - 1
    assert hits >= ({0} if cost is COSTS["declined"] else {0, 7})


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("prefetched", [False, True])
def test_a_chunk_that_expires_behind_a_gap_filled_by_a_tier_ends_the_hit(
    layout: Layout, prefetched: bool, cost: ComputeCost | None
) -> None:
    for looks in range(MOST_LOOKS):
        bench = Bench(layout, num_tiers=1)
        bench.store(first=1)
        below = {bench.prompt(0).chunk_key(0, group, 0) for group in range(len(layout.groups))}
        bench.clock.looks = looks
        if prefetched:
            bench.state.prefetch("a", bench.prompt(0).query())
            bench.commands(below)
        found = bench.state.lookup("a", bench.prompt(0).query(), cost)
        while found.arriving:
            bench.commands(below)
            found = bench.state.refresh(found.ticket)
        bench.check(found)


def test_a_chunk_named_twice_in_a_query_is_unpinned_as_often_as_it_was_pinned() -> None:
    bench = Bench(LAYOUTS["full"], num_tiers=1)
    bench.store()
    query = bench.prompt(0).query()
    # and one that is nowhere, so that tiers are asked
    hashes = query.hashes[:HASH_BYTES] * 2 + bytes(HASH_BYTES)
    twice = msgspec.structs.replace(query, hashes=hashes, tail_hashes=b"", tail_lengths=())
    reader = bench.state.lookup("b", bench.prompt(0).query())
    found = bench.state.lookup("a", twice)
    while found.arriving:
        bench.commands()
        found = bench.state.refresh(found.ticket)
    bench.state.release("a", found.ticket)
    assert bench.state.status()["pinned_chunks"] == 4, "those of the reader"
    bench.state.release("b", reader.ticket)
    assert bench.state.status()["pinned_chunks"] == 0
