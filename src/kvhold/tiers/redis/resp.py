"""A part of the Redis protocol, version 2. An invalid reply raises ProtocolError."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvhold.core.errors import ProtocolError, TierDenied, TierError, TierFull, TierUnavailable
from kvhold.net.pool import Exchange
from kvhold.net.stream import Bytes, Stream
from kvhold.tiers.base import Parts, size_of

_MAX_SMALL_BYTES = 1 << 20  # of a string that is not a value
_MAX_ITEMS = 1 << 16
_MAX_DEPTH = 5
_INTEGER = re.compile(rb"-?\d{1,19}")

_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED")
_UNAVAILABLE = (
    "LOADING",
    "READONLY",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "MISCONF",
    "NOREPLICAS",
    "MOVED",
    "ASK",
)


@dataclass(frozen=True)
class ErrorReply:
    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


Reply: TypeAlias = int | bytes | ErrorReply | list["Reply"] | None


class RedisCall(Exchange):
    """name: the command's key, which decides the server"""

    def __init__(
        self,
        name: bytes,
        *words: bytes | str | int,
        request: Sequence[Bytes] = (),
        value_bytes: int = 0,
    ) -> None:
        self.name = name
        self.request = request or (command(*words),)
        self.value_bytes = value_bytes
        self.reply: Reply = None

    async def take(self, stream: Stream) -> None:
        self.reply = await read_reply(stream)
        if isinstance(self.reply, ErrorReply) and self.reply.text.startswith("ERR Protocol error"):
            stream.close()

    def forget(self) -> None:
        self.fault = None
        self.reply = None

    def asking_request(self) -> Sequence[Bytes]:
        return (command("ASKING"), *self.request)

    async def take_asked(self, stream: Stream) -> None:
        await read_reply(stream)
        await self.take(stream)


class Asking(Exchange):
    """To a server that takes over the key's slot; accepted only after ASKING."""

    def __init__(self, call: RedisCall) -> None:
        self.call = call
        self.request = call.asking_request()
        self.value_bytes = call.value_bytes

    async def take(self, stream: Stream) -> None:
        await self.call.take_asked(stream)


def command(*words: bytes | str | int) -> bytes:
    data = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(data) + b"".join(
        [b"$%d\r\n%b\r\n" % (len(word), word) for word in data]
    )


def set_pieces(name: bytes, value: Parts, *options: bytes | str | int) -> list[Bytes]:
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        3 + len(options),
        len(name),
        name,
        size_of(value),
    )
    tail = b"\r\n" + command(*options).partition(b"\r\n")[2] if options else b"\r\n"
    return [head, *value, tail]


async def read_reply(stream: Stream, depth: int = 0) -> Reply:
    line = await stream.line()
    kind, rest = line[:1], line[1:]
    if kind == b":":
        return _integer(rest)
    if kind == b"+":
        return rest
    if kind == b"-":
        return ErrorReply(_readable(rest))
    if kind == b"$":
        return await _read_string(stream, _integer(rest))
    if kind == b"*":
        return await _read_list(stream, _integer(rest), depth)
    raise _not_redis(line)


async def read_string_head(stream: Stream) -> int | ErrorReply | None:
    """None: a null string. The string and its CRLF follow."""
    line = await stream.line()
    if line[:1] == b"-":
        return ErrorReply(_readable(line[1:]))
    if line[:1] != b"$":
        raise _not_redis(line)
    nbytes = _integer(line[1:])
    if nbytes < -1:
        raise ProtocolError(f"a string of {nbytes} bytes")
    return None if nbytes == -1 else nbytes


def fault_of(reply: Reply, operation: str) -> TierError:
    if not isinstance(reply, ErrorReply):
        return TierError(
            "redis",
            operation,
            f"the server answered {str(reply)[:40]!r}, which does not fit the command",
        )
    if reply.code == "OOM":
        return TierFull("redis", operation, f"the server is full: {reply.text}")
    if reply.code in _DENIED:
        return TierDenied("redis", operation, reply.text)
    if reply.code in _UNAVAILABLE or "max number of clients" in reply.text:
        return TierUnavailable("redis", operation, reply.text)
    return TierError("redis", operation, reply.text)


def no_answer(reply: Reply) -> ErrorReply:
    return (
        reply
        if isinstance(reply, ErrorReply)
        else ErrorReply(f"{str(reply)[:40]!r} does not fit the command")
    )


async def _read_string(stream: Stream, nbytes: int) -> bytes | None:
    if nbytes == -1:
        return None
    if not 0 <= nbytes <= _MAX_SMALL_BYTES:
        raise ProtocolError(f"a string of {nbytes} bytes; at most {_MAX_SMALL_BYTES} are expected")
    data = await stream.read(nbytes)
    await stream.expect_crlf()
    return data


async def _read_list(stream: Stream, length: int, depth: int) -> list[Reply] | None:
    if length == -1:
        return None
    if not 0 <= length <= _MAX_ITEMS or depth == _MAX_DEPTH:
        raise ProtocolError(f"an unexpected list of {length} items in {depth} others")
    return [await read_reply(stream, depth + 1) for _ in range(length)]


def _integer(text: bytes) -> int:
    if not _INTEGER.fullmatch(text):  # int() accepts blanks, a plus and underscores
        raise ProtocolError(f"{_readable(text)!r} instead of a number")
    return int(text)


def _not_redis(line: bytes) -> ProtocolError:
    return ProtocolError(f"{_readable(line)[:40]!r} is not an expected reply of Redis")


def _readable(text: bytes) -> str:
    return text[:200].decode("ascii", "backslashreplace")
