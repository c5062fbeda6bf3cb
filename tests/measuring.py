"""Lines are measured in the first part of each test: measuring doubles the time of a long one, and
by then it has run most of its lines. Its child processes are measured to their end.
"""

import sys
import threading
from time import process_time, sleep  # not those that a test has patched
from typing import Any

MEASURED_S = 0.25  # CPU time of the process
_LOOK_S = 0.05


def measured() -> Any:
    """This process's measurement, or None."""
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None


class Measuring:
    """A timer of the process would do, but makes its CPU clock coarse, which tests read."""

    def __init__(self, measurement: Any) -> None:
        # no public call pauses without leaving another handler behind
        self._lines = measurement._collector
        self._lock = threading.Lock()
        self._is_paused = self._is_closed = False
        self._until_s = float("inf")
        threading.Thread(target=self._watch, daemon=True, name="measuring").start()

    def begin(self) -> None:
        """Measure, for `MEASURED_S`."""
        with self._lock:
            self._until_s = process_time() + MEASURED_S
            self._resume()

    def end(self) -> None:
        """Measure, or not, as at the end of the test."""
        with self._lock:
            self._until_s = float("inf")

    def close(self) -> None:
        """Measure until the process ends: `coverage` stops what must have been started."""
        with self._lock:
            self._is_closed = True
            self._resume()

    def _resume(self) -> None:
        if self._is_paused:
            self._lines.start()
        self._is_paused = False

    def _watch(self) -> None:
        while not self._is_closed:
            sleep(_LOOK_S)
            with self._lock:
                is_late = process_time() > self._until_s
                if is_late and not self._is_paused and not self._is_closed:
                    self._is_paused = True
                    self._lines.stop()
