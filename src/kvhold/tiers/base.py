"""The contract of a tier. One event loop; calls may overlap. Item i of an answer belongs to key i.

A missing value is `None`. A fault of one item is a TierError in its place; one of the whole place
is raised. Lists of unequal lengths raise ValueError before any I/O. No other exception may escape.

A call, also a cancelled one, ends only when it no longer uses the caller's buffers (`in_thread`). A
tier connects at its first call, and again after a lost connection. Time-outs and retries are in
`guard.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from kvhold.core.errors import TierError
from kvhold.core.reasons import EVICTED, Reason
from kvhold.core.status import FollowedPeersStatus
from kvhold.tiers.policies.reuse_times import Worths

Parts: TypeAlias = Sequence[memoryview]  # C-contiguous pieces of a value, of any format

FolderMet: TypeAlias = Callable[[str, str], Awaitable[None]]

Result = TypeVar("Result")


class WatchedParts(tuple[memoryview, ...]):
    """begin: for each transfer; returns the watch of its bytes, in order"""

    begin: Callable[[], Callable[[memoryview], None]]


@dataclass(frozen=True)
class TierTraits:
    """durable: an acknowledged put survives the death of this process, also by `kill -9`
    shared: others may read, write and delete the same values
    expires: removes values when their `ttl_s` has passed
    replaces: has `Replaces.replace`
    lost: why a probed value may be missing later
    batch_bytes: best size of one call
    """

    name: str
    durable: bool = False
    shared: bool = False
    expires: bool = False
    replaces: bool = False
    read_only: bool = False
    lost: Reason = EVICTED
    lists: bool = True
    batch_bytes: int = 8 << 20


class Tier(Protocol):
    """Keys are KEY_BYTES long, values opaque, of one byte or more."""

    @property
    def traits(self) -> TierTraits:
        """Of a wrapper: those of the wrapped tier."""

    async def check(self) -> None:
        """One cheap round trip. Raises a TierError that names the fault and the place."""

    async def probe(self, keys: Sequence[bytes]) -> Sequence[int | TierError | None]:
        """The bytes of each value that is whole and readable now. No side effect.

        A TierError: unknown; a part of the place failed.
        """

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Read each value into its parts, in order, and return its size.

        `None`: missing, or larger than the parts, which may then hold any bytes.

        starts: read ranges from here, which fill the parts exactly; `None`: missing, or shorter
        """

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        """Store each value whole or not at all. `None`: stored, else the fault (TierFull: no room).

        A present key keeps its value.

        ttl_s: remove the values after it, if the tier can. None: by its settings; infinity: never
        """

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """True where a value was removed.

        Raises TierIncomplete, after the other removals, if a part of the place failed.
        """

    def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Yield every key that begins with `prefix`, once, in any order.

        Raises TierIncomplete, after the other keys, if a part of the place failed; TierCannotList
        if it never lists keys.
        """

    async def close(self) -> None:
        """Idempotent."""


@runtime_checkable
class Replaces(Protocol):
    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Replace each stored value in one step; false where none is stored.

        A TierError: the old value stays (TierFull if both do not fit), or either may be there.

        A reader gets the old value or the new one, whole; in a durable tier also after a `kill -9`.
        The remaining time to live stays. Of a repeated key, the first value counts.
        """


@runtime_checkable
class HasFolders(Protocol):
    def watch_folders(self, met: FolderMet) -> None:
        """Await `met(path, identity)` at each opening of a folder, before its values are used."""


@dataclass(frozen=True)
class Origin:
    """When: by the monotonic clock."""

    place: str
    began_s: float
    ended_s: float


@runtime_checkable
class TellsOrigins(Protocol):
    async def get_from(
        self,
        keys: Sequence[bytes],
        into: Sequence[Parts],
        *,
        starts: Sequence[int] | None,
        origins: list[Origin | None],
    ) -> list[int | TierError | None]:
        """As `get`. origins: receives that of each value that has arrived."""


class ValueChanges:
    def __init__(self) -> None:
        self.tell: Callable[[bytes, int], None] = _tell_nobody
        """Called with each visible value, and its bytes; 0: it was removed. Must be quick."""


def _tell_nobody(key: bytes, nbytes: int) -> None: ...


@runtime_checkable
class TellsChanges(Protocol):
    """Set `changes.tell` before any call."""

    @property
    def changes(self) -> ValueChanges: ...


@runtime_checkable
class KeepsClears(Protocol):
    """A shared tier that itself hides values from before a clear, and learns of clears."""

    @property
    def numbers(self) -> dict[bytes, int]:
        """For the next start: prefix -> number."""

    def keep_clears(
        self, learned: Callable[[bytes], None], numbers: Mapping[bytes, int] | None
    ) -> None:
        """Before any other call.

        learned: called with each namespace cleared by another host; b"": all
        numbers: of the last run
        """

    def advance(self, prefix: bytes, asked_s: float | None = None) -> None:
        """Begin a clear of this host: no older value is found from now on.

        asked_s: Unix time of the clear in memory: later values may stay. None: now
        """

    def announce(self, prefix: bytes) -> None:
        """This host has nothing left from before its known clears."""


@runtime_checkable
class FollowsPeers(Protocol):
    def peers_status(self) -> FollowedPeersStatus:
        """Any thread."""
        ...


@runtime_checkable
class Learns(Protocol):
    """Evicts as memory's policy has learnt (`policies/learned.py`)."""

    @property
    def learns(self) -> bool: ...

    def learn_from(self, worths: Worths) -> None:
        """Before any other call."""

    def used(
        self, keys: Sequence[bytes], prompt: int, value: int, at_s: float, *, are_whole: bool
    ) -> None:
        """Record a lookup's chunks, in the order of their eviction. No I/O.

        prompt, value: see `Policy.used`
        at_s:          by the clock of `worths`
        are_whole:     false: the keys are tails
        """

    def admits(self, key: bytes, nbytes: int) -> bool:
        """The chunk is worth at least as much as its first victim. No I/O."""


async def replace(tier: Tier, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
    """Raises TierError if the tier cannot."""
    if not tier.traits.replaces or not isinstance(tier, Replaces):
        raise TierError(
            tier.traits.name,
            "replace",
            "this kind of tier cannot replace a value in one step",
        )
    return await tier.replace(items)


def check_lengths(
    keys: Sequence[bytes], into: Sequence[Parts], starts: Sequence[int] | None
) -> None:
    if len(keys) != len(into):
        raise ValueError(f"{len(keys)} keys, {len(into)} buffers")
    if starts is not None and len(starts) != len(keys):
        raise ValueError(f"{len(keys)} keys, {len(starts)} starts")


def raise_if_all_failed(answers: Sequence[object]) -> None:
    faults = [answer for answer in answers if isinstance(answer, TierError)]
    if faults and len(faults) == len(answers):
        raise faults[0]


def size_of(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


async def in_thread(executor: Executor, work: Callable[[], Result]) -> Result:
    """A cancelled call waits for the thread."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()
        raise
