"""The tiers' loop writes. Any thread reads."""

import time
from collections.abc import Callable
from statistics import median

from kvhold.core.metrics import Metrics
from kvhold.core.rates import LastMinute
from kvhold.core.reasons import PEER_EVICTED
from kvhold.tiers.peers.faults import PeerFault

_MOST_TIMES = 64


class PeerRecord:
    def __init__(
        self, address: str, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address, self._metrics, self._clock = address, metrics, clock
        self.num_events = self.num_loads = self.num_chunks = self.num_absent = self.nbytes = 0
        self.events, self.loads, self.loaded_bytes = (LastMinute(clock) for _ in range(3))
        self._load_seconds: list[float] = []
        self.last_load_s: float | None = None
        self.last_fault: PeerFault | None = None
        self.last_fault_at_s = 0.0

    @property
    def median_load_s(self) -> float | None:
        """Of the last 64 loads."""
        times = list(self._load_seconds)
        return median(times) if times else None

    def close(self) -> None:
        self._metrics.forget("peer", self._address)
        self._metrics = Metrics()

    def changed(self, num_events: int) -> None:
        self.num_events += num_events
        self.events.add(num_events)
        self._metrics.add("kvhold_peer_events", num_events, peer=self._address)

    def indexed(self, num_chunks: int) -> None:
        self._metrics.set("kvhold_peer_index_chunks", num_chunks, peer=self._address)

    def loaded(self, seconds: float, *, num_chunks: int, nbytes: int, num_absent: int) -> None:
        self.num_loads += 1
        self.num_chunks += num_chunks
        self.num_absent += num_absent
        self.nbytes += nbytes
        self.loads.add(1)
        self.loaded_bytes.add(nbytes)
        self.last_load_s = seconds
        if len(self._load_seconds) < _MOST_TIMES:
            self._load_seconds.append(seconds)
        else:
            self._load_seconds[self.num_loads % _MOST_TIMES] = seconds
        metrics, peer = self._metrics, self._address
        metrics.add("kvhold_peer_loads", peer=peer, result="done")
        metrics.observe("kvhold_peer_load_seconds", seconds, peer=peer)
        metrics.add("kvhold_peer_loaded_chunks", num_chunks, peer=peer)
        metrics.add("kvhold_peer_loaded_bytes", nbytes, peer=peer)
        if num_absent:
            metrics.add("kvhold_peer_missed_chunks", num_absent, peer=peer, reason=PEER_EVICTED)

    def load_failed(self, fault: PeerFault, *, num_missed: int) -> None:
        self.num_loads += 1
        self.loads.add(1)
        self._metrics.add("kvhold_peer_loads", peer=self._address, result="failed")
        self._metrics.add(
            "kvhold_peer_missed_chunks", num_missed, peer=self._address, reason=fault.miss
        )
        self.failed(fault)

    def failed(self, fault: PeerFault) -> None:
        self.last_fault, self.last_fault_at_s = fault, self._clock()
        self._metrics.add("kvhold_peer_faults", peer=self._address, cause=fault.cause)
