"""Commands from the state to the tier worker. `->` names the state's method for the answer."""

from dataclasses import dataclass
from typing import TypeAlias

from kvhold.core.keys import HASH_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.core.tracing import TraceContext
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import TierPlace

MOST_READS = 250


@dataclass(frozen=True)
class ProbeCommand:
    """-> `probed(search, places)`, for each search

    others: probed in the same calls
    """

    search: int
    keys: list[bytes]
    trace: TraceContext = ""
    tier: str = ""
    others: tuple["ProbeCommand", ...] = ()

    @property
    def all_keys(self) -> list[bytes]:
        if not self.others:
            return self.keys
        return list(dict.fromkeys(key for one in (self, *self.others) for key in one.keys))


@dataclass(frozen=True)
class PendingRead:
    """layout: None: an opaque frame"""

    entry: Entry
    layout: Layout | None
    place: TierPlace
    tenant: str = ""
    trace: TraceContext = ""


@dataclass(frozen=True)
class FetchCommand:
    """Read chunks, roughly in order.

    -> `fetched(entry, ok)`; or `given_up(entry)`, and `let_go(entry)` when the memory is free
    """

    pending_reads: list[PendingRead]


@dataclass(frozen=True)
class WriteCommand:
    """Of a held entry. -> `written(number)`

    layout: None: an opaque frame
    above:  write only above this tier, which had the chunk
    """

    number: int
    entry: Entry
    layout: Layout | None
    store_options: StoreOptions = DEFAULT_OPTIONS
    above: int | None = None


@dataclass(frozen=True)
class ClearCommand:
    """-> `cleared(prefix)`

    learned: another host has cleared the shared tiers
    asked_s: Unix time of the clear in memory; None: now
    """

    prefix: bytes
    learned: bool = False
    asked_s: float | None = None


@dataclass(frozen=True)
class ClearChunksCommand:
    """Of one namespace. -> `prompt_clears.hidden(namespace)`, then `.ended()`

    last_keys: see `tiers/chunk_clears.py`
    """

    namespace: bytes
    last_keys: list[bytes]


@dataclass(frozen=True)
class ClearTierCommand:
    """Of one tier. -> `tier_clears.ended()`"""

    tier: int
    prefix: bytes


@dataclass(frozen=True)
class KeepTagsCommand:
    """Of a new namespace, before its writes."""

    namespace: bytes
    tags: bytes


@dataclass(frozen=True)
class Space:
    """layout: None: the frames name it"""

    layout: Layout | None
    store_options: StoreOptions


@dataclass(frozen=True)
class ReencodeCommand:
    """-> `reencode_progressed(number, progress)`, repeatedly

    keys: None: all
    """

    number: int
    tier: int
    codec: str
    spaces: dict[bytes, Space]
    layouts: dict[bytes, Layout]
    keys: list[bytes] | None = None


@dataclass(frozen=True)
class CopyCommand:
    """Of held entries. -> `copies.copied(number, ...)`"""

    number: int
    tier: int
    entries: list[Entry]
    layout: Layout
    store_options: StoreOptions


@dataclass(frozen=True)
class PeerCopyCommand:
    """-> `copies.copied(number, ...)`

    entries: held; none: wait for the load's end
    """

    number: int
    address: str
    query: Query
    entries: list[Entry]


@dataclass(frozen=True)
class TransferCommand:
    """From tier to tier. -> `moves.progressed(number, progress)`, repeatedly

    keys: None: all of the namespace
    drop: remove them from the source
    """

    number: int
    source: int
    target: int
    namespace: bytes
    keys: list[bytes] | None
    layout: Layout
    tenant: str
    drop: bool


@dataclass(frozen=True)
class DropCommand:
    """Of held chunks. -> `moves.progressed(number, progress)`"""

    number: int
    tier: int
    keys: list[bytes]
    nbytes: int


@dataclass(frozen=True)
class UsedCommand:
    """To tiers with a learning policy. -> `uses.done(command)`"""

    query: Query
    num_groups: int
    prompt: int
    value: int
    at_s: float

    @property
    def num_keys(self) -> int:
        num_chunks = (len(self.query.hashes) + len(self.query.tail_hashes)) // HASH_BYTES
        return num_chunks * self.num_groups * self.query.num_shards


@dataclass(frozen=True)
class StopCommand:
    number: int


Command: TypeAlias = (
    ProbeCommand
    | FetchCommand
    | WriteCommand
    | UsedCommand
    | ClearCommand
    | ClearChunksCommand
    | ClearTierCommand
    | KeepTagsCommand
    | ReencodeCommand
    | CopyCommand
    | PeerCopyCommand
    | TransferCommand
    | DropCommand
    | StopCommand
)
