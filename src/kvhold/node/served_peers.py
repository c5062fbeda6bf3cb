"""For `kvhold peers` and metrics. At most 32; a new one replaces the one that left first.

Written in the peers' loop; any thread reads.
"""

import time
from collections.abc import Callable

from kvhold.core.errors import ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.core.rates import LastMinute
from kvhold.core.status import RefusedPeerStatus, ServedPeerStatus
from kvhold.net.login import quoted
from kvhold.net.peers import Introduce
from kvhold.net.stream import Address
from kvhold.tiers.peers.index import MOST_PEERS

_MOST_NAME = 64
_MOST_REFUSED = 16
OTHERS = "others"


class ServedPeer:
    """A node that reads here.

    address: with its port, if it serves peers
    """

    def __init__(
        self, address: str, name: str, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.address, self.name = address, name
        self._metrics, self._clock = metrics, clock
        self.connections = self.following = 0
        self.since_s = clock()
        self.chunks = self.absent = self.nbytes = 0
        self._recent_bytes = LastMinute(clock)

    def sent(self, num_chunks: int, nbytes: int, *, absent: int) -> None:
        self.chunks += num_chunks
        self.absent += absent
        self.nbytes += nbytes
        self._recent_bytes.add(nbytes)
        add = self._metrics.add
        add("kvhold_peer_served_chunks", num_chunks, peer=self.address, result="sent")
        add("kvhold_peer_served_chunks", absent, peer=self.address, result="absent")
        add("kvhold_peer_served_bytes", nbytes, peer=self.address)

    def waited(self, seconds: float) -> None:
        self._metrics.add("kvhold_peer_served_wait_seconds", seconds, peer=self.address)

    def status(self, in_flight_bytes: int) -> ServedPeerStatus:
        return {
            "address": self.address,
            "name": self.name,
            "connections": self.connections,
            "follows": self.following > 0,
            "state_s": round(self._clock() - self.since_s, 3),
            "chunks": self.chunks,
            "absent_chunks": self.absent,
            "bytes": self.nbytes,
            "bytes_per_s": round(self._recent_bytes.per_s, 1),
            "in_flight_bytes": in_flight_bytes,
        }


class _Refused:
    def __init__(self) -> None:
        self.reason, self.times, self.at_s = "", 0, 0.0


class ServedPeers:
    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._peers: dict[tuple[str, str], ServedPeer] = {}
        self._others = ServedPeer(OTHERS, "", metrics, clock)
        self._refused: dict[str, _Refused] = {}

    def joined(self, host: str, introduction: Introduce | None) -> ServedPeer:
        """Raises ProtocolError: no such port."""
        name, address = "", host
        if introduction is not None:
            name = quoted(introduction.name, _MOST_NAME)
            if not 0 <= introduction.port <= 65535:
                raise ProtocolError(f"a peer on port {introduction.port}; 0 to 65535 are ports")
            if introduction.port:
                address = str(Address(host, introduction.port))
        peer = self._peers.get((address, name)) or self._new(address, name)
        if not peer.connections:
            peer.since_s = self._clock()
        peer.connections += 1
        return peer

    def left(self, peer: ServedPeer) -> None:
        peer.connections -= 1
        if not peer.connections:
            peer.since_s = self._clock()

    def refused(self, host: str, reason: str) -> None:
        refused = self._refused.pop(host, None) or _Refused()
        refused.reason, refused.at_s = quoted(reason), self._clock()
        refused.times += 1
        self._refused[host] = refused
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def status(self, in_flight: Callable[[ServedPeer], int]) -> list[ServedPeerStatus]:
        peers = list(self._peers.values())
        others = [self._others] if self._others.connections or self._others.chunks else []
        return [peer.status(in_flight(peer)) for peer in (*peers, *others)]

    def status_of_refused(self) -> list[RefusedPeerStatus]:
        now_s = self._clock()
        return [
            {
                "address": host,
                "reason": refused.reason,
                "times": refused.times,
                "ago_s": round(now_s - refused.at_s, 3),
            }
            for host, refused in reversed(list(self._refused.items()))
        ]

    def _new(self, address: str, name: str) -> ServedPeer:
        if len(self._peers) >= MOST_PEERS:
            gone = [key for key, peer in self._peers.items() if not peer.connections]
            if not gone:
                return self._others
            oldest = min(gone, key=lambda key: self._peers[key].since_s)
            self._metrics.forget("peer", self._peers.pop(oldest).address)
        peer = self._peers[address, name] = ServedPeer(address, name, self._metrics, self._clock)
        return peer
