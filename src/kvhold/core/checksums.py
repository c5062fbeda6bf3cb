"""Checksums of chunks in memory: taken by the writer as it copies, and checked by every reader.

    room.chunks(0).sums.take(chunks, layers, found)       # by a gather; `Room.commit` sends them
    loan.chunks(0).sums.compare(chunks, layers, found)    # by a scatter; may raise DamagedChunks

A checksum is the xxh3_64 of one layer's bytes of one chunk, the same as in a raw frame. It detects
accidents, not forgery: a process that may store can write the arena and commit a matching checksum.
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
    """Checksums of one group's chunks, layer by layer. Slices share memory.

    values: [chunks, layers] uint64. Of a reservation: as taken so far. Of a lease: as committed
    known:  [chunks, layers] bool. Of a reservation: taken. Of a lease: found right by a reader
    report: of a lease: called with the numbers of damaged chunks
    """

    values: Values
    known: npt.NDArray[np.bool_]
    report: Callable[[Numbers], None] = lambda _: None

    @classmethod
    def not_taken(cls, chunks: int, layers: int) -> "Checksums":
        """Return empty checksums for a writer."""
        return cls(np.zeros((chunks, layers), np.uint64), np.zeros((chunks, layers), np.bool_))

    @classmethod
    def expected(
        cls, packed: bytes, present: npt.NDArray[np.bool_], report: Callable[[Numbers], None]
    ) -> "Checksums":
        """Return the checksums in the answer to a claim, for a reader.

        packed:  BYTES for each layer of each present chunk, little-endian
        present: [chunks]

        Raises ProtocolError if the length does not give every present chunk the same number of
        layers.
        """
        count = int(np.count_nonzero(present))
        if len(packed) % (BYTES * max(1, count)) or bool(packed) != bool(count):
            raise ProtocolError(
                f"checksums has {len(packed)} bytes for {count} chunks; {BYTES} for each "
                "layer of each are needed"
            )
        rows = (
            np.frombuffer(packed, "<u8").reshape(count, -1)
            if count
            else np.zeros((0, 0), np.uint64)
        )
        values = np.zeros((len(present), rows.shape[1]), np.uint64)
        values[present] = rows
        return cls(values, np.zeros(values.shape, np.bool_), report)

    @property
    def layers(self) -> int:
        """The number of layers of each chunk."""
        return int(self.values.shape[1])

    def first(self, chunks: int) -> "Checksums":
        """Return the checksums of the first `chunks` chunks."""
        return Checksums(self.values[:chunks], self.known[:chunks], self.report)

    def take(self, chunks: Numbers, layers: range, found: Values) -> None:
        """Keep the checksums `found` by a writer: [chunks, layers], of those chunks and layers."""
        self.values[chunks, layers.start : layers.stop] = found
        self.known[chunks, layers.start : layers.stop] = True

    def compare(self, chunks: Numbers, layers: range, found: Values) -> None:
        """Compare the checksums `found` by a reader; arguments as for `take`.

        Reports damaged chunks, then raises DamagedChunks.
        """
        right = self.values[chunks, layers.start : layers.stop] == found
        self.known[chunks, layers.start : layers.stop] |= right
        damaged = chunks[~right.all(axis=1)]
        if damaged.size:
            self.report(damaged)
            raise DamagedChunks([int(chunk) for chunk in damaged])

    def packed(self, chunk: int) -> bytes:
        """Return one chunk's checksums, in the form for a commit."""
        packed: bytes = self.values[chunk].astype("<u8").tobytes()
        return packed


def pack(values: Sequence[int]) -> bytes:
    """Pack the checksums of a chunk's layers, in the form that an entry of memory holds."""
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(packed: bytes) -> tuple[int, ...]:
    """Unpack the checksums of a chunk's layers."""
    return struct.unpack(f"<{len(packed) // BYTES}Q", packed)
