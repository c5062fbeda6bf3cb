"""The speed of a tier, learned from requests' reads. Pure, with one monotonic clock.

Bytes count as in memory, so a codec's ratio and speed are included.
"""

from dataclasses import dataclass

import numpy as np

from kvhold.core.estimates import Estimate
from kvhold.core.planning import Floats, Ints

_PIECE_S = 1.0
_TOGETHER_S = 0.001  # reads that end this close together were one call
_GROWTH = 8  # request at most this many times the largest measured piece
_LATE = 1.5  # a read is late when it takes this many times its estimate
_ALIKE = 2  # reads within this ratio have one size
# a new tier's read may take this many times its silence
_DOUBT = 8
_FEW = 3  # fewer reads do not separate costs per call and byte
_STALE_S = 30.0
# pause, in durations of the last read
_STALE_READS = 20.0


@dataclass
class _Piece:
    """Reads without a pause.

    call:  1 if the tier was idle before, so the time includes a call's cost; else 0
    """

    began_s: float
    call: float
    nbytes: int = 0
    whole: bool = True


class TierSpeed:
    def __init__(self) -> None:
        self.requested_bytes = 0
        self.ended_bytes = 0
        self._estimate = Estimate(2)
        self._piece: _Piece | None = None
        self._last_s = -np.inf
        self._last_took_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._estimate.costs is not None

    @property
    def costs(self) -> tuple[float, float] | None:
        costs = self._estimate.costs
        return (costs[0], costs[1]) if costs is not None else None

    @property
    def most_bytes(self) -> int:
        """Limit requests: estimates hold only near measured sizes."""
        return int(_GROWTH * self._estimate.most(1))

    def is_stale(self, now_s: float) -> bool:
        idle = self.requested_bytes == self.ended_bytes
        return idle and now_s - self._last_s > max(_STALE_S, _STALE_READS * self._last_took_s)

    def requested(self, nbytes: int, now_s: float) -> None:
        if self.requested_bytes == self.ended_bytes:
            self._piece, self._last_s = _Piece(now_s, 1.0), now_s
        self.requested_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, *, ok: bool = True) -> None:
        piece = self._piece
        assert piece is not None and self.ended_bytes < self.requested_bytes, (
            "a read ended that was not requested"
        )
        if now_s - self._last_s > _TOGETHER_S and self._last_s - piece.began_s >= _PIECE_S:
            self._note(piece, self._last_s)
            piece = self._piece = _Piece(self._last_s, 0.0)
        self.ended_bytes += nbytes
        piece.nbytes += nbytes
        piece.whole &= ok
        self._last_s = now_s
        if self.ended_bytes == self.requested_bytes:
            self._note(piece, now_s)
            self._piece = None

    def wait_s(self, nbytes: Ints) -> Floats:
        """[n] seconds until `nbytes` [n] more bytes arrive; 0: unknown."""
        costs = self._estimate.costs
        if costs is None:
            return np.zeros(len(nbytes))
        before = self.requested_bytes - self.ended_bytes
        waits: Floats = np.where(nbytes > 0, costs[0] + (before + nbytes) * costs[1], 0.0)
        return waits

    def left_s(self, until_bytes: int, now_s: float, *, more_bytes: int = 0) -> float:
        """Seconds until `ended_bytes` reaches `until_bytes`, plus `more_bytes`.

        A late read should take as long again as the tier's silence, or eight times that after few
        measurements, but at most by `slowest_byte_s`.
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
        return self._estimate.num_measured < _FEW

    def _is_far_beyond(self, nbytes: int) -> bool:
        most, least = self._estimate.most(1), self._estimate.least(1)
        return most < _ALIKE * least and nbytes > _ALIKE * most

    def _byte_s(self, call_s: float, byte_s: float) -> float:
        """Of concurrent calls to a new tier, the first ends late, the others right after it."""
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
