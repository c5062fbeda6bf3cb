"""The rounds of `kvhold bench compare` with engines that are made up, and what becomes of their
times. The real thing is `test_real.py`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from kvhold_lab.bench.compare import command as command_module
from kvhold_lab.bench.compare import visits as visits_module
from kvhold_lab.bench.compare.goals import visiting_goals as goals
from kvhold_lab.bench.compare.names import (
    AGAIN,
    ALONE,
    KVHOLD,
    LEFT_AGAIN,
    LEFT_ALONE,
    LIMIT,
    LMCACHE,
    OFFLOADING,
    PLAIN,
    RECOMPUTE,
    key,
)
from kvhold_lab.bench.compare.report import render
from kvhold_lab.bench.compare.rows import SystemRow, failed, make_rows
from kvhold_lab.bench.compare.run import CompareMeasurement, differing, measure
from kvhold_lab.bench.compare.systems import RunningSystem, Sizes
from kvhold_lab.bench.compare.visits import (
    REUSE_PERCENT,
    VISITING,
    WORKLOADS,
    VisitTexts,
    visiting,
)
from kvhold_lab.bench.engines import System
from kvhold_lab.bench.ratios import Cell
from kvhold_lab.engines.engine import Engine
from kvhold_lab.engines.messages import Generated, GeneratedMany
from kvhold_lab.engines.models import SIZES, ModelInfo
from kvhold_lab.engines.process import EngineFailed

NUM_TOKENS = 40
WORKLOAD = WORKLOADS["2x"]
TIERS = ("ram", "disk")
MISSING = LIMIT  # one that does not start
OUTPUT_TOKENS = visiting([WORKLOAD], rounds=1, tiers=TIERS).output_tokens


@dataclass
class FakeEngine:
    """Answers with the prompt's last tokens, and notes what it was asked. fails_at: number of the
    request that it fails at.
    """

    answer: int = 0
    fails_at: int = -1
    asked: list[list[int]] = field(default_factory=list)

    def generate(self, prompt: list[int], *, max_tokens: int, rules: Any) -> Generated:
        self._ask([prompt])
        return Generated(
            ttft_s=0.5,
            total_s=1.0,
            token_ids=[self.answer + prompt[-1]] * max_tokens,
            num_cached_tokens=7,
        )

    def generate_many(
        self, prompts: list[list[int]], *, max_tokens: int, rules: Any
    ) -> GeneratedMany:
        self._ask(prompts)
        return GeneratedMany(
            token_ids=[[self.answer + prompt[-1]] * max_tokens for prompt in prompts],
            num_cached_tokens=[3, 9],
        )

    def reset_prefix_cache(self) -> bool:
        return True

    def _ask(self, prompts: Sequence[list[int]]) -> None:
        if 0 <= self.fails_at <= len(self.asked):
            raise EngineFailed("generate: died by SIGKILL")
        self.asked += prompts


def everyone() -> dict[str, FakeEngine]:
    names = dict.fromkeys(key(name, tier) for tier in TIERS for name in VISITING)
    return {name: FakeEngine() for name in names}


def run(
    engines: dict[str, FakeEngine], monkeypatch: pytest.MonkeyPatch, rounds: int = 1
) -> CompareMeasurement:
    monkeypatch.setattr(
        visits_module, "make_prompt", lambda path, num_tokens, seed: [seed] * num_tokens
    )
    systems = {
        name: System(cast(Engine, engine), (os.getpid(),)) for name, engine in engines.items()
    }
    running, measured = (
        RunningSystem(systems, {MISSING: "RuntimeError: no memory"}),
        CompareMeasurement(),
    )
    texts, told = VisitTexts(Path(), NUM_TOKENS), list[str]()
    plan = visiting([WORKLOAD], rounds=rounds, tiers=TIERS, page_cache=True)
    measure(running, texts, plan, measured, say=told.append)
    assert [line.split(":")[0].split(", ")[1] for line in told] == [
        "first visits",
        *(f"{reuse} % reuse" for reuse in REUSE_PERCENT),
    ]
    return measured


def cell(reuse: int, burst: bool = False, **seconds: float) -> Cell:
    """Underscores in names stand for what names have instead."""
    times = {name.replace("__", ", ").replace("_", " "): value for name, value in seconds.items()}
    return Cell(
        reuse,
        1_000,
        burst,
        times,
        {name: 2 * value for name, value in times.items()},
        dict.fromkeys(times, reuse),
    )


def measured_of(*cells: Cell, errors: dict[str, str] | None = None) -> CompareMeasurement:
    found = CompareMeasurement(errors=errors or {})
    for one in cells:
        found.cells.setdefault((WORKLOAD.title, one.reuse), []).append(one)
    return found


def test_everybody_gets_the_same_prompts_but_for_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = everyone()
    measured = run(engines, monkeypatch, rounds=2)
    of_all = engines[RECOMPUTE].asked
    assert len(of_all) == WORKLOAD.num_documents + len(REUSE_PERCENT) * 2 * 3
    for name in (PLAIN, AGAIN, OFFLOADING, key(LMCACHE, "disk"), key(ALONE, "ram")):
        assert engines[name].asked == of_all
    assert len(engines[LEFT_ALONE].asked) == len(engines[LEFT_AGAIN].asked) == 2 * 3
    assert [
        prompt
        for prompt in engines[key(KVHOLD, "ram")].asked
        if prompt not in engines[LEFT_ALONE].asked
    ] == of_all
    cells = [one for found in measured.cells.values() for one in found]
    assert {one.num_tokens for one in cells} == {
        NUM_TOKENS + OUTPUT_TOKENS,
        2 * (NUM_TOKENS + OUTPUT_TOKENS),
    }
    assert set(measured.cells) == {(WORKLOAD.title, reuse) for reuse in REUSE_PERCENT}


def test_one_that_fails_or_answers_otherwise_is_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = everyone()
    engines[key(LMCACHE, "disk")].fails_at = 9
    engines[OFFLOADING].answer = 1
    measured = run(engines, monkeypatch)
    assert engines[OFFLOADING].asked == engines[RECOMPUTE].asked[:1]
    rows = make_rows(measured, TIERS)
    of_offloading = [row for row in rows if row.system == OFFLOADING]
    assert all(
        row.ttft_p50_s is None and "recompute answered" in row.error for row in of_offloading
    )
    assert {(row.tier, row.reuse) for row in of_offloading} == {
        (tier, reuse) for tier in TIERS for reuse in REUSE_PERCENT
    }
    of_lmcache = {(row.tier, row.reuse): row for row in rows if row.system == LMCACHE}
    assert of_lmcache["disk", 100].ttft_p50_s == of_lmcache["ram", 0].ttft_p50_s == 0.5
    assert (
        of_lmcache["disk", 0].ttft_p50_s is None
        and of_lmcache["disk", 0].error == "generate: died by SIGKILL"
    )
    assert not of_lmcache["ram", 0].error
    assert {row.error for row in rows if row.system == MISSING} == {"RuntimeError: no memory"}
    assert not failed(rows)
    text = render(rows)
    assert (
        "lmcache (disk): FAILED: generate: died by SIGKILL" in text
        and "vllm, all in memory: FAILED: RuntimeError" in text
    )


def test_ours_that_answers_otherwise_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = everyone()
    engines[key(KVHOLD, "ram")].answer = 1
    bad = failed(make_rows(run(engines, monkeypatch), TIERS))
    assert {(row.system, row.tier) for row in bad} == {(KVHOLD, "ram")}
    assert not engines[LEFT_ALONE].asked  # it is the same engine


def test_without_the_engine_that_computes_everything_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = everyone()
    engines[RECOMPUTE].fails_at = 3
    with pytest.raises(EngineFailed):
        run(engines, monkeypatch)


def test_who_differs_is_told_by_the_one_that_computes() -> None:
    assert differing({}) == {}
    assert differing({PLAIN: [[1]], RECOMPUTE: [[1]]}) == {}
    assert list(differing({PLAIN: [[2]], KVHOLD: [[1]], RECOMPUTE: [[1]]})) == [PLAIN]
    assert list(differing({KVHOLD: [[1]], LEFT_ALONE: [[2]]})) == [LEFT_ALONE]


def rows_of(measured: CompareMeasurement, tier: str) -> dict[str, SystemRow]:
    return {row.system: row for row in make_rows(measured, (tier,))}


def test_kvhold_is_compared_with_the_best_that_is_not_kvhold() -> None:
    times: dict[str, Any] = {"recompute": 8.0, "vllm": 7.0, "offloading": 4.0, "lmcache__disk": 5.0}
    ours: dict[str, Any] = {
        "kvhold__disk": 3.0,
        "kvhold__no_prefix_cache__disk": 2.0,
        "kvhold__ram": 1.0,
    }
    rows = rows_of(
        measured_of(*[cell(75, **times, **ours), cell(75, burst=True, **times, **ours)] * 5), "disk"
    )
    assert (rows[KVHOLD].best_peer, rows[KVHOLD].ratio_to_best_peer, rows[KVHOLD].interval) == (
        OFFLOADING,
        0.75,
        (0.75, 0.75),
    )
    assert (rows[ALONE].best_peer, rows[ALONE].ratio_to_best_peer) == (OFFLOADING, 0.5)
    assert (rows[OFFLOADING].best_peer, rows[OFFLOADING].ratio_to_best_peer) == (ALONE, 2.0)
    assert (rows[KVHOLD].ttft_p50_s, rows[KVHOLD].requests, rows[KVHOLD].cached_tokens) == (
        3.0,
        5,
        75,
    )
    assert rows[KVHOLD].throughput == pytest.approx(1_000 / 3)
    assert rows[KVHOLD].throughput_ratios[LMCACHE].median == pytest.approx(5 / 3)
    assert set(rows[KVHOLD].ttft_ratios) == {RECOMPUTE, PLAIN, OFFLOADING, LMCACHE, ALONE}


def test_cost_is_judged_over_all_workloads_and_gain_against_every_peer() -> None:
    unused: dict[str, Any] = {
        "recompute": 1.0,
        "vllm": 1.0,
        "vllm__again": 1.0,
        "kvhold__ram": 1.01,
        "kvhold__disk": 1.1,
    }
    within: dict[str, Any] = {
        "kvhold__ram": 1.03,
        "kvhold__left_alone": 1.0,
        "kvhold__left_alone_again": 1.0,
    }
    used: dict[str, Any] = {
        "recompute": 9.0,
        "vllm": 2.5,
        "vllm__again": 2.5,
        "offloading": 1.9,
        "kvhold__ram": 2.0,
        "kvhold__disk": 2.0,
    }
    kinds = [cell(0, burst, **times) for burst in (False, True) for times in (unused, within)]
    measured = measured_of(*[*kinds, cell(50, **used), cell(25, **used)] * 5)
    measured.cells["another", 0] = measured.cells[WORKLOAD.title, 0]
    judged = {
        goal.what: (goal.ratio.median, goal.ratio.cells, goal.verdict)
        for goal in goals(measured, make_rows(measured, TIERS))
    }
    assert judged["ram, no reuse: TTFT over vLLM's without a connector"] == (1.01, 10, "yes")
    assert (
        judged[
            "ram, no reuse: time for the same work over that of requests left alone, in one engine"
        ][2]
        == "NO"
    )
    slower = judged["disk, no reuse: time for the same work over vLLM's without a connector"]
    assert slower[0] == pytest.approx(1.1)
    assert slower[1:] == (10, "NO")
    (gain,) = [(what, found) for what, found in judged.items() if "best peer" in what]
    assert gain[0] == "ram, working set 2x, 50 % reuse: TTFT over the best peer's, offloading"
    assert gain[1][0] == pytest.approx(2 / 1.9)
    assert gain[1][1:] == (5, "NO")


def test_differences_of_copies_leave_goals_undecided() -> None:
    unused: dict[str, Any] = {"recompute": 1.0, "vllm": 1.0, "vllm__again": 1.2, "kvhold__ram": 1.1}
    measured = measured_of(*[cell(0, burst, **unused) for burst in (False, True)] * 5)
    assert {goal.verdict for goal in goals(measured, make_rows(measured, ("ram",)))} == {
        "undecided"
    }


def test_without_copies_to_compare_nothing_is_decided() -> None:
    measured = measured_of(*[cell(50, recompute=9.0, vllm=9.0, kvhold__ram=1.0)] * 5)
    (goal,) = goals(measured, make_rows(measured, ("ram",)))
    assert goal.ratio.median == pytest.approx(1 / 9)
    assert goal.verdict == "undecided"


def test_the_table_has_a_line_for_each_system_and_says_where_hits_came_from() -> None:
    measured = measured_of(
        cell(100, recompute=8.0, vllm=7.0, kvhold__disk=2.0),
        cell(0, recompute=8.0, vllm=7.0, kvhold__disk=7.5),
    )
    measured.sources[(WORKLOAD.title, 100), key(KVHOLD, "disk")] = {"disk": 1_024}
    lines = render(make_rows(measured, ("disk",))).splitlines()
    assert lines[0].startswith("disk, working set 2x")
    assert lines[1].split() == ["0", "%", "100", "%"]
    assert [line.split()[0] for line in lines[2:5]] == [RECOMPUTE, PLAIN, KVHOLD]
    assert "1.071 (1.071-1.071)" in lines[5] and "0.286 (0.286-0.286)" in lines[5]
    assert lines[-1] == "kvhold found 1,024 tokens in disk"


def test_memory_above_a_tier_holds_a_burst_and_no_set_but_the_smallest() -> None:
    sizes = Sizes(ModelInfo("tiny", Path(), SIZES["tiny"]), 1_100, 28, OUTPUT_TOKENS)
    small = sizes.memory_bytes("disk") / sizes.prompt_bytes
    assert 2 <= small < WORKLOADS["2x"].num_documents - 1
    assert sizes.memory_bytes("ram") == 28 * sizes.prompt_bytes < sizes.below_bytes
    assert sizes.own_bytes // sizes.model.kv_bytes_per_token >= 2 * (1_100 + OUTPUT_TOKENS)
    assert sizes.own_bytes < 3 * sizes.prompt_bytes


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "is_vllm_available", lambda: False)
    result: Any = CliRunner().invoke(command_module.command, [])
    assert (result.exit_code, "vLLM is not installed" in result.output) == (1, True)
