"""The Cache: what integrations see, whether it lives in this process or in this host's node.

    with cache.lookup(prompt.query()) as hit:                          # pinned: how many tokens are here, and have come from below
        with cache.claim(hit.ticket) as loan:                          # the bytes of one shard, lent until closed
            scatter(loan.chunks(group=0), ...)                         # checked as it copies; or loan.verify(layout)
    with cache.reserve(layout, prompt.chunks(first=3)) as room:        # memory for what is missing
        gather(..., room.chunks(group=0)); room.commit()               # visible now; what is not committed is given back

A hit, a loan and a room are owned by whoever holds them and end with their `with`, or with the holder's connection. A ticket is a
number that may be sent to other processes (scheduler to workers), each of which claims a loan there. Chunks that lower tiers have are
brought into memory by the lookup: a hit that is *arriving* may grow, and is final when it has been settled. All calls are safe from any
thread. A miss is a shorter hit; a fault or a deadline missed is one of our errors, and leaves nothing behind.
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
from kvhold.core.errors import KVHoldError, ProtocolError
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.planning import Decision, Work
from kvhold.core.terms import FREE, Terms

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01  # between two questions after a hit that is arriving, if nothing ends them before
_RECODING_PAUSE_S = 0.1  # the same at most, after a recoding, which takes longer

ABSENT = -1  # the offset of a chunk that was not granted, or that the hit does not need


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Chunks of one group, where they lie in the arena.

    offsets:    [n] int64, in bytes from the arena's start; ABSENT where there is none
    num_tokens: [n] int64
    sums:       of a room: where a copy notes what it has written; of a loan: what a copy compares. None: nobody asks
    """

    offsets: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    sums: Checksums | None = None

    def first(self, chunks: int) -> "ChunkBytes":
        """The first chunks alone."""
        return ChunkBytes(self.offsets[:chunks], self.num_tokens[:chunks], self.sums and self.sums.first(chunks))


class Holding:
    """Something held in the cache until closed: a hit, a loan or a room. Closing twice is harmless."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        """Give it back."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of one group and one shard has become visible in a tier, or is so no more. A prompt's end may come before its beginning.

    number: counts up by one from event to event; in a snapshot, that of the last event before it
    kind:   admitted, evicted, expired or cleared
    tier:   `ram`: what goes on in tiers below is not told
    first_token, num_tokens: its place in its prompt
    parent: the key of the chunk before it in its prompt, of the same group and shard; empty if it is the first, or not known
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
        """Its namespace's digest."""
        return self.key[:NAMESPACE_BYTES]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order. next: ask for those after this number; lost: some are missing, or all: start anew from a snapshot."""

    events: list[Event]
    next: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup.

    ticket:   0 when nothing was found, and nothing is held
    arriving: it may grow yet; ask again
    sources:  of how many tokens the KV was in memory (`ram`), and of how many in which lower tier; by the slowest where parts of a chunk
              came from several. Empty while it is arriving
    reason:   why it ends where it ends, one of `core.reasons.REASONS`; empty while it is arriving
    """

    ticket: int
    num_tokens: int
    arriving: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    reason: str = ""


class Hit(Holding):
    """What a lookup found and pinned: `num_tokens` from the prompt's start, `ticket` to claim it with (0 when nothing was found).

    arriving: lower tiers may have more, which is on its way; `refresh` asks again, `settle` makes do with what is here
    sources, reason: where it came from and why it ends where it ends, see `Found`
    """

    def __init__(
        self,
        found: Found,
        give_back: Callable[[], None],
        *,
        ask: Callable[[int, bool, bool], Found] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """For a hit that is arriving:

        ask:   `(ticket, settle, growth)` -> how far it goes now. growth: pauses are to end when it has grown, too
        pause: for so many seconds, or until all has come
        """
        super().__init__(give_back)
        self._found = found
        self._ask = ask
        self._pause = pause

    @property
    def ticket(self) -> int:
        """The number to claim it with."""
        return self._found.ticket

    @property
    def num_tokens(self) -> int:
        """How far it goes."""
        return self._found.num_tokens

    @property
    def arriving(self) -> bool:
        """Whether it may grow."""
        return self._found.arriving

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by where their KV was; their sum is `num_tokens`, once it is final."""
        return self._found.sources

    @property
    def reason(self) -> str:
        """Why it ends where it ends, once it is final."""
        return self._found.reason

    def refresh(self) -> None:
        """How far it goes now."""
        self._update(settle=False)

    def settle(self) -> None:
        """Final, as far as it goes now."""
        self._update(settle=True)

    def wait(self, until_s: float) -> None:
        """Until all has come, or the monotonic clock says `until_s`; then it is settled."""
        pause_s = _FIRST_PAUSE_S
        while self.arriving and (left_s := until_s - time.monotonic()) > 0:
            self._pause(min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
            self.refresh()
        self.settle()

    def wait_for_more(self, until_s: float) -> None:
        """Until it is longer than it was, or final; when the monotonic clock says `until_s`, it is settled."""
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
    """How far a recoding has come, in chunks of one group and one shard: `seen` = `replaced` + `same` + `kept_lossy` + `missing` + `bad` +
    `unknown` + `failed`.

    done:        nothing more will happen
    stopped:     why it ended before its end; empty if it did not
    replaced:    written anew; bytes_before, bytes_after: what their frames have, had before and have now
    over_budget: those of the replaced and the same that are by another codec than was asked for, because of their namespace's budget
    same:        as they should be already
    kept_lossy:  by another codec with a loss: what was lost of a chunk is lost once, so they stay as they are
    missing:     gone meanwhile, or expired
    bad:         failed a check, and were removed
    unknown:     of a layout that nobody has registered, or a codec that is not there, so that they cannot be read here
    failed:      stay as they were, because the tier failed or there is no key for them
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
    """A recoding under way, with `recoded` as it was when last asked. Closed before it is done, it stops; what is done stays done."""

    def __init__(self, recoded: Recoded, give_back: Callable[[], None], *, ask: Callable[[], Recoded]) -> None:
        super().__init__(give_back)
        self.recoded = recoded
        self._ask = ask

    def refresh(self) -> Recoded:
        """How far it has come now."""
        if not self.recoded.done:
            self.recoded = self._ask()
        return self.recoded

    def wait(self, until_s: float = float("inf")) -> Recoded:
        """How far it has come when it is done, or the monotonic clock says `until_s`."""
        pause_s = _FIRST_PAUSE_S
        while not self.refresh().done and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))  # a recoding takes long, and rings no bell
            pause_s = min(_RECODING_PAUSE_S, 1.5 * pause_s)
        return self.recoded


class Loan(Holding):
    """The bytes of one shard's part of a hit. Read only; they stay where they are until the loan is closed.

    What a copy of `memory.copy` reads is compared with the checksums of what was stored. Who reads the buffer by other means calls
    `verify` after that, and uses nothing of it before.
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
        """offsets: [groups, chunks]; num_tokens: [chunks]; first_chunk: the number of the first one in its prompt.

        checksums: of each group, see `Checksums.expected`; None: nothing is compared
        report:    called with the offsets of chunks that are damaged

        Raises ProtocolError for checksums that do not fit the chunks.
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
                Checksums.expected(packed, row != ABSENT, lambda chunks, row=row: report([int(at) for at in row[chunks]]))  # type: ignore[misc]
                for packed, row in zip(checksums, offsets, strict=True)
            ]

    def chunks(self, group: int = 0) -> ChunkBytes:
        """Where the chunks of `group` lie in `buffer`."""
        return ChunkBytes(self._offsets[group], self.num_tokens, None if self._sums is None else self._sums[group])

    def verify(self, layout: Layout) -> None:
        """Compare all that no copy has compared yet. Raises DamagedChunks, for the first group with any."""
        for group, sums in enumerate(self._sums or ()):
            places = self.chunks(group)
            if np.count_nonzero(places.offsets != ABSENT) and sums.layers != layout.groups[group].layers:
                raise ProtocolError(f"checksums of {sums.layers} layers; group {group} has {layout.groups[group].layers}")
            rest = np.flatnonzero((places.offsets != ABSENT) & ~sums.known.all(axis=1))
            found = np.array([_sums_of_chunk(self.buffer, layout, group, places, int(chunk)) for chunk in rest], np.uint64)
            if rest.size:
                sums.compare(rest, range(sums.layers), found)


class Room(Holding):
    """Memory reserved for chunks that are missing. Nobody sees a chunk before `commit`; closing gives back what was not committed."""

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
        """offsets: [groups, chunks], ABSENT for what is there already, was not asked for, or found no room.

        commit: gets chunks, each once and granted, and their checksums: for each chunk, each granted group and each layer
                `checksums.BYTES`
        """
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
        """The numbers of the chunks (within the reservation) that got memory, in one group at least; `chunks` says in which."""
        return [int(i) for i in np.flatnonzero((self._offsets != ABSENT).any(axis=0))]

    def chunks(self, group: int = 0) -> ChunkBytes:
        """Where the chunks of `group` are to be written in `buffer`; ABSENT for those that are not."""
        return ChunkBytes(self._offsets[group], self.num_tokens, self._sums[group])

    def commit(self, chunks: Sequence[int] | None = None) -> int:
        """Make chunks visible (all that were granted, if not told which). Their bytes must be complete.

        Checksums that no copy has taken are taken now, of what lies in the buffer.

        Returns a mark: `flush(mark)` waits until they have been written to lower tiers, for whoever wants to know (write-through).
        """
        wanted = [chunk for chunk in dict.fromkeys(self.granted if chunks is None else chunks) if chunk in self._uncommitted]
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


def _sums_of_chunk(buffer: npt.NDArray[np.uint8], layout: Layout, group: int, places: ChunkBytes, chunk: int) -> list[int]:
    """[layers]; xxhash lets go of the GIL."""
    at, num_tokens = int(places.offsets[chunk]), int(places.num_tokens[chunk])
    ranges = (layout.layer_range(group, layer, num_tokens) for layer in range(layout.groups[group].layers))
    return [xxh3_64_intdigest(buffer[at + start : at + start + length].data) for start, length in ranges]


class Cache(Protocol):
    """One cache. `arena_buffer` is the host memory that every offset counts in."""

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes], read only; the same memory in every process that shares the cache."""

    def register(self, namespace: Namespace) -> None:
        """Make the layout known. Before any other call about it; again is harmless."""

    def lookup(
        self, query: Query, *, work: Work | None = None, have_tokens: int = 0, wait_s: float | None = None, deadline_s: float | None = None
    ) -> Hit:
        """The longest prefix of which every shard and every group has what it needs. Pins it.

        work:   what computing costs whoever asks: then the hit is as long as makes the first token soonest, and may settle by itself,
                when it is asked again, because the rest would take longer than computing it
        have_tokens: that whoever asks has already: where no tier has more, nothing is brought up, and nothing waited for
        wait_s: how long to wait for what comes from lower tiers; None: as the settings say; 0: not at all, the hit may be arriving
        """

    def came_of(self, request: str, *, load_s: float, compute_s: float, deadline_s: float | None = None) -> None:
        """For `explain`: how long the load of a request took that was looked up with its `work`, and computing the rest; -1: there was
        none."""

    def explain(self, request: str = "", *, deadline_s: float | None = None) -> list[Decision]:
        """The latest decisions about lookups with a `work`, the last one first: of the request of that name, or of those whose names have
        it in them; empty: of all."""

    def prefetch(self, query: Query, *, deadline_s: float | None = None) -> None:
        """Have what lower tiers hold of a prompt brought into memory, and wait for nothing."""

    def claim(
        self, ticket: int, shard: int = 0, *, first_chunk: int = 0, arriving: bool = False, deadline_s: float | None = None
    ) -> Loan | None:
        """A loan of one shard's part of a hit, from chunk `first_chunk` on; None when the ticket is not (or no longer) good.

        A ticket is good until its hit is closed, for as many claims as are wanted, of one shard too. Each loan has pins of its own.

        arriving: of a hit that is arriving, the whole chunks that have come so far, and it goes on arriving; else a claim settles it
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
        """Memory for what is missing of `names` and that nobody else is writing. All that a chunk is missing gets it, or none of that.

        terms:  on which they are kept
        groups: [groups, chunks] bool, which groups of which chunks are to be written; None: all. A hit needs of each group what its
                attention needs: one may pass over a chunk whose sliding group is missing, and ends where no missing one is in the window
        """

    def clear(self, namespace: bytes | None = None, *, deadline_s: float | None = None) -> int:
        """Forget everything, or one namespace, here and in all tiers that may be written to, and wait for that.

        Returns how many chunks memory had; what is pinned goes when its pins fall.
        """

    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool:
        """Wait until all that was committed up to `mark` (None: until now) has been written to lower tiers, or given up there.

        False when the deadline came first (None: as long as a request waits for chunks, by the settings).
        """

    def recode(
        self, tier: str, codec: str, *, namespace: bytes | None = None, query: Query | None = None, deadline_s: float | None = None
    ) -> Recoding:
        """Have what a tier holds written anew by another codec, in the background, while everything goes on: a small one to compress,
        `raw` or `lossless` to decompress. No request waits for it; a chunk can be read before, meanwhile and after. Recodings take turns.

        namespace: of this one alone (its digest); None: of all that are known, because they were registered or stored in since the start
        query:     of this prompt's chunks alone

        The codec is that of what is there now; what is stored from now on is written as the settings say. Budgets are kept, and what a
        codec with a loss has written is not given to another. Raises ConfigError (NodeError where a node says so) for a tier or codec that
        is unknown, a tier that is not to be written or cannot replace values, and a namespace that is not known, unless the codec is
        `raw` or `lossless` (and the tier not encrypted: whose key it would take is not known either).
        """

    def snapshot(self, *, deadline_s: float | None = None) -> EventBatch:
        """All that is visible in memory now, as events `admitted`; `events(snapshot.next)` goes on from there."""

    def events(self, after: int, *, deadline_s: float | None = None) -> EventBatch:
        """What has happened since event number `after`, some thousand events at most; ask again with `next` until there are none.

        Raises KVHoldError where the setting `event_buffer` is 0.
        """

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Sizes, counts and counters, for people and monitors."""

    def close(self) -> None:
        """Give back everything that was held through this object."""


def mask_bytes(groups: npt.ArrayLike | None, layout: Layout, names: ChunkNames) -> bytes | None:
    """The mask of a `reserve`, a byte for each group of each chunk, row by row; None where it says all. Raises ProtocolError."""
    if groups is None:
        return None
    mask, wanted = np.asarray(groups), (len(layout.groups), len(names))
    if mask.dtype != np.bool_ or mask.shape != wanted:
        raise ProtocolError(f"groups must be bool and have the shape [groups, chunks] = {wanted}, not {mask.dtype} and {mask.shape}")
    return mask.tobytes()


def loans_as_they_come(cache: Cache, hit: Hit, tokens_per_chunk: int, *, shard: int = 0, until_s: float) -> Iterator[Loan]:
    """Loans of one shard's part of a hit, one after another, each good until the next is asked for: what has come by now, then what comes
    after it, up to where the hit ends in the end. What a loan has may be copied while the rest is being read.

    until_s: when the monotonic clock says so, the hit is settled

    Of a group that does not need every chunk, the loans may have more than the hit needs in the end. Raises KVHoldError if it is lost.
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
