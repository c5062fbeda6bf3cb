"""Learn costs from measured times: seconds as a sum of non-negative costs, each times a quantity.

    reading = Estimate(2)                          # a cost per call, and a cost per byte
    reading.measured((1, 8 << 20), 0.09)
    reading.costs                                  # (0.001, 1.06e-08), or None without measurements

The fit minimises the sum of relative errors, not of their squares, so that one compile or one stall
does not spoil it. Recent measurements have more weight. If three in a row are off by a factor of
two to the same side, conditions have changed, and older measurements are forgotten. Of fits that
are equally good, the simplest wins, then the first in the order of the quantities. Pure; any
thread.
"""

import threading
from collections import deque
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt

_MOST = 48  # measurements remembered
_FADING = 0.93  # the weight of a measurement relative to the next one
_ALIKE = 0.003  # fits with mean relative errors this close are equally good
_ROUNDS = 8  # of reweighting
_LEAST_ERROR = 1e-3  # relative; smaller errors get the same weight
_OFF = 2.0
_IN_A_ROW = 3

Quantities = tuple[float, ...]


class Estimate:
    """The costs of several quantities.

    A quantity is a count: one that was never 1 or more has no cost.
    """

    def __init__(self, num_quantities: int) -> None:
        self._subsets = [
            s
            for size in range(1, num_quantities + 1)
            for s in combinations(range(num_quantities), size)
        ]
        self._num_quantities = num_quantities
        self._measured: deque[tuple[Quantities, float]] = deque(maxlen=_MOST)
        self._costs: Quantities | None = None
        self._unseen = 0  # measurements since the costs were fitted
        self._off = 0  # measurements in a row off to the same side; negative: faster than predicted
        self._lock = threading.Lock()

    @property
    def costs(self) -> Quantities | None:
        """Seconds per unit of each quantity; None without measurements."""
        with self._lock:
            # The more are known, the less one measurement changes.
            if self._unseen and self._unseen >= len(self._measured) // 8:
                self._fit()
            return self._costs

    @property
    def num_measured(self) -> int:
        """The number of measurements remembered."""
        return len(self._measured)

    def most(self, quantity: int) -> float:
        """Return the largest remembered value of a quantity; 0 without measurements."""
        with self._lock:
            return max((quantities[quantity] for quantities, _ in self._measured), default=0.0)

    def least(self, quantity: int) -> float:
        """Return the smallest remembered value of a quantity; 0 without measurements."""
        with self._lock:
            return min((quantities[quantity] for quantities, _ in self._measured), default=0.0)

    def measured(self, quantities: Quantities, seconds: float) -> None:
        """Add a measurement. One without time, or without a quantity of at least 1, is ignored."""
        assert len(quantities) == self._num_quantities
        if seconds <= 0 or max(quantities) < 1:
            return
        with self._lock:
            self._note_whether_off(quantities, seconds)
            self._measured.append((quantities, seconds))
            self._unseen += 1
            if abs(self._off) >= _IN_A_ROW:
                self._off = 0
                self._fit()
                latest = list(islice(self._measured, len(self._measured) - _IN_A_ROW, None))
                if {self._side(*one) for one in latest} in ({1}, {-1}):
                    # No single cost explains both the old and the new measurements.
                    self._measured = deque(latest, _MOST)
                    self._fit()

    def _note_whether_off(self, quantities: Quantities, seconds: float) -> None:
        if self._costs is None and self._measured:
            self._fit()
        side = self._side(quantities, seconds)
        self._off = 0 if not side else max(self._off, 0) + 1 if side > 0 else min(self._off, 0) - 1

    def _side(self, quantities: Quantities, seconds: float) -> int:
        """Return 1 if it took far longer than predicted, -1 if far shorter, else 0."""
        if self._costs is None:
            return 0
        thought = sum(
            cost * quantity for cost, quantity in zip(self._costs, quantities, strict=True)
        )
        return 1 if seconds > _OFF * thought else -1 if seconds * _OFF < thought else 0

    def _fit(self) -> None:
        rows = np.array([quantities for quantities, _ in self._measured], np.float64)
        seconds = np.array([seconds for _, seconds in self._measured], np.float64)
        self._costs = tuple(
            fit(
                rows,
                seconds,
                np.power(_FADING, np.arange(len(seconds), dtype=np.float64))[::-1],
                self._subsets,
            ).tolist()
        )
        self._unseen = 0


def fit(
    rows: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    subsets: list[tuple[int, ...]],
) -> npt.NDArray[np.float64]:
    """Return costs [quantities], none negative, such that rows @ costs is near `seconds`.

    The error is the weighted mean of relative errors.

    rows:    [n, quantities]
    seconds: [n]
    weights: [n]
    subsets: which quantities may have a cost together, the preferred ones first

    Least absolute deviations by iteratively reweighted least squares (Schlossmacher 1973).
    """
    scales = np.abs(rows).max(axis=0)
    relative = rows / np.maximum(scales, 1.0) / seconds[:, None]
    tried: list[tuple[float, npt.NDArray[np.float64]]] = []
    for subset in subsets:
        columns = relative[:, subset]
        if (scales[list(subset)] >= 1).all() and (
            costs := _deviations(columns, weights)
        ) is not None:
            error = float(weights @ np.abs(columns @ costs - 1) / weights.sum())
            found = np.zeros(rows.shape[1])
            found[list(subset)] = costs / scales[list(subset)]
            tried.append((error, found))
    best = min((error for error, _ in tried), default=0.0)
    return next(
        (found for error, found in tried if error <= best + _ALIKE), np.zeros(rows.shape[1])
    )


def _deviations(
    columns: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64] | None:
    """Return costs for which each row's sum is near 1.

    Returns None if a cost would be negative, or if the rows do not determine the costs.
    """
    factors, costs = weights, np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        weighted = columns * factors[:, None]
        try:
            costs = np.linalg.solve(weighted.T @ columns, weighted.sum(axis=0))
        except np.linalg.LinAlgError:
            return None
        factors = weights / np.maximum(np.abs(columns @ costs - 1), _LEAST_ERROR)
    return costs if np.isfinite(costs).all() and (costs >= 0).all() else None
