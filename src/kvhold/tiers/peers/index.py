"""Which peers have which chunks: 17 bytes a slot, 0.7 of them in use at most.

1,024 tables with linear probing, for short growths. One thread.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

MOST_PEERS = 32
DIGEST_BYTES = 8
_SLOT_BYTES = 17
_TABLES = 1024
_SMALLEST = 8
_MOST_FULL = 0.7
_GROWTH = 1.5
_TOO_LARGE = 1 << 40


class PeerChunk(NamedTuple):
    """nbytes: the largest size at its peers, or more
    peers:  bit n: peer n has the chunk
    """

    nbytes: int
    peers: int


class IndexPart(NamedTuple):
    """digests, sizes: joined, DIGEST_BYTES each, little-endian"""

    digests: bytes
    sizes: bytes


def digest_of(key: bytes) -> int:
    return xxh3_64_intdigest(key) or 1


def numbers_of(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


class PeerIndex:
    def __init__(self) -> None:
        self._counts = [0] * MOST_PEERS
        self._tables = [_Table(self._counts) for _ in range(_TABLES)]
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def find(self, digest: int) -> PeerChunk | None:
        return self._tables[digest % _TABLES].find(digest)

    def peers_of(self, digest: int) -> int:
        """Any thread; rarely wrong."""
        try:
            found = self.find(digest)
        except IndexError:
            return 0
        return 0 if found is None else found.peers

    def add(self, digest: int, nbytes: int, *, peer: int) -> None:
        """The largest size is kept: codecs of hosts may differ.

        Ignores the digest of a free slot, and invalid sizes.
        """
        if digest and 0 < nbytes < _TOO_LARGE:
            table = self._tables[digest % _TABLES]
            self._num -= table.num
            table.add(digest, nbytes, 1 << peer)
            self._num += table.num

    def remove(self, digest: int, *, peer: int) -> None:
        table = self._tables[digest % _TABLES]
        self._num -= table.num
        table.remove(digest, 1 << peer)
        self._num += table.num

    def forget(self, peer: int) -> Iterator[None]:
        for table in self._tables:
            if not self._counts[peer]:
                return
            if table.num:
                self._num -= table.num
                table.forget(1 << peer)
                self._num += table.num
                yield

    def parts(self, peer: int) -> Iterator[IndexPart]:
        """A table at a time. Chunks may change in between."""
        for table in self._tables:
            if not self._counts[peer]:
                return
            if table.num and (part := table.part(1 << peer)).digests:
                yield part

    def count(self, peer: int) -> int:
        return self._counts[peer]


class _Table:
    """digests: 0: free
    sizes: low and high part of the size, 40 bits together
    counts: chunks of each peer, in all tables
    """

    __slots__ = ("counts", "digests", "num", "peers", "sizes_high", "sizes_low")

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.num = 0
        self._allocate(_SMALLEST)

    @property
    def nbytes(self) -> int:
        return _SLOT_BYTES * len(self.digests)

    def find(self, digest: int) -> PeerChunk | None:
        at = self._slot(digest)
        if not self.digests[at]:
            return None
        return PeerChunk(self._size(at), self.peers[at])

    def add(self, digest: int, nbytes: int, mask: int) -> None:
        at = self._slot(digest)
        if self.digests[at]:
            before = self.peers[at]
            if before != mask:
                nbytes = max(nbytes, self._size(at))
            self._put(at, digest, nbytes, before | mask)
            self._count(before, before | mask)
            return
        if self.num + 1 > _MOST_FULL * len(self.digests):
            self._resize(int(len(self.digests) * _GROWTH) + 1)
            at = self._slot(digest)
        self._put(at, digest, nbytes, mask)
        self._count(0, mask)
        self.num += 1

    def remove(self, digest: int, mask: int) -> None:
        at = self._slot(digest)
        if not self.digests[at]:
            return
        before = self.peers[at]
        self.peers[at] = before & ~mask
        self._count(before, before & ~mask)
        if not self.peers[at]:
            self._free(at)
            self.num -= 1
            self._shrink()

    def forget(self, mask: int) -> None:
        peers = np.frombuffer(self.peers, np.uint32)
        num_forgotten = int(np.count_nonzero(peers & mask))
        if not num_forgotten:
            return
        self.counts[mask.bit_length() - 1] -= num_forgotten
        peers &= np.uint32(~mask & 0xFFFFFFFF)
        del peers
        self._resize(len(self.digests))
        self._shrink()

    def part(self, mask: int) -> IndexPart:
        chosen = np.nonzero(np.frombuffer(self.peers, np.uint32) & mask)[0]
        digests = np.frombuffer(self.digests, np.uint64)[chosen]
        sizes = np.frombuffer(self.sizes_low, np.uint32)[chosen].astype("<u8")
        sizes |= np.frombuffer(self.sizes_high, np.uint8)[chosen].astype("<u8") << np.uint64(32)
        return IndexPart(digests.astype("<u8").tobytes(), sizes.tobytes())

    def _slot(self, digest: int) -> int:
        digests, size = self.digests, len(self.digests)
        at = digest // _TABLES % size
        while (there := digests[at]) and there != digest:
            at += 1
            if at == size:
                at = 0
        return at

    def _count(self, before: int, after: int) -> None:
        changed = before ^ after
        while changed:
            bit = changed & -changed
            self.counts[bit.bit_length() - 1] += 1 if after & bit else -1
            changed ^= bit

    def _size(self, at: int) -> int:
        return self.sizes_high[at] << 32 | self.sizes_low[at]

    def _put(self, at: int, digest: int, nbytes: int, mask: int) -> None:
        self.digests[at], self.peers[at] = digest, mask
        self.sizes_low[at], self.sizes_high[at] = nbytes & 0xFFFFFFFF, nbytes >> 32

    def _free(self, hole: int) -> None:
        """Move later chunks that would not be found behind it."""
        size, at = len(self.digests), hole
        while True:
            at = (at + 1) % size
            digest = self.digests[at]
            if not digest:
                break
            home = digest // _TABLES % size
            if (at - home) % size >= (at - hole) % size:
                self._put(hole, digest, self._size(at), self.peers[at])
                hole = at
        self.digests[hole] = self.peers[hole] = 0

    def _shrink(self) -> None:
        size = len(self.digests)
        if size > _SMALLEST and self.num < _MOST_FULL / _GROWTH**2 * size:
            self._resize(max(_SMALLEST, int(self.num / _MOST_FULL * _GROWTH) + 1))

    def _resize(self, size: int) -> None:
        before = (self.digests, self.sizes_low, self.sizes_high, self.peers)
        self._allocate(size)
        self.num = 0
        for digest, low, high, mask in zip(*before, strict=True):
            if mask:
                self._put(self._slot(digest), digest, high << 32 | low, mask)
                self.num += 1

    def _allocate(self, size: int) -> None:
        self.digests = array("Q", bytes(8 * size))
        self.sizes_low = array("I", bytes(4 * size))
        self.sizes_high = array("B", bytes(size))
        self.peers = array("I", bytes(4 * size))


def pack(chunks: Sequence[tuple[int, int]]) -> IndexPart:
    numbers = np.array(chunks, "<u8").reshape(-1, 2)
    return IndexPart(numbers[:, 0].tobytes(), numbers[:, 1].tobytes())


def unpack(digests: bytes, sizes: bytes) -> tuple[Sequence[int], Sequence[int]]:
    """Raises ValueError: the lengths do not fit."""
    if len(digests) % DIGEST_BYTES or len(sizes) not in (0, len(digests)):
        raise ValueError(f"{len(digests)} bytes of digests and {len(sizes)} of sizes")
    return (
        np.frombuffer(digests, "<u8").tolist(),
        np.frombuffer(sizes, "<u8").tolist(),
    )
