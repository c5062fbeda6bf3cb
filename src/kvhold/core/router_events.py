"""KV cache events in vLLM's format, and a node's descriptions of chunks to publish them."""

from typing import Annotated, Any, TypeAlias

import msgspec

from kvhold.core.keys import NAME_BYTES

BlockHash: TypeAlias = int | bytes  # vLLM's, cut to 64 bits or whole

MOST_SHARDS = 4096
MOST_GROUPS = 64
MOST_EVENT_BYTES = 4 << 20


class StoredBlocks(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    """Consecutive blocks of one prompt and one group have been stored.

    parent_block_hash: of the preceding block; None: the first one
    token_ids:         of all blocks
    medium:            CPU or STORAGE
    extra_keys:        per block, its hash covers these beside the tokens
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    session_id: str | None = None


class RemovedBlocks(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class ClearedBlocks(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The publisher has nothing left."""


RouterEvent: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


class RouterBatch(msgspec.Struct, frozen=True, array_like=True):
    """ts: Unix time"""

    ts: float
    events: list[RouterEvent]
    data_parallel_rank: int | None = None


class ChunkDescription(msgspec.Struct, frozen=True, array_like=True):
    """The facts of a chunk that only its engine knows.

    name:        a key's first NAME_BYTES
    first_token: position in its prompt
    stored:      one packed StoredBlocks per group; None: the engine does not hash its blocks
    """

    name: Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    first_token: Annotated[int, msgspec.Meta(ge=0)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=MOST_SHARDS)]
    stored: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=MOST_EVENT_BYTES)] | None],
        msgspec.Meta(max_length=MOST_GROUPS),
    ]
