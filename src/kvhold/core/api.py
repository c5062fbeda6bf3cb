"""The interface of a cache, in this process or in this host's node.

    with cache.lookup(prompt.query()) as hit:         # pinned for the block
        with cache.claim(hit.ticket) as lease:        # one shard's bytes, until closed
            scatter(lease.chunks(group=0), ...)       # verifies checksums
    with cache.reserve(layout, prompt.chunks(first=3)) as reservation:  # for missing chunks
        gather(..., reservation.chunks(group=0))
        reservation.commit()                          # visible now; the rest is released

A hit, a lease or a reservation ends with its `with`, or with the holder's connection. An *arriving*
hit may grow while lower tiers are read; a settled hit is final.

Any thread. A miss is a shorter hit. A fault or a missed deadline raises a `KVHoldError` and leaves
nothing behind. A node raises NodeError in place of ConfigError.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvhold.core.errors import KVHoldError, ProtocolError
from kvhold.core.held_spans import HeldSpans
from kvhold.core.holdings import ABSENT as ABSENT
from kvhold.core.holdings import Holding, Lease, Reservation
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.planning import (
    BlendReport,
    ComputeCost,
    ComputeIntent,
    Decision,
    LoadedChunks,
    RequestInfo,
)
from kvhold.core.reasons import Reason
from kvhold.core.status import MEMORY, CacheStatus
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions

# Which chunks count as used, for a policy that learns:
# all:   in the cache or not
# known: only those of earlier lookups: the caller will not store others
# none:  another lookup of the request has used them
Uses: TypeAlias = Literal["all", "known", "none"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01  # between polls of an arriving hit
_REENCODING_PAUSE_S = 0.1  # the longest, for a job


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A chunk (one group, one shard) was admitted to a tier, or removed.

    number: one more than the previous event's. In a snapshot: of the last event before it
    kind:   admitted, evicted, expired or cleared
    tier:   always `ram`
    parent: key of the preceding chunk; empty: unknown
    """

    number: int
    kind: str
    key: bytes
    tier: str
    num_tokens: int
    first_token: int
    parent: bytes

    @property
    def namespace(self) -> bytes:
        return self.key[:NAMESPACE_BYTES]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order.

    next: for the next call of `events`
    lost: events are missing; start again from a snapshot
    """

    events: list[Event]
    next: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """ticket:       0: nothing is held
    sources:      tokens by place: `ram` or a lower tier's name
    waits:        another engine computes the missing chunks
    announcement: number of the caller's; 0: none
    loaded:       of a span, from peers
    """

    ticket: int
    num_tokens: int
    arriving: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    reason: Reason | None = None
    waits: bool = False
    announcement: int = 0
    loaded: Sequence[LoadedChunks] = ()


class Hit(Holding):
    """The pinned first `num_tokens` tokens of a prompt."""

    def __init__(
        self,
        found: Found,
        give_back: Callable[[], None],
        *,
        poll: Callable[[int, bool, bool], Found],
        pause: Callable[[float], None],
        give_back_hit: Callable[[], None] = lambda: None,
    ) -> None:
        """poll: `(ticket, settle, growth)` -> answer. growth: the next pause ends when
              the hit grows
        give_back_hit: ends only the hit; `give_back` its announcement, too
        """
        super().__init__(give_back)
        self._found = found
        self._poll = poll
        self._pause = pause
        self._give_back_hit = give_back_hit
        self._is_announced = True

    @property
    def ticket(self) -> int:
        """Claims the hit; 0: nothing was found."""
        return self._found.ticket

    @property
    def num_tokens(self) -> int:
        return self._found.num_tokens

    @property
    def arriving(self) -> bool:
        """The hit may still grow."""
        return self._found.arriving

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by place. Their sum is `num_tokens` once the hit is final."""
        return self._found.sources

    @property
    def loaded(self) -> Sequence[LoadedChunks]:
        """Of a span: from which peers. Empty while arriving."""
        return self._found.loaded

    @property
    def reason(self) -> Reason | None:
        """Why the hit ends; None while arriving."""
        return self._found.reason

    @property
    def waits(self) -> bool:
        """Another engine computes the missing chunks."""
        return self._found.waits

    def take_announcement(self) -> Holding | None:
        """The announcement that the caller computes the missing chunks. Close it after computing.

        Unless taken, it ends with the hit.
        """
        if not self._found.announcement or self._give_back is None or not self._is_announced:
            return None
        self._is_announced = False
        give_back, self._give_back = self._give_back, self._give_back_hit
        return Holding(give_back)

    def refresh(self) -> None:
        self._update(settle=False)

    def settle(self) -> None:
        """Make the hit final."""
        self._update(settle=True)

    def wait(self, until_s: float) -> None:
        """Settle when the hit is complete, or the monotonic clock reads `until_s`."""
        pause_s = _FIRST_PAUSE_S
        while self.arriving and (left_s := until_s - time.monotonic()) > 0:
            self._pause(min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
            self.refresh()
        self.settle()

    def wait_for_more(self, until_s: float) -> None:
        """As `wait`, but return when the hit has grown, too."""
        before, pause_s = self.num_tokens, _FIRST_PAUSE_S
        self._update(settle=False, growth=True)
        while self.arriving and self.num_tokens == before:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                self.settle()
                return
            self._pause(min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
            self._update(settle=False, growth=True)

    def _update(self, *, settle: bool, growth: bool = False) -> None:
        if self.arriving:
            self._found = self._poll(self.ticket, settle, growth)


class ReencodeProgress(msgspec.Struct, frozen=True, array_like=True):
    """Chunks of one group and one shard.

    stopped:     why it ended early; else empty
    seen:        the sum of the counts below, without `over_budget`
    over_budget: written with a more exact codec than requested
    same:        already encoded as requested
    kept_lossy:  encoded by another lossy codec
    missing:     deleted or expired since
    bad:         failed a check; removed
    unknown:     no registered layout, or no such codec
    failed:      unchanged: the tier failed, or there is no key
    """

    done: bool = False
    stopped: str = ""
    seen: int = 0
    replaced: int = 0
    over_budget: int = 0
    same: int = 0
    kept_lossy: int = 0
    missing: int = 0
    bad: int = 0
    unknown: int = 0
    failed: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


class CopyProgress(msgspec.Struct, frozen=True, array_like=True):
    """Chunks of one group and one shard.

    stopped: why it ended early; else empty
    copied:  the tier has them
    failed:  the tier failed, was full, or declined them
    dropped: of `copied`, removed from the source, unless in use
    bytes:   of `copied`, in the source; to memory, there
    """

    done: bool = False
    stopped: str = ""
    copied: int = 0
    failed: int = 0
    dropped: int = 0
    bytes: int = 0


AnyProgress = TypeVar("AnyProgress", bound=ReencodeProgress | CopyProgress)


class CacheJob(Holding, Generic[AnyProgress]):
    """A re-encoding or copy. Closing it early stops it."""

    def __init__(
        self,
        progress: AnyProgress,
        give_back: Callable[[], None],
        *,
        poll: Callable[[], AnyProgress],
    ) -> None:
        super().__init__(give_back)
        self.progress = progress
        self._poll = poll

    def refresh(self) -> AnyProgress:
        if not self.progress.done:
            self.progress = self._poll()
        return self.progress

    def wait(self, until_s: float = float("inf")) -> AnyProgress:
        """until_s: on the monotonic clock"""
        pause_s = _FIRST_PAUSE_S
        while not self.refresh().done and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s = min(_REENCODING_PAUSE_S, 1.5 * pause_s)
        return self.progress


class Reencoding(CacheJob[ReencodeProgress]):
    pass


class Copying(CacheJob[CopyProgress]):
    pass


class RetainAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The part of a prompt that is kept, from its start.

    number:         to be released; 0: nothing is kept
    num_tokens:     in memory, or kept once they are stored
    """

    number: int
    num_tokens: int
    present_tokens: int


class DemoteAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Chunks in memory, of one group and one shard each.

    num_chunks:    go first in eviction
    pinned_chunks: in use, left alone
    """

    num_chunks: int
    pinned_chunks: int


class RetainedPrompt(Holding):
    """Kept in memory until its deadline or closing."""

    def __init__(self, answer: RetainAnswer, give_back: Callable[[], None]) -> None:
        super().__init__(give_back)
        self.num_tokens = answer.num_tokens
        self.present_tokens = answer.present_tokens


class Cache(Protocol):
    """Offsets count from the start of `arena_buffer`, the host memory."""

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes], read only, shared between processes."""

    def map_for_device(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Map the arena twice, read only and writable, for a device that registers it.

        Raises NodeError where a device cannot be served.
        """

    def report_pinned(self, nbytes: int, *, numa_node: int = -1) -> None:
        """Report the arena bytes registered with a device."""

    def register(self, namespace: Namespace) -> None:
        """Make a namespace and its layout known, before other calls about it."""

    def lookup(
        self,
        query: Query,
        *,
        cost: ComputeCost | None = None,
        have_tokens: int = 0,
        uses: Uses = "all",
        intent: ComputeIntent | None = None,
        info: RequestInfo | None = None,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Hit:
        """Pin the longest prefix with all chunks that each shard and group needs.

        cost:        of the caller's computing. The hit's length then gives the earliest first token
        have_tokens: the caller's own. If no tier has more, nothing is loaded
        uses:        which chunks count as used
        intent:      see `Hit.waits` and `Hit.take_announcement`
        wait_s:      for lower tiers. None: as configured. 0: the hit may be arriving
        """

    def spans(
        self,
        queries: Sequence[Query],
        *,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> HeldSpans:
        """Pin the longest held beginning of each span, in one round trip.

        queries: in `Namespace.of_spans`
        wait_s:  as in `lookup`, for all together

        Raises ConfigError for over 256 spans, or exact namespaces.
        """

    def report_timing(
        self,
        request: str,
        *,
        load_s: float | None,
        compute_s: float | None,
        deadline_s: float | None = None,
    ) -> None:
        """The timing of a request that was looked up with its `cost`.

        None: nothing was loaded, or computed.
        """

    def report_blend(self, report: BlendReport, *, deadline_s: float | None = None) -> None:
        """Report a request with spans, for counters and `explain`."""

    def explain(self, request: str = "", *, deadline_s: float | None = None) -> list[Decision]:
        """The latest lookups, and samples of earlier ones, newest first.

        request: only requests whose names contain it
        """

    def prefetch(self, query: Query, *, deadline_s: float | None = None) -> None:
        """Start to load a prompt's chunks into memory."""

    def retain(
        self, query: Query, ttl_s: float, *, deadline_s: float | None = None
    ) -> RetainedPrompt:
        """Keep a prompt's chunks in memory, also those stored later.

        The first chunks are kept, within `hints.max_bytes` of all callers. A prompt without a whole
        chunk is not kept.
        """

    def demote(
        self, query: Query, *, first_chunk: int = 0, deadline_s: float | None = None
    ) -> DemoteAnswer:
        """Evict a prompt's chunks from `first_chunk` on, and its tails, before all others.

        Until a chunk's next use; also chunks that are stored within 10 s. Copies in lower tiers
        stay.
        """

    def claim(
        self,
        ticket: int,
        shard: int = 0,
        *,
        first_chunk: int = 0,
        arriving: bool = False,
        deadline_s: float | None = None,
    ) -> Lease | None:
        """Lease one shard's part of a hit, from chunk `first_chunk` on, with its own pins.

        None: unknown ticket or closed hit.

        arriving: lease the whole chunks that have arrived; else settle the hit
        """

    def reserve(
        self,
        layout: Layout,
        names: ChunkNames,
        shard: int = 0,
        *,
        groups: npt.ArrayLike | None = None,
        store_options: StoreOptions = DEFAULT_OPTIONS,
        deadline_s: float | None = None,
    ) -> Reservation:
        """Reserve memory for missing chunks of `names` that are not being written.

        A chunk gets memory for all missing groups, or for none.

        groups: [groups, chunks] bool, the groups of each chunk to be written; None: all
        """

    def clear(
        self,
        namespace: bytes | None = None,
        *,
        tier: str = "",
        deadline_s: float | None = None,
    ) -> int:
        """Forget everything, or a namespace and its spans, in memory and all writable tiers.

        tier: only there; `ram` is memory

        Returns the number of chunks in memory. Raises ConfigError: an unknown or read-only tier, or
        a shared one that cannot list its chunks.
        """

    def clear_prompt(
        self, query: Query, *, only_end: bool = False, deadline_s: float | None = None
    ) -> int:
        """Forget one prompt's chunks in memory and in all tiers of this host.

        only_end: keep the part that another prompt in memory continues

        Other hosts keep theirs; this one uses no peer's until the namespace is cleared. Leases stay
        valid. Returns the number of chunks in memory. Raises ConfigError for over 32,768 chunks.
        """

    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool:
        """Wait until lower tiers have written or given up all chunks up to `mark`; False: deadline.

        mark:       from `Reservation.commit`; None: until now
        deadline_s: None: the configured wait for arriving chunks
        """

    def reencode(
        self,
        tier: str,
        codec: str,
        *,
        namespace: bytes | None = None,
        query: Query | None = None,
        deadline_s: float | None = None,
    ) -> Reencoding:
        """Re-encode the chunks of a tier, in the background, one call after another.

        namespace: only its chunks (digest). None: of all registered or stored to since
            the start
        query: only this prompt's chunks

        `lossless` replaces a lossy codec where the namespace allows no loss. A lossy codec never
        re-encodes a chunk of another one.

        Raises ConfigError: unknown tier or codec; the tier cannot replace values; unknown
        namespace, unless the codec is `raw` or `lossless` and the tier is not encrypted.
        """

    def copy(
        self,
        tier: str,
        query: Query | None,
        *,
        drop: bool = False,
        source: str = MEMORY,
        namespace: bytes = b"",
        deadline_s: float | None = None,
    ) -> Copying:
        """Copy a prompt's chunks to a tier, in the background.

        tier:      or `ram`; on a node also `host:` and a peer's name
        query:     None: all chunks of `namespace`, but not to memory or a peer
        drop:      remove each from the source when the tier has it; from memory, unless in use
        source:    `ram` or a tier

        Raises ConfigError for an unknown or read-only tier.
        """

    def snapshot(self, *, deadline_s: float | None = None) -> EventBatch:
        """Return the chunks in memory as `admitted` events. Go on with `events(snapshot.next)`."""

    def events(self, after: int, *, deadline_s: float | None = None) -> EventBatch:
        """Return up to 500 events after number `after`; empty: no more.

        Raises KVHoldError where the setting `event_buffer` is 0.
        """

    def status(self, *, deadline_s: float | None = None) -> CacheStatus: ...

    def close(self) -> None:
        """Release everything held through this object."""


def mask_bytes(groups: npt.ArrayLike | None, layout: Layout, names: ChunkNames) -> bytes | None:
    """One byte per group and chunk, row by row.

    Raises ProtocolError for another type or shape.
    """
    if groups is None:
        return None
    mask, wanted = np.asarray(groups), (len(layout.groups), len(names))
    if mask.dtype != np.bool_ or mask.shape != wanted:
        raise ProtocolError(
            f"groups must be bool and have the shape [groups, chunks] = {wanted}, not "
            f"{mask.dtype} and {mask.shape}"
        )
    return mask.tobytes()


def leases_as_they_arrive(
    cache: Cache, hit: Hit, tokens_per_chunk: int, *, shard: int = 0, until_s: float
) -> Iterator[Lease]:
    """Yield leases on a shard's part of a hit, as chunks arrive.

    Each is valid until the next is requested. Raises KVHoldError if the hit is lost.

    until_s: on the monotonic clock; then the hit is settled
    """
    first = 0
    while True:
        arriving = hit.arriving
        if hit.num_tokens > first * tokens_per_chunk:
            lease = cache.claim(hit.ticket, shard, first_chunk=first, arriving=arriving)
            if lease is None:
                raise KVHoldError("the hit was lost before it was claimed")
            with lease:
                first += len(lease.num_tokens)
                if len(lease.num_tokens):
                    yield lease
        if not arriving:
            return
        hit.wait_for_more(until_s)
