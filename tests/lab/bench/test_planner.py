"""The bench of the planner: it asks what a trace shares, its ratios are right, and real engines
agree.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.planner.figures import make_row
from kvhold_lab.bench.planner.run import LOAD, PLAN, PlannerCell, cells
from kvhold_lab.bench.planner.sample import CHUNK, MOST_CHUNKS, sample, seen_before
from kvhold_lab.engines.models import make_model
from kvhold_lab.servers.base import NotInstalled, program

BYTES_S = 10e6


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations of three turns, which take turns; each begins as all do, and grows by two
    blocks a turn.
    """
    lines: list[dict[str, Any]] = []
    for turn in range(3):
        for talk in range(10):
            ids = [0, *range(1000 * (talk + 1), 1000 * (talk + 1) + 2 * turn + 2)]
            lines.append(
                {
                    "timestamp": len(lines),
                    "input_length": 512 * len(ids) - 12,
                    "output_length": 1,
                    "hash_ids": ids,
                }
            )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_conversations_are_drawn_whole_and_share_what_they_shared(trace: Path) -> None:
    prompts = sample(trace, num_requests=12, seed=3)
    assert sorted(map(len, prompts)) == [3 * CHUNK] * 4 + [5 * CHUNK] * 4 + [7 * CHUNK] * 4
    assert seen_before(prompts) == (11 + 4 * 2 + 4 * 4) / (12 * 5)
    assert (
        sample(trace, num_requests=12, seed=3) == prompts != sample(trace, num_requests=12, seed=4)
    )
    for prompt in prompts:
        before = [other for other in prompts if other[: CHUNK * 2] == prompt[: CHUNK * 2]]
        assert len(before) == 3 and all(
            max(before, key=len)[: len(other)] == other for other in before
        )


def test_what_is_too_long_is_cut_and_what_a_trace_has_not_is_not_made_up(
    trace: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="too few conversations for 31 requests"):
        sample(trace, num_requests=31, seed=0)
    long = tmp_path / "long.jsonl"
    long.write_text(
        "".join(
            json.dumps({"input_length": 512 * 900, "hash_ids": [n, *range(899)]}) + "\n"
            for n in range(2)
        )
    )
    assert [len(prompt) for prompt in sample(long, num_requests=2, seed=0)] == [
        CHUNK * MOST_CHUNKS
    ] * 2


def test_ratios_are_of_sums_within_an_engine_and_to_the_better_of_both() -> None:
    measured = [
        PlannerCell(100, {LOAD: 1.0, PLAN: 2.0}, {LOAD: 0.2, PLAN: 0.5}, {LOAD: 90, PLAN: 80}),
        PlannerCell(300, {LOAD: 3.0, PLAN: 6.0}, {LOAD: 3.0, PLAN: 5.5}, {LOAD: 0, PLAN: 0}),
    ]
    row = make_row(measured, speed=1.0, bytes_per_s=5e6)
    assert (row.load.value, row.plan.value, row.to_best.value) == pytest.approx(
        (0.8, 0.75, 0.75 / 0.8)
    )
    # of two cells, one resample in four is the first alone, and one is the second alone
    assert (row.to_best.low, row.to_best.high) == pytest.approx((5.5 / 6.0, 0.25 / 0.2))
    assert (row.load_loaded, row.plan_loaded, row.mb_s, row.requests) == (
        90 / 400,
        80 / 400,
        5.0,
        2,
    )
    slow = make_row(
        [PlannerCell(1, {LOAD: 1.0, PLAN: 1.0}, {LOAD: 7.0, PLAN: 1.5}, {LOAD: 1, PLAN: 0})],
        speed=1.0,
        bytes_per_s=1.0,
    )
    assert slow.to_best.value == 1.5, "computing is the better one"


@pytest.mark.vllm
@pytest.mark.alone
@pytest.mark.server
def test_real_engines_answer_the_same_computed_loaded_and_planned() -> None:
    pytest.importorskip("vllm", reason="no vLLM in this environment")
    try:
        program("redis-server", "apt-get install redis-server")
    except NotInstalled as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    shared = rng.integers(10, 8000, 8 * CHUNK).tolist()
    prompts = [[*shared, *rng.integers(10, 8000, 2 * CHUNK).tolist()] for _ in range(4)]
    counters: dict[str, float] = {}
    found = list(
        cells(
            make_model("tiny"), prompts, bytes_per_s=BYTES_S, num_threads=1, plans=counters.update
        )
    )
    assert [cell.loaded_tokens[LOAD] for cell in found] == [0] + [8 * CHUNK] * 3
    assert all(cell.loaded_tokens[PLAN] <= 8 * CHUNK for cell in found), (
        "how many is for the clock to say"
    )
    assert sum(
        value for name, value in counters.items() if name.startswith("kvhold_plans{")
    ) >= len(prompts)
    row = make_row(found, speed=1.0, bytes_per_s=BYTES_S)
    taken, computed = (
        sum(times[LOAD] for times in of_cells)
        for of_cells in (
            [cell.taken_s for cell in found],
            [cell.computed_s for cell in found],
        )
    )
    assert row.requests == len(prompts) and row.load.value == pytest.approx(taken / computed)
