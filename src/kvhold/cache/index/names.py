"""A name is namespace and hash, without group and shard."""

from collections.abc import Iterator

from kvhold.core.keys import HASH_BYTES, Query, split_hashes


def chunk_names(query: Query, first: int = 0) -> Iterator[tuple[int, bytes]]:
    for at, chain_hash in enumerate(split_hashes(query.hashes[first * HASH_BYTES :])):
        yield first + at, query.namespace + chain_hash


def tail_names(query: Query) -> Iterator[tuple[int, bytes]]:
    for length, tail_hash in zip(query.tail_lengths, split_hashes(query.tail_hashes), strict=True):
        yield length, query.namespace + tail_hash
