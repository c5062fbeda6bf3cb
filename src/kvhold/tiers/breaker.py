"""A circuit breaker: whether a tier is used at all. Pure; the clock is the caller's.

breaker.allows                                # closed: calls go through
breaker.succeeded(); breaker.failed(now_s)    # after `failures` failures in a row it opens: calls cost nothing any more
breaker.next_try_s                            # when to try in the background: a success closes it, a failure doubles the pause
"""

_LONGEST_PAUSE_S = 30.0


class Breaker:
    """Closed at first."""

    def __init__(self, *, failures: int, first_pause_s: float) -> None:
        self._limit = failures
        self._first_pause_s = first_pause_s
        self._pause_s = first_pause_s
        self._failures = 0
        self.next_try_s: float | None = None

    @property
    def allows(self) -> bool:
        """Whether calls go through."""
        return self.next_try_s is None

    def succeeded(self) -> bool:
        """True if that closed it."""
        closed = not self.allows
        self._failures, self._pause_s, self.next_try_s = 0, self._first_pause_s, None
        return closed

    def failed(self, now_s: float, *, for_good: bool = False) -> bool:
        """True if that opened it. for_good: trying once more is of no use now, as with wrong credentials."""
        self._failures += 1
        if not self.allows:  # the background's try, or a call that was under way when it opened
            if now_s >= (self.next_try_s or 0):
                self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
                self.next_try_s = now_s + self._pause_s
            return False
        if self._failures < self._limit and not for_good:
            return False
        self.next_try_s = now_s + self._pause_s
        return True
