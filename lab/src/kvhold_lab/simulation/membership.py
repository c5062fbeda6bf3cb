"""Directories for the real `DnsDirectory` and `EtcdDirectory`: late, incomplete, old or away."""

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from kvhold.core.errors import TierUnavailable
from kvhold.tiers.peers.directory import Directory, DirectoryConfig
from kvhold.tiers.peers.dns import DnsDirectory
from kvhold.tiers.peers.etcd import DEFAULT_PREFIX, EtcdDirectory
from kvhold.tiers.peers.etcd_gateway import (
    KeepAliveAnswer,
    KeyValue,
    LeaseAnswer,
    RangeAnswer,
)
from kvhold.tiers.peers.faults import TIER
from kvhold_lab.simulation.world import SimThread, World

_LATE_S = (0.1, 1.0, 5.0)
_LEASES = ((0.5, 2), (1.0, 3), (2.0, 6), (5.0, 20))
"""refresh_s and lease_s"""
_SLOW_S = 3.0


class SimMembership(ABC):
    """lists_itself: a host finds its own addresses"""

    lists_itself = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.random: Random = world.random
        self.refresh_s, self.lease_s = self.random.choice(_LEASES)
        keep_s = self.random.choice((0.5, 5.0, 600.0))
        self.timing = DirectoryConfig(refresh_s=self.refresh_s, keep_list_s=keep_s)

    @abstractmethod
    def directory(self, hosts: Sequence[int]) -> Directory:
        """Of a node; it lists these hosts."""

    def has_changed(self, host: int, addresses: Sequence[str]) -> None:  # noqa: B027
        """addresses: of a host's node; empty: none"""

    @abstractmethod
    def trouble(self) -> None: ...

    @abstractmethod
    def end_trouble(self) -> None: ...

    def _seconds(self) -> float:
        return self.random.choice((0.3, 3.0, 30.0)) * self.random.random()


class SimDns(SimMembership):
    """Addresses that another system registers.

    listed: by host
    """

    def __init__(self, world: World, port: int) -> None:
        super().__init__(world)
        self._port = port
        self._listed: dict[int, list[str]] = {}
        self._now: dict[int, list[str]] = {}
        self._late_s = self.random.choice(_LATE_S)
        self._fault = ""
        self._threads: list[SimThread] = []
        self._lists: dict[str, Sequence[int]] = {}
        self._old: dict[str, list[str]] = {}

    def directory(self, hosts: Sequence[int]) -> Directory:
        name = f"peers-{hosts[0]}.fleet"
        self._lists[name] = hosts
        directory = DnsDirectory(name, self._port, resolver=self._resolve)
        thread: Any = SimThread(self.world)
        directory._thread = thread
        self._threads.append(thread)
        return directory

    def has_changed(self, host: int, addresses: Sequence[str]) -> None:
        self._now[host] = list(addresses)
        late_s = self._late_s * self.random.random()
        self.world.later(late_s, self._add, host)
        self.world.later(late_s + self._late_s * self.random.random(), self._update, host)

    def trouble(self) -> None:
        random = self.random
        self._fault = random.choice(("away", "empty", "incomplete", "old", "silent"))
        self.world.note("DNS is %s", self._fault)
        if self._fault == "silent":
            for thread in self._threads:
                thread.usual_s = _SLOW_S
        self.world.later(self._seconds(), self.end_trouble)

    def end_trouble(self) -> None:
        self._fault = ""
        for thread in self._threads:
            thread.usual_s = 0.0005

    def _add(self, host: int) -> None:
        both = [*self._listed.get(host, ()), *self._now[host]]
        self._listed[host] = list(dict.fromkeys(both))

    def _update(self, host: int) -> None:
        self._listed[host] = list(self._now[host])

    def _resolve(self, name: str) -> list[str]:
        found = [one for host in self._lists[name] for one in self._listed.get(host, ())]
        match self._fault:
            case "away":
                raise socket.gaierror(socket.EAI_AGAIN, "the name cannot be resolved now")
            case "empty":
                return []
            case "incomplete":
                return [one for one in found if self.random.random() < 0.7]
            case "old":
                return self._old.get(name, found)
        self._old[name] = found
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "the name is not known")
        return found


class SimEtcd(SimMembership):
    lists_itself = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._leases: dict[int, tuple[float, int]] = {}
        self._values: dict[bytes, tuple[bytes, int]] = {}
        self._fault = ""
        self.lost = 0.0

    def directory(self, hosts: Sequence[int]) -> Directory:
        gateway: Any = _SimGateway(self)
        return EtcdDirectory(
            gateway, DEFAULT_PREFIX, lease_s=self.lease_s, source="the simulated etcd"
        )

    def trouble(self) -> None:
        random = self.random
        kind = random.choice(("away", "silent", "loses answers", "lease", "key", "other key"))
        self.world.note("etcd: %s", kind)
        match kind:
            case "away" | "silent":
                self._fault = kind
                self.world.later(self._seconds(), self._mend)
            case "loses answers":
                self.lost = 0.5
                self.world.later(self._seconds(), self._mend)
            case "lease" if self._leases:
                self._revoke(random.choice(list(self._leases)))
            case "key" if self._values:
                del self._values[random.choice(list(self._values))]
            case "other key":
                self._values[DEFAULT_PREFIX.encode() + b"other"] = b"not a node", 0

    def end_trouble(self) -> None:
        self._mend()
        self._values.pop(DEFAULT_PREFIX.encode() + b"other", None)

    def _mend(self) -> None:
        self._fault, self.lost = "", 0.0

    async def answer(self, path: str, request: Any) -> msgspec.Struct | None:
        await asyncio.sleep(self.world.delay(0.001))
        if self._fault == "silent":
            await asyncio.sleep(_SLOW_S)
        if self._fault:
            raise TierUnavailable(TIER, "list", f"the simulated etcd is {self._fault}")
        answer = self._apply(path, request)
        if self.random.random() < self.lost:
            raise TierUnavailable(TIER, "list", "the answer of the simulated etcd is lost")
        await asyncio.sleep(self.world.delay(0.001))
        return answer

    def _apply(self, path: str, request: Any) -> msgspec.Struct | None:
        now = self.world.now
        for lease in [lease for lease, (until, _) in self._leases.items() if until <= now]:
            self._revoke(lease)
        match path:
            case "lease/grant":
                lease = self.world.number()
                self._leases[lease] = now + request.TTL, request.TTL
                return LeaseAnswer(lease, request.TTL)
            case "lease/keepalive":
                _, ttl = self._leases.get(request.ID, (0.0, 0))
                if ttl:
                    self._leases[request.ID] = now + ttl, ttl
                return KeepAliveAnswer(LeaseAnswer(request.ID, ttl))
            case "lease/revoke":
                self._revoke(request.ID)
            case "kv/put":
                if request.lease not in self._leases:
                    raise TierUnavailable(TIER, "list", "requested lease not found")
                self._values[request.key] = request.value, request.lease
            case "kv/range":
                found = [
                    KeyValue(key, value, lease)
                    for key, (value, lease) in sorted(self._values.items())
                    if request.key <= key < request.range_end
                ]
                return RangeAnswer(found[: request.limit], len(found))
        return None

    def _revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        for key in [key for key, (_, of) in self._values.items() if of == lease]:
            del self._values[key]


class _SimGateway:
    def __init__(self, etcd: SimEtcd) -> None:
        self._etcd = etcd

    async def call(self, path: str, request: Any, kind: type[Any]) -> Any:
        answer = await self._etcd.answer(path, request)
        return kind() if answer is None else answer

    async def close(self) -> None: ...
