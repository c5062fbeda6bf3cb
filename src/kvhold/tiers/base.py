"""The contract of a tier: one place where chunks live.

    sizes = await tier.probe(keys)  # one round trip for all keys
    got = await tier.get(keys, [[header, payload], ...])  # into the caller's memory
    faults = await tier.put([(key, [header, payload]), ...])

Called from one event loop; calls may overlap. Item i of the answer belongs to key i, and a bad item
never loses the others.

A missing value is `None`. One item's fault is a TierError in its place. A fault of the whole place
(dead, unreachable, forbidden) raises TierError. Lists of unequal lengths raise ValueError before
any I/O. No other exception may escape.

**Memory.** A call that has ended no longer touches the caller's buffers. A cancelled call waits for
that (`in_thread`).

A tier connects at its first call, and again after a lost connection. `guard.py` has breaker,
time-outs and retries. `kvhold.testing.TierContract` is the conformance suite.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from kvhold.core.errors import TierError

Parts: TypeAlias = Sequence[memoryview]  # one value in C-contiguous pieces

Result = TypeVar("Result")


@dataclass(frozen=True)
class TierTraits:
    """The capabilities of a tier.

    durable:     an acknowledged put survives `kill -9` of this process
    shared:      other processes or hosts may read, write and delete the same values
    expires:     removes values when their `ttl_s` has passed
    batch_bytes: best size of one call: outweighs thread switches, and meets the deadline over a
    slow link with several batches at once
    """

    name: str
    durable: bool = False
    shared: bool = False
    expires: bool = False
    replaces: bool = False
    batch_bytes: int = 8 << 20


class Tier(Protocol):
    """Values are opaque, at least one byte. Keys are KEY_BYTES long."""

    @property
    def traits(self) -> TierTraits:
        pass

    async def check(self) -> None:
        """Make one cheap round trip. Raises TierError if the tier cannot be used now."""

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return each value's size in bytes, `None` unless it is whole and readable now."""

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Read each value into its parts, in order, and return its size.

        `None` where the value is missing or larger than the parts.

        starts: read ranges instead, from byte `starts[i]`, that fill the parts exactly; `None`
        where the value ends earlier

        Nothing is written outside the parts; parts not filled may hold any bytes.
        """

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        """Store each value whole or not at all. Return `None` where stored, else the fault.

        TierFull: no room. A key that is already there keeps its value.

        ttl_s: time to live, if the tier can. None: the tier's setting; infinity: never removed
        """

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Return true where a value was removed."""

    def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Yield every key that begins with `prefix`, each once, in any order."""

    async def close(self) -> None:
        """Idempotent."""


@runtime_checkable
class Replaces(Protocol):
    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Replace each stored value; true where that was done.

        False, and nothing is created, where no value is stored. A TierError means that the old
        value stays (TierFull: both do not fit at once), or that either may be there.

        Readers get the old or the new value, whole; in a durable tier also after a `kill -9`. The
        time to live stays. Of a repeated key, the first value counts.
        """


async def replace(tier: Tier, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
    if not tier.traits.replaces or not isinstance(tier, Replaces):
        raise TierError(
            tier.traits.name,
            "replace",
            "this kind of tier cannot put a value in the place of another in one step",
        )
    return await tier.replace(items)


def check_lengths(
    keys: Sequence[bytes], into: Sequence[Parts], starts: Sequence[int] | None
) -> None:
    if len(keys) != len(into):
        raise ValueError(f"{len(keys)} keys, {len(into)} buffers")
    if starts is not None and len(starts) != len(keys):
        raise ValueError(f"{len(keys)} keys, {len(starts)} starts")


def size_of(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


async def in_thread(executor: Executor, work: Callable[[], Result]) -> Result:
    """Run `work()` in a thread. A cancelled call raises when the thread has finished."""
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
            future.exception()  # else asyncio logs it
        raise
