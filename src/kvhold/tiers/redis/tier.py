"""Redis or Valkey: one server, one behind Sentinel, or a cluster.

Only primaries are used. Needs Redis 6.2 or later, and a user with these commands on the keys of the
prefix: get, getrange, strlen, set, unlink, pexpire, persist, watch, unwatch, multi, exec, scan,
ping and select; also pttl to replace values, `cluster|slots` for a cluster, and `role` for
Sentinel.
"""

import math
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Self

from kvhold.core.errors import TierError
from kvhold.tiers.base import Parts, TierTraits, check_lengths, size_of
from kvhold.tiers.redis.endpoint import RedisEndpoint
from kvhold.tiers.redis.large import LargeValues, RemoveString, peek
from kvhold.tiers.redis.names import RedisNames
from kvhold.tiers.redis.replacing import replace_string
from kvhold.tiers.redis.resp import ErrorReply, RedisCall, Reply, fault_of, set_pieces
from kvhold.tiers.redis.router import Router, fault_in, outage
from kvhold.tiers.redis.settings import RedisConfig, config_from
from kvhold.tiers.redis.split import HEAD_BYTES, Head, joined, looks_like_head
from kvhold.tiers.redis.topology import ask, make_topology
from kvhold.tiers.redis.values import ReadRange, ReadWhole, fill
from kvhold.tiers.url import TierUrl

_SCAN_COUNT = 1000
_MAX_TTL_MS = 100 * 365 * 86_400_000
_PROBE_ROUNDS = 3
_PUT_ROUNDS = 3


class RedisTier:
    traits: ClassVar[TierTraits] = TierTraits(
        "redis", durable=True, shared=True, expires=True, replaces=True
    )

    def __init__(self, config: RedisConfig) -> None:
        config.check()
        self._config = config
        self._names = RedisNames(config.prefix)
        self._topology = make_topology(config)
        self._router = Router(self._topology)
        self._large = LargeValues(self._router, config.max_value_bytes)

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        return cls(config_from(url))

    async def check(self) -> None:
        name = self._names.of(b"")
        self._topology.invalidate()
        for endpoint in await self._topology.primaries():
            await self._ping(endpoint)
        await self._router.run("check", [RedisCall(name, "STRLEN", name)], bulk=False)

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        """A key's fault: its server in a cluster does not answer."""
        sizes: list[int | TierError | None] = [None] * len(keys)
        todo = list(range(len(keys)))
        for _ in range(_PROBE_ROUNDS):
            names = [self._names.of(keys[i]) for i in todo]
            calls = [RedisCall(name, "STRLEN", name) for name in names]
            await self._router.run("probe", calls, bulk=False)
            for i, call in zip(todo, calls, strict=True):
                length = call.reply if isinstance(call.reply, int) and call.reply > 0 else None
                sizes[i] = outage(call, "probe") or length
            unsure = [i for i in todo if sizes[i] == HEAD_BYTES]
            if not unsure:
                break
            for i, nbytes in zip(
                unsure,
                await self._large.sizes([self._names.of(keys[i]) for i in unsure]),
                strict=True,
            ):
                sizes[i] = nbytes
            todo = [i for i in unsure if sizes[i] is None]
            if not todo:
                break
        return sizes

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        froms: Sequence[int | None] = [None] * len(keys) if starts is None else starts
        if any(start is not None and start < 0 for start in froms):
            raise ValueError("a range that starts before its value")
        reads = [
            self._read(self._names.of(key), parts, start)
            for key, parts, start in zip(keys, into, froms, strict=True)
        ]
        await self._router.run("get", reads, bulk=True)
        peeks = {
            i: peek(read.name)
            for i, read in enumerate(reads)
            if isinstance(read, ReadRange) and _may_be_in_parts(read)
        }
        if peeks:
            await self._router.run("get", list(peeks.values()), bulk=False)
        calls = [peeks.get(i, read) for i, read in enumerate(reads)]
        got = [
            await self._got(call, parts, start)
            for call, parts, start in zip(calls, into, froms, strict=True)
        ]
        for i in (i for i, start in enumerate(froms) if start is not None and not size_of(into[i])):
            (nbytes,) = await self.probe([keys[i]])
            if isinstance(nbytes, int):
                got[i] = None if (froms[i] or 0) > nbytes else 0
            else:
                got[i] = nbytes
        return got

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        ttl_ms = self._ttl_ms(ttl_s)
        faults: dict[bytes, TierError | None] = {}
        todo: dict[bytes, Parts] = {}
        for key, parts in items:
            todo.setdefault(key, parts)
        for _ in range(_PUT_ROUNDS):
            taken = await self._put_once(todo, ttl_ms, faults)
            broken = await self._unreadable(taken, faults) if taken else []
            todo = {key: todo[key] for key in broken}
            if not todo:
                break
        faults |= {
            key: TierError("redis", "put", "the stored value loses its parts again and again")
            for key in todo
        }
        return [faults[key] for key, _ in items]

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        answers: dict[bytes, bool | TierError] = {}
        for key, parts in items:
            if key not in answers:
                answers[key] = await self._replaced(self._names.of(key), parts)
        return [answers[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        removed, faults = [False] * len(keys), list[TierError]()
        calls: dict[int, RemoveString] = {}
        heads: dict[int, bytes] = {}
        for i, length in enumerate(await self._lengths(keys, "delete")):
            name = self._names.of(keys[i])
            if isinstance(length, TierError):
                faults.append(length)
            elif length == HEAD_BYTES:
                heads[i] = name
            elif length != 0:
                calls[i] = RemoveString(name)
        if calls:
            await self._router.run("delete", list(calls.values()), bulk=False)
        for i, call in calls.items():
            removed[i] = call.reply not in (0, None)
            if (fault := fault_in(call, "delete")) is not None:
                faults.append(fault)
        came = [(call.name, head) for call in calls.values() if (head := Head.parse(call.seen))]
        if came:
            await self._large.remove_parts(came)
        for i, name in heads.items():
            try:
                removed[i] = await self._large.delete(name)
            except TierError as error:
                faults.append(error)
        if faults:
            raise faults[0]
        return removed

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        seen: set[bytes] = set()
        for endpoint in await self._topology.primaries():
            cursor = b"0"
            while True:
                cursor, names = await self._scan_step(endpoint, cursor, self._names.pattern(prefix))
                for name in names:
                    key = self._names.key(name)
                    if key is not None and key.startswith(prefix) and key not in seen:
                        seen.add(key)
                        yield key
                if cursor == b"0":
                    break

    async def close(self) -> None:
        self._topology.close()

    async def _ping(self, endpoint: RedisEndpoint) -> None:
        if (reply := await ask(endpoint, "PING")) != b"PONG":
            raise fault_of(reply, "check")

    async def _lengths(self, keys: Sequence[bytes], operation: str) -> list[Reply | TierError]:
        names = [self._names.of(key) for key in keys]
        calls = [RedisCall(name, "STRLEN", name) for name in names]
        await self._router.run(operation, calls, bulk=False)
        return [
            call.reply
            if isinstance(call.reply, ErrorReply) and call.reply.code == "WRONGTYPE"
            else fault_in(call, operation) or call.reply
            for call in calls
        ]

    def _read(self, name: bytes, parts: Parts, start: int | None) -> RedisCall:
        if start is None:
            return ReadWhole(name, parts)
        # a short range of a head looks like a value
        return (
            ReadRange(name, start, parts)
            if start + size_of(parts) > HEAD_BYTES and size_of(parts)
            else peek(name)
        )

    async def _got(
        self, call: RedisCall, parts: Parts, start: int | None
    ) -> int | TierError | None:
        if (fault := fault_in(call, "get")) is not None:
            return fault
        if not isinstance(call.reply, bytes):
            return call.reply if isinstance(call.reply, int) else None
        if looks_like_head(call.reply):
            return await self._large.read(call.name, Head.parse(call.reply), start, parts)
        wanted = size_of(parts)
        if (
            isinstance(call, ReadWhole)
            or start is None
            or start + wanted > len(call.reply)
            or not call.reply
        ):
            return None
        return fill(parts, call.reply[start : start + wanted])

    async def _put_once(
        self, todo: dict[bytes, Parts], ttl_ms: int | None, faults: dict[bytes, TierError | None]
    ) -> list[bytes]:
        """Returns the keys that had a value before."""
        taken: list[bytes] = []
        small: dict[bytes, RedisCall] = {}
        options = ("NX",) if ttl_ms is None else ("NX", "PX", ttl_ms)
        for key, parts in todo.items():
            name, nbytes = self._names.of(key), size_of(parts)
            if not nbytes:
                faults[key] = TierError("redis", "put", "a value of no bytes")
            elif nbytes > self._config.max_value_bytes or (
                nbytes == HEAD_BYTES and looks_like_head(joined(parts))
            ):
                stored = await self._large.put(name, parts, ttl_ms)
                faults[key] = None if isinstance(stored, bool) else stored
                taken += [key] if stored is False else []
            else:
                small[key] = RedisCall(
                    name, request=set_pieces(name, parts, *options), value_bytes=nbytes
                )
        await self._router.run("put", list(small.values()), bulk=True)
        for key, call in small.items():
            faults[key] = fault_in(call, "put")
            if faults[key] is None and call.reply != b"OK":
                faults[key] = None if call.reply is None else fault_of(call.reply, "put")
                taken += [key] if call.reply is None else []
        return taken

    async def _replaced(self, name: bytes, parts: Parts) -> bool | TierError:
        nbytes = size_of(parts)
        if not nbytes:
            return TierError("redis", "replace", "a value of no bytes")
        if nbytes > self._config.max_value_bytes or (
            nbytes == HEAD_BYTES and looks_like_head(joined(parts))
        ):
            return await self._large.replace(name, parts)
        return await replace_string(self._router, name, parts)

    async def _unreadable(
        self, keys: Sequence[bytes], faults: dict[bytes, TierError | None]
    ) -> list[bytes]:
        """Set a fault for a key that holds no string. Return keys with removed, damaged values."""
        broken: list[bytes] = []
        for key, length in zip(keys, await self._lengths(keys, "put"), strict=True):
            if isinstance(length, ErrorReply):
                faults[key] = fault_of(length, "put")
            elif isinstance(length, TierError):
                faults[key] = length
            elif length == HEAD_BYTES and await self._mended(self._names.of(key)):
                broken.append(key)
        return broken

    async def _mended(self, name: bytes) -> bool:
        if await self._large.sizes([name]) != [None]:
            return False
        look = peek(name)
        await self._router.run("put", [look], bulk=False)
        head = Head.parse(look.reply) if isinstance(look.reply, bytes) else None
        if head is not None:
            await self._large.mend(name, head)
        return head is not None

    async def _scan_step(
        self, endpoint: RedisEndpoint, cursor: bytes, pattern: bytes
    ) -> tuple[bytes, list[bytes]]:
        reply = await ask(
            endpoint, "SCAN", cursor, "MATCH", pattern, "COUNT", str(_SCAN_COUNT), "TYPE", "string"
        )
        match reply:
            case [bytes(following), list(names)]:
                return following, [name for name in names if isinstance(name, bytes)]
            case _:
                raise fault_of(reply, "scan")

    def _ttl_ms(self, ttl_s: float | None) -> int | None:
        ttl_s = ttl_s if ttl_s is not None else self._config.ttl_s or None
        return (
            None
            if ttl_s is None or ttl_s == math.inf
            else max(1, min(_MAX_TTL_MS, round(min(ttl_s, _MAX_TTL_MS) * 1000)))
        )


def _may_be_in_parts(read: ReadRange) -> bool:
    start = read.start
    return (
        read.reply is None and read.fault is None and read.short_bytes == max(0, HEAD_BYTES - start)
    )
