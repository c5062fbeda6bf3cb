"""`kvhold bench pd` without engines: rows of times."""

import pytest

from kvhold_lab.bench.pd.faults import KVHOLD, NIXL
from kvhold_lab.bench.pd.requests import TimedAnswer
from kvhold_lab.bench.pd.speed import (
    ALONE,
    NEXT_DOOR,
    PREFILL_ALONE,
    UNSTORED,
    PdSpeedRow,
    PdTimes,
    render,
    speed_rows,
)


def answer(ttft_s: float, *gaps_s: float) -> TimedAnswer:
    return TimedAnswer([1] * (1 + len(gaps_s)), ttft_s, list(gaps_s))


def times(*, with_nixl: bool = False) -> PdTimes:
    measured = PdTimes()
    for number in range(5):
        answers = {
            KVHOLD: answer(1.2 + number, 0.1, 0.2, 0.3),
            ALONE: answer(1.1 + number, 0.1, 0.1, 0.4),
            PREFILL_ALONE: answer(1.0 + number),
        }
        if with_nixl:
            answers[NIXL] = answer(2 * (1.2 + number), 0.1)
        measured.add(0, 1_000, answers)
    return measured


def rows_of(measured: PdTimes) -> dict[str, PdSpeedRow]:
    return {row.system: row for row in speed_rows(measured)}


def test_times_are_medians_and_a_single_token_has_no_gap() -> None:
    rows = rows_of(times())
    assert list(rows) == [KVHOLD, ALONE, PREFILL_ALONE]
    ours = rows[KVHOLD]
    assert (ours.reuse, ours.requests) == (0, 5)
    assert ours.ttft_p50_s == pytest.approx(3.2)
    assert 5.0 < ours.ttft_p99_s < 5.2
    assert ours.itl_p50_s == pytest.approx(0.2)
    assert rows[PREFILL_ALONE].itl_p50_s is None


def test_without_nixl_there_is_no_ratio_to_it() -> None:
    for row in speed_rows(times()):
        assert (row.ratio_to_nixl, row.interval) == (None, None)


def test_ratios_are_of_the_same_round() -> None:
    rows = rows_of(times(with_nixl=True))
    ours = rows[KVHOLD]
    assert ours.ratio_to_nixl == pytest.approx(0.5)
    assert ours.interval == pytest.approx((0.5, 0.5))
    assert rows[NIXL].ratio_to_nixl is None, "it is not compared with itself"


def test_the_limit_is_the_prefill_alone_and_one_step() -> None:
    """A step is the median gap of the engine alone, 0.1 s; a later round's prefill is slower."""
    ours, limit = rows_of(times())[KVHOLD], rows_of(times())[PREFILL_ALONE]
    assert ours.ratio_to_limit == pytest.approx(3.2 / 3.1)
    assert ours.limit_interval is not None
    assert ours.limit_interval[0] <= 3.2 / 3.1 <= ours.limit_interval[1]
    assert limit.ratio_to_limit == pytest.approx(3.0 / 3.1)
    assert ours.later_s == pytest.approx(0.1)
    assert limit.later_s == pytest.approx(-0.1)


def test_the_time_between_tokens_beside_prefills_is_compared_with_that_alone() -> None:
    measured = PdTimes()
    for number in range(5):
        slower = 0.1 * (number + 1)
        answers = {
            ALONE: answer(1.0, slower, slower),
            NEXT_DOOR: answer(9.0, 2 * slower, 2 * slower, 100.0),
            UNSTORED: answer(9.0, 1.6 * slower),
        }
        measured.add(0, 1_000, answers)
    rows = rows_of(measured)
    beside = rows[NEXT_DOOR]
    assert beside.itl_p50_s == pytest.approx(0.8)
    assert beside.itl_ratio_to_alone == pytest.approx(2.0)
    assert beside.itl_interval == pytest.approx((2.0, 2.0))
    assert beside.itl_ratio_to_unstored == pytest.approx(1.25)
    assert rows[UNSTORED].itl_ratio_to_alone == pytest.approx(1.6)
    assert rows[UNSTORED].itl_ratio_to_unstored is None
    assert (beside.ratio_to_limit, beside.ratio_to_nixl) == (None, None)
    assert rows[ALONE].itl_ratio_to_alone is None
    assert "2.000 (2.000-2.000)" in render([beside])


def test_each_share_of_reuse_has_rows_of_its_own() -> None:
    measured = times()
    measured.add(50, 1_000, {KVHOLD: answer(0.5, 0.1), ALONE: answer(0.4, 0.1)})
    rows = speed_rows(measured)
    assert [(row.reuse, row.system) for row in rows] == [
        (0, KVHOLD),
        (0, ALONE),
        (0, PREFILL_ALONE),
        (50, KVHOLD),
        (50, ALONE),
    ]
    assert rows[3].ratio_to_limit is None
    shown = render(rows).splitlines()
    assert len(shown) == 6
    assert shown[4].split()[:3] == ["50", "%", "kvhold"]
