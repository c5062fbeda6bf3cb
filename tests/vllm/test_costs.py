"""What an engine's steps and loads cost is found from when they were planned and when they were
over.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhold.core import estimates
from kvhold.core.estimates import fit
from kvhold.integrations.vllm.costs import Costs, Took

pytest.importorskip("vllm", reason="no vLLM in this environment")
pytestmark = pytest.mark.vllm

STEP_S, TOKEN_S, PAIR_S = 0.004, 3e-4, 2e-8


class Engine:
    """Steps of known costs, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 50.0
        self.costs = Costs(2048, clock=lambda: self.now)

    def plan(
        self,
        new: Sequence[tuple[str, int, int]] = (),
        cached: Sequence[tuple[str, int, int]] = (),
        drafts: Sequence[str] = (),
    ) -> float:
        """new, cached: (request, computed tokens, tokens); drafts: those whose tokens are guesses,
        but for the first
        """
        counts = {name: count for name, _, count in (*new, *cached)}
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=computed)
                for name, computed, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in cached],
                num_computed_tokens=[computed for _, computed, _ in cached],
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={name: [0] * (counts[name] - 1) for name in drafts},
        )
        self.costs.planned(output)
        return STEP_S + sum(
            TOKEN_S * count + PAIR_S * count * (computed + count / 2)
            for _, computed, count in (*new, *cached)
        )

    def step(
        self, new: Sequence[tuple[str, int, int]] = (), cached: Sequence[tuple[str, int, int]] = ()
    ) -> list[Took]:
        self.now += self.plan(new, cached)
        return self.costs.over()


def test_nothing_is_known_before_the_first_step() -> None:
    cost = Engine().costs.cost("a", 100, 10)
    assert (
        cost.request,
        cost.num_tokens,
        cost.computed_tokens,
        cost.step_tokens,
        cost.is_known,
    ) == ("a", 100, 10, 2048, False)


def test_what_a_prompt_takes_to_compute_is_what_its_steps_took() -> None:
    engine = Engine()
    assert engine.costs.compute_s(1000, 0) == pytest.approx(2.0), (
        "as on a slow engine, as long as nothing is known"
    )
    for number in range(20):
        engine.step([(f"r{number}", 0, 100 + 50 * number)])
    expected = STEP_S + 1000 * TOKEN_S + PAIR_S * 1000 * 500
    assert engine.costs.compute_s(1000, 0) == pytest.approx(expected, rel=0.1)
    assert engine.costs.compute_s(1000, 900) < engine.costs.compute_s(1000, 0) / 5


def test_a_lookup_does_not_wait_for_what_can_be_fitted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, fitted = Engine(), []

    def counted(*given: Any) -> Any:
        fitted.append(1)
        return fit(*given)

    monkeypatch.setattr(estimates, "fit", counted)
    for number in range(20):
        engine.step([(f"r{number}", 0, 100 + 50 * number)])
    before = len(fitted)
    engine.costs.prepare()
    assert len(fitted) == before + 1
    assert engine.costs.cost("a", 100, 0).is_known
    assert len(fitted) == before + 1


def test_costs_are_those_of_steps_that_compute_prompts() -> None:
    engine, rng = Engine(), np.random.default_rng(0)
    engine.now += 100  # compiling, perhaps
    for number in range(30):
        others = [("other", int(rng.integers(10, 4000)), 1)]
        engine.step(
            [(f"r{number}", int(rng.integers(0, 6000)), int(rng.integers(1, 2048)))], others
        )
        for _ in range(3):
            engine.step(cached=[("other", 5, 1), ("another", 5, 1)])
            engine.now += 7.0  # what is no step's
        for _ in range(20):
            engine.plan(cached=[("other", 9, 4)], drafts=["other"])
            engine.now += 3.0  # generating says nothing of prompts
            engine.costs.over()
    cost = engine.costs.cost("a", 8192, 4096)
    found = cost.step_s + 2048 * cost.token_s + 2048 * 5000 * cost.pair_s
    assert found == pytest.approx(STEP_S + 2048 * TOKEN_S + 2048 * 5000 * PAIR_S, rel=0.02)


def test_of_steps_under_way_beside_each_other_each_lasts_from_the_end_of_the_one_before() -> None:
    engine = Engine()
    for number in range(20):
        seconds = [
            engine.plan([(f"{number}.{i}", 0, tokens)]) for i, tokens in enumerate((100, 500, 2000))
        ]
        for one in seconds:
            engine.now += one
            engine.costs.over()
    cost = engine.costs.cost("a", 1000, 0)
    assert cost.step_s + 1000 * cost.token_s + 5e5 * cost.pair_s == pytest.approx(
        STEP_S + 1000 * TOKEN_S + 5e5 * PAIR_S, rel=0.02
    )


def test_a_load_lasts_until_its_request_runs_and_the_end_is_told_once() -> None:
    engine = Engine()
    for number, nbytes in enumerate((1 << 20, 4 << 20, 16 << 20, 64 << 20)):
        name = f"r{number}"
        engine.costs.follow(name, 1000)
        engine.costs.load_begins(name, nbytes)
        engine.step(cached=[("other", 10, 1)])
        engine.now += 0.01 + nbytes * 1e-9 - STEP_S - TOKEN_S - PAIR_S * 10.5
        assert engine.step([(name, 600, 300)]) == []
        [took] = engine.step(cached=[(name, 900, 100), ("other", 11, 1)])
        computed_s = 2 * STEP_S + 401 * TOKEN_S + PAIR_S * (300 * 750 + 100 * 950 + 11.5)
        assert isinstance(took, Took)
        assert took.request_id == name
        assert took.load_s == pytest.approx(0.01 + nbytes * 1e-9)
        assert took.compute_s == pytest.approx(computed_s)
        assert engine.step(cached=[(name, 1000, 1), ("other", 12, 1)]) == []
    cost = engine.costs.cost("a", 1000, 0)
    assert cost.load_s + (8 << 20) * cost.load_byte_s == pytest.approx(
        0.01 + (8 << 20) * 1e-9, rel=0.05
    )


def test_a_request_that_is_no_more_is_not_told_of_and_nobody_waits_for_steps_that_never_end() -> (
    None
):
    engine = Engine()
    engine.costs.follow("a", 10)
    engine.costs.forget("a")
    assert engine.step([("a", 0, 10)]) == []
    for _ in range(1000):
        engine.plan([("b", 0, 10)])
    assert len(engine.costs._steps) <= 64
    assert Engine().costs.over() == []
