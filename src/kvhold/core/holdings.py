from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvhold.core.checksums import Checksums
from kvhold.core.errors import DeviceError, ProtocolError
from kvhold.core.layout import Layout

ABSENT = -1  # the offset of a chunk that was not granted, or that the hit does not need


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The places of one group's chunks in the arena.

    offsets:    [n] int64, in bytes from the arena's start; ABSENT where there is no chunk
    num_tokens: [n] int64
    sums:       filled by a copy into a reservation, compared by a copy from a lease; None:
                unchecked
    """

    offsets: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    sums: Checksums | None = None

    def first(self, chunks: int) -> "ChunkBytes":
        return ChunkBytes(
            self.offsets[:chunks], self.num_tokens[:chunks], self.sums and self.sums.first(chunks)
        )


kept: list["Holding"] = []
"""Collecting one would close its connection and free its memory."""


class Holding:
    """A hit, a lease or a reservation, until it is closed. Closing twice is harmless.

    If its `with` ends with DeviceError, it is kept.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def keep(self) -> None:
        """Until the process ends: a failed device may still use the memory."""
        kept.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DeviceError):
            self.keep()
        else:
            self.close()


class Lease(Holding):
    """One shard's part of a hit. Read only; it does not move until the lease is closed.

    `memory.copy` compares checksums; a direct reader must call `verify` first.
    """

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        first_chunk: int,
        buffer: npt.NDArray[np.uint8],
        give_back: Callable[[], None],
        *,
        checksums: Sequence[bytes] | None = None,
        report: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        """offsets: [groups, chunks]
        checksums: one item per group, see `Checksums.expected`; None: nothing is compared
        report: called with the offsets of damaged chunks

        Raises ProtocolError: the checksums do not fit the chunks.
        """
        super().__init__(give_back)
        self.first_chunk = first_chunk
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._offsets = offsets
        self._sums: list[Checksums] | None = None
        if checksums is not None:
            if len(checksums) != len(offsets):
                raise ProtocolError(f"checksums of {len(checksums)} groups for {len(offsets)}")
            self._sums = [
                Checksums.expected(
                    packed,
                    row != ABSENT,
                    lambda chunks, row=row: report(  # type: ignore[misc]
                        [int(at) for at in row[chunks]]
                    ),
                )
                for packed, row in zip(checksums, offsets, strict=True)
            ]

    def chunks(self, group: int = 0) -> ChunkBytes:
        return ChunkBytes(
            self._offsets[group], self.num_tokens, None if self._sums is None else self._sums[group]
        )

    def verify(self, layout: Layout) -> None:
        """Compare every chunk that no copy has compared yet.

        Raises DamagedChunks, and ProtocolError for a wrong number of layers.
        """
        for group, sums in enumerate(self._sums or ()):
            places = self.chunks(group)
            if (
                np.count_nonzero(places.offsets != ABSENT)
                and sums.layers != layout.groups[group].layers
            ):
                raise ProtocolError(
                    f"checksums of {sums.layers} layers; group {group} has "
                    f"{layout.groups[group].layers}"
                )
            rest = np.flatnonzero((places.offsets != ABSENT) & ~sums.known.all(axis=1))
            found = np.array(
                [_sums_of_chunk(self.buffer, layout, group, places, int(chunk)) for chunk in rest],
                np.uint64,
            )
            if rest.size:
                sums.compare(rest, range(sums.layers), found)


class Reservation(Holding):
    """Memory reserved for missing chunks. A chunk is invisible until `commit`.

    Closing releases the memory of uncommitted chunks.
    """

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        buffer: npt.NDArray[np.uint8],
        commit: Callable[[Sequence[int], bytes], int],
        give_back: Callable[[], None],
        *,
        layout: Layout,
    ) -> None:
        """offsets: [groups, chunks]; ABSENT: present, not requested, or no memory
        commit: called with chunk numbers and their checksums: `checksums.BYTES` for each chunk,
                granted group and layer
        """
        super().__init__(give_back)
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._offsets = offsets
        self._commit = commit
        self._layout = layout
        self._sums = [Checksums.not_taken(len(num_tokens), group.layers) for group in layout.groups]
        self._uncommitted = set(self.granted)

    @property
    def granted(self) -> list[int]:
        """Numbers within the reservation: chunks with memory in at least one group."""
        return [int(i) for i in np.flatnonzero((self._offsets != ABSENT).any(axis=0))]

    def chunks(self, group: int = 0) -> ChunkBytes:
        """Return the places in `buffer` to write; ABSENT: do not write."""
        return ChunkBytes(self._offsets[group], self.num_tokens, self._sums[group])

    def commit(self, chunks: Sequence[int] | None = None) -> int:
        """Make chunks visible; all granted ones by default. Their bytes must be complete.

        Computes the checksums that no copy has taken. Returns a mark, for `flush(mark)`.
        """
        wanted = [
            chunk
            for chunk in dict.fromkeys(self.granted if chunks is None else chunks)
            if chunk in self._uncommitted
        ]
        packed = b"".join(self._packed(chunk) for chunk in wanted)
        self._uncommitted.difference_update(wanted)
        return self._commit(wanted, packed)

    def _packed(self, chunk: int) -> bytes:
        packed = b""
        for group, sums in enumerate(self._sums):
            places = self.chunks(group)
            if places.offsets[chunk] == ABSENT:
                continue
            if not sums.known[chunk].all():
                sums.values[chunk] = _sums_of_chunk(self.buffer, self._layout, group, places, chunk)
            packed += sums.packed(chunk)
        return packed


def _sums_of_chunk(
    buffer: npt.NDArray[np.uint8], layout: Layout, group: int, places: ChunkBytes, chunk: int
) -> list[int]:
    at, num_tokens = int(places.offsets[chunk]), int(places.num_tokens[chunk])
    ranges = (
        layout.layer_range(group, layer, num_tokens) for layer in range(layout.groups[group].layers)
    )
    return [
        xxh3_64_intdigest(buffer[at + start : at + start + length].data) for start, length in ranges
    ]
