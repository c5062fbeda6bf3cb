"""One memcached server (1.6 or later), by the meta protocol.

A value beyond the server's item size (1 MiB by default) is TierFull.
"""

import asyncio
import math
import re
import time
from binascii import unhexlify
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias
from urllib.parse import unquote_to_bytes

from kvhold.core.errors import ConfigError, ProtocolError, TierError, TierFull, TierUnavailable
from kvhold.core.keys import KEY_BYTES
from kvhold.core.setting import setting
from kvhold.net.pool import Exchange, Pool, run
from kvhold.net.stream import Address, Bytes, Stream, open_stream
from kvhold.tiers.base import Parts, TierTraits, check_lengths, size_of
from kvhold.tiers.url import TierUrl

_PORT = 11211
_SMALL_CONNECTIONS = 2
_DRAIN_BYTES = 4 << 20  # beyond it, a new connection is cheaper
_LONGEST_RELATIVE_S = 30 * 86_400  # longer ones are dates
_LAST_DATE_S = 2**31 - 1
_MAX_PREFIX = 150  # a key is at most 250 bytes

_HIT = re.compile(rb"HD s(\d{1,15})")
_VALUE = re.compile(rb"VA (\d{1,15})")
_STATE = re.compile(rb"HD t(-1|\d{1,15}) c(\d{1,20})")

_REPLACE_ROUNDS = 3
_CHANGED = 2


@dataclass(frozen=True)
class MemcachedConfig:
    addresses: tuple[Address, ...] = setting((), "the server")
    prefix: str = setting("kvhold:", "beginning of the names of this tier's keys")
    ttl_s: float = setting(
        0.0,
        "time after which a value is removed; 0: keep it until the server evicts it",
        minimum=0,
    )
    connections: int = setting(
        4, "connections that carry values; two more carry small commands", minimum=1
    )


class MemcachedTier:
    traits: ClassVar[TierTraits] = TierTraits(
        "memcached", durable=True, shared=True, expires=True, replaces=True
    )

    def __init__(self, config: MemcachedConfig) -> None:
        if len(config.addresses) != 1 or not isinstance(config.addresses[0], Address):
            raise ConfigError(
                "memcached: name one server, as in memcached://host:11211; for several, write a "
                "tier for each, or use a proxy"
            )
        if len(config.prefix) > _MAX_PREFIX or re.search(r"[^!-$&-~]", config.prefix):
            raise ConfigError(
                f"memcached: prefix = {config.prefix!r}: at most {_MAX_PREFIX} visible "
                "ASCII characters, without %"
            )
        self._config = config
        self._address = config.addresses[0]
        self._prefix = config.prefix.encode()
        self._small = Pool(self._connect, _SMALL_CONNECTIONS)
        self._bulk = Pool(self._connect, config.connections)

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if url.path.strip("/") or "@" in url.netloc:
            raise ConfigError(
                f"{url.shown}: databases and users are not supported; write memcached://host:port"
            )
        addresses = tuple(Address(host, port or _PORT) for host, port in url.hosts)
        return cls(url.apply(replace(MemcachedConfig(), addresses=addresses)))

    async def check(self) -> None:
        await self._run("check", [_Call((b"mn\r\n",), _noop)], self._small)

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        calls = [_Call((b"mg %b s\r\n" % self._name_of(key),), _size) for key in keys]
        await self._run("probe", calls, self._small)
        return [
            call.fault or (call.answer if isinstance(call.answer, int) and call.answer else None)
            for call in calls
        ]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        if starts is not None and any(start < 0 for start in starts):
            raise ValueError("a range that starts before its value")
        froms: Sequence[int | None] = [None] * len(keys) if starts is None else starts
        calls = [
            _Read(self._name_of(key), parts, start)
            for key, parts, start in zip(keys, into, froms, strict=True)
        ]
        await self._run("get", calls, self._bulk)
        return [
            call.fault or (call.answer if isinstance(call.answer, int) else None) for call in calls
        ]

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        until = _expiry(ttl_s if ttl_s is not None else self._config.ttl_s or None)
        calls: dict[bytes, _Call] = {}
        faults: dict[bytes, TierError | None] = {}
        for key, parts in items:
            if not size_of(parts):
                faults.setdefault(key, TierError("memcached", "put", "a value of no bytes"))
            elif key not in calls:
                head = b"ms %b %d ME T%d\r\n" % (self._name_of(key), size_of(parts), until)
                calls[key] = _Call((head, *parts, b"\r\n"), _stored, size_of(parts))
        await self._run("put", list(calls.values()), self._bulk)
        faults |= {key: call.fault for key, call in calls.items()}
        return [faults[key] for key, _ in items]

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        answers: dict[bytes, bool | TierError] = {}
        todo: dict[bytes, Parts] = {}
        for key, parts in items:
            if size_of(parts):
                todo.setdefault(key, parts)
            else:
                answers.setdefault(key, TierError("memcached", "replace", "a value of no bytes"))
        for _ in range(_REPLACE_ROUNDS):
            looks = {key: _Look(self._name_of(key)) for key in todo}
            await self._run("replace", list(looks.values()), self._small)
            writes: dict[bytes, _Call] = {}
            for key, look in looks.items():
                if look.fault is not None or look.answer is None:
                    answers[key] = look.fault or False
                else:
                    head = b"cas %b 0 %d %d %d\r\n" % (
                        self._name_of(key),
                        _expiry(look.left_s),
                        size_of(todo[key]),
                        look.version,
                    )
                    writes[key] = _Call((head, *todo[key], b"\r\n"), _replaced, size_of(todo[key]))
            await self._run("replace", list(writes.values()), self._bulk)
            answers |= {key: call.fault or call.answer is True for key, call in writes.items()}
            todo = {
                key: todo[key]
                for key, call in writes.items()
                if call.fault is None and call.answer == _CHANGED
            }
            if not todo:
                break
        answers |= {
            key: TierError("memcached", "replace", "the value changes again and again")
            for key in todo
        }
        return [answers[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        calls = [_Call((b"md %b\r\n" % self._name_of(key),), _removed) for key in keys]
        await self._run("delete", calls, self._small)
        for call in calls:
            if call.fault is not None:
                raise call.fault
        return [call.answer is True for call in calls]

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """By `hash`: the server's lists by age may omit items."""
        seen: set[bytes] = set()
        try:
            reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
            try:
                writer.write(b"lru_crawler metadump hash\r\n")
                while (line := (await reader.readline()).rstrip(b"\r\n")) != b"END":
                    key = self._listed(line)
                    if key is not None and key.startswith(prefix) and key not in seen:
                        seen.add(key)
                        yield key
            finally:
                writer.close()
        except (OSError, ValueError, ProtocolError) as error:
            raise self._fault("scan", error) from None

    async def close(self) -> None:
        self._small.close()
        self._bulk.close()

    def _name_of(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _listed(self, line: bytes) -> bytes | None:
        if not line.startswith(b"key="):
            if (refusal := _refusal(line)) is not None:
                raise refusal.fault("scan")
            raise (
                _nonsense(line)
                if line
                else ConnectionResetError("the server closed the connection")
            )
        name = unquote_to_bytes(line[4:].partition(b" ")[0])
        text = name.removeprefix(self._prefix)
        if (
            len(text) != 2 * KEY_BYTES
            or not re.fullmatch(rb"[0-9a-f]+", text)
            or name != self._prefix + text
        ):
            return None
        return unhexlify(text)

    async def _connect(self) -> Stream:
        return await open_stream(self._address, None)

    async def _run(self, operation: str, calls: Sequence["_Exchange"], pool: Pool) -> None:
        await run(pool, calls, fault=lambda error: self._fault(operation, error))
        if calls and all(call.fault is not None for call in calls):
            raise next(call.fault for call in calls if call.fault is not None)
        for call in calls:
            if isinstance(call.answer, _Refusal):
                call.fault = call.answer.fault(operation)

    def _fault(self, operation: str, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        if isinstance(error, ProtocolError):
            return TierError(
                "memcached",
                operation,
                f"{self._address} does not speak memcached's meta protocol: {error}",
            )
        return TierUnavailable(
            "memcached", operation, f"{self._address}: {str(error) or type(error).__name__}"
        )


@dataclass(frozen=True)
class _Refusal:
    text: str

    def fault(self, operation: str) -> TierError:
        full = "too large" in self.text or "out of memory" in self.text.lower()
        hint = "; memcached -I sets the largest item size" if "too large" in self.text else ""
        return (TierFull if full else TierError)("memcached", operation, self.text + hint)


_Answer: TypeAlias = int | bool | _Refusal | None


class _Exchange(Exchange):
    answer: _Answer = None


class _Call(_Exchange):
    def __init__(
        self, request: Sequence[Bytes], read: Callable[[bytes], _Answer], value_bytes: int = 0
    ) -> None:
        self.request = request
        self.value_bytes = value_bytes
        self._read = read

    async def take(self, stream: Stream) -> None:
        line = await stream.line()
        self.answer = _refusal(line) or self._read(line)
        if isinstance(self.answer, _Refusal) and self.answer.text.startswith(
            ("ERROR", "CLIENT_ERROR")
        ):
            stream.close()  # the server might take the rest for commands


class _Look(_Exchange):
    """left_s:  the remaining time to live; None: for ever
    version: for `cas`
    """

    def __init__(self, name: bytes) -> None:
        self.request = (b"mg %b t c\r\n" % name,)
        self.left_s: float | None = None
        self.version = 0

    async def take(self, stream: Stream) -> None:
        line = await stream.line()
        if (refusal := _refusal(line)) is not None or line == b"EN":
            self.answer = refusal
            return
        if (found := _STATE.fullmatch(line)) is None:
            raise _nonsense(line)
        self.left_s = None if found[1] == b"-1" else float(found[1])
        self.version = int(found[2])
        self.answer = True


class _Read(_Exchange):
    def __init__(self, name: bytes, parts: Parts, start: int | None) -> None:
        self.request = (b"mg %b v\r\n" % name,)
        self.value_bytes = size_of(parts)
        self._parts = parts
        self._start = start

    async def take(self, stream: Stream) -> None:
        line = await stream.line()
        if (refusal := _refusal(line)) is not None or line == b"EN":
            self.answer = refusal
            return
        if (found := _VALUE.fullmatch(line)) is None:
            raise _nonsense(line)
        nbytes, room = int(found[1]), self.value_bytes
        first, wanted = (0, nbytes) if self._start is None else (self._start, room)
        if wanted > room or first + wanted > nbytes or not nbytes:
            await self._drop(stream, nbytes)
            return
        await stream.skip(first)
        await stream.read_into(self._parts, wanted)
        self.answer = wanted
        await self._drop(stream, nbytes - first - wanted)

    async def _drop(self, stream: Stream, nbytes: int) -> None:
        if nbytes > _DRAIN_BYTES:
            stream.close()
            return
        await stream.skip(nbytes)
        await stream.expect_crlf()


def _refusal(line: bytes) -> _Refusal | None:
    if line.startswith((b"SERVER_ERROR", b"CLIENT_ERROR", b"ERROR", b"BUSY")):
        return _Refusal(line[:200].decode("ascii", "backslashreplace"))
    return None


def _noop(line: bytes) -> _Answer:
    if line != b"MN":
        raise _nonsense(line)
    return True


def _size(line: bytes) -> _Answer:
    if line == b"EN":
        return None
    if (found := _HIT.fullmatch(line)) is None:
        raise _nonsense(line)
    return int(found[1])


def _stored(line: bytes) -> _Answer:
    if line not in (b"HD", b"NS"):
        raise _nonsense(line)
    return True


def _replaced(line: bytes) -> _Answer:
    if line not in (b"STORED", b"EXISTS", b"NOT_FOUND"):
        raise _nonsense(line)
    return {b"STORED": True, b"EXISTS": _CHANGED, b"NOT_FOUND": False}[line]


def _removed(line: bytes) -> _Answer:
    if line not in (b"HD", b"NF"):
        raise _nonsense(line)
    return line == b"HD"


def _nonsense(line: bytes) -> ProtocolError:
    return ProtocolError(f"{line[:40].decode('ascii', 'backslashreplace')!r}")


def _expiry(ttl_s: float | None) -> int:
    """Whole seconds (at least 1), a date if that is beyond 30 days, or 0 for never."""
    if ttl_s is None or ttl_s == math.inf:
        return 0
    seconds = max(1, math.ceil(min(ttl_s, _LAST_DATE_S)))
    return (
        seconds if seconds <= _LONGEST_RELATIVE_S else min(_LAST_DATE_S, int(time.time()) + seconds)
    )
