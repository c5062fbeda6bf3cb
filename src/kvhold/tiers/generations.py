"""A shared tier in which `clear` holds for every host: a namespace's generation is part of its keys' names there.

    tier = GenerationTier(redis, learned=drop_from_memory)
    await tier.advance(namespace)       # a clear: from here on nobody finds what was stored before, on any host
    await tier.refresh()                # learn what others have cleared; every probe does so for its own namespaces

The generation of a namespace is how often it was cleared in this tier. It begins at 0, and then keys are stored under their own names. In
later generations the namespace in a key is replaced by a hash of it and the generation, so old values are simply never asked for; whoever
cleared removes them. A clear puts a marker, which is never replaced or removed: the one with number n says that generation n has begun. A
probe asks for the next marker in the same round trip, so no clock and no lock is needed, and two clears at once are one.

A write of an old chunk that is on its way when another host clears gets an old name, or is stopped: `learned` is called before any key
gets a name of the new generation. If the store evicts a marker, the hosts that know it put it again (`refresh`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

from kvhold.core.errors import TierError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES
from kvhold.tiers.base import Parts, Replaces, Tier, TierTraits

Result = TypeVar("Result")

ALL = bytes(NAMESPACE_BYTES)  # stands for every namespace
_PLACE = b"\xff\xff\xff\xff"  # group and shard that no chunk has
_SAYS = b"kvhold-clear"  # where other keys have a hash of tokens
_MARK = b"kvhold: this namespace was cleared".ljust(64)
_MARKS_AT_ONCE = 16
_MOST_SPACES = 4096  # that are looked after without being asked for


class GenerationTier:
    """Tier contract, over a tier that others share."""

    def __init__(self, tier: Tier, learned: Callable[[bytes], None], *, read_only: bool = False) -> None:
        """learned: told at once of each namespace that somebody else has cleared; b"" for all of them. read_only: put no markers."""
        self._read_only = read_only
        self._tier = tier
        self._learned = learned
        self._numbers: dict[bytes, int] = {ALL: 0}
        self._spaces: dict[bytes, bytes] = {}  # name in the tier -> namespace
        self._has_contact = False
        self._was_away = False  # then what memory holds may be older than a clear that we have not heard of

    @property
    def traits(self) -> TierTraits:
        """Of the tier below."""
        return self._tier.traits

    @property
    def used_bytes(self) -> int | None:
        """Of the tier below, if it says so."""
        return getattr(self._tier, "used_bytes", None)

    async def check(self) -> None:
        """Tier contract."""
        await self._noticed(self._tier.check())

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract. Learns, in the same round trip, whether the keys' namespaces were cleared."""
        spaces = [ALL, *dict.fromkeys(key[:NAMESPACE_BYTES] for key in keys)]
        while True:
            next_marks = [marker_key(space, self._number(space) + 1) for space in spaces]
            sizes = await self._noticed(self._tier.probe([*map(self.name_of, keys), *next_marks]))
            newer = [space for space, size in zip(spaces, sizes[len(keys) :], strict=False) if size is not None]
            await self._catch_up(newer)
            for space in spaces:
                self._numbers.setdefault(space, 0)
            self._has_contact = True
            if not newer:
                return sizes[: len(keys)] if len(sizes) == len(keys) + len(spaces) else sizes

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract."""
        return await self._noticed(self._tier.get(self._names(keys), into, starts=starts))

    async def put(self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None) -> list[TierError | None]:
        """Tier contract."""
        return await self.putting(items, ttl_s=ttl_s)()

    def putting(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> Callable[[], Awaitable[list[TierError | None]]]:
        """A put whose keys have their names now: one of an old generation, if a clear is learned of before it begins."""
        named = [(self.name_of(key), parts) for key, parts in items]
        return lambda: self._noticed(self._tier.put(named, ttl_s=ttl_s))

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Tier contract."""
        if not isinstance(self._tier, Replaces):
            raise TierError(self.traits.name, "replace", "this kind of tier cannot put a value in the place of another in one step")
        return await self._noticed(self._tier.replace([(self.name_of(key), parts) for key, parts in items]))

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract."""
        return await self._noticed(self._tier.delete(self._names(keys)))

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract. The markers among the names tell of namespaces that were never asked for here."""
        if len(prefix) >= NAMESPACE_BYTES:
            names = [name async for name in self._tier.scan(self.name_of(prefix))]
        else:
            names = [name async for name in self._tier.scan(b"")]
            spaces = dict.fromkeys(name[:NAMESPACE_BYTES] for name in names if is_marker(name))
            await self._catch_up(list(spaces))
            for space in spaces:
                self.name_of(space)
        for name in names:
            key = self._key_of(name)
            if key is not None and key.startswith(prefix):
                yield key

    async def close(self) -> None:
        """Tier contract."""
        await self._tier.close()

    async def advance(self, prefix: bytes) -> list[bytes]:
        """Begin the next generation of a namespace, or (an empty prefix) of all. Returns the names that are garbage then, or raises.

        When it returns, nobody who asks the tier finds what was stored before it was called.
        """
        space = prefix or ALL
        await self._catch_up([space], tell=False)
        old = b"" if not prefix else self.name_of(prefix)
        number = self._number(space) + 1
        await self._mark(space, number)
        self._set(space, number)
        return [name async for name in self._tier.scan(old) if not is_marker(name)]

    async def remove_names(self, names: Sequence[bytes]) -> list[bool]:
        """Remove garbage, by its names in the tier."""
        return await self._tier.delete(names)

    async def refresh(self) -> None:
        """Learn what others have cleared of the namespaces in use; put markers that were evicted again."""
        spaces = list(self._numbers)[-_MOST_SPACES:]
        marks = [marker_key(space, self._number(space)) for space in spaces if self._number(space)]
        sizes = await self._noticed(self._tier.probe([*(marker_key(space, self._number(space) + 1) for space in spaces), *marks]))
        lost = [space for space, size in zip([s for s in spaces if self._number(s)], sizes[len(spaces) :], strict=False) if size is None]
        for space in lost if not self._read_only else ():
            await self._mark(space, self._number(space))
        await self._catch_up([space for space, size in zip(spaces, sizes, strict=False) if size is not None])

    def name_of(self, key: bytes) -> bytes:
        """What a key is called in the tier now."""
        space = key[:NAMESPACE_BYTES]
        own, every = self._numbers.get(space, 0), self._numbers[ALL]
        if not own and not every:
            return key
        digest = blake2b(space + own.to_bytes(8, "little") + every.to_bytes(8, "little"), digest_size=NAMESPACE_BYTES, person=b"kvhold-gen")
        name = digest.digest()
        self._spaces[name] = space
        return name + key[NAMESPACE_BYTES:]

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self.name_of(key) for key in keys]

    def _key_of(self, name: bytes) -> bytes | None:
        """The key that is called so now; None for what no key is called."""
        if is_marker(name):
            return None
        key = self._spaces.get(name[:NAMESPACE_BYTES], name[:NAMESPACE_BYTES]) + name[NAMESPACE_BYTES:]
        return key if self.name_of(key) == name else None

    def _number(self, space: bytes) -> int:
        return self._numbers.get(space, 0)

    def _set(self, space: bytes, number: int) -> None:
        if space != ALL:
            self._numbers.pop(space, None)  # so that the one that changed last is last
        self._numbers[space] = number

    async def _catch_up(self, spaces: Sequence[bytes], *, tell: bool = True) -> None:
        """Find the latest generation of each; whoever holds something older is told before it is used."""
        for space in spaces:
            known = space in self._numbers and (space != ALL or self._has_contact)
            number = first = self._number(space)
            while True:
                marks = [marker_key(space, number + step) for step in range(1, _MARKS_AT_ONCE + 1)]
                there = [size is not None for size in await self._noticed(self._tier.probe(marks))]
                number += max((step for step, is_there in enumerate(there, 1) if is_there), default=0)
                if not there or not there[-1]:
                    break
            if number > first:
                if tell and (known or self._was_away):
                    self._learned(b"" if space == ALL else space)
                self._set(space, number)

    async def _mark(self, space: bytes, number: int) -> None:
        [fault] = await self._noticed(self._tier.put([(marker_key(space, number), [memoryview(_MARK)])]))
        if fault is not None:
            raise fault

    async def _noticed(self, call: Awaitable[Result]) -> Result:
        """The answer; that there was none is remembered."""
        try:
            return await call
        except BaseException:
            self._was_away = True
            raise


def marker_key(space: bytes, number: int) -> bytes:
    """The name of the value that says that generation `number` of a namespace has begun."""
    return space + _SAYS + number.to_bytes(HASH_BYTES - len(_SAYS), "little") + _PLACE


def is_marker(name: bytes) -> bool:
    """Whether a name in a tier is a marker's."""
    return name.endswith(_PLACE) and name[NAMESPACE_BYTES:].startswith(_SAYS)
