"""Which of several peers is expected to send first."""

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

_MOST_LOADS = 15
_RECENT_S = 30.0
_LEAST_BYTES = 64 << 10  # less is mostly latency


class PeerSpeed:
    def __init__(self) -> None:
        self._loads: deque[tuple[float, float]] = deque(maxlen=_MOST_LOADS)

    def add(self, seconds: float, nbytes: int, at_s: float) -> None:
        if nbytes >= _LEAST_BYTES:
            self._loads.append((at_s, seconds / nbytes))

    def forget(self) -> None:
        self._loads.clear()

    def seconds_per_byte(self, now_s: float) -> float | None:
        while self._loads and self._loads[0][0] < now_s - _RECENT_S:
            self._loads.popleft()
        return median(seconds for _, seconds in self._loads) if self._loads else None


class PeerQueues:
    """speeds: seconds a byte"""

    def __init__(self, speeds: Mapping[int, float | None], asked_bytes: Mapping[int, int]) -> None:
        self._speeds = speeds
        self._asked_bytes = dict(asked_bytes)
        self._slowest = max((one for one in speeds.values() if one), default=1.0)

    def put(self, nbytes: int, peers: Iterable[int]) -> int:
        """Returns the peer. An unknown one is tried."""
        number = min(peers, key=lambda number: self._seconds(number, nbytes))
        self._asked_bytes[number] += nbytes
        return number

    def _seconds(self, number: int, nbytes: int) -> float:
        speed, asked = self._speeds[number], self._asked_bytes[number]
        if speed is None and not asked:
            return 0.0
        return (asked + nbytes) * (speed or self._slowest)
