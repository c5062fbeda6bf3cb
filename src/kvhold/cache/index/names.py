"""The names of a query's chunks: namespace and hash, without group and shard."""

from collections.abc import Iterator

from kvhold.core.keys import HASH_BYTES, Query, split_hashes


def chunk_names(query: Query, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Return the whole chunks from `first` on, with their numbers."""
    for at, chain_hash in enumerate(split_hashes(query.hashes[first * HASH_BYTES :])):
        yield first + at, query.namespace + chain_hash


def tail_names(query: Query) -> Iterator[tuple[int, bytes]]:
    """Return the candidate tails, with their lengths in tokens."""
    for length, tail_hash in zip(query.tail_lengths, split_hashes(query.tail_hashes), strict=True):
        yield length, query.namespace + tail_hash
