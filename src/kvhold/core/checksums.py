"""Checksums of chunks in memory: taken by the writer as it copies, committed, kept, and compared by every reader.

    room.chunks(0).sums.take(chunks, layers, found)       # a gather, of what it has copied; `Room.commit` sends them
    loan.chunks(0).sums.compare(chunks, layers, found)    # a scatter, of what it has copied; DamagedChunks

The checksum is the xxh3_64 of one layer's bytes of one chunk, the same that a raw frame states. It finds accidents, not forgers: any
process that may store can write the arena, and could commit a checksum that fits.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DamagedChunks, ProtocolError

BYTES = 8  # of one checksum

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Checksums:
    """Checksums of one group's chunks, layer by layer. Slices share their memory.

    values: [chunks, layers] uint64. Of a room: as taken so far. Of a loan: as committed
    known:  [chunks, layers] bool. Of a room: those taken. Of a loan: those that a reader has found right
    report: of a loan: called with the numbers of damaged chunks
    """

    values: Values
    known: npt.NDArray[np.bool_]
    report: Callable[[Numbers], None] = lambda _: None

    @classmethod
    def not_taken(cls, chunks: int, layers: int) -> "Checksums":
        """None yet, for a writer."""
        return cls(np.zeros((chunks, layers), np.uint64), np.zeros((chunks, layers), np.bool_))

    @classmethod
    def expected(cls, packed: bytes, present: npt.NDArray[np.bool_], report: Callable[[Numbers], None]) -> "Checksums":
        """Those that a claim was answered with, for a reader.

        packed:  BYTES for each layer of each present chunk, little-endian
        present: [chunks]

        Raises ProtocolError where there are not equally many for each chunk.
        """
        count = int(np.count_nonzero(present))
        if len(packed) % (BYTES * max(1, count)) or bool(packed) != bool(count):
            raise ProtocolError(f"checksums has {len(packed)} bytes for {count} chunks; {BYTES} for each layer of each are needed")
        rows = np.frombuffer(packed, "<u8").reshape(count, -1) if count else np.zeros((0, 0), np.uint64)
        values = np.zeros((len(present), rows.shape[1]), np.uint64)
        values[present] = rows
        return cls(values, np.zeros(values.shape, np.bool_), report)

    @property
    def layers(self) -> int:
        """How many layers each chunk has."""
        return int(self.values.shape[1])

    def first(self, chunks: int) -> "Checksums":
        """Those of the first chunks."""
        return Checksums(self.values[:chunks], self.known[:chunks], self.report)

    def take(self, chunks: Numbers, layers: range, found: Values) -> None:
        """Keep what a writer has found. found: [chunks, layers], of those chunks and layers."""
        self.values[chunks, layers.start : layers.stop] = found
        self.known[chunks, layers.start : layers.stop] = True

    def compare(self, chunks: Numbers, layers: range, found: Values) -> None:
        """Compare what a reader has found. Arguments as for `take`. Reports damaged chunks, then raises DamagedChunks."""
        right = self.values[chunks, layers.start : layers.stop] == found
        self.known[chunks, layers.start : layers.stop] |= right
        damaged = chunks[~right.all(axis=1)]
        if damaged.size:
            self.report(damaged)
            raise DamagedChunks([int(chunk) for chunk in damaged])

    def packed(self, chunk: int) -> bytes:
        """One chunk's, as a commit carries them."""
        packed: bytes = self.values[chunk].astype("<u8").tobytes()
        return packed


def pack(values: Sequence[int]) -> bytes:
    """Checksums of a chunk's layers, as an entry of memory keeps them."""
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(packed: bytes) -> tuple[int, ...]:
    """The reverse."""
    return struct.unpack(f"<{len(packed) // BYTES}Q", packed)
