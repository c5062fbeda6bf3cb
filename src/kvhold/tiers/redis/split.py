"""The format of values that are too large for one string: parts, and a head that is written last.

    head = Head.new(nbytes=3 << 30, part_bytes=512 << 20); head.part_names(name)
    Head.parse(data)                                # None if the bytes are an ordinary value

The head is stored under the value's name and makes the value visible. It is HEAD_BYTES long and
begins with a magic word. A reader inspects every string of exactly this length. A value that looks
like a head is stored in parts itself, so the two cannot be confused. Part names contain a random
number for each put, so that two writers never mix their parts. Pure; any thread.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from kvhold.tiers.base import Parts, size_of

_LAYOUT = struct.Struct("<8sQQ16s")  # magic, size of the value, size of a part, nonce
_MAGIC = b"\xf5kvhold\x01"
_MAX_PARTS = 1 << 16

HEAD_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Span:
    """A range of bytes within one part of a value."""

    part: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Head:
    """The head of a value in parts.

    nbytes:     size of the whole value
    part_bytes: size of each part but the last
    nonce:      random number of the put
    """

    nbytes: int
    part_bytes: int
    nonce: bytes

    @classmethod
    def new(cls, nbytes: int, part_bytes: int) -> Self:
        """Make the head of a new put."""
        return cls(nbytes, part_bytes, os.urandom(16))

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Parse a string of a server; None if it is no head."""
        if not looks_like_head(data):
            return None
        _, nbytes, part_bytes, nonce = _LAYOUT.unpack(data)
        head = cls(nbytes, part_bytes, nonce)
        return head if nbytes and part_bytes and head.num_parts <= _MAX_PARTS else None

    def pack(self) -> bytes:
        """Return the head as HEAD_BYTES bytes."""
        return _LAYOUT.pack(_MAGIC, self.nbytes, self.part_bytes, self.nonce)

    @property
    def num_parts(self) -> int:
        """Number of parts of the value."""
        return -(-self.nbytes // self.part_bytes)

    def part_names(self, name: bytes) -> list[bytes]:
        """Return the names of the parts of the value at `name`.

        They contain its `{...}`, so they share its slot in a cluster.
        """
        return [
            b"%b:%b:%d" % (name, self.nonce.hex().encode(), part) for part in range(self.num_parts)
        ]

    def spans(self, start: int, nbytes: int) -> Iterator[Span]:
        """Yield the range of each part that holds bytes `start` to `start + nbytes`."""
        end = start + nbytes
        for part in range(start // self.part_bytes, -(-end // self.part_bytes)):
            first = part * self.part_bytes
            begin = max(start, first) - first
            yield Span(part, begin, min(end, first + self.part_bytes) - first - begin)


def looks_like_head(data: bytes) -> bool:
    """Return whether a reader would take these bytes for a head."""
    return len(data) == HEAD_BYTES and data.startswith(_MAGIC)


def cut(parts: Parts, start: int, nbytes: int) -> list[memoryview]:
    """Return `nbytes` bytes from `start` on, as views of the same memory."""
    found: list[memoryview] = []
    for part in parts:
        if start < part.nbytes and nbytes:
            view = part.cast("B")[start : start + nbytes]
            found.append(view)
            nbytes -= view.nbytes
        start = max(0, start - part.nbytes)
    return found


def joined(parts: Parts) -> bytes:
    """Return a copy of all parts. At most HEAD_BYTES."""
    assert size_of(parts) <= HEAD_BYTES
    return b"".join(part.tobytes() for part in parts)
