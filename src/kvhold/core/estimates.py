"""What things cost, learnt from how long they took: seconds as a sum of non-negative costs, each times a quantity.

    reading = Estimate(2)                          # of a call, and of a byte
    reading.measured((1, 8 << 20), 0.09)
    reading.costs                                  # (0.001, 1.06e-08) once there is something to go by, else None

Robust: what is minimised is the sum of relative errors, not of their squares, so that a compile or a stalled machine does not spoil it.
Recent measurements count more, and where three in a row are off by a factor of two to the same side, those before them are forgotten: the
world has changed. Of explanations that fit alike the simplest is taken, quantities in their given order. Pure; any thread.
"""

import threading
from collections import deque
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt

_MOST = 48  # measurements remembered
_FADING = 0.93  # the weight of one beside that of the next
_ALIKE = 0.003  # explanations whose mean relative errors are no further apart
_ROUNDS = 8  # of reweighting
_LEAST_ERROR = 1e-3  # relative; a smaller one weighs no more
_OFF = 2.0
_IN_A_ROW = 3

Quantities = tuple[float, ...]


class Estimate:
    """Costs of so many quantities, which are counts: one that was never 1 or more has no cost."""

    def __init__(self, num_quantities: int) -> None:
        self._subsets = [s for size in range(1, num_quantities + 1) for s in combinations(range(num_quantities), size)]
        self._num_quantities = num_quantities
        self._measured: deque[tuple[Quantities, float]] = deque(maxlen=_MOST)
        self._costs: Quantities | None = None
        self._unseen = 0  # measurements since the costs were fitted
        self._off = 0  # measurements in a row that were off to one side; negative: it went faster than thought
        self._lock = threading.Lock()

    @property
    def costs(self) -> Quantities | None:
        """Seconds for one of each quantity; None while nothing was measured."""
        with self._lock:
            if self._unseen and self._unseen >= len(self._measured) // 8:  # each is a smaller part of what is known
                self._fit()
            return self._costs

    @property
    def num_measured(self) -> int:
        """How many measurements it remembers."""
        return len(self._measured)

    def most(self, quantity: int) -> float:
        """The largest that was measured of a quantity, of those remembered; 0 if none was."""
        with self._lock:
            return max((quantities[quantity] for quantities, _ in self._measured), default=0.0)

    def least(self, quantity: int) -> float:
        """The smallest; 0 if none was."""
        with self._lock:
            return min((quantities[quantity] for quantities, _ in self._measured), default=0.0)

    def measured(self, quantities: Quantities, seconds: float) -> None:
        """It took so long. What took no time at all, or has no quantity, says nothing."""
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
                    self._measured = deque(latest, _MOST)  # no one cost explains what was before and what is now
                    self._fit()

    def _note_whether_off(self, quantities: Quantities, seconds: float) -> None:
        if self._costs is None and self._measured:
            self._fit()
        side = self._side(quantities, seconds)
        self._off = 0 if not side else max(self._off, 0) + 1 if side > 0 else min(self._off, 0) - 1

    def _side(self, quantities: Quantities, seconds: float) -> int:
        """1: it took far longer than thought; -1: it went far faster; 0: neither."""
        if self._costs is None:
            return 0
        thought = sum(cost * quantity for cost, quantity in zip(self._costs, quantities, strict=True))
        return 1 if seconds > _OFF * thought else -1 if seconds * _OFF < thought else 0

    def _fit(self) -> None:
        rows = np.array([quantities for quantities, _ in self._measured], np.float64)
        seconds = np.array([seconds for _, seconds in self._measured], np.float64)
        self._costs = tuple(fit(rows, seconds, np.power(_FADING, np.arange(len(seconds), dtype=np.float64))[::-1], self._subsets).tolist())
        self._unseen = 0


def fit(
    rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], subsets: list[tuple[int, ...]]
) -> npt.NDArray[np.float64]:
    """[quantities] costs, none negative, such that rows @ costs is near `seconds`, by weighted relative errors.

    rows: [n, quantities]; seconds, weights: [n]; subsets: which quantities may have a cost together, the explanation liked best first

    Least absolute deviations by iteratively reweighted least squares (Schlossmacher 1973).
    """
    scales = np.abs(rows).max(axis=0)
    relative = rows / np.maximum(scales, 1.0) / seconds[:, None]
    tried: list[tuple[float, npt.NDArray[np.float64]]] = []
    for subset in subsets:
        columns = relative[:, subset]
        if (scales[list(subset)] >= 1).all() and (costs := _deviations(columns, weights)) is not None:
            error = float(weights @ np.abs(columns @ costs - 1) / weights.sum())
            found = np.zeros(rows.shape[1])
            found[list(subset)] = costs / scales[list(subset)]
            tried.append((error, found))
    best = min((error for error, _ in tried), default=0.0)
    return next((found for error, found in tried if error <= best + _ALIKE), np.zeros(rows.shape[1]))


def _deviations(columns: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """Costs with which each row's sum is near 1; None where one of them would be negative, or nothing tells them apart."""
    factors, costs = weights, np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        weighted = columns * factors[:, None]
        try:
            costs = np.linalg.solve(weighted.T @ columns, weighted.sum(axis=0))
        except np.linalg.LinAlgError:
            return None
        factors = weights / np.maximum(np.abs(columns @ costs - 1), _LEAST_ERROR)
    return costs if np.isfinite(costs).all() and (costs >= 0).all() else None
