"""Systems that did the same in turn, and the ratios of their times within each such cell, with
intervals of confidence.

Cores are shared, so a time says little and a ratio of two times from the same cell more: it is the
median of such ratios that rows and goals are about. Intervals are of 95 %, by bootstrap over cells
(percentiles of the resampled median). No I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

_RESAMPLES = 4_000


@dataclass(frozen=True)
class Cell:
    """One piece of work, such as a prompt or a burst of them, as every system met it.

    Times in seconds, by system.
    """

    reuse: int  # per cent of the prompt
    num_tokens: int  # prompts and outputs
    burst: bool
    seconds: dict[str, float] = field(
        default_factory=dict
    )  # to the first token; of a burst: until all is done and the engine has settled
    cpu_s: dict[str, float] = field(
        default_factory=dict
    )  # CPU time of the whole request or burst, in all processes of a system
    cached_tokens: dict[str, int] = field(default_factory=dict)  # not computed, of the shortest hit


@dataclass(frozen=True)
class Ratio:
    """A median of ratios within cells, the ends of its 95 % interval, and of how many cells."""

    median: float
    low: float
    high: float
    cells: int

    @property
    def inverse(self) -> "Ratio":
        """The other way round."""
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low, self.cells)

    @property
    def apart(self) -> float:
        """How far the two are from each other, as a factor of 1 or more, whichever is larger."""
        return max(self.median, 1 / self.median)


@dataclass(frozen=True)
class Goal:
    """What kvhold is to reach: `what` holds when the ratio is at most `most`.

    noise: how far two identical engines were apart in this run, as a factor of 1 or more; no
        smaller difference means anything.
        Infinity: not known
    """

    what: str
    ratio: Ratio
    most: float
    noise: float = 1.0

    @property
    def verdict(self) -> str:
        """Whether it is reached; "undecided" where the interval, wider by the noise on both sides,
        has the goal in it.
        """
        low, high = self.ratio.low / self.noise, self.ratio.high * self.noise
        if low <= self.most < high:
            return "undecided"
        return "yes" if high <= self.most else "NO"


def ratio(
    cells: Sequence[Cell], name: str, other: str, what: Literal["seconds", "cpu_s"] = "seconds"
) -> Ratio:
    """Times of `name` over those of `other`, in the cells where both are; there must be one."""
    times = [getattr(cell, what) for cell in shared(cells, name, other)]
    values = np.array([time[name] / time[other] for time in times])
    resampled = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), (2.5, 97.5))
    return Ratio(float(np.median(values)), float(low), float(high), len(values))


def shared(cells: Sequence[Cell], name: str, other: str) -> list[Cell]:
    """Those in which both are."""
    return [cell for cell in cells if name in cell.seconds and other in cell.seconds]


def seconds_of(cells: Sequence[Cell], name: str) -> list[float]:
    """A system's times, of the cells in which it is."""
    return [cell.seconds[name] for cell in cells if name in cell.seconds]


def rates_of(cells: Sequence[Cell], name: str) -> list[float]:
    """Tokens a second, of the cells in which it is."""
    return [cell.num_tokens / cell.seconds[name] for cell in cells if name in cell.seconds]


def render_goals(goals: Sequence[Goal], *, noise: bool = True) -> str:
    """A line for each goal. noise: say how far identical engines differ."""
    width = max((len(goal.what) for goal in goals), default=0)
    return "\n".join(
        f"{goal.what:<{width}}  {goal.ratio.median:6.3f} "
        f"({goal.ratio.low:.3f}-{goal.ratio.high:.3f}, {goal.ratio.cells} pairs)"
        f"  at most {goal.most:g}: {goal.verdict}"
        + (f"; identical engines differ by {goal.noise:.3f}" if noise else "")
        for goal in goals
    )
