from kvhold.core.errors import ProtocolError
from kvhold.net.stream import Stream
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.redis.resp import RedisCall, read_string_head
from kvhold.tiers.redis.split import HEAD_BYTES, looks_like_head

_DRAIN_BYTES = 4 << 20  # beyond it, a new connection is cheaper


class ReadWhole(RedisCall):
    """The size; None if missing or too large; or the bytes of a head."""

    def __init__(self, name: bytes, parts: Parts) -> None:
        self.parts = parts
        self.room_bytes = size_of(parts)
        super().__init__(name, "GET", name, value_bytes=self.room_bytes)

    async def take(self, stream: Stream) -> None:
        nbytes = await read_string_head(stream)
        if not isinstance(nbytes, int):
            self.reply = nbytes
        elif nbytes == HEAD_BYTES:
            data = await stream.read(nbytes)
            await stream.expect_crlf()
            self.reply = data if looks_like_head(data) else fill(self.parts, data)
        elif nbytes > self.room_bytes:
            self.reply = None
            await _drop(stream, nbytes)
        else:
            await stream.read_into(self.parts, nbytes)
            await stream.expect_crlf()
            self.reply = nbytes or None


class ReadRange(RedisCall):
    """The size of the parts, or None; then see `short_bytes`."""

    def __init__(self, name: bytes, start: int, parts: Parts) -> None:
        self.parts = parts
        self.room_bytes = size_of(parts)
        self.start = start
        self.short_bytes = 0
        super().__init__(
            name, "GETRANGE", name, start, start + self.room_bytes - 1, value_bytes=self.room_bytes
        )

    async def take(self, stream: Stream) -> None:
        nbytes = await read_string_head(stream)
        self.reply = None
        if nbytes is None or not isinstance(nbytes, int):
            self.reply = nbytes
        elif nbytes > self.room_bytes:
            raise ProtocolError(f"{nbytes} bytes for a range of {self.room_bytes}")
        elif nbytes < self.room_bytes:
            self.short_bytes = nbytes
            await _drop(stream, nbytes)
        else:
            await stream.read_into(self.parts, nbytes)
            await stream.expect_crlf()
            self.reply = nbytes


def fill(parts: Parts, data: bytes) -> int | None:
    if len(data) > size_of(parts) or not data:
        return None
    at = 0
    for part in parts:
        step = min(part.nbytes, len(data) - at)
        if step:
            part.cast("B")[:step] = data[at : at + step]
            at += step
    return len(data)


async def _drop(stream: Stream, nbytes: int) -> None:
    if nbytes > _DRAIN_BYTES:
        stream.close()
        return
    await stream.skip(nbytes)
    await stream.expect_crlf()
