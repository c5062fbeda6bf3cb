"""Sentinels and cluster nodes are asked at the first use, and after `invalidate`."""

import asyncio
import binascii
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from kvhold.core.errors import TierError, TierUnavailable
from kvhold.net.stream import Address
from kvhold.tiers.redis.endpoint import Login, RedisEndpoint, Tls
from kvhold.tiers.redis.resp import ErrorReply, RedisCall, Reply, fault_of
from kvhold.tiers.redis.settings import RedisConfig

NUM_SLOTS = 16384

Answer = TypeVar("Answer")


class Topology(Protocol):
    async def endpoint_of(self, name: bytes) -> RedisEndpoint:
        """Raises TierError if no server answers."""

    async def primaries(self) -> Sequence[RedisEndpoint]:
        """Raises TierError."""

    def invalidate(self) -> None:
        """The servers are asked again before the next key."""

    def moved(self, name: bytes, reply: ErrorReply, by: RedisEndpoint) -> RedisEndpoint | None:
        """The server of a MOVED or ASK reply of `by`; None: it is invalid."""

    def close(self) -> None: ...


class Single:
    def __init__(self, config: RedisConfig) -> None:
        login = Login(config.username, config.password, config.db)
        self._endpoint = RedisEndpoint(
            config.addresses[0], login, tls=Tls(config), connections=config.connections
        )

    async def endpoint_of(self, name: bytes) -> RedisEndpoint:
        return self._endpoint

    async def primaries(self) -> Sequence[RedisEndpoint]:
        return (self._endpoint,)

    def invalidate(self) -> None:
        """The address is fixed."""

    def moved(self, name: bytes, reply: ErrorReply, by: RedisEndpoint) -> RedisEndpoint | None:
        return None

    def close(self) -> None:
        self._endpoint.close()


class Discovered(ABC):
    def __init__(self, config: RedisConfig, login: Login) -> None:
        self._config = config
        self._login = login
        self._tls = Tls(config)
        self._endpoints: dict[Address, RedisEndpoint] = {}
        self._asking = asyncio.Lock()
        self._known = False

    def invalidate(self) -> None:
        self._known = False

    def close(self) -> None:
        self._keep(())

    @abstractmethod
    async def _discover(self) -> None: ...

    async def _learn(self) -> None:
        if not self._known:
            async with self._asking:
                if not self._known:
                    await self._discover()
                    self._known = True

    def _endpoint(self, address: Address) -> RedisEndpoint:
        if address not in self._endpoints:
            self._endpoints[address] = RedisEndpoint(
                address, self._login, tls=self._tls, connections=self._config.connections
            )
        return self._endpoints[address]

    def _keep(self, addresses: Iterable[Address]) -> None:
        kept = set(addresses)
        for address in [address for address in self._endpoints if address not in kept]:
            self._endpoints.pop(address).close()


class Sentinels(Discovered):
    def __init__(self, config: RedisConfig) -> None:
        super().__init__(
            config, Login(config.username, config.password, config.db, primary_only=True)
        )
        login = Login(config.sentinel_username, config.sentinel_password)
        self._sentinels = [
            RedisEndpoint(address, login, tls=self._tls, connections=1)
            for address in config.addresses
        ]
        self._primary: Address | None = None

    async def endpoint_of(self, name: bytes) -> RedisEndpoint:
        await self._learn()
        assert self._primary is not None
        return self._endpoint(self._primary)

    async def primaries(self) -> Sequence[RedisEndpoint]:
        return (await self.endpoint_of(b""),)

    def moved(self, name: bytes, reply: ErrorReply, by: RedisEndpoint) -> RedisEndpoint | None:
        return None

    def close(self) -> None:
        super().close()
        for sentinel in self._sentinels:
            sentinel.close()

    async def _discover(self) -> None:
        self._primary = await first_good(
            [self._primary_of(sentinel) for sentinel in self._sentinels]
        )
        self._keep([self._primary])

    async def _primary_of(self, sentinel: RedisEndpoint) -> Address:
        reply = await ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._config.service)
        if reply is None:
            raise TierError(
                "redis",
                "connect",
                f"the sentinel {sentinel.address} watches no {self._config.service!r}: see "
                "?service=",
            )
        if isinstance(reply, list) and len(reply) == 2 and (found := _address(*reply)):
            return found
        raise fault_of(reply, "connect")


class Cluster(Discovered):
    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config, Login(config.username, config.password))
        self._owners: list[Address | None] = [None] * NUM_SLOTS

    async def endpoint_of(self, name: bytes) -> RedisEndpoint:
        await self._learn()
        owner = self._owners[slot_of(name)]
        if owner is None:
            raise TierUnavailable(
                "redis", "connect", f"no node of the cluster serves slot {slot_of(name)}"
            )
        return self._endpoint(owner)

    async def primaries(self) -> Sequence[RedisEndpoint]:
        await self._learn()
        return [self._endpoint(address) for address in dict.fromkeys(self._owners) if address]

    def moved(self, name: bytes, reply: ErrorReply, by: RedisEndpoint) -> RedisEndpoint | None:
        """MOVED is remembered, and the slots are asked for again. ASK is for one call."""
        host, colon, port = reply.text.rpartition(" ")[2].rpartition(":")
        address = _address(host.strip("[]").encode() or by.address.host.encode(), port.encode())
        if not colon or address is None:
            return None
        if reply.code == "MOVED":
            self._owners[slot_of(name)] = address
            self.invalidate()
        return self._endpoint(address)

    async def _discover(self) -> None:
        asked = [
            self._endpoint(address)
            for address in dict.fromkeys((*self._endpoints, *self._config.addresses))
        ]
        self._owners = await first_good([self._slot_owners(endpoint) for endpoint in asked])
        self._keep([*(address for address in self._owners if address), *self._config.addresses])

    async def _slot_owners(self, endpoint: RedisEndpoint) -> list[Address | None]:
        reply = await ask(endpoint, "CLUSTER", "SLOTS")
        owners: list[Address | None] = [None] * NUM_SLOTS
        if not isinstance(reply, list):
            raise fault_of(reply, "connect")
        if not reply:
            raise TierUnavailable(
                "redis", "connect", f"{endpoint.address} is in no cluster that serves slots"
            )
        for row in reply:
            match row:
                case [int(first), int(last), [host, int(port), *_], *_] if (
                    0 <= first <= last < NUM_SLOTS
                ):
                    address = _address(host or endpoint.address.host.encode(), port)
                    owners[first : last + 1] = [address] * (last + 1 - first)
                case _:
                    raise fault_of(row, "connect")
        return owners


def make_topology(config: RedisConfig) -> Topology:
    if config.service:
        return Sentinels(config)
    return Cluster(config) if config.cluster else Single(config)


def slot_of(name: bytes) -> int:
    """By the Redis Cluster specification."""
    start = name.find(b"{")
    end = name.find(b"}", start + 1)
    tag = name[start + 1 : end] if 0 <= start and start + 1 < end else name
    return binascii.crc_hqx(tag, 0) % NUM_SLOTS


async def ask(endpoint: RedisEndpoint, *words: bytes | str) -> Reply:
    call = RedisCall(b"", *words)
    await endpoint.run("connect", [call], bulk=False)
    if call.fault is not None:
        raise call.fault
    return call.reply


async def first_good(questions: Sequence[Coroutine[Any, Any, Answer]]) -> Answer:
    """If all fail, raise the TierError easiest to repair."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    faults: list[TierError] = []
    try:
        for done in asyncio.as_completed(tasks):
            try:
                return await done
            except TierError as error:
                faults.append(error)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise min(faults, key=lambda fault: (fault.retryable, isinstance(fault, TierUnavailable)))


def _address(host: Reply, port: Reply) -> Address | None:
    text = str(port, "ascii", "replace") if isinstance(port, bytes) else str(port)
    if (
        not isinstance(host, bytes)
        or not host
        or len(host) > 255
        or not text.isdecimal()
        or not 0 < int(text) < 65536
    ):
        return None
    return Address(host.decode("ascii", "backslashreplace"), int(text))
