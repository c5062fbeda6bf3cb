"""Opens after `failures` failures in a row. Success closes it; failure doubles the pause.

`next_try_s`: when to try in the background.
"""

_LONGEST_PAUSE_S = 30.0


class Breaker:
    def __init__(self, *, failures: int, first_pause_s: float) -> None:
        self._limit = failures
        self._first_pause_s = first_pause_s
        self._pause_s = first_pause_s
        self._failures = 0
        self.next_try_s: float | None = None

    @property
    def allows(self) -> bool:
        return self.next_try_s is None

    def succeeded(self) -> bool:
        closed = not self.allows
        self._failures, self._pause_s, self.next_try_s = 0, self._first_pause_s, None
        return closed

    def failed(self, now_s: float, *, for_good: bool = False) -> bool:
        """for_good: open at once, because retries cannot help."""
        self._failures += 1
        if not self.allows:
            if now_s >= (self.next_try_s or 0):
                self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
                self.next_try_s = now_s + self._pause_s
            return False
        if self._failures < self._limit and not for_good:
            return False
        self.next_try_s = now_s + self._pause_s
        return True
