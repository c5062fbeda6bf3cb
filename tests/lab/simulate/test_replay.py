"""The simulation agrees with a real cache that serves the same requests."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="no numba in this environment")

from kvhold.tiers.policies import POLICIES as SHIPPED
from kvhold_lab.simulate.numba_eviction import POLICIES as MODELS
from kvhold_lab.simulate.numba_eviction import replay
from kvhold_lab.simulate.policy_replay import replay_class
from kvhold_lab.simulate.replay import POLICIES, as_lower, serve
from kvhold_lab.simulate.trace import parse_trace
from tests.lab.simulate.traces import make_trace

CUT = parse_trace(make_trace(seed=3)).cut(512)
RAM = 300  # of some 1,400 different chunks


MODELLED = [name for name in POLICIES if name in MODELS]


def test_all_policies_that_ship_are_replayed() -> None:
    assert set(POLICIES) == set(SHIPPED) - {"learned"}  # it depends on the time, too


@pytest.mark.parametrize("policy", POLICIES)
def test_the_class_finds_exactly_what_a_real_cache_does(policy: str) -> None:
    replayed = replay_class(CUT.chunks, CUT.starts, CUT.parents, make=SHIPPED[policy], capacity=RAM)
    assert replayed.evicted > RAM
    assert np.array_equal(replayed.found, serve(CUT, policy=policy, ram_chunks=RAM))


@pytest.mark.parametrize("lower", [0, 2 * RAM])
@pytest.mark.parametrize("policy", MODELLED)
def test_the_class_and_its_model_find_and_evict_exactly_the_same(policy: str, lower: int) -> None:
    sizes = {"capacity": RAM, "lower_capacity": lower, "num_victims": CUT.chunks.size}
    model = replay(CUT.chunks, CUT.starts, CUT.parents, policy=policy, **sizes)
    own = replay_class(
        CUT.chunks, CUT.starts, CUT.parents, make=SHIPPED[policy], times_s=None, **sizes
    )
    assert np.array_equal(model.found, own.found)
    assert np.array_equal(model.victims, own.victims) and model.victims.size > RAM
    assert model.evicted_below == own.evicted_below and bool(lower) == bool(own.evicted_below)


@pytest.mark.parametrize("policy", MODELLED)
def test_memory_alone_finds_exactly_the_same(policy: str) -> None:
    simulated = replay(CUT.chunks, CUT.starts, CUT.parents, policy=policy, capacity=RAM)
    assert simulated.evicted > RAM, "or nothing was tried"
    assert 0 < simulated.found.sum() < CUT.chunks.size
    assert np.array_equal(simulated.found, serve(CUT, policy=policy, ram_chunks=RAM))


@pytest.mark.parametrize("policy", MODELLED)
def test_with_a_tier_below_hit_rates_are_within_two_points(policy: str) -> None:
    """Not exactly: chunks of one request are written there one after another, and a policy may
    choose one of them as a victim.
    """
    lower = as_lower(RAM)
    simulated = replay(
        CUT.chunks, CUT.starts, CUT.parents, policy=policy, capacity=RAM, lower_capacity=lower
    )
    served = serve(CUT, policy=policy, ram_chunks=RAM, lower_chunks=lower)
    assert simulated.evicted_below > 0 and served[:, 1].sum() > 0
    assert np.abs(simulated.found.sum(axis=0) - served.sum(axis=0)).max() / CUT.chunks.size < 0.02
