"""The nodes that read a node's chunks, and those that were refused."""

import pytest

from kvhold.core.errors import ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.net.peers import Introduce
from kvhold.node.served_peers import ServedPeers


class Served:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.metrics = Metrics()
        self.peers = ServedPeers(self.metrics, lambda: self.now_s)

    def status(self) -> dict[str, object]:
        return {one["address"]: one for one in self.peers.status(lambda peer: 0)}

    def join(self, number: int) -> object:
        return self.peers.joined(f"10.0.0.{number}", Introduce(f"host-{number}", 7711))


def test_the_connections_of_one_peer_count_together() -> None:
    served = Served()
    first = served.peers.joined("10.0.0.4", Introduce("host-a", 7711))
    served.now_s += 10
    assert served.peers.joined("10.0.0.4", Introduce("host-a", 7711)) is first
    first.sent(3, 3000, absent=1)
    served.now_s += 10
    [one] = served.peers.status(lambda peer: 7)
    assert one == {
        "address": "10.0.0.4:7711",
        "name": "host-a",
        "connections": 2,
        "follows": False,
        "state_s": 20.0,
        "chunks": 3,
        "absent_chunks": 1,
        "bytes": 3000,
        "bytes_per_s": 150.0,
        "in_flight_bytes": 7,
    }
    for _ in range(2):
        served.peers.left(first)
    served.now_s += 5
    [one] = served.peers.status(lambda peer: 0)
    assert (one["connections"], one["state_s"]) == (0, 5.0)


def test_two_followers_behind_one_address_are_told_apart_by_their_names() -> None:
    served = Served()
    one, other = (served.peers.joined("::1", Introduce(name, 0)) for name in ("a", "b"))
    assert one is not other
    assert one.address == "::1"
    assert served.peers.joined("::1", Introduce("a", 7711)).address == "[::1]:7711"
    assert served.peers.joined("::1", None).name == ""


def test_32_peers_are_told_apart() -> None:
    served = Served()
    peers = [served.join(number) for number in range(33)]
    for peer in peers:
        peer.sent(1, 10, absent=0)  # type: ignore[attr-defined]
    assert len(served.status()) == 33
    assert served.status()["others"]["chunks"] == 1  # type: ignore[index]
    assert served.metrics.value("kvhold_peer_served_bytes", peer="others") == 10


def test_a_new_peer_replaces_the_one_that_left_first_also_in_the_metrics() -> None:
    served = Served()
    peers = [served.join(number) for number in range(32)]
    for number in (7, 3):
        peers[number].sent(1, 10, absent=0)  # type: ignore[attr-defined]
        served.now_s += 1
        served.peers.left(peers[number])  # type: ignore[arg-type]
    served.join(99)
    assert "10.0.0.7:7711" not in served.status()
    assert {"10.0.0.3:7711", "10.0.0.99:7711"} < served.status().keys()
    told = "".join(served.metrics.as_dict())
    assert "10.0.0.7" not in told
    assert "10.0.0.3" in told


def test_refused_hosts_are_listed_with_their_latest_reason() -> None:
    served = Served()
    for number in range(20):
        served.peers.refused(f"10.0.0.{number}", "the token is wrong")
        served.now_s += 1
    served.peers.refused("10.0.0.19", "bad\n" + 300 * "x")
    refused = served.peers.status_of_refused()
    assert len(refused) == 16
    assert refused[0] == {
        "address": "10.0.0.19",
        "reason": "bad?" + 196 * "x",
        "times": 2,
        "ago_s": 0.0,
    }
    assert refused[1]["ago_s"] == 2.0


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(ProtocolError, match="port -1"):
        Served().peers.joined("10.0.0.1", Introduce("a", -1))
