"""Values in the memory of a Mooncake Store. RDMA is untested.

**The client listens on all interfaces**, without authentication (0.3.13): hence
`allow_all_interfaces=true`. `delete` waits for readers' leases, at most `delete_wait_s`.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from itertools import accumulate
from typing import Any, TypeVar
from urllib.request import urlopen

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ConfigError, TierCannotList, TierError, TierFull, TierUnavailable
from kvhold.core.keys import KEY_BYTES
from kvhold.core.setting import setting, size
from kvhold.tiers.base import Parts, TierTraits, check_lengths, in_thread, size_of
from kvhold.tiers.files.opener import Opener
from kvhold.tiers.url import TierUrl

Result = TypeVar("Result")
Place = tuple[int, int]

_NO_ROOM = -200
_NOT_READY = -703  # being written
_MISSING = -704
_EXISTS = -705
_LEASED = -706
_LEASE_EXPIRED = -707
_NO_ANSWER = -900
_GONE = (_MISSING, _NOT_READY, _LEASE_EXPIRED)

_TRIES = 3
_CONNECT_S = 1.0
_LEASE_POLL_S = 0.05
_LISTING_BYTES = 1 << 30


@dataclass(frozen=True)
class MooncakeConfig:
    master: str = setting("", "host:port of the master")
    metadata: str = setting(
        "P2PHANDSHAKE", "the metadata server; P2PHANDSHAKE: none, the clients ask each other"
    )
    admin: str = setting(
        "",
        "host:port of the master's HTTP server (its --metrics_port), which lists keys; "
        "empty: no scan",
    )
    protocol: str = setting("tcp", "protocol for values", choices=("tcp", "rdma"))
    device: str = setting("", "RDMA devices, separated by commas")
    hostname: str = setting(
        "",
        "address of this client for others; empty: loopback if the master is on loopback, else "
        "this host's name",
    )
    segment_bytes: int = size(0, "memory that this process lends to the store")
    buffer_bytes: int = size(16 << 20, "the client's own buffer")
    replicas: int = setting(1, "copies of each value", minimum=1)
    prefix: str = setting(
        "kvhold", "before each key; tiers with different prefixes do not see each other"
    )
    threads: int = setting(4, "calls at once", minimum=1)
    delete_wait_s: float = setting(10.0, "how long a delete waits for leases to end", minimum=0)
    allow_all_interfaces: bool = setting(
        False, "accept that the client listens on all interfaces, without authentication"
    )


class MooncakeTier:
    def __init__(self, config: MooncakeConfig) -> None:
        host, colon, port = config.master.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ConfigError(
                f"mooncake: {config.master!r} is not the master's host:port; write "
                "mooncake://host:50051"
            )
        if not config.allow_all_interfaces:
            raise ConfigError(
                "mooncake: its client listens on all interfaces of this host without "
                "authentication;"
                " set allow_all_interfaces=true if nobody else can reach them"
            )
        if "/" in config.prefix or not config.prefix.isprintable() or not config.prefix.isascii():
            raise ConfigError(f"mooncake: prefix = {config.prefix!r}: use ASCII without /")
        self.traits = TierTraits(name="mooncake", shared=True, lists=bool(config.admin))
        self._config = config
        self._host, self._port = host.strip("[]"), int(port)
        self._root = f"{config.prefix}/"
        closed = TierUnavailable("mooncake", "open", f"{config.master} was closed")
        self._opener = Opener[Any](self._open, self._begin_close, closed=closed)
        self._threads: ThreadPoolExecutor | None = None
        self._client_close: Future[None] | None = None
        self._session = threading.Lock()
        self._replicate = ReplicateConfig()
        self._replicate.replica_num = config.replicas

    @classmethod
    def from_url(cls, url: TierUrl) -> "MooncakeTier":
        if "@" in url.netloc or url.path.strip("/"):
            raise ConfigError(
                "mooncake: write mooncake://host:port?option=value; it has no credentials "
                "and no path"
            )
        return cls(url.apply(MooncakeConfig(master=url.netloc)))

    async def check(self) -> None:
        await self._with_client(self._alive)

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        return (
            await self._with_client(lambda client: self._sizes(client, keys, "probe"))
            if keys
            else []
        )

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        return (
            await self._with_client(lambda client: self._get(client, keys, into, starts))
            if keys
            else []
        )

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        first = dict(reversed(items))
        faults = await self._with_client(lambda client: self._put(client, first)) if first else {}
        return [faults[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Raises TierError if a lease does not end in time."""
        unique = list(dict.fromkeys(keys))
        removed: set[bytes] = set()
        until = time.monotonic() + self._config.delete_wait_s
        while unique:
            leased = await self._with_client(partial(self._remove, keys=unique, removed=removed))
            if leased and time.monotonic() > until:
                raise TierError(
                    self.traits.name, "delete", f"{len(leased)} keys are still leased to readers"
                )
            unique = leased
            if leased:
                await asyncio.sleep(_LEASE_POLL_S)
        return [key in removed and key not in keys[:i] for i, key in enumerate(keys)]

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Raises TierCannotList without `admin`."""
        if not self._config.admin:
            raise TierCannotList(
                self.traits.name,
                "scan",
                "the client lists no keys: set the option admin to the master's HTTP host:port",
            )
        for name in await self._with_client(lambda _: self._listing()):
            key = self._key(name)
            if key is not None and key.startswith(prefix):
                yield key

    async def close(self) -> None:
        await self._opener.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            try:
                if self._client_close is not None:
                    await in_thread(threads, self._client_close.result)
            finally:
                threads.shutdown(wait=False)

    async def _with_client(self, work: Callable[[Any], Result]) -> Result:
        async with self._opener.use() as client:
            assert self._threads is not None
            return await in_thread(self._threads, lambda: work(client))

    async def _open(self) -> Any:
        await self._reach_master()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._config.threads, thread_name_prefix="kvhold-mooncake"
            )
        return await in_thread(self._threads, self._set_up)

    def _begin_close(self, client: Any) -> None:
        assert self._threads is not None
        self._client_close = self._threads.submit(client.close)

    async def _reach_master(self) -> None:
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(self._host, self._port), _CONNECT_S
            )
        except (OSError, TimeoutError) as error:
            raise TierUnavailable(
                self.traits.name,
                "open",
                f"no master at {self._config.master}: {str(error) or 'timed out'}",
            ) from None
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    def _set_up(self) -> Any:
        config = self._config
        hostname = config.hostname or (
            "127.0.0.1" if _is_loopback(self._host) else socket.gethostname()
        )
        client = MooncakeDistributedStore()
        with on_error(client.close):
            code: int = client.setup(
                hostname,
                config.metadata,
                config.segment_bytes,
                config.buffer_bytes,
                config.protocol,
                config.device,
                config.master,
            )
            if code:
                raise self._fault(code, "open")
        return client

    def _alive(self, client: Any) -> None:
        code = client.batch_is_exist([self._root])[0]
        if code < 0:
            raise self._fault(code, "check")

    def _sizes(self, client: Any, keys: Sequence[bytes], operation: str) -> list[int | None]:
        """Ask which keys exist first: with a dead master, the call for sizes takes 4 s."""
        names = [self._name_of(key) for key in keys]
        codes = dict(zip(names, client.batch_is_exist(names), strict=True))
        if any(code < 0 for code in codes.values()):
            raise self._fault(min(codes.values()), operation)
        there = [name for name, code in codes.items() if code]
        found = client.batch_get_replica_desc(there) if there else {}
        return [_size_in(found.get(name, ())) for name in names]

    def _get(
        self,
        client: Any,
        keys: Sequence[bytes],
        into: Sequence[Parts],
        starts: Sequence[int] | None,
    ) -> list[int | TierError | None]:
        answers: list[int | TierError | None] = [None] * len(keys)
        reads: list[tuple[int, int, int]] = []
        for i, (nbytes, parts) in enumerate(
            zip(self._sizes(client, keys, "get"), into, strict=True)
        ):
            room = size_of(parts)
            if nbytes is None or (nbytes > room if starts is None else starts[i] + room > nbytes):
                continue
            if room:
                reads.append((i, 0, nbytes) if starts is None else (i, starts[i], room))
            else:
                answers[i] = 0
        with self._known(client, [into[i] for i, _, _ in reads]) as places:
            cut = {
                i: _cut(place, nbytes) for (i, _, nbytes), place in zip(reads, places, strict=True)
            }
            for _ in range(_TRIES):
                late = []
                for batch in _without_repeats(reads, keys):
                    names, targets = (
                        [self._name_of(keys[i]) for i, _, _ in batch],
                        [cut[i] for i, _, _ in batch],
                    )
                    codes = self._read(
                        client,
                        names,
                        targets,
                        None if starts is None else [start for _, start, _ in batch],
                    )
                    for read, code in zip(batch, codes, strict=True):
                        answers[read[0]] = (
                            code
                            if code >= 0
                            else None
                            if code in _GONE
                            else self._fault(code, "get")
                        )
                        if code == _LEASE_EXPIRED:
                            late.append(read)
                reads = late
        return answers

    def _read(
        self,
        client: Any,
        names: list[str],
        places: Sequence[Sequence[Place]],
        starts: Sequence[int] | None,
    ) -> list[int]:
        pointers, lengths = (
            [[at for at, _ in p] for p in places],
            [[nbytes for _, nbytes in p] for p in places],
        )
        codes: list[int]
        if starts is None:
            codes = client.batch_get_into_multi_buffers(names, pointers, lengths)
            return codes
        sources = [
            list(accumulate(of_value[:-1], initial=start))
            for of_value, start in zip(lengths, starts, strict=True)
        ]
        with self._session:  # one session per key in the client
            opened = client.batch_get_session_start(names)
            try:
                codes = client.batch_get_into_multi_buffer_ranges(names, pointers, lengths, sources)
            finally:
                client.batch_get_session_end(names)
        return [code if code < 0 else nbytes for code, nbytes in zip(opened, codes, strict=True)]

    def _put(self, client: Any, values: dict[bytes, Parts]) -> dict[bytes, TierError | None]:
        names = [self._name_of(key) for key in values]
        with self._known(client, list(values.values())) as places:
            pointers, lengths = (
                [[at for at, _ in p] for p in places],
                [[n for _, n in p] for p in places],
            )
            codes = client.batch_put_from_multi_buffers(names, pointers, lengths, self._replicate)
        faults = {
            key: None if code in (0, _EXISTS) else self._fault(code, "put")
            for key, code in zip(values, codes, strict=True)
        }
        if all(code == _NO_ANSWER for code in codes):
            raise self._fault(_NO_ANSWER, "put")
        return faults

    def _remove(self, client: Any, keys: Sequence[bytes], removed: set[bytes]) -> list[bytes]:
        codes = client.batch_remove([self._name_of(key) for key in keys])
        leased = []
        for key, code in zip(keys, codes, strict=True):
            if code == 0:
                removed.add(key)
            elif code in (_LEASED, _NOT_READY):
                leased.append(key)
            elif code != _MISSING:
                raise self._fault(code, "delete")
        return leased

    def _listing(self) -> list[str]:
        try:
            with urlopen(f"http://{self._config.admin}/get_all_keys", timeout=30) as answer:
                text: bytes = answer.read(_LISTING_BYTES)
        except OSError as error:
            raise TierUnavailable(
                self.traits.name, "scan", f"no listing from {self._config.admin}: {error}"
            ) from None
        return text.decode(errors="replace").splitlines()

    @contextmanager
    def _known(self, client: Any, values: Sequence[Parts]) -> Iterator[list[list[Place]]]:
        arrays = [
            [np.frombuffer(part.cast("B"), np.uint8) for part in parts if part.nbytes]
            for parts in values
        ]
        places = [
            [(int(array.ctypes.data), array.nbytes) for array in of_value] for of_value in arrays
        ]
        known: list[int] = []
        try:
            if self._config.protocol != "tcp":
                for at, nbytes in (place for of_value in places for place in of_value):
                    if code := client.register_buffer(at, nbytes):
                        raise self._fault(code, "register")
                    known.append(at)
            yield places
        finally:
            for at in known:
                client.unregister_buffer(at)

    def _name_of(self, key: bytes) -> str:
        return self._root + key.hex()

    def _key(self, name: str) -> bytes | None:
        with suppress(ValueError):
            key = bytes.fromhex(name[len(self._root) :])
            return key if len(key) == KEY_BYTES and self._name_of(key) == name else None
        return None

    def _fault(self, code: int, operation: str) -> TierError:
        at = f"the store of {self._config.master}"
        if code == _NO_ROOM:
            return TierFull(
                self.traits.name,
                operation,
                f"{at} has no room for it (no client lends that much memory)",
            )
        if code == _NO_ANSWER:
            return TierUnavailable(self.traits.name, operation, f"no answer from {at}")
        return TierError(self.traits.name, operation, f"{at} gave error {code}")


def _size_in(replicas: Sequence[Any]) -> int | None:
    for replica in replicas:
        if replica.is_memory_replica() and replica.status.name == "COMPLETE":
            nbytes: int = replica.get_memory_descriptor().buffer_descriptor.size
            return nbytes
    return None


def _cut(places: Sequence[Place], nbytes: Any) -> list[Place]:
    cut, left = [], int(nbytes)
    for at, length in places:
        if left:
            cut.append((at, min(length, left)))
            left -= cut[-1][1]
    return cut


def _without_repeats(
    reads: Sequence[tuple[int, int, int]], keys: Sequence[bytes]
) -> Iterator[list[tuple[int, int, int]]]:
    """The client (0.3.13) fills one of two reads of a key, but reports both."""
    left = list(reads)
    while left:
        first = {keys[read[0]]: read for read in reversed(left)}
        yield list(first.values())
        left = [read for read in left if first[keys[read[0]]] is not read]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
