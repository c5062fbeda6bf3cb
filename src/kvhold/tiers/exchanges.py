from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvhold.core.errors import ProtocolError
from kvhold.net.bulk import Incoming, Watch
from kvhold.net.messages import MAX_MESSAGE_BYTES
from kvhold.net.stream import Stream
from kvhold.net.wire import LENGTH_BYTES, body_length
from kvhold.tiers.base import Parts, WatchedParts, size_of

_BATCH_BYTES = 8 << 20


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Item = TypeVar("Item", bound=_Sized)


@dataclass
class Getting:
    key: bytes
    parts: Parts
    start: int | None
    size: int | None = None

    @property
    def nbytes(self) -> int:
        return size_of(self.parts)

    async def take(self, stream: Stream, size: int | None) -> None:
        await take_all(stream, [self], [size])

    def begin(self) -> Watch | None:
        return self.parts.begin() if isinstance(self.parts, WatchedParts) else None


async def take_all(stream: Stream, items: Sequence[Getting], sizes: Sequence[int | None]) -> None:
    """After an error, arrived items have their sizes."""
    incoming: list[tuple[Getting, Incoming]] = []
    for item, size in zip(items, sizes, strict=True):
        item.size = None  # a second reply may overwrite the first
        if size is not None:
            if not 0 < size <= item.nbytes or (item.start is not None and size != item.nbytes):
                raise ProtocolError(f"a value of {size} bytes for a buffer of {item.nbytes}")
            incoming.append((item, Incoming(item.parts, size, item.begin())))
    try:
        await stream.read_values([value for _, value in incoming])
    finally:
        for item, value in incoming:
            item.size = value.nbytes if value.has_arrived else None


def gettings(
    keys: Sequence[bytes], into: Sequence[Parts], starts: Sequence[int] | None
) -> list[Getting]:
    return [
        Getting(keys[at], into[at], None if starts is None else starts[at])
        for at in range(len(keys))
    ]


def batched(
    items: Sequence[Item], most: int | None = None, most_bytes: int = _BATCH_BYTES
) -> list[list[Item]]:
    batches: list[list[Item]] = []
    left = 0
    for item in items:
        nbytes = item.nbytes
        if not batches or nbytes > left or len(batches[-1]) == most:
            batches.append([])
            left = most_bytes
        batches[-1].append(item)
        left -= nbytes
    return batches


async def read_body(stream: Stream, most_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    return await stream.read(body_length(await stream.read(LENGTH_BYTES), most_bytes))
