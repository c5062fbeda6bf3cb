"""The node's chunks as announced to routers.

A block is announced for a medium while all shards of one of its chunks are there, and the chunk has
a description. One thread, but for `has`.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import NamedTuple

import msgspec

from kvhold.core.keys import KEY_BYTES, NAME_BYTES, place_suffix
from kvhold.core.router_events import (
    BlockHash,
    ChunkDescription,
    RemovedBlocks,
    RouterEvent,
    StoredBlocks,
)
from kvhold.tiers.peers.index import MOST_PEERS, PeerIndex, digest_of


class _Medium(NamedTuple):
    """places: bits: memory, then the tiers; 0: shared stores"""

    name: str
    locality: str
    places: int


_MEDIA = (
    _Medium("CPU", "LOCAL", 1),
    _Medium("STORAGE", "LOCAL", (1 << MOST_PEERS) - 2),
    _Medium("STORAGE", "REMOTE", 0),
)
MOST_PLACES = MOST_PEERS
_MOST_EARLY = 16_384
_CHUNK_BYTES, _BLOCK_BYTES = 500, 200
_stored_decoder = msgspec.msgpack.Decoder(StoredBlocks)


class _Chunk:
    """seen: suffix of a key -> bits of shared stores"""

    __slots__ = ("description", "nbytes", "seen", "told")

    def __init__(self, description: ChunkDescription, nbytes: int, seen: dict[bytes, int]) -> None:
        self.description = description
        self.nbytes = nbytes
        self.seen = seen
        self.told: set[tuple[int, int]] = set()


class RouterLedger:
    def __init__(self, limit_bytes: int, count_loss: Callable[[str], None]) -> None:
        """count_loss: called with the reason, `malformed` or `limit`, for each lost description"""
        self._limit_bytes = limit_bytes
        self._count_loss = count_loss
        self._present = PeerIndex()
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        # `seen`, without a description
        self._early: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()
        # chunks that announce the block: (number of the medium, group, hash)
        self._blocks: Counter[tuple[int, int | None, BlockHash]] = Counter()
        self._touched: set[bytes] = set()
        self._removed: list[RouterEvent] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def has(self, name: bytes) -> bool:
        """Any thread."""
        return name in self._chunks

    def move(self, key: bytes, place: int, *, present: bool) -> None:
        if place < 0:
            self._see(key, 1 << -place, present=present)
            return
        if present:
            self._present.add(digest_of(key), 1, peer=place)
        else:
            self._present.remove(digest_of(key), peer=place)
        if (name := key[:NAME_BYTES]) in self._chunks:
            self._touched.add(name)

    def use(self, name: bytes) -> None:
        """Keep its description longer than that of others."""
        if name in self._chunks:
            self._chunks.move_to_end(name)

    def describe(self, description: ChunkDescription) -> None:
        if description.name in self._chunks:
            return
        try:
            nbytes = sum(_checked_bytes(packed) for packed in description.stored)
        except (msgspec.DecodeError, ValueError):
            self._count_loss("malformed")
            return
        seen = self._early.pop(description.name, {})
        self._chunks[description.name] = _Chunk(description, _CHUNK_BYTES + nbytes, seen)
        self._touched.add(description.name)
        self.nbytes += _CHUNK_BYTES + nbytes
        while self.nbytes > self._limit_bytes:
            self._forget(next(iter(self._chunks)))
            self._count_loss("limit")

    def forget_all(self) -> None:
        """After changes were lost: announce all as removed."""
        self._present = PeerIndex()
        while self._chunks:
            self._forget(next(iter(self._chunks)))
        self._early.clear()

    def changes(self) -> list[RouterEvent]:
        """A prompt's beginning comes first."""
        touched, self._touched = self._touched, set()
        events, self._removed = self._removed, []
        chunks = [chunk for name in touched if (chunk := self._chunks.get(name)) is not None]
        chunks.sort(key=lambda chunk: (chunk.description.first_token, chunk.description.name))
        for chunk in chunks:
            events += self._update(chunk)
        return events

    def _see(self, key: bytes, store: int, *, present: bool) -> None:
        names: Iterable[bytes] = (key[:NAME_BYTES],)
        if len(key) < NAME_BYTES:
            names = [name for name in (*self._chunks, *self._early) if name.startswith(key)]
        for name in names:
            chunk = self._chunks.get(name)
            seen = self._early.get(name, {}) if chunk is None else chunk.seen
            suffixes = list(seen) if len(key) < KEY_BYTES else [key[NAME_BYTES:]]
            for suffix in suffixes:
                stores = seen.get(suffix, 0)
                seen[suffix] = stores | store if present else stores & ~store
                if not seen[suffix]:
                    del seen[suffix]
            if chunk is None:
                self._keep_early(name, seen)
            else:
                self._touched.add(name)

    def _keep_early(self, name: bytes, seen: dict[bytes, int]) -> None:
        self._early.pop(name, None)
        if seen:
            self._early[name] = seen
            if len(self._early) > _MOST_EARLY:
                self._early.popitem(last=False)

    def _update(self, chunk: _Chunk) -> Iterator[RouterEvent]:
        description = chunk.description
        for number, group in product(range(len(_MEDIA)), range(len(description.stored))):
            packed = description.stored[group]
            if packed is None:
                continue
            is_present = self._is_present(chunk, group, _MEDIA[number].places)
            if is_present == ((number, group) in chunk.told):
                continue
            if is_present:
                yield from self._announce(chunk, number, group, packed)
            else:
                yield from self._take_back(chunk, number, group, packed)

    def _is_present(self, chunk: _Chunk, group: int, places: int) -> bool:
        for shard in range(chunk.description.shards):
            suffix = place_suffix(group, shard)
            if not places:
                if suffix not in chunk.seen:
                    return False
                continue
            found = self._present.find(digest_of(chunk.description.name + suffix))
            if found is None or not found.peers & places:
                return False
        return True

    def _announce(
        self, chunk: _Chunk, number: int, group: int, packed: bytes
    ) -> Iterator[StoredBlocks]:
        chunk.told.add((number, group))
        stored = _stored_decoder.decode(packed)
        keys = [(number, stored.group_idx, block) for block in stored.block_hashes]
        # a tail has the first blocks of a whole chunk
        known = next((at for at, key in enumerate(keys) if not self._blocks[key]), len(keys))
        self._blocks.update(keys)
        if known < len(keys):
            yield _without_first(stored, known, _MEDIA[number])

    def _take_back(
        self, chunk: _Chunk, number: int, group: int, packed: bytes
    ) -> Iterator[RemovedBlocks]:
        chunk.told.remove((number, group))
        stored = _stored_decoder.decode(packed)
        gone: list[BlockHash] = []
        for block in stored.block_hashes:
            key = number, stored.group_idx, block
            self._blocks[key] -= 1
            if not self._blocks[key]:
                del self._blocks[key]
                gone.append(block)
        if gone:
            medium = _MEDIA[number]
            yield RemovedBlocks(gone, medium.name, stored.group_idx, medium.locality)

    def _forget(self, name: bytes) -> None:
        chunk = self._chunks.pop(name)
        self.nbytes -= chunk.nbytes
        for number, group in sorted(chunk.told):
            packed = chunk.description.stored[group]
            if packed is not None:
                self._removed += self._take_back(chunk, number, group, packed)
        self._keep_early(name, chunk.seen)


def _checked_bytes(packed: bytes | None) -> int:
    """Raises msgspec.DecodeError, ValueError."""
    if packed is None:
        return 0
    stored = _stored_decoder.decode(packed)
    blocks = len(stored.block_hashes)
    if not blocks or len(stored.token_ids) != blocks * stored.block_size:
        raise ValueError("blocks and tokens differ in number")
    if stored.extra_keys is not None and len(stored.extra_keys) != blocks:
        raise ValueError("blocks and extra keys differ in number")
    return len(packed) + blocks * _BLOCK_BYTES


def _without_first(stored: StoredBlocks, blocks: int, medium: _Medium) -> StoredBlocks:
    return msgspec.structs.replace(
        stored,
        block_hashes=stored.block_hashes[blocks:],
        parent_block_hash=stored.block_hashes[blocks - 1] if blocks else stored.parent_block_hash,
        token_ids=stored.token_ids[blocks * stored.block_size :],
        extra_keys=stored.extra_keys[blocks:] if stored.extra_keys is not None else None,
        medium=medium.name,
        locality=medium.locality,
    )
