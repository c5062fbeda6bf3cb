"""The contract of a tier: one place where chunks live.

    sizes = await tier.probe(keys)                           # one round trip for all of them
    got = await tier.get(keys, [[header, payload], ...])     # each value into memory of the caller's, in parts
    faults = await tier.put([(key, [header, payload]), ...]) # each value from memory of the caller's, in parts
    done = await replace(tier, [(key, [header, payload])])   # over a value that is there, where the tier can

Called from one event loop only, never from an engine's thread; calls may overlap. Every call is per item: item i of the answer belongs
to key i, and a bad item never loses the others. A missing value is `None`; what went wrong with one item is a TierError in its place; a
fault of the whole place (dead, unreachable, forbidden) raises TierError, after which nothing is known about any item. Nothing else may
escape, but for a ValueError where lists have unequal lengths, before any I/O.

**Memory.** Nobody writes to the caller's buffers, and nobody reads them, after a call has returned, raised or ended its cancellation: a
cancelled call lets go of them before it ends, however long that takes. (`in_thread` below does so for work in threads.)

A tier does no I/O when it is made, and connects when first used; a connection that was lost is made again by the next call. It has no
time-outs of its own where a library does not force them on it, no retries but of what a stale connection failed, and no breaker: `guard.py`
has these for all. `kvhold.testing.TierContract` is the conformance suite.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from kvhold.core.errors import TierError

Parts: TypeAlias = Sequence[memoryview]  # one value, end to end; each C-contiguous, of any format

Result = TypeVar("Result")


@dataclass(frozen=True)
class TierTraits:
    """What a tier can do.

    durable:   an acknowledged put survives the death of this process, by `kill -9` too
    shared:    others, on this host or elsewhere, may read, write and delete the same values
    expires:   removes by itself what has outlived its `ttl_s`
    replaces:  has `Replaces.replace`
    batch_bytes: what one call had best carry: enough to be worth its turns between threads, and little enough that a batch is checked
                 while the next one is read, and that some at once come within their deadline over a slow link
    """

    name: str
    durable: bool = False
    shared: bool = False
    expires: bool = False
    replaces: bool = False
    batch_bytes: int = 8 << 20


class Tier(Protocol):
    """Keys are KEY_BYTES long; values are opaque bytes here, one or more (frames below RAM, plain chunks in RAM)."""

    @property
    def traits(self) -> TierTraits:
        """What it can do: a class's own, or for a wrapper those of what it wraps."""

    async def check(self) -> None:
        """One cheap round trip. Raises TierError if the tier cannot be used now; its message tells a user what is wrong and where."""

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Size in bytes of each value that is whole and readable now, `None` for the rest. One round trip for all, no side effect."""

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Read each value into its parts, in order, and return its size; `None` where it is missing or larger than the parts.

        starts: read ranges instead: from byte `starts[i]` on exactly as many bytes as the parts have, and return that number; `None`
                where the value is missing or ends before that

        Parts that were not filled, or not to their end, may hold anything within, and nothing is written beyond them.
        """

    async def put(self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None) -> list[TierError | None]:
        """Store each value whole or not at all: `None` where it is there afterwards, else why not (TierFull where there is no room).

        A key that is there already keeps its value. ttl_s: where the tier can, remove the values after so long; None: as its settings
        say; infinity: never, whatever they say.
        """

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove; true where something was removed."""

    def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Every key that begins with `prefix`, each once, in no order."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""


@runtime_checkable
class Replaces(Protocol):
    """What a tier has besides that can put another value in the place of one, in one step."""

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Put each value in the place of the one that is there: true where that was done.

        False where there is none, or none any more; none is made then. A TierError says why the old one stays as it is (TierFull where
        there is no room for both for a moment), or that the answer was lost, and it is one of the two. Whoever reads meanwhile, and
        whoever comes after a `kill -9` where the tier is durable, has the old value or the new one, whole. What time the old one had
        left, the new one has. Of a key that is there twice, the first value counts, and both have its answer.
        """


async def replace(tier: Tier, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
    """`tier.replace(items)`. Raises TierError for a tier that has none."""
    if not tier.traits.replaces or not isinstance(tier, Replaces):
        raise TierError(tier.traits.name, "replace", "this kind of tier cannot put a value in the place of another in one step")
    return await tier.replace(items)


def check_lengths(keys: Sequence[bytes], into: Sequence[Parts], starts: Sequence[int] | None) -> None:
    """What `get` does first: raises ValueError for lists of unequal length."""
    if len(keys) != len(into):
        raise ValueError(f"{len(keys)} keys, {len(into)} buffers")
    if starts is not None and len(starts) != len(keys):
        raise ValueError(f"{len(keys)} keys, {len(starts)} starts")


def size_of(parts: Parts) -> int:
    """Bytes in all parts."""
    return sum(part.nbytes for part in parts)


async def in_thread(executor: Executor, work: Callable[[], Result]) -> Result:
    """`work()` in a thread of `executor`. When cancelled, it waits until the thread has finished, and raises CancelledError then."""
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
            future.exception()  # so that nobody misses it
        raise
