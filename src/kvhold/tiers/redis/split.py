"""Values larger than a server takes at once: cut into parts under names of their own, and made visible by a head that is written last.

    head = Head.new(nbytes=3 << 30, part_bytes=512 << 20); head.part_names(name)
    Head.parse(data)                                # None where the bytes are an ordinary value

A head is HEAD_BYTES long and begins with a magic word. It stands at the value's name, as an ordinary value would: whoever finds a string
of exactly that length there looks inside. (A value that would pass for a head is stored in parts itself, so there is no third case.)
Part names hold a number that is drawn anew for each put, so that two writers never mix their parts. Pure; any thread.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from kvhold.tiers.base import Parts, size_of

_LAYOUT = struct.Struct("<8sQQ16s")  # magic, size of the value, of a part, the put's own number
_MAGIC = b"\xf5kvhold\x01"
_MAX_PARTS = 1 << 16

HEAD_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Span:
    """A run of bytes of a value, within one of its parts."""

    part: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Head:
    """nbytes: of the whole value. nonce: the put's own number."""

    nbytes: int
    part_bytes: int
    nonce: bytes

    @classmethod
    def new(cls, nbytes: int, part_bytes: int) -> Self:
        """For a new put."""
        return cls(nbytes, part_bytes, os.urandom(16))

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """The head in a string of a server; None if it is none."""
        if not looks_like_head(data):
            return None
        _, nbytes, part_bytes, nonce = _LAYOUT.unpack(data)
        head = cls(nbytes, part_bytes, nonce)
        return head if nbytes and part_bytes and head.num_parts <= _MAX_PARTS else None

    def pack(self) -> bytes:
        """HEAD_BYTES."""
        return _LAYOUT.pack(_MAGIC, self.nbytes, self.part_bytes, self.nonce)

    @property
    def num_parts(self) -> int:
        """Of the value."""
        return -(-self.nbytes // self.part_bytes)

    def part_names(self, name: bytes) -> list[bytes]:
        """Where the parts of the value at `name` are. They share its slot in a cluster, for they begin with its `{...}`."""
        return [b"%b:%b:%d" % (name, self.nonce.hex().encode(), part) for part in range(self.num_parts)]

    def spans(self, start: int, nbytes: int) -> Iterator[Span]:
        """What to read of each part for the bytes from `start` on."""
        end = start + nbytes
        for part in range(start // self.part_bytes, -(-end // self.part_bytes)):
            first = part * self.part_bytes
            begin = max(start, first) - first
            yield Span(part, begin, min(end, first + self.part_bytes) - first - begin)


def looks_like_head(data: bytes) -> bool:
    """Whether a reader would take these bytes for a head."""
    return len(data) == HEAD_BYTES and data.startswith(_MAGIC)


def cut(parts: Parts, start: int, nbytes: int) -> list[memoryview]:
    """The bytes from `start` on, as parts of the same memory."""
    found: list[memoryview] = []
    for part in parts:
        if start < part.nbytes and nbytes:
            view = part.cast("B")[start : start + nbytes]
            found.append(view)
            nbytes -= view.nbytes
        start = max(0, start - part.nbytes)
    return found


def joined(parts: Parts) -> bytes:
    """A copy of all parts; for small values."""
    assert size_of(parts) <= HEAD_BYTES
    return b"".join(part.tobytes() for part in parts)
