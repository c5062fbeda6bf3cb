from dataclasses import dataclass


@dataclass(frozen=True)
class PeersRow:
    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    goal: str


@dataclass(frozen=True)
class PeersSizes:
    """link_gbit_s: of a slower link
    layers:      of a chunk, 128 KiB each
    lookups:     in each round
    engine_rounds: of parts with engines, after one that does not count
    threads:     of each engine
    """

    rounds: int = 9
    link_gbit_s: float = 1.0
    layers: int = 16
    peers: int = 8
    chunks: int = 100_000
    lookups: int = 300
    events_s: int = 10_000
    event_s: float = 5.0
    engine_rounds: int = 3
    model: str = "mid"
    tokens: int = 4_000
    wire_mbit_s: float = 10_000.0
    threads: int = 1


def peers_row(name: str, value: float, unit: str, limit: float, goal: str) -> PeersRow:
    return PeersRow(name, round(value, 4), unit, round(limit, 4), round(value / limit, 4), goal)
