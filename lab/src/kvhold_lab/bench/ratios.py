"""Ratios of systems' times, with intervals of 95 % by bootstrap over cells. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

_RESAMPLES = 4_000
_CPU_TICK_S = 0.01  # of a coarse CPU clock


@dataclass(frozen=True)
class Cell:
    reuse: int
    num_tokens: int
    burst: bool
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float
    high: float
    cells: int

    @property
    def apart(self) -> float:
        return max(self.median, 1 / self.median)


@dataclass(frozen=True)
class Goal:
    """noise: factor between identical engines; infinity: unknown"""

    what: str
    ratio: Ratio
    most: float
    noise: float = 1.0

    @property
    def verdict(self) -> str:
        """ "undecided" if the widened interval contains `most`."""
        low, high = self.ratio.low / self.noise, self.ratio.high * self.noise
        if low <= self.most < high:
            return "undecided"
        return "yes" if high <= self.most else "NO"


def ratio(
    cells: Sequence[Cell], name: str, other: str, what: Literal["seconds", "cpu_s"] = "seconds"
) -> Ratio:
    least_s = _CPU_TICK_S if what == "cpu_s" else 0.0
    times = [getattr(cell, what) for cell in shared(cells, name, other)]
    values = np.array([max(time[name], least_s) / max(time[other], least_s) for time in times])
    resampled = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), (2.5, 97.5))
    return Ratio(float(np.median(values)), float(low), float(high), len(values))


def shared(cells: Sequence[Cell], name: str, other: str) -> list[Cell]:
    return [cell for cell in cells if name in cell.seconds and other in cell.seconds]


def seconds_of(cells: Sequence[Cell], name: str) -> list[float]:
    return [cell.seconds[name] for cell in cells if name in cell.seconds]


def rates_of(cells: Sequence[Cell], name: str) -> list[float]:
    return [cell.num_tokens / cell.seconds[name] for cell in cells if name in cell.seconds]


def render_goals(goals: Sequence[Goal], *, noise: bool = True) -> str:
    width = max((len(goal.what) for goal in goals), default=0)
    return "\n".join(
        f"{goal.what:<{width}}  {goal.ratio.median:6.3f} "
        f"({goal.ratio.low:.3f}-{goal.ratio.high:.3f}, {goal.ratio.cells} pairs)"
        f"  at most {goal.most:g}: {goal.verdict}"
        + (f"; identical engines differ by {goal.noise:.3f}" if noise else "")
        for goal in goals
    )
