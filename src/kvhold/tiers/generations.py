"""A shared tier in which `clear` holds for every host.

    await tier.advance(namespace)  # a clear: no host finds the older values from here on
    await tier.refresh()  # learn the clears of other hosts

**Generations** count a namespace's clears. From generation 1 on, names in the tier begin with a
hash of namespace and generation, so no host asks for older values. The number of clears of
everything follows, readable: a host removes older names of namespaces that it does not know.

**Marker** n says that generation n has begun. A probe asks for the next marker in the same round
trip, without clock or lock.

**Search.** From 0, a host probes all numbers a power of two ahead, goes to the largest marker, and
repeats. It reaches 13 by 8 and 12. Hosts restore evicted markers.

**Chunks on this host** have a generation too, kept in a journal. `learned` is called before any key
gets a newer name, so a running write uses an old name or is stopped.
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

ALL = bytes(NAMESPACE_BYTES)
_PLACE = b"\xff\xff\xff\xff"  # a group and shard that no chunk has
_SAYS = b"kvhold-clear"  # in place of the hash of tokens
_MARK = b"kvhold: this namespace was cleared".ljust(64)
_TOKEN_BYTES = 16  # tells who put a marker
_EVERY_BYTES = 4  # of a name: the number of clears of everything
_EVERY_WRAP = 1 << 8 * _EVERY_BYTES
# Names of so many later numbers are not older. A key without generation has any number there, so
# the old values of one namespace in 4 million stay.
_MOST_LATER = 1 << 10
_BITS_AT_ONCE = 16
_MOST_BITS = 48
_SPACES_AT_ONCE = 64  # in one call
_MOST_SLICES = 64  # in one refresh
_MOST_AT_ONCE = 8
_ROUNDS = 12


class GenerationTier:
    def __init__(
        self,
        tier: Tier,
        learned: Callable[[bytes], None],
        *,
        read_only: bool = False,
        numbers: Mapping[bytes, int] | None = None,
        may_hold: Callable[[bytes], bool] = lambda space: True,
    ) -> None:
        """Wrap a tier.

        learned:  called with each namespace that another host has cleared; b"" means all
        numbers:  namespace -> generation of this host's chunks, from a journal
        may_hold: false: do not call `learned` at first contact with a namespace
        """
        self._read_only = read_only
        self._tier = tier
        self._learned = learned
        self._numbers: dict[bytes, int] = {ALL: 0} | dict(numbers or {})
        self._may_hold = may_hold
        # namespaces searched since the tier was last away
        self._met: set[bytes] = set()
        self._used: dict[bytes, None] = {ALL: None}
        # the generation that this host is beginning
        self._own: dict[bytes, int] = {}
        self._next_slice = 0  # of the namespaces in use: the one to refresh next
        self._is_failing = False  # the latest question for markers had no answer
        self._spaces: dict[bytes, bytes] = {}  # name -> namespace
        # memory may hold chunks from before an unknown clear
        self._was_away = False

    @property
    def traits(self) -> TierTraits:
        return self._tier.traits

    @property
    def used_bytes(self) -> int | None:
        return getattr(self._tier, "used_bytes", None)

    async def check(self) -> None:
        await self._noticed(self._tier.check())

    async def probe(self, keys: Sequence[bytes]) -> Sequence[int | TierError | None]:
        """Tier contract. Raises the fault of a marker: another host may have cleared."""
        spaces = [ALL, *dict.fromkeys(key[:NAMESPACE_BYTES] for key in keys)]
        await self.meet(spaces)
        while True:
            next_marks = [(space, self._number(space) + 1) for space in spaces]
            sizes = await self._noticed(self._probed(self._names(keys), next_marks))
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
        return await self._noticed(self._tier.get(self._names(keys), into, starts=starts))

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        return await self.putting(items, ttl_s=ttl_s)()

    def putting(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> Callable[[], Awaitable[list[TierError | None]]]:
        """Return a put with the names of now."""
        named = [(self.name_of(key), parts) for key, parts in items]
        return lambda: self._noticed(self._tier.put(named, ttl_s=ttl_s))

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        return await self.replace_named([(self.name_of(key), parts) for key, parts in items])

    async def replace_named(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Replace values under the names that they had when they were read.

        Raises TierError if the tier below cannot.
        """
        if not isinstance(self._tier, Replaces):
            raise TierError(
                self.traits.name,
                "replace",
                "this kind of tier cannot put a value in the place of another in one step",
            )
        return await self._noticed(self._tier.replace(items))

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._noticed(self._tier.delete(self._names(keys)))

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract. A scan of all namespaces learns their clears."""
        if len(prefix) >= NAMESPACE_BYTES:
            names, _ = await self._scanned(self.name_of(prefix))
        else:
            names, spaces = await self._scanned(b"")
            await self._catch_up(spaces)
            for space in spaces:
                self.use(space)
                self.name_of(space)
        for part in names.taken():
            await asyncio.sleep(0)
            for name in part:
                key = self._key_of(name)
                if key is not None and key.startswith(prefix):
                    yield key

    async def _scanned(self, prefix: bytes) -> tuple[KeyList, list[bytes]]:
        names, spaces = KeyList(), dict[bytes, None]()
        async for name in self._tier.scan(prefix):
            if is_marker(name):
                spaces[name[:NAMESPACE_BYTES]] = None
            elif names.append(name):
                await asyncio.sleep(0)
        return names, list(spaces)

    async def close(self) -> None:
        await self._tier.close()

    async def advance(self, prefix: bytes) -> bytes:
        """Begin the next generation of a namespace; an empty prefix means all.

        Returns the name prefix of the old values. Raises TierError if other hosts were first each
        time, or if the tier keeps no marker.
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
        """Return the names with the prefix `old`, which `advance` returned, without markers.

        b"": only names from before the latest known clear of everything. Names that other hosts
        have used since are told by their number, whatever namespaces this host knows.
        """
        every = self._numbers[ALL]
        names, _ = await self._scanned(old)
        if old:
            return names
        garbage = KeyList()
        assert every, "removed without a clear"
        for part in names.taken():
            for name in part:
                if _is_older(name, every):
                    garbage.append(name)
            await asyncio.sleep(0)
        return garbage

    async def _begin_next(self, space: bytes, prefix: bytes) -> bool:
        """Put the next marker. Return false if another host put it first.

        Then values stored between both clears have this generation, so one more must begin.
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
        return await self._tier.delete(names)

    def use(self, space: bytes) -> None:
        self._used[space] = None

    def has_met(self, spaces: Sequence[bytes]) -> bool:
        return ALL in self._met and self._met.issuperset(spaces)

    async def meet(self, spaces: Sequence[bytes]) -> None:
        """Search the namespaces not searched since the tier was last away."""
        new = [space for space in dict.fromkeys([ALL, *spaces]) if space not in self._met]
        if new:
            for space in new:
                self.use(space)
            await self._catch_up(new)

    @property
    def numbers(self) -> dict[bytes, int]:
        return {space: number for space, number in self._numbers.items() if number}

    async def refresh(self) -> None:
        """Learn the clears of the namespaces in use, and restore evicted markers.

        A slice of the namespaces at a time. If it fails or is cancelled, the next refresh goes on
        with the next slice.
        """
        slices = _sliced([space for space in self._used if space != ALL]) or [[]]
        for _ in range(min(len(slices), _MOST_SLICES)):
            num_rounds, at = divmod(self._next_slice, len(slices))
            self._next_slice += 1
            spaces = [ALL, *slices[at]]
            if num_rounds % _ROUNDS == _ROUNDS - 1:
                await self._catch_up(spaces)
            await self._refresh_slice(spaces)

    async def _refresh_slice(self, spaces: Sequence[bytes]) -> None:
        await self.meet(spaces)
        marks = [
            (space, number)
            for space in spaces
            for number in (*_leading(self._number(space)), self._number(space) + 1)
        ]
        sizes = await self._asked(
            marks, self._tier.probe([marker_key(space, number) for space, number in marks])
        )
        lost = [
            (space, number)
            for (space, number), size in zip(marks, sizes, strict=True)
            if size is None and number <= self._number(space) and not self._read_only
        ]
        newer = [
            space
            for (space, number), size in zip(marks, sizes, strict=True)
            if isinstance(size, int) and number > self._number(space)
        ]
        await self._catch_up(newer)
        unknown = [
            (space, size)
            for (space, _), size in zip(marks, sizes, strict=True)
            if isinstance(size, TierError)
        ]
        if unknown:
            self._was_away = True
            self._met.difference_update(space for space, _ in unknown)
        faults = [fault for _, fault in unknown]
        if lost:
            faults += await self._restored(lost)
        if faults:
            raise faults[0]

    def name_of(self, key: bytes) -> bytes:
        space = key[:NAMESPACE_BYTES]
        own, every = self._numbers.get(space, 0), self._numbers[ALL]
        if not own and not every:
            return key
        digest = blake2b(
            space + own.to_bytes(8, "little") + every.to_bytes(8, "little"),
            digest_size=NAMESPACE_BYTES - _EVERY_BYTES,
            person=b"kvhold-gen",
        )
        name = digest.digest() + (every % _EVERY_WRAP).to_bytes(_EVERY_BYTES, "little")
        self._spaces[name] = space
        return name + key[NAMESPACE_BYTES:]

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self.name_of(key) for key in keys]

    def _key_of(self, name: bytes) -> bytes | None:
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
        self._numbers[space] = max(number, self._number(space))

    async def _catch_up(self, spaces: Sequence[bytes]) -> None:
        """Search each namespace's latest generation. Call `learned` before it is used.

        A generation that this host is beginning is skipped: that clear checks whose marker it is.
        """
        for some in _sliced(spaces):
            self._learn(await self._searched(some))

    def _learn(self, latest: Mapping[bytes, int]) -> None:
        for space, number in latest.items():
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
        latest = await self._climbed(dict.fromkeys(spaces, 0))
        known = {
            space: self._number(space) for space in spaces if self._number(space) > latest[space]
        }
        if known:  # the markers on the way are lost
            latest |= await self._climbed(known)
        return latest

    async def _probed(
        self, names: Sequence[bytes], marks: Sequence[tuple[bytes, int]]
    ) -> Sequence[int | TierError | None]:
        """Probe names, then markers. Raises the fault of a marker that may be there."""
        sizes = await self._tier.probe([*names, *(marker_key(*mark) for mark in marks)])
        for size in sizes[len(names) :]:
            if isinstance(size, TierError):
                raise size
        return sizes

    async def _climbed(self, latest: dict[bytes, int]) -> dict[bytes, int]:
        latest, going, top = dict(latest), list(latest), dict.fromkeys(latest, _BITS_AT_ONCE)
        while going:
            steps = [(space, 1 << bit) for space in going for bit in range(top[space])]
            marks = [(space, latest[space] + step) for space, step in steps]
            sizes = await self._asked(marks, self._probed([], marks))
            found: dict[bytes, int] = {}
            for (space, step), size in zip(steps, sizes, strict=True):
                if size is not None:
                    found[space] = max(step, found.get(space, 0))
            for space, step in found.items():
                latest[space] += step
                top[space] = min(_MOST_BITS, _BITS_AT_ONCE + step.bit_length())
            going = list(found)
        return latest

    async def _restored(self, marks: Sequence[tuple[bytes, int]]) -> list[TierError]:
        """Put markers that the tier has lost. Return the faults."""
        items = [(marker_key(*mark), [memoryview(_MARK)]) for mark in marks]
        faults = await self._noticed(self._tier.put(items, ttl_s=math.inf))
        return [fault for fault in faults if fault is not None]

    async def _mark_as_first(self, space: bytes, number: int) -> bool:
        """Return true only if this host's marker is certainly the first."""
        mine = bytearray(_MARK)
        mine[-_TOKEN_BYTES:] = os.urandom(_TOKEN_BYTES)
        key, there = marker_key(space, number), bytearray(len(mine))
        [fault] = await self._noticed(self._tier.put([(key, [memoryview(mine)])], ttl_s=math.inf))
        if fault is not None:
            raise fault
        [size] = await self._noticed(self._tier.get([key], [[memoryview(there)]]))
        return size == len(mine) and there == mine

    async def _noticed(self, call: Awaitable[Result]) -> Result:
        try:
            return await call
        except BaseException:
            self._was_away = True
            self._met.clear()
            raise

    async def _asked(self, marks: Sequence[tuple[bytes, int]], call: Awaitable[Result]) -> Result:
        """Await a question for markers. A fault forgets their namespaces, a second one all.

        A slow tier answers for some slices and not for others. Those that it has answered stay
        met, or a search of very many namespaces would never end.
        """
        try:
            answer = await call
        except BaseException:
            self._was_away = True
            if self._is_failing:
                self._met.clear()
            self._met.difference_update(space for space, _ in marks)
            self._is_failing = True
            raise
        self._is_failing = False
        return answer


def _sliced(spaces: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [spaces[at : at + _SPACES_AT_ONCE] for at in range(0, len(spaces), _SPACES_AT_ONCE)]


def marker_key(space: bytes, number: int) -> bytes:
    return space + _SAYS + number.to_bytes(HASH_BYTES - len(_SAYS), "little") + _PLACE


def is_marker(name: bytes) -> bool:
    return name.endswith(_PLACE) and name[NAMESPACE_BYTES:].startswith(_SAYS)


def _is_older(name: bytes, every: int) -> bool:
    """Return whether a name is from before the clear of everything with this number."""
    number = int.from_bytes(name[NAMESPACE_BYTES - _EVERY_BYTES : NAMESPACE_BYTES], "little")
    return (number - every) % _EVERY_WRAP >= _MOST_LATER


def _leading(number: int) -> list[int]:
    """Return the numbers through which a search finds `number`: 13 -> 8, 12, 13."""
    leading = {number >> bit << bit for bit in range(number.bit_length())}
    return sorted(
        leading | {1 << bit for bit in range(_BITS_AT_ONCE - 1, number.bit_length(), _BITS_AT_ONCE)}
    )
