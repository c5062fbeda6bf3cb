from collections.abc import Sequence
from math import sqrt
from statistics import fmean, pvariance

import numpy as np

_RESAMPLES, _AT_ONCE = 2_000, 100
_Z = 1.96
_MOST_PROMPTS = 1_000_000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean, by resampling"""
    known, rng = np.asarray(values, float), np.random.default_rng(0)
    means = [
        known[rng.integers(0, len(known), (_AT_ONCE, len(known)))].mean(1)
        for _ in range(_RESAMPLES // _AT_ONCE)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975)).tolist()
    return low, high


def change_interval(changes: Sequence[float]) -> tuple[float, float]:
    """Of changes from -1 to 1; one more of each keeps it wide if there are few."""
    return interval([*changes, -1.0, 1.0])


def prompts_needed(changes: Sequence[float], most_loss: float) -> int:
    """For a `change_interval` above `-most_loss`; 0: no number."""
    mean, variance = fmean(changes), pvariance(changes)
    for count in np.unique(np.geomspace(1, _MOST_PROMPTS, 2_000).round().astype(int)).tolist():
        spread = (count * (variance + mean**2) + 2) / (count + 2)
        middle = count * mean / (count + 2)
        if middle - _Z * sqrt((spread - middle**2) / (count + 2)) >= -most_loss:
            return int(count)
    return 0
