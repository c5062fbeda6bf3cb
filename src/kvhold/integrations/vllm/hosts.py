"""On each host but the scheduler's, a worker relays lookups to its node."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvhold.core.errors import LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.naming import Facts
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.node.span import RelayPlace

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_AUTO = "auto"


@dataclass(frozen=True)
class NodePlace(KVConnectorHandshakeMetadata):
    """boot:     of the host's last start
    folder:   device and inode of the socket's folder, to tell containers apart
    layout:   fingerprint of the worker's layout
    relay:    the worker's address; empty: none
    """

    boot: str
    folder: tuple[int, int]
    socket: str
    layout: bytes = b""
    facts: tuple[tuple[str, str], ...] = ()
    relay: str = ""
    token: str = field(default="", repr=False)
    uses_tls: bool = False
    blend: str = ""

    def is_same_node(self, other: "NodePlace") -> bool:
        return (self.boot, self.folder) == (other.boot, other.folder)


@dataclass(frozen=True)
class WorkerHost:
    """ranks: of the workers on this host, in order
    place: of the worker that relays
    """

    ranks: tuple[int, ...]
    place: NodePlace
    is_own: bool

    @property
    def name(self) -> str:
        return f"the host of worker {self.ranks[0]}"

    def shards(self, geometry: Geometry) -> tuple[int, ...]:
        return tuple(sorted({shard for rank in self.ranks for shard in geometry.held_by(rank)}))

    def storers(self, geometry: Geometry) -> Iterable[int]:
        stored: set[int] = set()
        for rank in self.ranks:
            if not stored.issuperset(held := geometry.held_by(rank)):
                stored.update(held)
                yield rank

    def relay_place(self, geometry: Geometry) -> RelayPlace:
        return RelayPlace(
            self.name,
            self.place.relay,
            self.place.token,
            self.place.uses_tls,
            self.shards(geometry),
        )


def place_of(socket: Path) -> NodePlace:
    status = socket.parent.stat()
    return NodePlace(_BOOT.read_text().strip(), (status.st_dev, status.st_ino), str(socket))


def relay_address(listen: str) -> str:
    """Raises LayoutError: all interfaces."""
    if listen == _AUTO:
        from vllm.utils.network_utils import get_ip

        host = get_ip()
        return f"[{host}]:0" if ":" in host else f"{host}:0"
    if listen.rpartition(":")[0].strip("[]") in ("0.0.0.0", "::"):
        raise LayoutError(
            f"span.listen = {listen!r}: name an address of this host that the scheduler can "
            "reach, or auto"
        )
    return listen


def hosts_of(
    scheduler: NodePlace, workers: Mapping[tuple[int, int], NodePlace], geometry: Geometry
) -> list[WorkerHost]:
    """workers: by (stage, rank)

    Raises LayoutError: a worker uses another node and cannot relay, or arranges its KV in another
    way.
    """
    hosts: list[WorkerHost] = []
    for (stage, place_in_stage), place in sorted(workers.items()):
        rank = stage * geometry.width + place_in_stage
        for number, host in enumerate(hosts):
            if host.place.is_same_node(place):
                relays = host.place if host.place.relay else place
                hosts[number] = replace(host, ranks=(*host.ranks, rank), place=relays)
                break
        else:
            hosts.append(WorkerHost((rank,), place, is_own=place.is_same_node(scheduler)))
    if all(host.is_own for host in hosts):
        return hosts
    for host in hosts:
        stage, place_in_stage = divmod(host.ranks[0], geometry.width)
        worker = f"worker {place_in_stage} of stage {stage}"
        if not host.is_own and not host.place.relay:
            where = (
                "is on another host than the scheduler"
                if host.place.boot != scheduler.boot
                else (
                    f"finds its node in another folder ({host.place.socket}) than the scheduler "
                    f"({scheduler.socket})"
                )
            )
            raise LayoutError(
                f"kvhold does not serve an engine whose workers use several nodes: {worker} "
                f"{where}. Set span.listen on all hosts, or run the engine's workers on one host, "
                "and let them share the folder of node.socket"
            )
        if host.place.layout and host.place.layout != geometry.layout.fingerprint:
            raise LayoutError(
                f"{worker} is on another host than the scheduler, and arranges its KV in another "
                "way. Use hosts with the same processors and devices, and the same settings"
            )
    told = {shard for host in hosts for shard in host.shards(geometry)}
    if told != set(range(geometry.shards)):
        raise LayoutError(
            f"the workers' nodes have {len(told)} of the engine's {geometry.shards} shards: some "
            "workers did not tell their node. Use the same kvhold on all hosts"
        )
    return hosts


def named_by_hosts(namespace: Namespace, hosts: list[WorkerHost], geometry: Geometry) -> Namespace:
    """Add differences between hosts, such as other weights."""
    # the scheduler's host may have no worker
    own = next((host for host in hosts if host.is_own), None)
    known = dict(own.place.facts) if own is not None else {}
    different: dict[str, str] = {}
    for host in hosts:
        shards = ",".join(map(str, host.shards(geometry)))
        facts = dict(host.place.facts)
        for name in known.keys() | facts.keys():
            if facts.get(name) != known.get(name):
                different[f"hosts.{shards}.{name}"] = facts.get(name, "None")
    if not different:
        return namespace
    return replace(namespace, facts=Facts.of(dict(namespace.facts.items) | different))
