"""A tier of the tests' own: values in a dictionary, every call counted, held up or failed as the
test says.

    with a_place() as place:  # beside the tier, for the test's thread
        open_cache(tiers=[place.url()], plugins=[PLUGIN])
        place.hold("get"); ...; place.let_go("get")  # calls wait until they are let go; where
        `deaf`, even cancelled ones

Its tier is loaded as a plugin's is, so that it comes to its cache by the same way as any other.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import ClassVar, Self

from kvhold.core.errors import TierError, TierUnavailable
from kvhold.tiers.base import Parts, TierTraits, check_lengths, size_of
from kvhold.tiers.url import TierUrl

PLUGIN = f"{__name__}:MemoryTier"
SHARED_PLUGIN = f"{__name__}:SharedMemoryTier"

_places: dict[str, "Place"] = {}
_numbers = count()


class Place:
    """What a MemoryTier keeps, and how it behaves. Safe from any thread: each step is one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[bytes, bytes] = {}
        self.ttls: dict[bytes, float | None] = {}
        self.calls: Counter[str] = Counter()
        self.asked: dict[str, list[list[bytes]]] = {}  # operation -> the keys of each call
        self.inside: Counter[str] = Counter()
        self.faults: dict[str, BaseException] = {}
        self.unreadable: set[bytes] = set()  # these it has and cannot give
        self.unanswered: set[bytes] = set()  # of these a probe learns nothing
        self.deaf = False  # does not end when it is cancelled, but when it is let go
        self.shorten = False  # answers with an item too few
        self._held: set[str] = set()
        self._changed = threading.Condition()

    def url(self, **options: object) -> str:
        """The line for settings; without other options, of a tier that nobody gives up because the
        machine is busy.
        """
        patient = dict.fromkeys(("probe_timeout_s", "get_timeout_s", "put_timeout_s"), 60)
        return f"plugin://{PLUGIN}?place={self.name}" + "".join(
            f"&{name}={value}" for name, value in (patient | options).items()
        )

    def shared_url(self, **options: object) -> str:
        """The same of a tier that says of itself that others share it."""
        return self.url(**options).replace(PLUGIN, SHARED_PLUGIN)

    def hold(self, *operations: str) -> None:
        """Calls of these wait from now on."""
        self._held.update(operations)

    def let_go(self, *operations: str) -> None:
        """They go on."""
        self._held.difference_update(operations)

    def wait_for(self, operation: str, calls: int = 1) -> None:
        """Until so many calls of it are inside."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.inside[operation] >= calls, 60)

    async def enter(self, operation: str, keys: Sequence[bytes]) -> None:
        self.calls[operation] += 1
        self.asked.setdefault(operation, []).append(list(keys))
        self._count(operation, 1)
        try:
            while operation in self._held:
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    if not self.deaf:
                        raise
        finally:
            self._count(operation, -1)
        if fault := self.faults.get(operation):
            raise fault

    def _count(self, operation: str, step: int) -> None:
        with self._changed:
            self.inside[operation] += step
            self._changed.notify_all()


@contextmanager
def a_place() -> Iterator[Place]:
    """A place of its own. What it still holds up goes on in the end."""
    name = f"place{next(_numbers)}"
    place = _places[name] = Place(name)
    try:
        yield place
    finally:
        place.let_go("check", "probe", "get", "put", "replace", "delete", "scan", "close")
        del _places[name]


class MemoryTier:
    """Tier contract, over a place."""

    traits: ClassVar[TierTraits] = TierTraits(name="memory", replaces=True)

    def __init__(self, place: Place) -> None:
        self._place = place

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        return cls(_places[url.options["place"]])

    async def check(self) -> None:
        await self._place.enter("check", [])

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        await self._place.enter("probe", keys)
        values = self._place.values
        return self._answer(
            [
                TierUnavailable("memory", "probe", "no answer")
                if key in self._place.unanswered
                else len(values[key])
                if key in values
                else None
                for key in keys
            ]
        )

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        await self._place.enter("get", keys)
        return self._answer([self._copy(key, parts) for key, parts in zip(keys, into, strict=True)])

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        await self._place.enter("put", [key for key, _ in items])
        for key, parts in items:
            self._place.values.setdefault(key, b"".join(part.cast("B") for part in parts))
            self._place.ttls[key] = ttl_s
        return self._answer([None] * len(items))

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        await self._place.enter("replace", [key for key, _ in items])
        there = [key in self._place.values for key, _ in items]
        for (key, parts), found in zip(items, there, strict=True):
            if found:
                self._place.values[key] = b"".join(part.cast("B") for part in parts)
        return self._answer(there)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        await self._place.enter("delete", keys)
        return self._answer([self._place.values.pop(key, None) is not None for key in keys])

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        await self._place.enter("scan", [prefix])
        for key in list(self._place.values):
            if key.startswith(prefix):
                yield key

    async def close(self) -> None:
        await self._place.enter("close", [])

    def _answer(self, items: list) -> list:  # type: ignore[type-arg]
        return items[:-1] if self._place.shorten else items

    def _copy(self, key: bytes, parts: Parts) -> int | TierError | None:
        value = self._place.values.get(key)
        if value is not None and key in self._place.unreadable:
            return TierError("memory", "get", "a bad sector")
        if value is None or len(value) > size_of(parts):
            return None
        at = 0
        for part in parts:
            step = min(part.nbytes, len(value) - at)
            part.cast("B")[:step] = value[at : at + step]
            at += step
        return len(value)


class SharedMemoryTier(MemoryTier):
    """One that several caches of a test use at once."""

    traits: ClassVar[TierTraits] = TierTraits(
        name="memory", shared=True, durable=True, replaces=True
    )
