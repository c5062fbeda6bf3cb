"""What the simulation finds if a node breaks its promise about hand-overs."""

from typing import Any
from unittest.mock import Mock

import pytest

from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.core.reasons import EVICTED
from kvhold_lab.simulation.handovers import HandoverPromises
from kvhold_lab.simulation.world import World
from tests.cache.computing import PLAIN, SPACE, TEXT, Cache, cache_of

PROMPT = SPACE.prompt(TEXT[:20])
KEEP_S = 3.0
COST = ComputeCost("request", 20)


class Promised:
    """A prompt that a client hands over, and the promises about it."""

    def __init__(self) -> None:
        self.world = World(1)
        self.cache: Cache = cache_of(PLAIN)
        self.state = self.cache.state
        self.state.planner.clock = lambda: self.world.now
        self.promises = HandoverPromises(self.world)
        self.promises.watch(self.state)
        self.owner: Any = Mock(_verbs={"there": 1})
        self.cache.lookup(self.owner, PROMPT, ComputeIntent(COST, waits=False, keep_s=KEEP_S))
        self.cache.store(self.owner, PROMPT)

    def evict_one(self) -> None:
        entry = self.state.ram.find(PROMPT.chunk_key(2))
        assert entry is not None
        self.state.ram.remove(entry, why=EVICTED)

    def findings(self) -> list[str]:
        self.promises.check(self.state)
        return self.world.findings


@pytest.fixture
def promised() -> Promised:
    return Promised()


def test_a_promise_that_is_kept_is_no_finding(promised: Promised) -> None:
    assert promised.state.status()["handover_chunks"] == 5
    assert promised.findings() == []
    promised.world.now = KEEP_S
    assert promised.findings() == []
    assert promised.state.status()["handover_chunks"] == 0
    promised.evict_one()
    assert promised.findings() == []


def test_an_eviction_before_the_deadline_is_found(promised: Promised) -> None:
    promised.world.now = KEEP_S - 0.1
    promised.evict_one()
    [finding] = promised.findings()
    assert "was evicted 2.900 s after the last chunk" in finding


@pytest.mark.parametrize("how", ["read", "cleared", "left"])
def test_after_another_end_an_eviction_is_none(promised: Promised, how: str) -> None:
    if how == "read":
        reads = ComputeIntent(COST, waits=False, announces=False, handover=HandoverWait(1.0))
        found = promised.cache.lookup("reader", PROMPT, reads)
        promised.state.release("reader", found.ticket)
    elif how == "cleared":
        promised.state.clear(SPACE.digest)
        promised.cache.store("another", PROMPT)
    else:
        promised.state.release_owner(promised.owner)
    promised.evict_one()
    assert promised.findings() == []


def test_chunks_that_stay_pinned_are_found(promised: Promised) -> None:
    pins: Any = promised.state._handovers
    pins.expire = lambda: None
    promised.world.now = KEEP_S
    assert "no engine hands it over any more" in promised.findings()[0]


def test_chunks_of_a_client_that_has_gone_are_found(promised: Promised) -> None:
    promised.owner._verbs.clear()
    assert "no engine hands it over any more" in promised.findings()[0]
