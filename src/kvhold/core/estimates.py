"""Learn costs from times: seconds = the sum of cost * quantity.

The fit minimises relative errors. Three measurements far off to one side replace older ones. Any
thread.
"""

import threading
from collections import deque
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt

_MOST = 48
_FADING = 0.93  # weight of a measurement relative to the next
_ALIKE = 0.003
_ROUNDS = 8
_LEAST_ERROR = 1e-3  # smaller relative errors count alike
_OFF = 2.0
_IN_A_ROW = 3

Quantities = tuple[float, ...]


class Estimate:
    """A quantity that was never 1 or more has no cost."""

    def __init__(self, num_quantities: int) -> None:
        self._subsets = [
            s
            for size in range(1, num_quantities + 1)
            for s in combinations(range(num_quantities), size)
        ]
        self._num_quantities = num_quantities
        self._measured: deque[tuple[Quantities, float]] = deque(maxlen=_MOST)
        self._costs: Quantities | None = None
        self._unseen = 0
        self._off = 0
        self._lock = threading.Lock()

    @property
    def costs(self) -> Quantities | None:
        """Seconds per unit; None without measurements."""
        with self._lock:
            if self._unseen and self._unseen >= len(self._measured) // 8:
                self._fit()
            return self._costs

    @property
    def num_measured(self) -> int:
        return len(self._measured)

    def most(self, quantity: int) -> float:
        with self._lock:
            return max((quantities[quantity] for quantities, _ in self._measured), default=0.0)

    def least(self, quantity: int) -> float:
        with self._lock:
            return min((quantities[quantity] for quantities, _ in self._measured), default=0.0)

    def measured(self, quantities: Quantities, seconds: float) -> None:
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
                    self._measured = deque(latest, _MOST)
                    self._fit()

    def _note_whether_off(self, quantities: Quantities, seconds: float) -> None:
        if self._costs is None and self._measured:
            self._fit()
        side = self._side(quantities, seconds)
        self._off = 0 if not side else max(self._off, 0) + 1 if side > 0 else min(self._off, 0) - 1

    def _side(self, quantities: Quantities, seconds: float) -> int:
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
    """Costs [quantities], none negative, by least weighted relative errors.

    rows:             [n, quantities]
    seconds, weights: [n]
    subsets:          quantities with a cost, preferred first

    Iteratively reweighted least squares (Schlossmacher 1973).
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
    factors, costs = weights, np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        weighted = columns * factors[:, None]
        try:
            costs = np.linalg.solve(weighted.T @ columns, weighted.sum(axis=0))
        except np.linalg.LinAlgError:
            return None
        factors = weights / np.maximum(np.abs(columns @ costs - 1), _LEAST_ERROR)
    return costs if np.isfinite(costs).all() and (costs >= 0).all() else None
