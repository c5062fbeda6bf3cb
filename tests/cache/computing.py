"""A state machine under a clock that the test moves, and engines that announce what they do."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from kvhold.cache.state import CacheState, new_state
from kvhold.core.api import Found
from kvhold.core.config import Config
from kvhold.core.hints_config import HintsConfig
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.memory.slab import size_class
from tests.cache.laws import assert_counters_reconcile, finish_chores
from tests.cache.scripted import arena_of

FULL = Group(layers=1, planes=1, heads=1, head_dim=1024, dtype="int8")
WINDOW = Group(
    layers=1, planes=1, heads=1, head_dim=512, dtype="int8", attention="sliding", window=4
)
STATE = Group(layers=1, planes=1, heads=1, head_dim=64, dtype="int8", attention="state")
PLAIN = Layout(groups=(FULL,), tokens_per_chunk=4, tail_tokens=1)
HYBRID = Layout(groups=(FULL, WINDOW), tokens_per_chunk=4)
STATES = Layout(groups=(STATE,), tokens_per_chunk=4)
SPACE = Namespace("model", PLAIN)
TEXT = list(range(42))
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}
TOKEN_S = 0.1  # 4.2 s for the text
LATE = 1.5
STEP = 8  # tokens a pass, where passes matter


def intent_of(
    num_tokens: int = len(TEXT),
    *,
    token_s: float = TOKEN_S,
    computed: int = 0,
    step: int = 1 << 20,
    waits: bool = True,
    announces: bool = True,
    load_byte_s: float = 0.0,
    handover: HandoverWait | None = None,
    keep_s: float = 0.0,
    announces_tail: bool = False,
) -> ComputeIntent:
    cost = ComputeCost(
        "request", num_tokens, computed, step, token_s=token_s, load_byte_s=load_byte_s
    )
    return ComputeIntent(cost, waits, announces, handover, keep_s, announces_tail)


@dataclass
class Cache:
    """A state machine, its clock, and engines that are its owners."""

    state: CacheState
    now_s: float = 1000.0
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def lookup(
        self, owner: str, prompt: Prompt, intent: ComputeIntent | None = None, **changes: object
    ) -> Found:
        return self.state.lookup(
            owner,
            prompt.query(),
            intent=intent if intent is not None else intent_of(prompt.num_tokens),
            **changes,  # type: ignore[arg-type]
        )

    def reserve(self, owner: str, prompt: Prompt, first: int = 0, shard: int = 0) -> int:
        layout = prompt.namespace.layout
        return self.state.reserve(owner, layout, prompt.chunks(first), shard).reservation

    def store(
        self, owner: str, prompt: Prompt, *, first: int = 0, last: int | None = None, shard: int = 0
    ) -> None:
        """All of a prompt, or its whole chunks from `first` to before `last`."""
        names = prompt.chunks(first, last=last, tail=last is None)
        granted = self.state.reserve(owner, prompt.namespace.layout, names, shard)
        chunks = {n for row in granted.offsets for n, offset in enumerate(row) if offset != ABSENT}
        self.state.commit(owner, granted.reservation, sorted(chunks))

    def asked_again(self, found: Found, *, settle: bool = False) -> Found:
        return self.state.refresh(found.ticket, settle=settle)

    def waits(self) -> dict[str, float]:
        return {
            sample.labels[0]: sample.value
            for sample in self.state.metrics.samples()
            if sample.metric.name == "kvhold_waited_for_computing"
        }


def cache_of(
    *layouts: Layout,
    slots: int = 200,
    tiers: tuple[str, ...] = (),
    quota_slots: int = 0,
    hints_slots: int = 0,
) -> Cache:
    slot_bytes = size_class(FULL.head_dim * 4)
    config = Config(
        tiers=tiers,
        event_buffer=1000,
        namespace_quota_bytes=quota_slots * slot_bytes,
        hints=HintsConfig(max_bytes=hints_slots * slot_bytes),
    )
    state = new_state(config, arena_of(slots * slot_bytes))
    cache = Cache(state)
    state.planner.clock = lambda: cache.now_s
    for layout in layouts:
        state.register(layout)
    return cache


@pytest.fixture
def cache() -> Iterator[Cache]:
    """In the end all owners leave, and nothing is held or announced."""
    cache = cache_of(PLAIN, HYBRID, STATES)
    yield cache
    for owner in ("a", "b", "c"):
        cache.state.release_owner(owner)
    finish_chores(cache.state)
    assert cache.state.holdings() == NOTHING
    status = cache.state.status()
    assert status["announced_chunks"] == status["pinned_chunks"] == 0
    assert_counters_reconcile(cache.state)
