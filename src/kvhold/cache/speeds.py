"""The speed of a tier, learned from the reads of requests, and estimates for the next read.

    speed.ordered(nbytes, now_s); speed.ended(nbytes, now_s)  # each read: queue, tier, checks,
    until it is visible speed.wait_s(nbytes)  # for so many more bytes, behind the reads in progress

It measures the time in which reads were in progress, and the bytes that arrived in that time. These
are bytes in memory, so a codec's ratio and speed are included. A tier that was never read has no
estimate, and gets pieces of growing size. The caller passes all times, from a monotonic clock.
Pure.
"""

from dataclasses import dataclass

import numpy as np

from kvhold.core.estimates import Estimate
from kvhold.core.planning import Floats, Ints

_PIECE_S = 1.0  # continuous reading is measured in pieces of this length
_TOGETHER_S = 0.001  # reads that end within this time ended in one call
_GROWTH = 8  # at most this many times the largest measured piece is ordered at once
_LATE = 1.5  # times the estimate: beyond it, a read is late and not just unlucky
_ALIKE = 2  # reads count as one size up to this ratio
# an unknown tier takes this many times as long again: the wait is at most an eighth of computing
_DOUBT = 8
_FEW = 3  # fewer reads do not separate the cost of a call from that of a byte
_STALE_S = 30.0
# times the last read: retries of a slow tier take at most a twentieth of its time
_STALE_READS = 20.0


@dataclass
class _Piece:
    """Reading without a pause.

    call: 1 if it began with an idle tier, whose first answer takes longer; else 0
    """

    began_s: float
    call: float
    nbytes: int = 0
    whole: bool = True


class TierSpeed:
    """The speed of one tier.

    ordered_bytes: all bytes ever ordered
    ended_bytes:   those that have arrived or failed
    """

    def __init__(self) -> None:
        self.ordered_bytes = 0
        self.ended_bytes = 0
        self._estimate = Estimate(2)
        self._piece: _Piece | None = None
        self._last_s = -np.inf  # the last end of a read, or the last order to an idle tier
        self._last_took_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a read was ever measured."""
        return self._estimate.costs is not None

    @property
    def costs(self) -> tuple[float, float] | None:
        """Seconds per call, and per byte; None if unknown."""
        costs = self._estimate.costs
        return (costs[0], costs[1]) if costs is not None else None

    @property
    def most_bytes(self) -> int:
        """The most bytes to order at once, because estimates hold only near measured sizes.

        0: order the least that is possible.
        """
        return int(_GROWTH * self._estimate.most(1))

    def is_stale(self, now_s: float) -> bool:
        """Return whether it is time for a small read without a waiting request.

        Such a read keeps a bad estimate from staying for ever.
        """
        idle = self.ordered_bytes == self.ended_bytes
        return idle and now_s - self._last_s > max(_STALE_S, _STALE_READS * self._last_took_s)

    def ordered(self, nbytes: int, now_s: float) -> None:
        """Note that a read begins."""
        if self.ordered_bytes == self.ended_bytes:
            self._piece, self._last_s = _Piece(now_s, 1.0), now_s
        self.ordered_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, *, ok: bool = True) -> None:
        """Note that bytes have arrived or failed. A failure says nothing about speed."""
        piece = self._piece
        assert piece is not None and self.ended_bytes < self.ordered_bytes, (
            "nothing ends that was not ordered"
        )
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
        """Return the seconds until so many more bytes arrive, if they are ordered now: [n].

        0 for no bytes, and if the costs are unknown.
        """
        costs = self._estimate.costs
        if costs is None:
            return np.zeros(len(nbytes))
        before = self.ordered_bytes - self.ended_bytes
        waits: Floats = np.where(nbytes > 0, costs[0] + (before + nbytes) * costs[1], 0.0)
        return waits

    def left_s(self, until_bytes: int, now_s: float, *, more_bytes: int = 0) -> float:
        """Return the seconds until the mark `until_bytes` is reached, and `more_bytes` after it.

        `until_bytes` counts all bytes ever ordered; `more_bytes` are not ordered yet. If nothing
        has arrived for far longer than estimated, assume as long again as that silence. For a tier
        with few measured reads, or far more bytes than were ever read at once, assume eight times
        that silence. This is capped by the time that the bytes take if the whole time of earlier
        reads was due to bytes, unless the read is late by that measure, too.
        """
        left = until_bytes - self.ended_bytes
        if left <= 0:
            return 0.0
        silent_s = now_s - self._last_s
        costs = self._estimate.costs
        if costs is None:
            return _DOUBT * silent_s
        byte_s = self._byte_s(*costs)
        thought_s = (
            costs[0] if self._piece is not None and not self._piece.nbytes else 0.0
        ) + left * byte_s
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
        """Whether too few reads were measured to separate the cost of a call from a byte's."""
        return self._estimate.num_measured < _FEW

    def _is_far_beyond(self, nbytes: int) -> bool:
        """Return whether `nbytes` is far more than was ever read at once, by reads of one size.

        Reads of one size do not separate the cost of a call from that of a byte.
        """
        most, least = self._estimate.most(1), self._estimate.least(1)
        return most < _ALIKE * least and nbytes > _ALIKE * most

    def _byte_s(self, call_s: float, byte_s: float) -> float:
        """Return the seconds per byte that is still to arrive.

        For a new tier, use the current piece if it is far slower than estimated. For a known tier
        this would mislead: of concurrent calls the first ends late, and the others right after it.
        """
        piece = self._piece
        if piece is None or not piece.nbytes or not self._is_new:
            return byte_s
        took_s = self._last_s - piece.began_s
        return (
            took_s / piece.nbytes
            if took_s > _LATE * (piece.call * call_s + piece.nbytes * byte_s)
            else byte_s
        )

    def _note(self, piece: _Piece, end_s: float) -> None:
        self._last_took_s = end_s - piece.began_s
        if piece.whole:
            self._estimate.measured((piece.call, float(piece.nbytes)), end_s - piece.began_s)
