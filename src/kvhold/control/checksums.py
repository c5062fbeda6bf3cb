"""Checksums of a prompt's KV, to compare it between hosts."""

from http import HTTPStatus
from typing import TypedDict

import numpy as np
from xxhash import xxh3_64_hexdigest

from kvhold.control.refusals import ControlRefusal
from kvhold.core.errors import DamagedChunks, NodeError
from kvhold.core.holdings import ABSENT, Lease
from kvhold.core.keys import Namespace, Query
from kvhold.node import NodeClient


class ChunkChecksum(TypedDict):
    """first_token: its position in the prompt
    group:       of layers
    checksum:    xxh3_64 of the xxh3_64 of each layer's bytes (8 bytes each, little-endian)
    """

    first_token: int
    num_tokens: int
    group: int
    shard: int
    checksum: str


class PromptChecksums(TypedDict):
    """Equal ones mean equal bytes.

    num_tokens: cached, from the prompt's start
    sources:    tokens by place
    reason:     why the hit ends there
    chunks:     by shard, group and position, without those that the hit does not need
    """

    num_tokens: int
    sources: dict[str, int]
    reason: str | None
    chunks: list[ChunkChecksum]


def checksums_of(
    client: NodeClient, namespace: Namespace, query: Query, *, wait_s: float
) -> PromptChecksums:
    """Load chunks from lower tiers, and check all bytes. Raises ControlRefusal.

    client: one that checks memory
    """
    with client.lookup(query, uses="none", wait_s=wait_s) as hit:
        chunks: list[ChunkChecksum] = []
        for shard in range(namespace.shards) if hit.num_tokens else ():
            lease = client.claim(hit.ticket, shard)
            if lease is None:
                raise NodeError("the hit was lost before it was read")
            with lease:
                chunks += _of_shard(lease, namespace, shard)
        return {
            "num_tokens": hit.num_tokens,
            "sources": dict(hit.sources),
            "reason": None if hit.reason is None else str(hit.reason),
            "chunks": chunks,
        }


def _of_shard(lease: Lease, namespace: Namespace, shard: int) -> list[ChunkChecksum]:
    layout = namespace.layout
    try:
        lease.verify(layout)
    except DamagedChunks as error:
        raise ControlRefusal(HTTPStatus.CONFLICT, "damaged", str(error)) from None
    found: list[ChunkChecksum] = []
    for group in range(len(layout.groups)):
        places = lease.chunks(group)
        assert places.sums is not None, "the client checks memory"
        found += (
            {
                "first_token": int(chunk) * layout.tokens_per_chunk,
                "num_tokens": int(places.num_tokens[chunk]),
                "group": group,
                "shard": shard,
                "checksum": xxh3_64_hexdigest(places.sums.packed(int(chunk))),
            }
            for chunk in np.flatnonzero(places.offsets != ABSENT)
        )
    return found
