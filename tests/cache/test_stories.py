"""Every lookup has a story, planned or not, in bounded memory."""

import itertools

import pytest
from msgspec.structs import replace

from kvhold.cache.compute_speeds import ComputeSpeeds
from kvhold.cache.local import LocalCache
from kvhold.cache.planner import _REMEMBERED, _SAMPLE_S, Planner
from kvhold.core.config import load_config
from kvhold.core.keys import Namespace
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeCost, Decision, RequestInfo
from kvhold.testing.cache import PLAIN, a_prompt, store

ACME = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),))
GLOBEX = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),))


def told(request: str, at_s: float = 0.0, tenant: str = "") -> Decision:
    return Decision(request, at_s, 100, 0, {}, {}, 0, "", hit_tokens=0, tenant=tenant)


def planner() -> Planner:
    return Planner(Metrics(), list, 0, lambda: 0.0)


def names(planner: Planner, request: str = "", tenant: str = "") -> list[str]:
    return [one.request for one in planner.explain(request, tenant)]


def test_earlier_stories_are_kept_in_samples() -> None:
    many = planner()
    for number in range(100_000):
        many.finished(number, told(f"r{number}.", number / 100))
    assert (len(many._decisions), len(many._earlier)) == (_REMEMBERED, 100)
    times = [one.at_s for one in many._earlier]
    assert all(later - one >= _SAMPLE_S for one, later in itertools.pairwise(times))
    assert names(many)[0] == "r99999."
    assert names(many, "r0.") == ["r0."] and names(many, "r1.") == []
    for number in range(100_000, 200_000):
        many.finished(number, told("later", number * _SAMPLE_S))
    assert len(many._earlier) == _REMEMBERED


def test_a_tenant_is_shown_its_own_however_many_others_there_are() -> None:
    mixed = planner()
    mixed.finished(1, told("mine", tenant="acme"))
    for number in range(2, 100):
        mixed.finished(number, told("mine", tenant="globex"))
    assert names(mixed, "", "acme") == names(mixed, "mine", "acme") == ["mine"]
    assert names(mixed, "", "initech") == []


def test_a_planned_lookup_keeps_its_plan_and_gets_its_caller() -> None:
    with LocalCache(load_config({"ram_bytes": "16MiB"}, environ={})) as cache:
        for space in (ACME, GLOBEX):
            cache.register(space)
        store(cache, a_prompt(ACME, 64))
        cost = ComputeCost("planned", 64, step_s=1e-3, token_s=1e-3)
        query = a_prompt(ACME, 64).query()
        cache.lookup(query, cost=cost, info=RequestInfo("planned", "chat")).close()
        cache.lookup(a_prompt(GLOBEX, 64).query(), info=RequestInfo("plain", "", 70, 16)).close()
        cache.lookup(query, uses="none", info=RequestInfo("operator")).close()
        plain, planned = cache.explain()
        assert (planned.request, planned.session, planned.tenant) == ("planned", "chat", "acme")
        assert planned.alternatives and planned.hit_tokens == 64 and planned.why
        assert (plain.request, plain.tenant, plain.num_tokens) == ("plain", "globex", 70)
        assert (plain.hit_tokens, plain.reason, plain.computed_tokens) == (0, "never_stored", 16)
        cache.report_timing("plain", load_s=None, compute_s=0.54)
        speeds = cache._state.planner.compute_speeds
        assert speeds.token_s(GLOBEX.digest.hex()) is None, "54 tokens are too few"
        story = replace(plain, num_tokens=16 + 100)
        cache._state.planner._decisions.clear()
        cache._state.planner.finished(1, story)
        cache.report_timing("plain", load_s=None, compute_s=1.0)
        assert speeds.token_s(GLOBEX.digest.hex()) == pytest.approx(0.01)
        assert speeds.token_s(ACME.digest.hex()) is None


def test_a_compute_speed_follows_a_change_and_takes_little_memory() -> None:
    speeds = ComputeSpeeds()
    for _ in range(1000):
        speeds.measured("a", 10_000, 10.0)
    assert speeds.token_s("a") == pytest.approx(1e-3)
    for _ in range(1000):
        speeds.measured("a", 10_000, 20.0)
    assert speeds.token_s("a") == pytest.approx(2e-3, rel=0.01)
    for number in range(1000):
        speeds.measured(f"n{number}", 100, 1.0)
    assert len(speeds._sums) == 256 and speeds.token_s("a") is None
