"""Checksums of chunks in memory: xxh3_64 per layer, as in a raw frame."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DamagedChunks, ProtocolError

BYTES = 8  # per checksum

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Checksums:
    """values: [chunks, layers] uint64
    known: [chunks, layers] bool: computed by the writer, or verified by a reader
    report: called with the numbers of damaged chunks
    """

    values: Values
    known: npt.NDArray[np.bool_]
    report: Callable[[Numbers], None] = lambda _: None

    @classmethod
    def not_taken(cls, chunks: int, layers: int) -> "Checksums":
        return cls(np.zeros((chunks, layers), np.uint64), np.zeros((chunks, layers), np.bool_))

    @classmethod
    def expected(
        cls, packed: bytes, present: npt.NDArray[np.bool_], report: Callable[[Numbers], None]
    ) -> "Checksums":
        """packed: BYTES for each layer of each present chunk, little-endian
        present: [chunks]

        Raises ProtocolError for a wrong length.
        """
        count = int(np.count_nonzero(present))
        if len(packed) % (BYTES * max(1, count)) or bool(packed) != bool(count):
            raise ProtocolError(
                f"checksums has {len(packed)} bytes for {count} chunks; it must have {BYTES} for "
                "each layer of each chunk"
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
        return int(self.values.shape[1])

    def first(self, chunks: int) -> "Checksums":
        return Checksums(self.values[:chunks], self.known[:chunks], self.report)

    def take(self, chunks: Numbers, layers: range, found: Values) -> None:
        self.values[chunks, layers.start : layers.stop] = found
        self.known[chunks, layers.start : layers.stop] = True

    def compare(self, chunks: Numbers, layers: range, found: Values) -> None:
        """found: a reader's, [chunks, layers]. Reports damaged chunks, then raises DamagedChunks"""
        right = self.values[chunks, layers.start : layers.stop] == found
        self.known[chunks, layers.start : layers.stop] |= right
        damaged = chunks[~right.all(axis=1)]
        if damaged.size:
            self.report(damaged)
            raise DamagedChunks([int(chunk) for chunk in damaged])

    def packed(self, chunk: int) -> bytes:
        packed: bytes = self.values[chunk].astype("<u8").tobytes()
        return packed


def pack(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // BYTES}Q", packed)
