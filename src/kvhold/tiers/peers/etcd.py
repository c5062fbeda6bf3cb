"""Peers register in etcd, each under a lease (docs/peers.md).

key:   PREFIX/<incarnation, 16 hexadecimal digits>
value: {"address": "10.0.0.5:7711", "incarnation": 1234}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import UNDECODABLE, ConfigError, KVHoldError, TierError
from kvhold.core.setting import setting
from kvhold.net.addresses import is_loopback
from kvhold.net.stream import Address, open_stream
from kvhold.net.tls import client_context
from kvhold.tiers.peers.directory import DirectoryConfig, Listing, Own, parse_address
from kvhold.tiers.peers.etcd_gateway import (
    EtcdGateway,
    GrantRequest,
    Ignored,
    KeepAliveAnswer,
    KeyValue,
    LeaseAnswer,
    LeaseRequest,
    PutRequest,
    RangeAnswer,
    RangeRequest,
)
from kvhold.tiers.peers.peer import Connect
from kvhold.tiers.peers.tier import PeersConfig, PeersTier
from kvhold.tiers.url import TierUrl

ETCD_PORT = 2379
DEFAULT_PREFIX = "/kvhold/peers/"
MOST_LISTED = 128
_MOST_PREFIX = 200
_MOST_ENDPOINTS = 16
_MOST_VALUE_BYTES = 512
_LEASE_READS = 3  # a lease outlives two readings that fail


class Registration(msgspec.Struct, frozen=True):
    address: str
    incarnation: int


@dataclass(frozen=True)
class EtcdPeersConfig(PeersConfig, DirectoryConfig):
    token: str = setting("", "the peers' token; better in a file", secret=True)
    lease_s: int = setting(
        20,
        "a node that was killed leaves the list after this time; at least three times refresh_s",
        minimum=2,
    )
    etcd_tls: bool = setting(False, "use TLS to etcd")
    etcd_insecure: bool = setting(False, "send etcd's password to other hosts without TLS")
    etcd_ca_file: str = setting(
        "", "PEM file of the authorities to trust for etcd; empty: the system's"
    )
    etcd_cert_file: str = setting("", "PEM file of the certificate for etcd, if it requires one")
    etcd_key_file: str = setting(
        "", "PEM file of that certificate's key; empty: it is in etcd_cert_file"
    )


class EtcdDirectory:
    def __init__(self, gateway: EtcdGateway, prefix: str, *, lease_s: int, source: str) -> None:
        self.source = source
        self._gateway = gateway
        self._prefix = prefix
        self._lease_s = lease_s
        self._lease = 0
        self._registration: Registration | None = None

    async def read(self, own: Own) -> Listing:
        fault = ""
        if own.address:
            try:
                await self._keep_registered(Registration(own.address, own.incarnation))
            except TierError as error:
                fault = f"this node is not registered: {error}"
        begin = self._prefix.encode()
        request = RangeRequest(begin, begin[:-1] + bytes((begin[-1] + 1,)), MOST_LISTED)
        answer = await self._gateway.call("kv/range", request, RangeAnswer)
        found, num_bad = self._parse(answer.kvs)
        if self._registration is not None and self._registration not in found:
            self._registration = None
        others = [one for one in found if one.incarnation != own.incarnation]
        if num_bad:
            fault = fault or (
                f"{self.source}: {num_bad} keys below {self._prefix} are no registrations of nodes"
            )
        if answer.count > len(answer.kvs):
            fault = f"{self.source}: {answer.count} nodes are registered, {MOST_LISTED} are read"
        addresses = [parse_address(one.address, where=self.source) for one in others]
        is_alone = bool(found) and not others
        return Listing(list(dict.fromkeys(addresses)), fault, is_alone=is_alone)

    def registered_as(self) -> str:
        registration = self._registration
        return "" if registration is None else registration.address

    async def close(self) -> None:
        try:
            if self._lease:
                await self._gateway.call("lease/revoke", LeaseRequest(self._lease), Ignored)
        finally:
            self._lease, self._registration = 0, None
            await self._gateway.close()

    async def _keep_registered(self, wanted: Registration) -> None:
        if self._lease:
            kept = await self._gateway.call(
                "lease/keepalive", LeaseRequest(self._lease), KeepAliveAnswer
            )
            if not kept.result.TTL:
                self._lease, self._registration = 0, None
        if not self._lease:
            granted = await self._gateway.call(
                "lease/grant", GrantRequest(self._lease_s), LeaseAnswer
            )
            self._lease = granted.ID
        if wanted != self._registration:
            key = f"{self._prefix}{wanted.incarnation:016x}".encode()
            request = PutRequest(key, msgspec.json.encode(wanted), self._lease)
            await self._gateway.call("kv/put", request, Ignored)
            self._registration = wanted

    def _parse(self, kvs: Sequence[KeyValue]) -> tuple[list[Registration], int]:
        found = []
        for kv in kvs:
            try:
                if len(kv.value) > _MOST_VALUE_BYTES:
                    continue
                registration = msgspec.json.decode(kv.value, type=Registration)
                parse_address(registration.address, where=self.source)
            except (*UNDECODABLE, ConfigError):
                continue
            found.append(registration)
        return found, len(kvs) - len(found)


class EtcdPeersTier(PeersTier):
    def check_serving(self, config: ServePeersConfig) -> None:
        if not config.advertise and _host_of(config.listen) in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"peers.listen = {config.listen!r} is no address that other nodes can use; set "
                "peers.advertise to this host's own, such as 10.0.0.5:7711"
            )

    @classmethod
    def from_url(cls, url: TierUrl, *, connect: Connect = open_stream) -> Self:
        endpoints = [Address(host, port or ETCD_PORT) for host, port in url.hosts]
        if not 0 < len(endpoints) <= _MOST_ENDPOINTS:
            raise ConfigError(
                f"tiers: {url.shown}: name 1 to {_MOST_ENDPOINTS} members of etcd, such as "
                f"peers-etcd://etcd-a:{ETCD_PORT},etcd-b:{ETCD_PORT}{DEFAULT_PREFIX[:-1]}"
            )
        prefix = f"/{url.path.strip('/')}/" if url.path.strip("/") else DEFAULT_PREFIX
        if len(prefix.encode()) > _MOST_PREFIX:
            raise ConfigError(
                f"tiers: {url.shown}: a prefix of at most {_MOST_PREFIX} bytes is allowed"
            )
        config = url.apply(EtcdPeersConfig())
        if config.lease_s < _LEASE_READS * config.refresh_s:
            raise ConfigError(
                f"tiers: {url.shown}: lease_s = {config.lease_s} must be at least {_LEASE_READS} "
                f"times refresh_s = {config.refresh_s:g}"
            )
        names = ",".join(str(endpoint) for endpoint in endpoints)
        directory = EtcdDirectory(
            cls._gateway(url, config, endpoints),
            prefix,
            lease_s=config.lease_s,
            source=f"etcd at {names}",
        )
        if not config.tls and not config.insecure and (config.token or config.token_file):
            raise ConfigError(
                f"tiers: {url.shown}: the peers' token would cross the network in clear text; add "
                "tls=true, or insecure=true if the network is trusted"
            )
        return cls((), config, directory=directory, timing=config, connect=connect)

    @classmethod
    def _gateway(
        cls, url: TierUrl, config: EtcdPeersConfig, endpoints: Sequence[Address]
    ) -> EtcdGateway:
        user, password = url.username, url.password
        if bool(user) != bool(password):
            raise ConfigError(
                f"tiers: {url.shown}: etcd's login is a user and a password, such as "
                "peers-etcd://USER:${file:/etc/kvhold/etcd-password}@host"
            )
        files = (config.etcd_ca_file, config.etcd_cert_file, config.etcd_key_file)
        if not config.etcd_tls and any(files):
            raise ConfigError(
                f"tiers: {url.shown}: etcd_ca_file, etcd_cert_file and etcd_key_file are for TLS; "
                "add etcd_tls=true"
            )
        for endpoint in endpoints:
            if password and not (
                config.etcd_tls or config.etcd_insecure or is_loopback(endpoint.host)
            ):
                raise ConfigError(
                    f"tiers: {url.shown}: {endpoint}: the password would cross the network in "
                    "clear text; add etcd_tls=true, or etcd_insecure=true if the network is trusted"
                )
        try:
            tls = client_context(*files) if config.etcd_tls else None
        except KVHoldError as error:
            raise ConfigError(f"tiers: {url.shown}: etcd_{error}") from None
        scheme = "https" if config.etcd_tls else "http"
        return EtcdGateway(
            [f"{scheme}://{endpoint}" for endpoint in endpoints],
            user=user,
            password=password,
            tls=tls,
        )


def _host_of(listen: str) -> str:
    return listen.rpartition(":")[0].strip("[]")
