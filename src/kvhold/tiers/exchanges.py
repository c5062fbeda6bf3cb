from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvhold.core.errors import ProtocolError
from kvhold.net.messages import MAX_MESSAGE_BYTES
from kvhold.net.stream import Stream
from kvhold.net.wire import LENGTH_BYTES, body_length
from kvhold.tiers.base import Parts, size_of

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
        self.size = None  # a second reply may overwrite the first
        if size is not None:
            if not 0 < size <= self.nbytes or (self.start is not None and size != self.nbytes):
                raise ProtocolError(f"a value of {size} bytes for a buffer of {self.nbytes}")
            await stream.read_into(self.parts, size)
        self.size = size


def gettings(
    keys: Sequence[bytes], into: Sequence[Parts], starts: Sequence[int] | None
) -> list[Getting]:
    return [
        Getting(keys[at], into[at], None if starts is None else starts[at])
        for at in range(len(keys))
    ]


def batched(items: Sequence[Item], most: int | None = None) -> list[list[Item]]:
    batches: list[list[Item]] = []
    left = 0
    for item in items:
        if not batches or item.nbytes > left or len(batches[-1]) == most:
            batches.append([])
            left = _BATCH_BYTES
        batches[-1].append(item)
        left -= item.nbytes
    return batches


async def read_body(stream: Stream, most_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    return await stream.read(body_length(await stream.read(LENGTH_BYTES), most_bytes))
