"""The simulation agrees with a real cache that serves the same requests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="no numba in this environment")

from kvhold.core.errors import ConfigError
from kvhold.tiers.policies import POLICIES, LearnedPolicy, LruPolicy
from kvhold_lab.simulate import policy_replay
from kvhold_lab.simulate import replay as real_replay
from kvhold_lab.simulate.numba_eviction import POLICIES as MODELS
from kvhold_lab.simulate.numba_eviction import replay
from kvhold_lab.simulate.policy_replay import learned_policy, replay_class
from kvhold_lab.simulate.replay import serve
from kvhold_lab.simulate.simulation import replay_policy
from kvhold_lab.simulate.trace import parse_trace
from tests.lab.simulate.traces import make_trace
from tests.tiers.learnt import samples

TRACE = parse_trace(make_trace(seed=3))
CUT = TRACE.cut(512)
RAM = 300  # of some 1,400 different chunks


MODELLED = [name for name in POLICIES if name in MODELS]


@pytest.mark.parametrize("lower", [0, RAM])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_cache_finds_exactly_the_same(policy: str, lower: int) -> None:
    """Also with a real disk below. `learned` has the trace's clock in both."""
    simulated = replay_policy(CUT, policy, capacity=RAM, lower_capacity=lower)
    assert simulated.evicted > RAM, "or nothing was tried"
    assert bool(lower) == (simulated.evicted_below > 0)
    assert 0 < simulated.found.sum() < CUT.chunks.size
    served = serve(CUT, policy=policy, ram_chunks=RAM, lower_chunks=lower)
    assert np.array_equal(simulated.found, served)


@pytest.mark.parametrize("lower", [0, 4 * RAM])
def test_a_real_cache_takes_exactly_the_same_samples(
    lower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long prompts, whose chunks a lookup records in parts."""
    cut, made = TRACE.cut(128), list[LearnedPolicy]()
    for module in (policy_replay, real_replay):

        def noted(arrivals: policy_replay.Arrivals) -> LearnedPolicy:
            made.append(learned_policy(arrivals))
            return made[-1]

        monkeypatch.setattr(module, "learned_policy", noted)
    assert np.diff(cut.starts).max() > 64
    simulated = replay_policy(cut, "learned", capacity=4 * RAM, lower_capacity=lower)
    assert simulated.evicted > RAM
    assert bool(lower) == (simulated.promoted > RAM)
    served = serve(cut, policy="learned", ram_chunks=4 * RAM, lower_chunks=lower)
    assert np.array_equal(simulated.found, served)
    first, second = made
    assert samples(first) == samples(second)
    assert np.array_equal(first.times._ended, second.times._ended)


@pytest.mark.parametrize("lower", [0, RAM, 2 * RAM])
@pytest.mark.parametrize("policy", MODELLED)
def test_the_class_and_its_model_find_and_evict_exactly_the_same(policy: str, lower: int) -> None:
    sizes: dict[str, Any] = {
        "capacity": RAM,
        "lower_capacity": lower,
        "num_victims": CUT.chunks.size,
    }
    model = replay(CUT.chunks, CUT.starts, CUT.parents, policy=policy, **sizes)
    own = replay_class(
        CUT.chunks, CUT.starts, CUT.parents, make=POLICIES[policy], times_s=None, **sizes
    )
    assert np.array_equal(model.found, own.found)
    assert np.array_equal(model.victims, own.victims) and model.victims.size > RAM
    assert model.written == own.written and model.stored == own.stored
    assert model.evicted_below == own.evicted_below and bool(lower) == bool(own.evicted_below)


def test_below_another_policy_that_learns_is_the_least_recently_used() -> None:
    """It needs no lookups."""

    class Learning(LruPolicy):
        learns = True

    sizes: dict[str, Any] = {"capacity": RAM, "lower_capacity": RAM}
    learning, least_recent = (
        replay_class(CUT.chunks, CUT.starts, CUT.parents, make=make, **sizes)
        for make in (Learning, LruPolicy)
    )
    assert np.array_equal(learning.found, least_recent.found)


def test_below_learned_a_disk_s_index_is_told_of_lookups() -> None:
    made: list[LearnedPolicy] = []

    def make() -> LearnedPolicy:
        made.append(LearnedPolicy(lambda: 0.0))
        return made[-1]

    replayed = replay_class(
        CUT.chunks, CUT.starts, CUT.parents, make=make, capacity=RAM, lower_capacity=RAM
    )
    assert len(made) == 1 and replayed.evicted_below > 0
    assert len(made[0].times._places) == 2


@pytest.mark.parametrize("lower", [0, RAM])
def test_learned_needs_the_times_of_the_requests(lower: int) -> None:
    untimed = replace(CUT, times_s=None)
    with pytest.raises(ConfigError, match="timestamp"):
        replay_policy(untimed, "learned", capacity=RAM, lower_capacity=lower)
    with pytest.raises(ConfigError, match="timestamp"):
        serve(untimed, policy="learned", ram_chunks=RAM, lower_chunks=lower)
