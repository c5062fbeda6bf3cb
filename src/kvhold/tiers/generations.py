"""A shared tier in which `clear` holds for every host.

    tier = GenerationTier(redis, learned=drop_from_memory)
    await tier.advance(namespace)  # a clear: no host finds the older values from here on
    await tier.refresh()  # learn the clears of other hosts; each probe does so for its namespaces

**Generations.** The generation of a namespace is the number of its clears in this tier. In
generation 0, keys are stored under their own names. In later generations, the namespace in a key is
replaced by a hash of the namespace and its generation. So no host asks for older values any more.
The host that cleared removes them.

**Markers.** A clear puts a marker, which is never replaced or removed. Marker n means that
generation n has begun. A probe asks for the next marker in the same round trip, so no clock and no
lock is needed. Two clears at the same time count as one.

**Search.** A host that does not know a namespace searches its generation from 0. It probes all
numbers that are a power of two ahead, goes to the largest marker that exists, and repeats this from
there. Generation 13 is found through markers 8, 12 and 13. Each host that knows generation 13 keeps
these markers in the tier: it puts them again if the store has evicted them. A namespace is searched
when a host first uses it, again after the tier was away, and once in a while.

**Chunks on this host** (in memory, on its own disks) belong to a generation too. `numbers` has
these generations, and a journal keeps them through restarts. A later generation means that another
host has cleared: `learned` is called.

A write of an old chunk may be under way when another host clears. The write then uses an old name
or is stopped, because `learned` is called before any key gets a name of the new generation.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

from kvhold.core.errors import TierError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES
from kvhold.tiers.base import Parts, Replaces, Tier, TierTraits
from kvhold.tiers.table import KeyList

Result = TypeVar("Result")

ALL = bytes(NAMESPACE_BYTES)  # stands for all namespaces
_PLACE = b"\xff\xff\xff\xff"  # a group and shard that no chunk has
_SAYS = b"kvhold-clear"  # stands where other keys have a hash of tokens
_MARK = b"kvhold: this namespace was cleared".ljust(64)
_TOKEN_BYTES = 16  # at the end of a marker: tells who put it
_BITS_AT_ONCE = 16  # of a number, in one search step
_MOST_BITS = 48
_SPACES_AT_ONCE = 4096  # namespaces in one `refresh`; the next ones have the others
_MOST_AT_ONCE = 8  # attempts of a clear, if clears of other hosts are a little earlier
_ROUNDS = 12  # each namespace is searched again after so many refreshes


class GenerationTier:
    """Tier contract, over a tier that several hosts share."""

    def __init__(
        self,
        tier: Tier,
        learned: Callable[[bytes], None],
        *,
        read_only: bool = False,
        numbers: Mapping[bytes, int] | None = None,
        may_hold: Callable[[bytes], bool] = lambda space: True,
    ) -> None:
        """Wrap a tier. No I/O happens yet.

        learned:   called at once with each namespace that another host has cleared; b"" means all
        read_only: put no markers
        numbers:   namespace -> generation of the chunks that this host holds, from a journal; 0 if
                   absent
        may_hold:  whether this host may hold chunks of a namespace, at its first contact with the
                   tier; if not, `learned` is not called for that namespace then
        """
        self._read_only = read_only
        self._tier = tier
        self._learned = learned
        self._numbers: dict[bytes, int] = {ALL: 0} | dict(numbers or {})
        self._may_hold = may_hold
        # namespaces whose generation was searched since the tier was last away
        self._met: set[bytes] = set()
        self._used: dict[bytes, None] = {ALL: None}  # namespaces that this host uses
        # namespace -> the generation that a clear of this host is beginning
        self._own: dict[bytes, int] = {}
        self._next_round = 0
        self._spaces: dict[bytes, bytes] = {}  # name in the tier -> namespace
        # if true, memory may hold chunks from before a clear that this host has not learned of
        self._was_away = False

    @property
    def traits(self) -> TierTraits:
        """The traits of the tier below."""
        return self._tier.traits

    @property
    def used_bytes(self) -> int | None:
        """The bytes in the tier below, or None if it does not report them."""
        return getattr(self._tier, "used_bytes", None)

    async def check(self) -> None:
        """Tier contract."""
        await self._noticed(self._tier.check())

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract. Learns clears of the keys' namespaces in the same round trip."""
        spaces = [ALL, *dict.fromkeys(key[:NAMESPACE_BYTES] for key in keys)]
        await self.meet(spaces)
        while True:
            next_marks = [marker_key(space, self._number(space) + 1) for space in spaces]
            sizes = await self._noticed(self._tier.probe([*map(self.name_of, keys), *next_marks]))
            marked = [
                space
                for space, size in zip(spaces, sizes[len(keys) :], strict=False)
                if size is not None
            ]
            newer = [space for space in marked if self._own.get(space) != self._number(space) + 1]
            await self._catch_up(newer)
            if not newer:
                return sizes[: len(keys)] if len(sizes) == len(keys) + len(spaces) else sizes

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract."""
        return await self._noticed(self._tier.get(self._names(keys), into, starts=starts))

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        """Tier contract."""
        return await self.putting(items, ttl_s=ttl_s)()

    def putting(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> Callable[[], Awaitable[list[TierError | None]]]:
        """Return a put whose keys have their names already.

        If this host learns of a clear before the put begins, the values still get old names.
        """
        named = [(self.name_of(key), parts) for key, parts in items]
        return lambda: self._noticed(self._tier.put(named, ttl_s=ttl_s))

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Tier contract."""
        return await self.replace_named([(self.name_of(key), parts) for key, parts in items])

    async def replace_named(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Replace values by their names in the tier: the names from when they were read.

        Raises TierError if the tier below cannot replace values.
        """
        if not isinstance(self._tier, Replaces):
            raise TierError(
                self.traits.name,
                "replace",
                "this kind of tier cannot put a value in the place of another in one step",
            )
        return await self._noticed(self._tier.replace(items))

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract."""
        return await self._noticed(self._tier.delete(self._names(keys)))

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract.

        A scan of all namespaces also finds their markers, and so learns clears of namespaces that
        this host never used.
        """
        if len(prefix) >= NAMESPACE_BYTES:
            names, _ = await self._scanned(self.name_of(prefix))
        else:
            names, spaces = await self._scanned(b"")
            await self._catch_up(spaces)
            for space in spaces:
                self.use(space)
                self.name_of(space)
        for part in names.taken():
            await asyncio.sleep(0)  # perhaps no name of many belongs to a key now
            for name in part:
                key = self._key_of(name)
                if key is not None and key.startswith(prefix):
                    yield key

    async def _scanned(self, prefix: bytes) -> tuple[KeyList, list[bytes]]:
        """Return the names that begin with `prefix`, without markers.

        Also returns the namespaces of the markers.
        """
        names, spaces = KeyList(), dict[bytes, None]()
        async for name in self._tier.scan(prefix):
            if is_marker(name):
                spaces[name[:NAMESPACE_BYTES]] = None
            elif names.append(name):
                await asyncio.sleep(0)
        return names, list(spaces)

    async def close(self) -> None:
        """Tier contract."""
        await self._tier.close()

    async def advance(self, prefix: bytes) -> bytes:
        """Begin the next generation of a namespace; an empty prefix means all namespaces.

        When this returns, no host that asks the tier finds a value that was stored before the call.
        Returns the name prefix of the old values. Raises TierError if another host's clear was
        first each time, or if the tier keeps no marker.
        """
        space = prefix or ALL
        self.use(space)
        await self._catch_up([space])
        old = b"" if not prefix else self.name_of(prefix)
        for _ in range(_MOST_AT_ONCE):
            if await self._begin_next(space, prefix):
                break
        else:
            raise TierError(
                self.traits.name, "put", "too many hosts clear at once, or it keeps no marker"
            )
        return old

    async def names_of(self, old: bytes) -> KeyList:
        """Return the garbage: names that begin with `old`, as `advance` returned it.

        Markers, and names that are known to be of the current generation, are left out.
        """
        names, spaces = await self._scanned(old)
        await self._catch_up(spaces)
        for space in spaces:
            self.name_of(space)
        garbage = KeyList()
        for part in names.taken():
            for name in part:
                if self._key_of(name) is None:
                    garbage.append(name)
            await asyncio.sleep(0)
        return garbage

    async def _begin_next(self, space: bytes, prefix: bytes) -> bool:
        """Put the next marker. Return false if another host put it first.

        Then values from between that host's clear and ours are in the new generation too, and the
        caller must begin one more.
        """
        number = self._number(space) + 1
        self._own[space] = number
        try:
            is_ours = await self._mark_as_first(space, number)
            if not is_ours:
                self._learned(prefix)
            self._set(space, number)
        finally:
            if self._own.get(space) == number:
                del self._own[space]
        return is_ours

    async def remove_names(self, names: Sequence[bytes]) -> list[bool]:
        """Remove garbage, by its names in the tier."""
        return await self._tier.delete(names)

    def use(self, space: bytes) -> None:
        """Include a namespace in `refresh` from now on, whether or not this host probes it."""
        self._used[space] = None

    def has_met(self, spaces: Sequence[bytes]) -> bool:
        """Return whether `meet` has nothing to search."""
        return ALL in self._met and self._met.issuperset(spaces)

    async def meet(self, spaces: Sequence[bytes]) -> None:
        """Search the generations of namespaces that were not searched since the tier was last away.

        The generation that stands for all namespaces is included.
        """
        new = [space for space in dict.fromkeys([ALL, *spaces]) if space not in self._met]
        if new:
            for space in new:
                self.use(space)
            await self._catch_up(new)

    @property
    def numbers(self) -> dict[bytes, int]:
        """Namespace -> its generation, for the namespaces that were cleared.

        `learned` is called before a generation appears here, where this host may hold older chunks.
        """
        return {space: number for space, number in self._numbers.items() if number}

    async def refresh(self) -> None:
        """Learn the clears of the namespaces in use, and put evicted markers again."""
        self._next_round += 1
        others = [space for space in self._used if space != ALL]
        parts = -(-len(others) // _SPACES_AT_ONCE) or 1
        at = self._next_round % parts * _SPACES_AT_ONCE
        spaces = [ALL, *others[at : at + _SPACES_AT_ONCE]]
        if self._next_round // parts % _ROUNDS == 0:
            self._met.difference_update(spaces)
        await self.meet(spaces)
        marks = [
            (space, number)
            for space in spaces
            for number in (*_leading(self._number(space)), self._number(space) + 1)
        ]
        sizes = await self._noticed(
            self._tier.probe([marker_key(space, number) for space, number in marks])
        )
        for (space, number), size in zip(marks, sizes, strict=True):
            if size is None and number <= self._number(space) and not self._read_only:
                await self._mark(space, number)
        newer = [
            space
            for (space, number), size in zip(marks, sizes, strict=True)
            if size is not None and number > self._number(space)
        ]
        await self._catch_up(newer)

    def name_of(self, key: bytes) -> bytes:
        """Return the current name of a key in the tier."""
        space = key[:NAMESPACE_BYTES]
        own, every = self._numbers.get(space, 0), self._numbers[ALL]
        if not own and not every:
            return key
        digest = blake2b(
            space + own.to_bytes(8, "little") + every.to_bytes(8, "little"),
            digest_size=NAMESPACE_BYTES,
            person=b"kvhold-gen",
        )
        name = digest.digest()
        self._spaces[name] = space
        return name + key[NAMESPACE_BYTES:]

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self.name_of(key) for key in keys]

    def _key_of(self, name: bytes) -> bytes | None:
        """Return the key that has this name now; None if there is none."""
        if is_marker(name):
            return None
        key = (
            self._spaces.get(name[:NAMESPACE_BYTES], name[:NAMESPACE_BYTES])
            + name[NAMESPACE_BYTES:]
        )
        return key if self.name_of(key) == name else None

    def _number(self, space: bytes) -> int:
        return self._numbers.get(space, 0)

    def _set(self, space: bytes, number: int) -> None:
        # two calls may have searched at the same time
        self._numbers[space] = max(number, self._number(space))

    async def _catch_up(self, spaces: Sequence[bytes]) -> None:
        """Search the latest generation of each namespace, and call `learned` before it is used.

        If this host is beginning a generation itself, that clear finds out whether the marker is
        its own.
        """
        for space, number in (await self._searched(spaces)).items():
            if number > self._number(space) and self._own.get(space) != number:
                known = (
                    self._may_hold(space)
                    or self._was_away
                    or space in self._met
                    or self._number(space) > 0
                )
                if known:
                    self._learned(b"" if space == ALL else space)
                self._set(space, number)
            self._met.add(space)

    async def _searched(self, spaces: Sequence[bytes]) -> dict[bytes, int]:
        """Return the latest generation of each namespace, by its markers.

        All namespaces share the round trips.
        """
        latest = await self._climbed(dict.fromkeys(spaces, 0))
        known = {
            space: self._number(space) for space in spaces if self._number(space) > latest[space]
        }
        if known:  # the markers on the way are lost; later ones may exist
            latest |= await self._climbed(known)
        return latest

    async def _climbed(self, latest: dict[bytes, int]) -> dict[bytes, int]:
        """Go up from each number, as far as there are markers."""
        latest, going, top = dict(latest), list(latest), dict.fromkeys(latest, _BITS_AT_ONCE)
        while going:
            steps = [(space, 1 << bit) for space in going for bit in range(top[space])]
            sizes = await self._noticed(
                self._tier.probe([marker_key(space, latest[space] + step) for space, step in steps])
            )
            found: dict[bytes, int] = {}
            for (space, step), size in zip(steps, sizes, strict=True):
                if size is not None:
                    found[space] = max(step, found.get(space, 0))
            for space, step in found.items():
                latest[space] += step
                top[space] = min(_MOST_BITS, _BITS_AT_ONCE + step.bit_length())
            going = list(found)
        return latest

    async def _mark(self, space: bytes, number: int) -> None:
        put = self._tier.put([(marker_key(space, number), [memoryview(_MARK)])], ttl_s=math.inf)
        [fault] = await self._noticed(put)
        if fault is not None:
            raise fault

    async def _mark_as_first(self, space: bytes, number: int) -> bool:
        """Put a marker. Return true only if this host's marker is certainly the first."""
        mine = bytearray(_MARK)
        mine[-_TOKEN_BYTES:] = os.urandom(_TOKEN_BYTES)
        key, there = marker_key(space, number), bytearray(len(mine))
        [fault] = await self._noticed(self._tier.put([(key, [memoryview(mine)])], ttl_s=math.inf))
        if fault is not None:
            raise fault
        [size] = await self._noticed(self._tier.get([key], [[memoryview(there)]]))
        return size == len(mine) and there == mine

    async def _noticed(self, call: Awaitable[Result]) -> Result:
        """Await a call of the tier below. If it fails, remember that the tier was away."""
        try:
            return await call
        except BaseException:
            self._was_away = True
            self._met.clear()
            raise


def marker_key(space: bytes, number: int) -> bytes:
    """Return the name of the marker that says that generation `number` has begun."""
    return space + _SAYS + number.to_bytes(HASH_BYTES - len(_SAYS), "little") + _PLACE


def is_marker(name: bytes) -> bool:
    """Return whether a name in a tier is the name of a marker."""
    return name.endswith(_PLACE) and name[NAMESPACE_BYTES:].startswith(_SAYS)


def _leading(number: int) -> list[int]:
    """Return the numbers through which a search finds `number`: 13 -> 8, 12, 13.

    For very large numbers, the powers of two at which the search widens are included.
    """
    leading = {number >> bit << bit for bit in range(number.bit_length())}
    return sorted(
        leading | {1 << bit for bit in range(_BITS_AT_ONCE - 1, number.bit_length(), _BITS_AT_ONCE)}
    )
