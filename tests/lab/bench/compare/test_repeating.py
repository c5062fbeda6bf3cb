"""What `kvhold bench vllm` makes of times, and how it asks for them; no vLLM.

The real thing is in `test_vllm.py`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from kvhold_lab.bench.compare import command as command_module
from kvhold_lab.bench.compare import visits as visits_module
from kvhold_lab.bench.compare.goals import repeating_goals
from kvhold_lab.bench.compare.names import (
    AGAIN,
    BESIDE,
    CHECKED_AGAIN,
    KVHOLD,
    LAYERWISE,
    LIMIT,
    OFFLOADING,
    RECOMPUTE,
    UNCHECKED,
    key,
)
from kvhold_lab.bench.compare.report import draw, render
from kvhold_lab.bench.compare.rounds import HELD_PROMPTS, SHARES, repeating
from kvhold_lab.bench.compare.rows import SystemRow, failed, make_rows
from kvhold_lab.bench.compare.run import CompareMeasurement, measure
from kvhold_lab.bench.compare.systems import RunningSystem
from kvhold_lab.bench.compare.visits import WITHIN, VisitTexts
from kvhold_lab.bench.engines import OutputsDiffer, System
from kvhold_lab.bench.ratios import Cell, Goal, Ratio, ratio, render_goals
from kvhold_lab.engines.engine import Engine
from kvhold_lab.engines.messages import Generated, GeneratedMany

NUM_TOKENS = 40
OURS = key(KVHOLD, "ram")
ANSWER_TOKENS = repeating(rounds=1).output_tokens


@dataclass
class FakeEngine:
    """Answers with the prompt's last tokens, and notes what it was asked, with the number of the
    call.
    """

    answer: int = 0
    asked: list[list[int]] = field(default_factory=list)

    def generate(self, prompt: list[int], *, max_tokens: int, rules: Any) -> Generated:
        self.asked.append(prompt)
        return Generated(
            ttft_s=0.5,
            total_s=1.0,
            token_ids=[self.answer + prompt[-1]] * max_tokens,
            num_cached_tokens=7,
        )

    def reset_prefix_cache(self) -> bool:
        return True

    def generate_many(
        self, prompts: list[list[int]], *, max_tokens: int, rules: Any
    ) -> GeneratedMany:
        self.asked += prompts
        return GeneratedMany(
            token_ids=[[prompt[-1]] * max_tokens for prompt in prompts], num_cached_tokens=[3, 9]
        )


def fake_rounds(
    engines: dict[str, FakeEngine], num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> CompareMeasurement:
    monkeypatch.setattr(
        visits_module, "make_prompt", lambda path, num_tokens, seed: [seed] * num_tokens
    )
    systems = {
        key(name, "ram"): System(cast(Engine, engine), (os.getpid(),))
        for name, engine in engines.items()
    }
    measured = CompareMeasurement()
    plan = repeating(
        rounds=num_rounds, layerwise=LAYERWISE in engines, unchecked=UNCHECKED in engines
    )
    texts = VisitTexts(Path(), NUM_TOKENS)
    measure(RunningSystem(systems), texts, plan, measured, say=lambda _: None)
    return measured


def everyone() -> dict[str, FakeEngine]:
    """Those that are there by default."""
    return {name: FakeEngine() for name in repeating(rounds=1).systems}


def cell(reuse: int, burst: bool = False, **seconds: float) -> Cell:
    """Underscores in names stand for what names have instead."""
    times = {
        key(name.replace("__", ", ").replace("_", " "), "ram"): value
        for name, value in seconds.items()
    }
    return Cell(
        reuse,
        1_000,
        burst,
        times,
        {name: 2 * value for name, value in times.items()},
        dict.fromkeys(times, reuse),
    )


def measured_of(cells: Sequence[Cell]) -> CompareMeasurement:
    found = CompareMeasurement()
    for one in cells:
        found.cells.setdefault(("", one.reuse), []).append(one)
    return found


def rows_of(measured: CompareMeasurement | Sequence[Cell]) -> list[SystemRow]:
    if not isinstance(measured, CompareMeasurement):
        measured = measured_of(measured)
    return make_rows(measured, ("ram",))


def goals_of(measured: CompareMeasurement | Sequence[Cell]) -> list[Goal]:
    if not isinstance(measured, CompareMeasurement):
        measured = measured_of(measured)
    return repeating_goals(measured, rows_of(measured))


def test_what_is_known_was_met_in_the_round_before_and_what_is_new_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = everyone()
    fake_rounds(engines, 2, monkeypatch)
    asked = engines[KVHOLD].asked
    per_round = len(asked) // 3
    assert per_round <= HELD_PROMPTS
    for at, prompt in enumerate(asked):
        known = [token for token in prompt if token >= 1_000_000]
        assert prompt[: len(known)] == known  # it begins with what is known
        before = [number for number in range(at) if known and asked[number][: len(known)] == known]
        assert before == (
            [] if at < per_round or not known else list(range(at % per_round, at, per_round))
        )
        assert sum(prompt[-1] == other[-1] for other in asked) == (
            1 if len(known) < NUM_TOKENS else 3
        )
    assert {len([token for token in prompt if token >= 1_000_000]) for prompt in asked} == {
        0,
        10,
        20,
        30,
        40,
    }


def test_the_first_round_does_not_count_and_each_system_meets_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = everyone()
    measured = fake_rounds(engines, 1, monkeypatch)
    cells = [one for found in measured.cells.values() for one in found]
    stages = repeating(rounds=1).stages
    assert 2 * len(cells) == sum(len(stage.visits) for stage in stages)
    assert len(stages) == 2 * len(SHARES)
    assert engines[RECOMPUTE].asked == [
        prompt for prompt in engines[OFFLOADING].asked if prompt in engines[RECOMPUTE].asked
    ]
    assert engines[RECOMPUTE].asked == engines[OFFLOADING].asked
    burst, alone = next(c for c in cells if c.burst), next(c for c in cells if not c.burst)
    assert (alone.num_tokens, burst.num_tokens) == (
        NUM_TOKENS + ANSWER_TOKENS,
        2 * (NUM_TOKENS + ANSWER_TOKENS),
    )
    assert set(alone.seconds.values()) == {0.5}
    assert (set(alone.cached_tokens.values()), set(burst.cached_tokens.values())) == ({7}, {3})
    assert all(cpu_s >= 0 for c in cells for cpu_s in c.cpu_s.values())


def test_a_system_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = everyone()
    del engines[OFFLOADING]
    measured = fake_rounds(engines, 1, monkeypatch)
    assert OFFLOADING not in {row.system for row in rows_of(measured)}
    assert [goal.what.split(":")[0] for goal in goals_of(measured)] == ["no reuse"] * 5 + [
        "full hit"
    ]


def test_layer_by_layer_is_compared_with_what_differs_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = fake_rounds(
        everyone() | {name: FakeEngine() for name in (LAYERWISE, BESIDE)}, 1, monkeypatch
    )
    rows = rows_of(measured)
    assert {(row.reuse, *row.ttft_ratios) for row in rows if row.system == LAYERWISE} == {
        (reuse, BESIDE) for reuse in SHARES
    }
    assert sum("layer by layer" in goal.what for goal in goals_of(measured)) == len(SHARES)
    assert all(BESIDE not in row.ttft_ratios for row in rows if row.system == KVHOLD)


def test_the_check_of_memory_is_judged_on_full_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = fake_rounds(
        everyone() | {name: FakeEngine() for name in (UNCHECKED, CHECKED_AGAIN)}, 1, monkeypatch
    )
    assert {row.reuse for row in rows_of(measured) if row.system == UNCHECKED} == {100}
    assert [
        goal.most for goal in goals_of(measured) if "without comparing checksums" in goal.what
    ] == [1.03]


def test_engines_forget_where_no_cell_without_reuse_makes_them() -> None:
    def forgetting(*shares: int) -> set[tuple[int, bool]]:
        stages = repeating(shares, rounds=1).stages
        return {
            (visit.reuse, visit.forgets)
            for stage in stages
            for visit in stage.visits
            if visit.asked != WITHIN
        }

    assert forgetting(0, 100) == {(0, False), (100, False)}
    assert forgetting(50, 100) == {(50, True), (100, True)}


def test_another_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = everyone()
    engines[OFFLOADING].answer = 1
    with pytest.raises(OutputsDiffer, match="offloading"):
        fake_rounds(engines, 1, monkeypatch)


def test_ratios_are_taken_within_cells() -> None:
    cells = [cell(50, kvhold=seconds, recompute=2 * seconds) for seconds in (1.0, 10.0, 100.0)]
    cells += [cell(50, kvhold=5.0)]
    assert ratio(cells, OURS, RECOMPUTE) == Ratio(0.5, 0.5, 0.5, 3)
    spread = [cell(50, kvhold=seconds, recompute=1.0) for seconds in (1.0, 2.0, 3.0, 4.0, 5.0)]
    found = ratio(spread, OURS, RECOMPUTE)
    assert found.median == 3.0
    assert 1.0 <= found.low < found.median < found.high <= 5.0


def test_cpu_time_below_a_tick_of_the_clock_counts_as_one_tick() -> None:
    seconds = {OURS: 1.0, RECOMPUTE: 1.0}
    cells = [
        Cell(50, 64, False, seconds, {OURS: ours_s, RECOMPUTE: others_s})
        for ours_s, others_s in ((0.02, 0.0), (0.0, 0.0), (0.0, 0.02))
    ]
    assert ratio(cells, OURS, RECOMPUTE, "cpu_s") == Ratio(1.0, 0.5, 2.0, 3)


def test_a_row_compares_with_the_best_other_system_but_the_limit() -> None:
    cells = [cell(75, recompute=8.0, offloading=4.0, kvhold=3.0, vllm__all_in_memory=1.0)] * 5
    cells += [
        cell(75, burst=True, recompute=8.0, offloading=4.0, kvhold=2.0, vllm__all_in_memory=1.0)
    ] * 5
    rows = {row.system: row for row in rows_of(cells)}
    assert list(rows) == [RECOMPUTE, OFFLOADING, KVHOLD, LIMIT]
    row = rows[KVHOLD]
    assert (row.best_peer, row.ratio_to_best_peer, row.requests, row.cached_tokens) == (
        OFFLOADING,
        0.75,
        5,
        75,
    )
    assert (row.ttft_p50_s, row.ttft_p99_s, row.throughput) == (3.0, 3.0, 500.0)
    assert row.throughput_ratios[OFFLOADING].median == 2.0
    assert row.cpu_ratios[OFFLOADING].median == 0.5
    assert rows[OFFLOADING].best_peer == KVHOLD
    assert rows[LIMIT].best_peer == KVHOLD
    assert row.ttft_ratios[LIMIT].median == 3.0


def test_the_99th_percentile_is_that_of_the_requests() -> None:
    (row, _) = rows_of(
        [cell(0, kvhold=float(seconds), recompute=1.0) for seconds in range(1, 101)]
    )[::-1]
    assert row.system == KVHOLD
    assert row.ttft_p50_s == 50.5
    assert row.ttft_p99_s == pytest.approx(99.01)
    assert row.throughput is None


def sample(kvhold: float = 1.0, hit: float = 1.0) -> list[Cell]:
    both = [
        cell(
            0,
            burst,
            recompute=1.0,
            vllm=1.0,
            offloading=1.0,
            kvhold=kvhold,
            vllm__all_in_memory=1.0,
        )
        for burst in (False, True)
    ]
    full = [
        cell(100, burst, recompute=9.0, offloading=2.0, kvhold=hit, vllm__all_in_memory=1.0)
        for burst in (False, True)
    ]
    return (both + full) * 5


def test_goals_are_judged_by_their_whole_interval() -> None:
    assert [(goal.most, goal.verdict) for goal in goals_of(sample())] == [(1.02, "yes")] * 3 + [
        (1.0, "yes"),
        (1.1, "yes"),
    ]
    assert [goal.verdict for goal in goals_of(sample(kvhold=1.03, hit=1.2))] == [
        "NO",
        "NO",
        "NO",
        "yes",
        "NO",
    ]
    assert goals_of(sample(kvhold=1.25))[1].ratio.median == pytest.approx(1.25)
    varied = [
        cell(0, burst, recompute=1.0, vllm=1.0, kvhold=seconds)
        for seconds in (1.0, 1.1, 1.2)
        for burst in (False, True)
    ]
    assert all(goal.ratio.low < goal.ratio.median < goal.ratio.high for goal in goals_of(varied))
    assert Goal("", Ratio(1.0, 0.9, 1.1, 5), 1.02).verdict == "undecided"
    assert Goal("", Ratio(1.0, 0.9, 1.02, 5), 1.02).verdict == "yes"


def test_no_goal_is_decided_by_less_than_identical_engines_differ() -> None:
    cells = [
        cell(0, burst, recompute=1.0, vllm=1.0, vllm__again=0.8, kvhold=1.1)
        for burst in (False, True)
    ] * 5
    rows = rows_of(cells)
    assert [(goal.verdict, goal.noise) for goal in goals_of(cells)] == [("undecided", 1.25)] * 3
    assert AGAIN not in {row.best_peer for row in rows}
    assert Goal("", Ratio(1.3, 1.3, 1.3, 5), 1.02, 1.25).verdict == "NO"
    assert Goal("", Ratio(0.8, 0.8, 0.8, 5), 1.02, 1.25).verdict == "yes"


def test_what_a_followed_request_costs_is_judged_within_one_engine() -> None:
    plain = [cell(0, burst, recompute=1.0, vllm=1.0, kvhold=1.3) for burst in (False, True)]
    within = [
        cell(0, burst, kvhold=1.01, kvhold__left_alone=1.0, kvhold__left_alone_again=1.005)
        for burst in (False, True)
    ]
    rows = rows_of((plain + within) * 5)
    judged = [goal for goal in goals_of((plain + within) * 5) if "in one engine" in goal.what]
    assert [(round(goal.ratio.median, 3), goal.noise, goal.verdict) for goal in judged] == [
        (1.01, 1.005, "yes")
    ] * 2
    worse = [
        cell(0, burst, kvhold=1.05, kvhold__left_alone=1.0, kvhold__left_alone_again=1.005)
        for burst in (False, True)
    ]
    assert [
        goal.verdict for goal in goals_of((plain + worse) * 5) if "in one engine" in goal.what
    ] == ["NO"] * 2
    assert {row.best_peer for row in rows if row.system == KVHOLD} <= {RECOMPUTE, "vllm"}


def test_the_table_and_the_curve_show_every_row(tmp_path: Path) -> None:
    measured = measured_of(sample(hit=1.2))
    rows = rows_of(measured)
    lines = render(rows).splitlines()
    assert lines[1].split() == ["0", "%", "100", "%"]
    for row in rows:
        (line,) = [line for line in lines if re.match(rf"{row.system}  +\d", line)]
        assert f"{row.ttft_p50_s:.3f} s" in line
        assert f"{row.throughput:.0f}/s" in line
    (line,) = [line for line in lines if line.startswith(f"{KVHOLD} not computed")]
    assert line.split() == [*f"{KVHOLD} not computed".split(), "0", "tokens", "100", "tokens"]
    assert "1.200 (1.200-1.200, 5 pairs)  at most 1.1: NO" in render_goals(goals_of(measured))
    draw(rows, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "is_vllm_available", lambda: False)
    result: Any = CliRunner().invoke(command_module.vllm, [])
    assert (result.exit_code, "vLLM is not installed" in result.output) == (1, True)


def test_a_run_in_which_kvhold_reused_nothing_fails() -> None:
    reused = cell(100, recompute=2.0, kvhold=1.0)
    nothing = cell(100, recompute=2.0, kvhold=1.0)
    nothing.cached_tokens[OURS] = 0
    assert not failed(rows_of([reused]), strict=True)
    measured = measured_of([reused, nothing])
    measured.sources[("", 100), OURS] = {"ram": 100}
    assert [row.system for row in failed(rows_of(measured), strict=True)] == [KVHOLD]
    assert not failed(rows_of(measured))
    assert not failed(rows_of(measured), most_reuse=75, strict=True)
