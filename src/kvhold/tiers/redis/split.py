"""Values too large for one string: parts, and a head under the value's name, written last.

A value that looks like a head is stored in parts. A nonce in part names keeps two writers apart.
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
class PartRange:
    part: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Head:
    nbytes: int
    part_bytes: int
    nonce: bytes

    @classmethod
    def new(cls, nbytes: int, part_bytes: int) -> Self:
        return cls(nbytes, part_bytes, os.urandom(16))

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        if not looks_like_head(data):
            return None
        _, nbytes, part_bytes, nonce = _LAYOUT.unpack(data)
        head = cls(nbytes, part_bytes, nonce)
        return head if nbytes and part_bytes and head.num_parts <= _MAX_PARTS else None

    def pack(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, self.nbytes, self.part_bytes, self.nonce)

    @property
    def num_parts(self) -> int:
        return -(-self.nbytes // self.part_bytes)

    def part_names(self, name: bytes) -> list[bytes]:
        """All are in the cluster slot of `name`."""
        return [
            b"%b:%b:%d" % (name, self.nonce.hex().encode(), part) for part in range(self.num_parts)
        ]

    def part_ranges(self, start: int, nbytes: int) -> Iterator[PartRange]:
        end = start + nbytes
        for part in range(start // self.part_bytes, -(-end // self.part_bytes)):
            first = part * self.part_bytes
            begin = max(start, first) - first
            yield PartRange(part, begin, min(end, first + self.part_bytes) - first - begin)


def looks_like_head(data: bytes) -> bool:
    return len(data) == HEAD_BYTES and data.startswith(_MAGIC)


def cut(parts: Parts, start: int, nbytes: int) -> list[memoryview]:
    found: list[memoryview] = []
    for part in parts:
        if start < part.nbytes and nbytes:
            view = part.cast("B")[start : start + nbytes]
            found.append(view)
            nbytes -= view.nbytes
        start = max(0, start - part.nbytes)
    return found


def joined(parts: Parts) -> bytes:
    assert size_of(parts) <= HEAD_BYTES
    return b"".join(part.tobytes() for part in parts)
