"""The loads and stores that the scheduler sends to the workers in one step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvhold.core.keys import ChunkNames
from kvhold.core.terms import FREE, Terms
from kvhold.integrations.vllm.naming.adapters import AdapterUse


@dataclass(frozen=True)
class Load:
    """Load a hit into blocks: beside the forward passes, or inside this step's pass.

    ticket:      the hit's ticket, which each worker claims for its shards
    first_chunk: number of the first chunk needed
    block_ids:   for each part of the geometry: the engine's blocks, from that chunk's first block
        on; -1 for a block that is not to be written
    inside:      the step's pass computes the rest of the request, and waits for each layer
    patience_s:  the longest wait for the claim, after which computing is better; 0: the deadline of
        any call
    adapter:     the adapter of the KV; None: the model itself
    """

    request_id: str
    ticket: int
    first_chunk: int
    block_ids: list[list[int]]
    inside: bool = False
    patience_s: float = 0.0
    adapter: AdapterUse | None = None


@dataclass(frozen=True)
class Store:
    """Copy chunks out of blocks, after the forward pass that completes them.

    block_ids: for each part of the geometry: the blocks of `names`, in order; -1 for a block that
        the engine has freed already
    terms:     the terms of storage
    last:      the request has ended; its blocks are kept until the workers have copied them
    adapter:   the adapter of the KV; None: the model itself
    """

    request_id: str
    names: ChunkNames
    block_ids: list[list[int]]
    terms: Terms = FREE
    last: bool = False
    adapter: AdapterUse | None = None


@dataclass
class Steps(KVConnectorMetadata):
    """The work of one step.

    computes: whether the engine computes anything in it. If not, it can wait for loads.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    computes: bool = True
