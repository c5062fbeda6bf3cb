from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvhold.blend.permits import Permit
from kvhold.core.keys import ChunkNames
from kvhold.core.planning import SpanReport
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.core.tracing import TraceContext
from kvhold.integrations.vllm.naming.adapters import AdapterUse


@dataclass(frozen=True)
class Load:
    """tickets: by rank, if the workers are on several hosts; empty: all use `ticket`
    block_ids: for each part, the blocks from `first_chunk` on; -1 is not written
    inside: the step's pass waits for each layer
    patience_s: for the claim; None: a call's usual deadline
    """

    request_id: str
    ticket: int
    first_chunk: int
    block_ids: list[list[int]]
    inside: bool = False
    patience_s: float | None = None
    adapter: AdapterUse | None = None
    tickets: tuple[int, ...] = ()
    trace: TraceContext = ""

    def ticket_of(self, rank: int) -> int:
        return self.tickets[rank] if self.tickets else self.ticket


@dataclass(frozen=True)
class Store:
    """Copy chunks out of blocks, after the pass that completes them.

    block_ids: for each part, the blocks of `names`; -1: freed
    last: the request has ended; its blocks are kept until the copy
    """

    request_id: str
    names: ChunkNames
    block_ids: list[list[int]]
    store_options: StoreOptions = DEFAULT_OPTIONS
    last: bool = False
    adapter: AdapterUse | None = None
    trace: TraceContext = ""


@dataclass(frozen=True)
class SpanLoad:
    """start, end: of the tokens to reuse, before those that are exact are skipped
    skip:       tokens that are exact, from `start` on
    num_tokens: of the stored KV, whole blocks; may end after `end`
    text_end:   end of the marked text, whose rest is no whole block
    ticket:     0: computed alone, and stored as `names`
    """

    start: int
    end: int
    skip: int
    num_tokens: int
    text_end: int
    ticket: int
    names: ChunkNames | None = None


@dataclass(frozen=True)
class BlendLoad:
    """Compute KV of a prompt over that of its spans.

    tokens:     of the whole prompt
    num_tokens: of these get KV
    ticket:     of the first `num_exact` tokens
    """

    request_id: str
    tokens: list[int]
    num_tokens: int
    block_ids: list[int]
    spans: tuple[SpanLoad, ...]
    num_exact: int = 0
    ticket: int = 0
    patience_s: float | None = None
    store_options: StoreOptions = DEFAULT_OPTIONS
    permit: Permit | None = None
    reports: tuple[SpanReport, ...] = ()


@dataclass
class Steps(KVConnectorMetadata):
    """The engine can wait for loads if it computes nothing.

    storers: ranks that store; None: see `Geometry.stored_by`
    zeroed:  for each part, blocks to zero before the pass; they have no KV yet
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    computes: bool = True
    storers: tuple[int, ...] | None = None
    blends: list[BlendLoad] = field(default_factory=list)
    zeroed: list[list[int]] = field(default_factory=list)
