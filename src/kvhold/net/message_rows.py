"""The base of messages, and rows of answers to operators."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    @property
    def operation(self) -> str:
        return type(self).__name__.lower()


class KnownSpace(msgspec.Struct, frozen=True, array_like=True):
    digest: bytes
    client: str
    description: bytes
    at_s: float
    nbytes: int = 0


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """As `core.metrics.Sample`; name: of its metric"""

    name: str
    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


class ClientInfo(msgspec.Struct, frozen=True):
    """nbytes: arena bytes in its leases and reservations"""

    number: int
    name: str
    pid: int
    alive: bool
    silent_s: float
    hits: int
    leases: int
    reservations: int
    nbytes: int
    ended: bool
    device: bool = False
    pinned_bytes: int = 0
