from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhold_lab.bench.planner.run import LOAD, PLAN, PlannerCell

_RESAMPLES = 4_000


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PlannerRow:
    """speed: 1 loads KV as fast as the engine computes it
    load, plan: times / compute times
    to_best: planning / the better of loading and computing
    """

    speed: float
    mb_s: float
    requests: int
    compute_p50_s: float
    load_p50_s: float
    plan_p50_s: float
    load: Interval
    plan: Interval
    to_best: Interval
    load_loaded: float
    plan_loaded: float


def make_row(cells: Sequence[PlannerCell], *, speed: float, bytes_per_s: float) -> PlannerRow:
    computed = {name: np.array([cell.computed_s[name] for cell in cells]) for name in (LOAD, PLAN)}
    taken = {name: np.array([cell.taken_s[name] for cell in cells]) for name in (LOAD, PLAN)}
    numbers = np.arange(len(cells))
    resampled = np.random.default_rng(0).choice(numbers, (_RESAMPLES, len(cells)))
    ratios = {
        name: _ratios(taken[name], computed[name], np.vstack([numbers, resampled]))
        for name in (LOAD, PLAN)
    }
    total = sum(cell.num_tokens for cell in cells)
    return PlannerRow(
        speed=speed,
        mb_s=bytes_per_s / 1e6,
        requests=len(cells),
        compute_p50_s=float(np.median(computed[PLAN])),
        load_p50_s=float(np.median(taken[LOAD])),
        plan_p50_s=float(np.median(taken[PLAN])),
        load=_interval(ratios[LOAD]),
        plan=_interval(ratios[PLAN]),
        to_best=_interval(ratios[PLAN] / np.minimum(ratios[LOAD], 1.0)),
        load_loaded=sum(cell.loaded_tokens[LOAD] for cell in cells) / total,
        plan_loaded=sum(cell.loaded_tokens[PLAN] for cell in cells) / total,
    )


def _ratios(
    taken: npt.NDArray[np.float64],
    computed: npt.NDArray[np.float64],
    samples: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    ratios: npt.NDArray[np.float64] = taken[samples].sum(axis=1) / computed[samples].sum(axis=1)
    return ratios


def _interval(ratios: npt.NDArray[np.float64]) -> Interval:
    low, high = np.percentile(ratios[1:], (2.5, 97.5))
    return Interval(float(ratios[0]), float(low), float(high))
