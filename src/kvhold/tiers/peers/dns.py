"""Peers at the addresses of a DNS name (docs/peers.md)."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, TypeAlias

from kvhold.core.errors import ConfigError, TierUnavailable
from kvhold.net.peers import DEFAULT_PORT
from kvhold.net.stream import Address, open_stream
from kvhold.tiers.peers.directory import DirectoryConfig, Listing, Own, is_host_name
from kvhold.tiers.peers.faults import TIER
from kvhold.tiers.peers.peer import Connect
from kvhold.tiers.peers.tier import PeersConfig, PeersTier
from kvhold.tiers.url import TierUrl

Resolve: TypeAlias = Callable[[str], Sequence[str]]
"""In a thread. Raises OSError."""


def resolve(name: str) -> Sequence[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(where[0]) for *_, where in found]


class DnsDirectory:
    def __init__(self, name: str, port: int, *, resolver: Resolve = resolve) -> None:
        self.source = f"the DNS name {name}"
        self._name = name
        self._port = port
        self._resolver = resolver
        # DNS may hold the thread for long
        self._thread = ThreadPoolExecutor(1, "kvhold-dns")
        self._asking: asyncio.Future[Sequence[str]] | None = None

    async def read(self, own: Own) -> Listing:
        if self._asking is None:
            self._asking = asyncio.get_running_loop().run_in_executor(
                self._thread, self._resolver, self._name
            )
        try:
            # a late answer is the next read's
            found = await asyncio.shield(self._asking)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise TierUnavailable(TIER, "list", f"{self.source}: {why}") from None
        finally:
            if self._asking.done():
                self._asking = None
        name = self._name.rstrip(".")
        usable = dict.fromkeys(host for host in found if _is_usable(host))
        return Listing([Address(host, self._port, tls_name=name) for host in usable])

    def registered_as(self) -> str:
        return ""

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._asking is not None:
            self._asking.add_done_callback(_ignore)


@dataclass(frozen=True)
class DnsPeersConfig(PeersConfig, DirectoryConfig):
    pass


class DnsPeersTier(PeersTier):
    @classmethod
    def from_url(
        cls, url: TierUrl, *, resolver: Resolve = resolve, connect: Connect = open_stream
    ) -> Self:
        hosts = url.hosts
        if url.path not in ("", "/") or len(hosts) != 1 or not _is_name(hosts[0][0]):
            raise ConfigError(
                f"tiers: {url.shown}: write one name whose addresses are the peers, such as "
                f"peers-dns://kvhold-peers.namespace.svc:{DEFAULT_PORT}; several hosts, or IP "
                "addresses, belong to peers://"
            )
        [(name, port)] = hosts
        config = url.apply(DnsPeersConfig(token=cls.token_of(url)))
        return cls(
            [Address(name, port or DEFAULT_PORT)],
            config,
            directory=DnsDirectory(name, port or DEFAULT_PORT, resolver=resolver),
            timing=config,
            connect=connect,
        )


def _is_name(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return False
    return is_host_name(host)


@lru_cache(4096)
def _is_usable(host: str) -> bool:
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return not (address.is_multicast or address.is_unspecified)
    return False


def _ignore(asking: "asyncio.Future[Sequence[str]]") -> None:
    if not asking.cancelled():
        asking.exception()
