"""What the scheduler tells the workers to do in one step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvhold.core.keys import ChunkNames
from kvhold.core.terms import FREE, Terms
from kvhold.integrations.vllm.naming.adapters import AdapterUse


@dataclass(frozen=True)
class Load:
    """Bring a hit into blocks: beside the forward passes, or inside the one of this step.

    ticket:      of the hit, to be claimed by each worker for its shards
    first_chunk: number of the first chunk needed
    block_ids:   of each part of the geometry: the engine's blocks, from that chunk's first on; -1 for a block that is not to be written
    inside:      the step's pass computes the rest of the request, and waits for each layer
    adapter:     whose KV it is; None: the model's own
    patience_s:  how long the claim may take before computing is better; 0: as long as any call
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
    """Take chunks out of blocks, after the forward pass that completes them.

    block_ids: of each part of the geometry: the blocks of `names`, in order; -1 for one that the engine has let go of already
    terms:     on which they are kept
    last:      the request has ended, and its blocks are kept until the workers say that they have them
    adapter:   whose KV it is; None: the model's own
    """

    request_id: str
    names: ChunkNames
    block_ids: list[list[int]]
    terms: Terms = FREE
    last: bool = False
    adapter: AdapterUse | None = None


@dataclass
class Steps(KVConnectorMetadata):
    """One step's work. computes: whether the engine computes anything in it; where it does not, it has time to wait for a load."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    computes: bool = True
