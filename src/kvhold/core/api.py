"""The interface of the cache, in this process or in this host's node.

    with cache.lookup(prompt.query()) as hit:
        with cache.claim(hit.ticket) as loan:                    # one shard's bytes
            scatter(loan.chunks(group=0), ...)
    with cache.reserve(layout, prompt.chunks(first=3)) as room:  # for missing chunks
        gather(..., room.chunks(group=0)); room.commit()         # visible now

Holdings end with their `with`, or with the holder's connection. Any thread. A miss is a shorter
hit. A fault or a missed deadline raises a KVHoldError and leaves nothing behind.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvhold.core.checksums import Checksums
from kvhold.core.errors import DeviceError, KVHoldError, ProtocolError
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.planning import Decision, Work
from kvhold.core.terms import FREE, Terms

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01  # between polls of a hit
_RECODING_PAUSE_S = 0.1  # the longest, between polls of a re-encoding

ABSENT = -1  # the offset of a chunk that is not granted or not needed


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The places of one group's chunks.

    offsets:    [n] int64, bytes from the arena's start, or ABSENT
    num_tokens: [n] int64
    sums:       recorded by a writer's copy, compared by a reader's
    """

    offsets: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    sums: Checksums | None = None

    def first(self, chunks: int) -> "ChunkBytes":
        return ChunkBytes(
            self.offsets[:chunks], self.num_tokens[:chunks], self.sums and self.sums.first(chunks)
        )


kept: list["Holding"] = []
"""Kept holdings. A collected one would close its connection and free its memory."""


class Holding:
    """A hit, a lease or a reservation. Closing twice is harmless."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def keep(self) -> None:
        """Hold it until the process ends: a failed device may still use the memory."""
        kept.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DeviceError):
            self.keep()
        else:
            self.close()


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of one group and one shard was admitted to memory or removed.

    A prompt's later chunks may come first.

    kind:   admitted, evicted, expired or cleared
    parent: key of the preceding chunk; empty if none or unknown
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

    next: the number to pass to the next call
    lost: events are missing; start again from a snapshot
    """

    events: list[Event]
    next: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a lookup. `sources` and `reason` are empty while it is arriving.

    ticket:  0 if nothing is held
    sources: tokens by source: `ram` or a lower tier
    reason:  one of `core.reasons.REASONS`
    """

    ticket: int
    num_tokens: int
    arriving: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    reason: str = ""


class Hit(Holding):
    """The pinned first `num_tokens` tokens of a prompt."""

    def __init__(
        self,
        found: Found,
        give_back: Callable[[], None],
        *,
        ask: Callable[[int, bool, bool], Found] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make a hit from the answer to a lookup.

        ask:   `(ticket, settle, growth)` -> answer. growth: the next pause also ends when the hit
               grows
        pause: sleep for so many seconds, or until the hit is complete
        """
        super().__init__(give_back)
        self._found = found
        self._ask = ask
        self._pause = pause

    @property
    def ticket(self) -> int:
        return self._found.ticket

    @property
    def num_tokens(self) -> int:
        return self._found.num_tokens

    @property
    def arriving(self) -> bool:
        """Whether lower tiers may add chunks."""
        return self._found.arriving

    @property
    def sources(self) -> dict[str, int]:
        return self._found.sources

    @property
    def reason(self) -> str:
        return self._found.reason

    def refresh(self) -> None:
        self._update(settle=False)

    def settle(self) -> None:
        """Make the hit final."""
        self._update(settle=True)

    def wait(self, until_s: float) -> None:
        """Settle when the hit is complete, or at `until_s` of the monotonic clock."""
        pause_s = _FIRST_PAUSE_S
        while self.arriving and (left_s := until_s - time.monotonic()) > 0:
            self._pause(min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
            self.refresh()
        self.settle()

    def wait_for_more(self, until_s: float) -> None:
        """Wait until the hit grows or is final. Settle it at `until_s` (monotonic)."""
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
        if self.arriving and self._ask is not None:
            self._found = self._ask(self.ticket, settle, growth)


class Recoded(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a re-encoding, in chunks of one group and one shard.

    stopped:     why it ended early, or empty
    over_budget: of `replaced` and `same`: the budget demanded another codec
    kept_lossy:  unchanged: a chunk loses precision only once
    missing:     deleted or expired
    bad:         failed a check, and were removed
    unknown:     their layout or codec is not available
    failed:      unchanged: the tier failed, or no key
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


class Recoding(Holding):
    """A running re-encoding. Closing stops it; finished chunks stay re-encoded."""

    def __init__(
        self, recoded: Recoded, give_back: Callable[[], None], *, ask: Callable[[], Recoded]
    ) -> None:
        super().__init__(give_back)
        self.recoded = recoded
        self._ask = ask

    def refresh(self) -> Recoded:
        if not self.recoded.done:
            self.recoded = self._ask()
        return self.recoded

    def wait(self, until_s: float = float("inf")) -> Recoded:
        """Wait until it is done, or until `until_s` (monotonic)."""
        pause_s = _FIRST_PAUSE_S
        while not self.refresh().done and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))  # a re-encoding sends no notification
            pause_s = min(_RECODING_PAUSE_S, 1.5 * pause_s)
        return self.recoded


class Loan(Holding):
    """A lease on one shard's part of a hit. Read only; the bytes do not move.

    Copies by `memory.copy` compare checksums. Other readers must call `verify` before they use the
    bytes that they have read.
    """

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        first_chunk: int,
        buffer: npt.NDArray[np.uint8],
        give_back: Callable[[], None],
        *,
        checksums: Sequence[bytes] | None = None,
        report: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        """Make a lease from a claim's answer.

        offsets:    [groups, chunks]
        num_tokens: [chunks]
        checksums:  see `Checksums.expected`; None: unchecked
        report:     called with the offsets of damaged chunks

        Raises ProtocolError for bad checksums.
        """
        super().__init__(give_back)
        self.first_chunk = first_chunk
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._offsets = offsets
        self._sums: list[Checksums] | None = None
        if checksums is not None:
            if len(checksums) != len(offsets):
                raise ProtocolError(f"checksums of {len(checksums)} groups for {len(offsets)}")
            self._sums = [
                Checksums.expected(
                    packed,
                    row != ABSENT,
                    lambda chunks, row=row: report(  # type: ignore[misc]
                        [int(at) for at in row[chunks]]
                    ),
                )
                for packed, row in zip(checksums, offsets, strict=True)
            ]

    def chunks(self, group: int = 0) -> ChunkBytes:
        return ChunkBytes(
            self._offsets[group], self.num_tokens, None if self._sums is None else self._sums[group]
        )

    def verify(self, layout: Layout) -> None:
        """Compare every chunk that no copy has compared.

        Raises DamagedChunks, or ProtocolError for a wrong number of layers.
        """
        for group, sums in enumerate(self._sums or ()):
            places = self.chunks(group)
            if (
                np.count_nonzero(places.offsets != ABSENT)
                and sums.layers != layout.groups[group].layers
            ):
                raise ProtocolError(
                    f"checksums of {sums.layers} layers; group {group} has "
                    f"{layout.groups[group].layers}"
                )
            rest = np.flatnonzero((places.offsets != ABSENT) & ~sums.known.all(axis=1))
            found = np.array(
                [_sums_of_chunk(self.buffer, layout, group, places, int(chunk)) for chunk in rest],
                np.uint64,
            )
            if rest.size:
                sums.compare(rest, range(sums.layers), found)


class Room(Holding):
    """Memory for missing chunks, invisible until `commit`. Closing frees the rest."""

    def __init__(
        self,
        offsets: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        buffer: npt.NDArray[np.uint8],
        commit: Callable[[Sequence[int], bytes], int],
        give_back: Callable[[], None],
        *,
        layout: Layout,
    ) -> None:
        """`commit` is called with chunk numbers and packed checksums."""
        super().__init__(give_back)
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._offsets = offsets
        self._commit = commit
        self._layout = layout
        self._sums = [Checksums.not_taken(len(num_tokens), group.layers) for group in layout.groups]
        self._uncommitted = set(self.granted)

    @property
    def granted(self) -> list[int]:
        """Numbers (in the reservation) of chunks with memory in at least one group."""
        return [int(i) for i in np.flatnonzero((self._offsets != ABSENT).any(axis=0))]

    def chunks(self, group: int = 0) -> ChunkBytes:
        return ChunkBytes(self._offsets[group], self.num_tokens, self._sums[group])

    def commit(self, chunks: Sequence[int] | None = None) -> int:
        """Make complete chunks visible, by default all. Return the mark for `flush`."""
        wanted = [
            chunk
            for chunk in dict.fromkeys(self.granted if chunks is None else chunks)
            if chunk in self._uncommitted
        ]
        packed = b"".join(self._packed(chunk) for chunk in wanted)
        self._uncommitted.difference_update(wanted)
        return self._commit(wanted, packed)

    def _packed(self, chunk: int) -> bytes:
        packed = b""
        for group, sums in enumerate(self._sums):
            places = self.chunks(group)
            if places.offsets[chunk] == ABSENT:
                continue
            if not sums.known[chunk].all():
                sums.values[chunk] = _sums_of_chunk(self.buffer, self._layout, group, places, chunk)
            packed += sums.packed(chunk)
        return packed


def _sums_of_chunk(
    buffer: npt.NDArray[np.uint8], layout: Layout, group: int, places: ChunkBytes, chunk: int
) -> list[int]:
    """Return [layers] checksums. xxhash releases the GIL."""
    at, num_tokens = int(places.offsets[chunk]), int(places.num_tokens[chunk])
    ranges = (
        layout.layer_range(group, layer, num_tokens) for layer in range(layout.groups[group].layers)
    )
    return [
        xxh3_64_intdigest(buffer[at + start : at + start + length].data) for start, length in ranges
    ]


class Cache(Protocol):
    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes] uint8, read only."""

    def map_for_device(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Map the arena read only and writable, for a device that registers it.

        Raises NodeError where a device cannot be served.
        """

    def report_pinned(self, nbytes: int) -> None:
        """Report the arena bytes that a device has registered."""

    def register(self, namespace: Namespace) -> None:
        """Make a namespace known, before any other call about it. Idempotent."""

    def lookup(
        self,
        query: Query,
        *,
        work: Work | None = None,
        have_tokens: int = 0,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Hit:
        """Find and pin the longest prefix in all shards and groups.

        work:        the caller's compute cost; the hit ends where loading stops being faster
        have_tokens: tokens that the caller has; if no tier has more, nothing is loaded
        wait_s:      how long to wait for lower tiers. None: as configured. 0: the hit may be
                     arriving
        """

    def came_of(
        self, request: str, *, load_s: float, compute_s: float, deadline_s: float | None = None
    ) -> None:
        """Report how many seconds a request took, for `explain`; -1: none."""

    def explain(self, request: str = "", *, deadline_s: float | None = None) -> list[Decision]:
        """Return the latest decisions, newest first. request: its name or a part; empty: all."""

    def prefetch(self, query: Query, *, deadline_s: float | None = None) -> None:
        """Start to load chunks from lower tiers into memory."""

    def claim(
        self,
        ticket: int,
        shard: int = 0,
        *,
        first_chunk: int = 0,
        arriving: bool = False,
        deadline_s: float | None = None,
    ) -> Loan | None:
        """Lease one shard's part of a hit, from `first_chunk` on; None for an invalid ticket.

        A ticket is valid until its hit is closed, for any number of claims.

        arriving: lease the chunks that have arrived; False: settle the hit
        """

    def reserve(
        self,
        layout: Layout,
        names: ChunkNames,
        shard: int = 0,
        *,
        groups: npt.ArrayLike | None = None,
        terms: Terms = FREE,
        deadline_s: float | None = None,
    ) -> Room:
        """Reserve memory for the chunks of `names` that are missing and not being written.

        A chunk gets memory for all its missing groups, or for none.

        groups: [groups, chunks] bool, the groups to write; None: all. A sliding group may leave out
                chunks outside the final window
        """

    def clear(self, namespace: bytes | None = None, *, deadline_s: float | None = None) -> int:
        """Forget everything, or one namespace, in memory and all writable tiers; wait for the end.

        Returns the number of chunks in memory. Pinned ones are freed when unpinned.
        """

    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool:
        """Wait until the chunks up to `mark` are written to lower tiers or given up.

        mark:       from `Room.commit`; None: now
        deadline_s: None: the configured wait for arriving chunks

        Returns False at the deadline.
        """

    def recode(
        self,
        tier: str,
        codec: str,
        *,
        namespace: bytes | None = None,
        query: Query | None = None,
        deadline_s: float | None = None,
    ) -> Recoding:
        """Re-encode a tier's chunks with another codec, online, one recoding at a time.

        Budgets are kept. A lossy chunk gets no other lossy codec.

        namespace: its digest; None: all known ones
        query:     only this prompt

        Raises ConfigError (NodeError from a node) for an unknown tier, codec or namespace, and for
        a tier that is read only or cannot replace values. `raw` and `lossless` do not need a known
        namespace in an unencrypted tier.
        """

    def snapshot(self, *, deadline_s: float | None = None) -> EventBatch:
        """Return memory's visible chunks as `admitted` events."""

    def events(self, after: int, *, deadline_s: float | None = None) -> EventBatch:
        """Return at most 500 events after `after`. Raises KVHoldError without `event_buffer`."""

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Return sizes and counters."""

    def close(self) -> None:
        """Release everything held through this object."""


def mask_bytes(groups: npt.ArrayLike | None, layout: Layout, names: ChunkNames) -> bytes | None:
    """Encode the `groups` mask of a `reserve`, row by row.

    Raises ProtocolError for a bad type or shape.
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


def loans_as_they_come(
    cache: Cache, hit: Hit, tokens_per_chunk: int, *, shard: int = 0, until_s: float
) -> Iterator[Loan]:
    """Yield leases on a hit in the order of arrival. Each is valid until the next one.

    The hit is settled at `until_s` (monotonic). If a group does not need every chunk, leases may
    exceed the final hit. Raises KVHoldError if the hit is lost.
    """
    first = 0
    while True:
        arriving = hit.arriving
        if hit.num_tokens > first * tokens_per_chunk:
            loan = cache.claim(hit.ticket, shard, first_chunk=first, arriving=arriving)
            if loan is None:
                raise KVHoldError("the hit was lost before it was claimed")
            with loan:
                first += len(loan.num_tokens)
                if len(loan.num_tokens):
                    yield loan
        if not arriving:
            return
        hit.wait_for_more(until_s)
