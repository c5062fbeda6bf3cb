"""A shared tier in which `clear` holds for every host: a namespace's generation is part of its keys' names there.

    tier = GenerationTier(redis, learned=drop_from_memory)
    await tier.advance(namespace)       # a clear: from here on nobody finds what was stored before, on any host
    await tier.refresh()                # learn what others have cleared; every probe does so for its own namespaces

The generation of a namespace is how often it was cleared in this tier. It begins at 0, and then keys are stored under their own names. In
later generations the namespace in a key is replaced by a hash of it and the generation, so old values are simply never asked for; whoever
cleared removes them. A clear puts a marker, which is never replaced or removed: the one with number n says that generation n has begun. A
probe asks for the next marker in the same round trip, so no clock and no lock is needed, and two clears at once are one.

Whoever knows nothing of a namespace finds its generation from 0 on, bit by bit: if n is the latest, then the markers of n's leading bits
(of 13: 8, 12, 13) lead to it. So these are what every host that knows n keeps there: it puts them again if the store has evicted
them. A namespace is searched so when a host first uses it, again after the tier was away, and once in a while.

What this host holds of a namespace (memory, disks of its own) belongs to a generation, too. `numbers` says to which; a journal remembers
it through restarts. A later generation means that somebody has cleared since: `learned` is told.

A write of an old chunk that is on its way when another host clears gets an old name, or is stopped: `learned` is called before any key
gets a name of the new generation.
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

ALL = bytes(NAMESPACE_BYTES)  # stands for every namespace
_PLACE = b"\xff\xff\xff\xff"  # group and shard that no chunk has
_SAYS = b"kvhold-clear"  # where other keys have a hash of tokens
_MARK = b"kvhold: this namespace was cleared".ljust(64)
_TOKEN_BYTES = 16  # at the end of a marker: says who put it
_BITS_AT_ONCE = 16  # of a number that is searched
_MOST_BITS = 48
_SPACES_AT_ONCE = 4096  # that are looked after in one `refresh`; those beyond have their turn in the next ones
_MOST_AT_ONCE = 8  # clears of other hosts that may each be a little earlier than one of ours
_ROUNDS = 12  # after so many refreshes each namespace is searched again


class GenerationTier:
    """Tier contract, over a tier that others share."""

    def __init__(
        self,
        tier: Tier,
        learned: Callable[[bytes], None],
        *,
        read_only: bool = False,
        numbers: Mapping[bytes, int] | None = None,
        may_hold: Callable[[bytes], bool] = lambda space: True,
    ) -> None:
        """Nothing is asked yet.

        learned:   told at once of each namespace that somebody else has cleared; b"" for all of them
        read_only: put no markers
        numbers:   namespace -> to which generation belongs what this host holds, from a journal; those that are absent: 0
        may_hold:  whether this host may hold chunks of a namespace, at its first contact with the tier; if not, it is not told then
        """
        self._read_only = read_only
        self._tier = tier
        self._learned = learned
        self._numbers: dict[bytes, int] = {ALL: 0} | dict(numbers or {})
        self._may_hold = may_hold
        self._met: set[bytes] = set()  # namespaces whose latest generation was searched since the tier was last away
        self._used: dict[bytes, None] = {ALL: None}  # namespaces that this host uses
        self._own: dict[bytes, int] = {}  # namespace -> the generation that a clear of this host is beginning
        self._next_round = 0
        self._spaces: dict[bytes, bytes] = {}  # name in the tier -> namespace
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
        await self.meet(spaces)
        while True:
            next_marks = [marker_key(space, self._number(space) + 1) for space in spaces]
            sizes = await self._noticed(self._tier.probe([*map(self.name_of, keys), *next_marks]))
            marked = [space for space, size in zip(spaces, sizes[len(keys) :], strict=False) if size is not None]
            newer = [space for space in marked if self._own.get(space) != self._number(space) + 1]
            await self._catch_up(newer)
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
        return await self.replace_named([(self.name_of(key), parts) for key, parts in items])

    async def replace_named(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """The same of values by their names in the tier: those they had when they were read."""
        if not isinstance(self._tier, Replaces):
            raise TierError(self.traits.name, "replace", "this kind of tier cannot put a value in the place of another in one step")
        return await self._noticed(self._tier.replace(items))

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract."""
        return await self._noticed(self._tier.delete(self._names(keys)))

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract. The markers among the names tell of namespaces that were never asked for here."""
        if len(prefix) >= NAMESPACE_BYTES:
            names, _ = await self._scanned(self.name_of(prefix))
        else:
            names, spaces = await self._scanned(b"")
            await self._catch_up(spaces)
            for space in spaces:
                self.use(space)
                self.name_of(space)
        for part in names.taken():
            await asyncio.sleep(0)  # of many names perhaps none is a key's now
            for name in part:
                key = self._key_of(name)
                if key is not None and key.startswith(prefix):
                    yield key

    async def _scanned(self, prefix: bytes) -> tuple[KeyList, list[bytes]]:
        """The names that begin with `prefix`, but for markers; and the namespaces that those are of."""
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

    async def advance(self, prefix: bytes) -> KeyList:
        """Begin the next generation of a namespace, or (an empty prefix) of all. Returns the names that are garbage then, or raises.

        When it returns, nobody who asks the tier finds what was stored before it was called.
        """
        space = prefix or ALL
        self.use(space)
        await self._catch_up([space])
        old = b"" if not prefix else self.name_of(prefix)
        for _ in range(_MOST_AT_ONCE):
            if await self._begin_next(space, prefix):
                break
        else:
            raise TierError(self.traits.name, "put", "too many hosts clear at once, or it keeps no marker")
        names, _ = await self._scanned(old)
        return names

    async def _begin_next(self, space: bytes, prefix: bytes) -> bool:
        """Put the next marker. False where another host's clear was first: what that one left may be older than ours."""
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
        """Have a namespace looked after from now on: `refresh` asks for its clears, whether or not anybody probes it here."""
        self._used[space] = None

    def has_met(self, spaces: Sequence[bytes]) -> bool:
        """Whether `meet` has nothing to ask."""
        return ALL in self._met and self._met.issuperset(spaces)

    async def meet(self, spaces: Sequence[bytes]) -> None:
        """Find out the generation of those of these that have not been searched since the tier was last away; of all, too."""
        new = [space for space in dict.fromkeys([ALL, *spaces]) if space not in self._met]
        if new:
            for space in new:
                self.use(space)
            await self._catch_up(new)

    @property
    def numbers(self) -> dict[bytes, int]:
        """Namespace -> its generation, of those that were cleared: whoever was told of a clear has heard of all these."""
        return {space: number for space, number in self._numbers.items() if number}

    async def refresh(self) -> None:
        """Learn what others have cleared of the namespaces in use; put markers that were evicted again."""
        self._next_round += 1
        others = [space for space in self._used if space != ALL]
        parts = -(-len(others) // _SPACES_AT_ONCE) or 1
        at = self._next_round % parts * _SPACES_AT_ONCE
        spaces = [ALL, *others[at : at + _SPACES_AT_ONCE]]
        if self._next_round // parts % _ROUNDS == 0:
            self._met.difference_update(spaces)
        await self.meet(spaces)
        marks = [(space, number) for space in spaces for number in (*_leading(self._number(space)), self._number(space) + 1)]
        sizes = await self._noticed(self._tier.probe([marker_key(space, number) for space, number in marks]))
        for (space, number), size in zip(marks, sizes, strict=True):
            if size is None and number <= self._number(space) and not self._read_only:
                await self._mark(space, number)
        newer = [space for (space, number), size in zip(marks, sizes, strict=True) if size is not None and number > self._number(space)]
        await self._catch_up(newer)

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
        self._numbers[space] = max(number, self._number(space))  # two calls may have searched at once

    async def _catch_up(self, spaces: Sequence[bytes]) -> None:
        """Find the latest generation of each; whoever holds something older is told before it is used.

        One that a clear of this host is beginning is left to that clear, which finds out whether the marker is its own.
        """
        for space, number in (await self._searched(spaces)).items():
            if number > self._number(space) and self._own.get(space) != number:
                known = self._may_hold(space) or self._was_away or space in self._met or self._number(space) > 0
                if known:
                    self._learned(b"" if space == ALL else space)
                self._set(space, number)
            self._met.add(space)

    async def _searched(self, spaces: Sequence[bytes]) -> dict[bytes, int]:
        """The latest generation of each by its markers; of all namespaces in the same round trips."""
        latest = await self._climbed(dict.fromkeys(spaces, 0))
        known = {space: self._number(space) for space in spaces if self._number(space) > latest[space]}
        if known:  # the markers that lead there are lost; there may be later ones beyond
            latest |= await self._climbed(known)
        return latest

    async def _climbed(self, latest: dict[bytes, int]) -> dict[bytes, int]:
        """From each number upwards, as far as the markers lead."""
        latest, going, top = dict(latest), list(latest), dict.fromkeys(latest, _BITS_AT_ONCE)
        while going:
            steps = [(space, 1 << bit) for space in going for bit in range(top[space])]
            sizes = await self._noticed(self._tier.probe([marker_key(space, latest[space] + step) for space, step in steps]))
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
        """Put a marker; whether it was not there. Whoever cannot be sure was not the first."""
        mine = bytearray(_MARK)
        mine[-_TOKEN_BYTES:] = os.urandom(_TOKEN_BYTES)
        key, there = marker_key(space, number), bytearray(len(mine))
        [fault] = await self._noticed(self._tier.put([(key, [memoryview(mine)])], ttl_s=math.inf))
        if fault is not None:
            raise fault
        [size] = await self._noticed(self._tier.get([key], [[memoryview(there)]]))
        return size == len(mine) and there == mine

    async def _noticed(self, call: Awaitable[Result]) -> Result:
        """The answer; that there was none is remembered."""
        try:
            return await call
        except BaseException:
            self._was_away = True
            self._met.clear()
            raise


def marker_key(space: bytes, number: int) -> bytes:
    """The name of the value that says that generation `number` of a namespace has begun."""
    return space + _SAYS + number.to_bytes(HASH_BYTES - len(_SAYS), "little") + _PLACE


def is_marker(name: bytes) -> bool:
    """Whether a name in a tier is a marker's."""
    return name.endswith(_PLACE) and name[NAMESPACE_BYTES:].startswith(_SAYS)


def _leading(number: int) -> list[int]:
    """The numbers of a number's leading bits, and the steps that lead there where it is very large: 13 -> 8, 12, 13."""
    leading = {number >> bit << bit for bit in range(number.bit_length())}
    return sorted(leading | {1 << bit for bit in range(_BITS_AT_ONCE - 1, number.bit_length(), _BITS_AT_ONCE)})
