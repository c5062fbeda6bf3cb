from typing import TypedDict, cast

import msgspec

from kvhold.core.naming import unpack
from kvhold.net.messages import ClientInfo, KnownSpace


class ClientRow(TypedDict):
    """What a client holds.

    id:           such as c12
    alive:        its process runs
    silent_s:     since its latest message
    nbytes:       of its leases and reservations
    ended:        but still connected
    device:       a device copies for it
    pinned_bytes: registered with the device
    """

    id: str
    name: str
    pid: int
    alive: bool
    silent_s: float
    hits: int
    leases: int
    reservations: int
    nbytes: int
    ended: bool
    device: bool
    pinned_bytes: int


class NamespaceRow(TypedDict):
    """client: that registered it
    bytes:  in memory
    at_s:   Unix time of its registration
    """

    digest: str
    title: str
    client: str
    bytes: int
    at_s: float


class NamespaceFacts(NamespaceRow):
    """facts: by name"""

    facts: dict[str, str]


def client_id(client: ClientInfo) -> str:
    return f"c{client.number}"


def client_row(client: ClientInfo) -> ClientRow:
    fields = msgspec.structs.asdict(client)
    del fields["number"]
    return cast(ClientRow, {"id": client_id(client)} | fields)


def namespace_row(space: KnownSpace) -> NamespaceRow:
    return {
        "digest": space.digest.hex(),
        "title": unpack(space.description).title,
        "client": space.client,
        "bytes": space.nbytes,
        "at_s": space.at_s,
    }


def namespace_facts(space: KnownSpace) -> NamespaceFacts:
    return {**namespace_row(space), "facts": dict(unpack(space.description).facts)}
