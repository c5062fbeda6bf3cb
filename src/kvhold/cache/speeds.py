"""How fast a tier is, learnt from the reads that requests wait for, and how long the next one would take.

    speed.ordered(nbytes, now_s); speed.ended(nbytes, now_s)      # each read, all of its way: queue, tier, checks, until it is visible
    speed.wait_s(nbytes)                                          # for so many more bytes, behind those that are on their way

What is measured is the time in which something was being read, and what came in it: as bytes in memory, so that a codec's ratio and speed
are part of it. A tier that was never read has no estimate, and is given pieces that grow. Times are a monotonic clock's, given. Pure.
"""

from dataclasses import dataclass

import numpy as np

from kvhold.core.estimates import Estimate
from kvhold.core.planning import Floats, Ints

_PIECE_S = 1.0  # reading that goes on is measured in pieces of so long
_TOGETHER_S = 0.001  # what ends within so long came in one call
_GROWTH = 8  # of what was seen to come at once, the most that is ordered at once
_LATE = 1.5  # times as long as was thought: no longer a matter of chance
_ALIKE = 2  # reads whose sizes are no further apart are of one size
_DOUBT = 8  # times as long again: nobody waits for what nobody knows longer than an eighth of what computing takes
_FEW = 3  # reads that tell nothing yet but how long they took
_STALE_S = 30.0
_STALE_READS = 20.0  # so many times as long as the last read took: trying a slow tier anew takes no more than a twentieth of its time


@dataclass
class _Piece:
    """Reading without a pause. call: 1 where it began with an idle tier, whose first answer takes longer."""

    began_s: float
    call: float
    nbytes: int = 0
    whole: bool = True


class TierSpeed:
    """One tier's. ordered_bytes, ended_bytes: all that was ever ordered, and all of it that has come, or failed."""

    def __init__(self) -> None:
        self.ordered_bytes = 0
        self.ended_bytes = 0
        self._estimate = Estimate(2)
        self._piece: _Piece | None = None
        self._last_s = -np.inf  # when something ended, or was ordered of an idle tier
        self._last_took_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was ever read."""
        return self._estimate.costs is not None

    @property
    def costs(self) -> tuple[float, float] | None:
        """Seconds of a call, and of a byte; None where nobody knows."""
        costs = self._estimate.costs
        return (costs[0], costs[1]) if costs is not None else None

    @property
    def most_bytes(self) -> int:
        """How much to order at once: no estimate reaches far beyond what was measured. 0: the least that can be ordered."""
        return int(_GROWTH * self._estimate.most(1))

    def is_stale(self, now_s: float) -> bool:
        """Whether it is time for a small read that nobody waits for, so that an estimate cannot stay bad for ever."""
        idle = self.ordered_bytes == self.ended_bytes
        return idle and now_s - self._last_s > max(_STALE_S, _STALE_READS * self._last_took_s)

    def ordered(self, nbytes: int, now_s: float) -> None:
        """A read begins."""
        if self.ordered_bytes == self.ended_bytes:
            self._piece, self._last_s = _Piece(now_s, 1.0), now_s
        self.ordered_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, *, ok: bool = True) -> None:
        """Of what was ordered, so much is here, or has failed; a failure says nothing about speed."""
        piece = self._piece
        assert piece is not None and self.ended_bytes < self.ordered_bytes, "nothing ends that was not ordered"
        if now_s - self._last_s > _TOGETHER_S and self._last_s - piece.began_s >= _PIECE_S:
            self._note(piece, self._last_s)
            piece = self._piece = _Piece(self._last_s, 0.0)
        self.ended_bytes += nbytes
        piece.nbytes += nbytes
        piece.whole &= ok
        self._last_s = now_s
        if self.ended_bytes == self.ordered_bytes:
            self._note(piece, now_s)
            self._piece = None

    def wait_s(self, nbytes: Ints) -> Floats:
        """[n] seconds until so many more bytes would be here, if they were ordered now; 0 for none, and where nobody knows."""
        costs = self._estimate.costs
        if costs is None:
            return np.zeros(len(nbytes))
        before = self.ordered_bytes - self.ended_bytes
        waits: Floats = np.where(nbytes > 0, costs[0] + (before + nbytes) * costs[1], 0.0)
        return waits

    def left_s(self, until_bytes: int, now_s: float, *, more_bytes: int = 0) -> float:
        """Seconds until of all that was ordered `until_bytes` will have come, and then `more_bytes` that are not ordered yet.

        Where nothing has come for far longer than was thought: as long again as that has lasted by now. While a tier is hardly known, or
        so much was never read of it: eight times as long, but no longer than if what its reads took was all due to their bytes, unless
        that would be late, too.
        """
        left = until_bytes - self.ended_bytes
        if left <= 0:
            return 0.0
        silent_s = now_s - self._last_s
        costs = self._estimate.costs
        if costs is None:
            return _DOUBT * silent_s
        byte_s = self._byte_s(*costs)
        thought_s = (costs[0] if self._piece is not None and not self._piece.nbytes else 0.0) + left * byte_s
        if silent_s > _LATE * thought_s:
            if not self._is_new and not self._is_far_beyond(left):
                return silent_s + more_bytes * byte_s
            doubted_s = _DOUBT * silent_s + more_bytes * byte_s
            slowest_byte_s = costs[0] / self._estimate.most(1) + costs[1]
            is_slower = silent_s > _LATE * left * slowest_byte_s
            return doubted_s if is_slower else min(doubted_s, (left + more_bytes) * slowest_byte_s)
        return max(thought_s - silent_s, thought_s / 4) + more_bytes * byte_s

    @property
    def _is_new(self) -> bool:
        """Whether so few reads were measured that what a call takes, and what a byte, cannot be told apart."""
        return self._estimate.num_measured < _FEW

    def _is_far_beyond(self, nbytes: int) -> bool:
        """Whether it is far more than was ever read at once, by reads of one size, which do not tell a call from its bytes either."""
        most, least = self._estimate.most(1), self._estimate.least(1)
        return most < _ALIKE * least and nbytes > _ALIKE * most

    def _byte_s(self, call_s: float, byte_s: float) -> float:
        """Seconds of a byte that is still to come. While a tier is hardly known: as in what has come since reading began, if that took far
        longer than was thought. Later it would mislead: of calls under way together the first ends late, the others right after it."""
        piece = self._piece
        if piece is None or not piece.nbytes or not self._is_new:
            return byte_s
        took_s = self._last_s - piece.began_s
        return took_s / piece.nbytes if took_s > _LATE * (piece.call * call_s + piece.nbytes * byte_s) else byte_s

    def _note(self, piece: _Piece, end_s: float) -> None:
        self._last_took_s = end_s - piece.began_s
        if piece.whole:
            self._estimate.measured((piece.call, float(piece.nbytes)), end_s - piece.began_s)
