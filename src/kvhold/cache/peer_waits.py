"""Lookups that wait for an engine of another host (docs/decisions/0037). No I/O."""

from collections.abc import Callable

from kvhold.cache.computing import PeerWait, WaitEnd
from kvhold.cache.index.presence import Extent
from kvhold.cache.transfer.search import Search
from kvhold.core.keys import HANDED_OVER, HASH_BYTES
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeIntent

_LEAST_S = 0.005
_PART = 0.02
_KEY_S = 50e-6  # asking takes 3 us


class PeerWaits:
    def __init__(self, metrics: Metrics, clock: Callable[[], float], *, has_peers: bool) -> None:
        self._metrics = metrics
        self._clock = clock
        self._has_peers = has_peers

    def has_some(self, intent: ComputeIntent | None) -> bool:
        return self._has_peers and intent is not None and intent.handover is not None

    def marked(self, search: Search) -> Search:
        last = search.query.hashes[-HASH_BYTES:]
        if last and self.has_some(search.intent):
            search.mark = search.query.namespace + last + HANDED_OVER
        return search

    def leave(self, search: Search) -> None:
        if not isinstance(search.wait, PeerWait):
            search.has_begun, search.asks_peers = True, False

    def next(self, search: Search, extent: Extent, waited_s: float) -> PeerWait | None:
        """None: all chunks have come, or no more will."""
        handover = None if search.intent is None else search.intent.handover
        if handover is None or not search.mark:
            return None
        is_computed = search.mark in search.places
        grace_s = 0.0 if search.has_begun else handover.grace_s
        search.has_begun = search.has_begun or is_computed
        longest_s = handover.timeout_s if is_computed else min(grace_s, handover.timeout_s)
        num_whole = len(search.query.hashes) // HASH_BYTES
        # the tail is stored last
        tail_tokens = max(search.query.tail_lengths, default=0) if is_computed else 0
        is_whole = extent.num_tokens >= num_whole * search.layout.tokens_per_chunk + tail_tokens
        if not (is_whole or search.faults) and waited_s < longest_s:
            search.asks_peers = True
            return PeerWait(
                self._clock(), max(_LEAST_S, _PART * waited_s, _KEY_S * search.num_keys)
            )
        if search.asks_peers:
            end = WaitEnd.DEADLINE if is_computed else WaitEnd.ENDED
            end = end if search.has_begun else WaitEnd.NOT_ANNOUNCED
            end = WaitEnd.STORED if is_whole else end
            self._metrics.add("kvhold_waited_for_computing", result=end)
            self._metrics.add("kvhold_waited_for_computing_seconds", waited_s)
        return None
