"""A shared tier's clears hold for every host (docs/format.md).

Marker n: generation n has begun. A search from 0 probes all numbers a power of two ahead, goes to
the largest marker, and repeats. Probes ask for the next marker; hosts restore evicted ones.

Known: the `_MOST_USED` namespaces last used, and those in memory.
"""

import math
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

from kvhold.core.errors import TierError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES
from kvhold.core.turns import next_turn
from kvhold.tiers.base import Parts, Replaces, Tier, TierTraits
from kvhold.tiers.scans import closing_scan
from kvhold.tiers.table import KeyList

Result = TypeVar("Result")

ALL = bytes(NAMESPACE_BYTES)
_PLACE = b"\xff\xff\xff\xff"  # a group and shard that no chunk has
_SAYS = b"kvhold-clear"  # instead of the hash of tokens
_MARK = b"kvhold: this namespace was cleared".ljust(64)
_TOKEN_BYTES = 16  # random; shows which host put a marker
_EVERY_BYTES = 4  # of a name: the number of clears of everything
_EVERY_WRAP = 1 << 8 * _EVERY_BYTES
# numbers this far ahead are not older, so old values of one namespace in 4 million stay
_MOST_LATER = 1 << 10
_BITS_AT_ONCE = 16
_MOST_BITS = 48
_SPACES_AT_ONCE = 64
_MOST_SLICES = 64
_MOST_USED = _SPACES_AT_ONCE * _MOST_SLICES
_MOST_NUMBERS = 20_000
_LOOKS = 4
_MOST_AT_ONCE = 8
_ROUNDS = 12
_NOT_SEARCHED, _SEARCH_AGAIN = 0, -1  # instead of the number of a contact


class _Use:
    __slots__ = ("contact", "num_refreshes")

    def __init__(self) -> None:
        self.contact = _NOT_SEARCHED
        self.num_refreshes = 0


class GenerationTier:
    def __init__(
        self,
        tier: Tier,
        learned: Callable[[bytes], None],
        *,
        read_only: bool = False,
        numbers: Mapping[bytes, int] | None = None,
        may_hold: Callable[[bytes], bool] = lambda space: True,
        holds: Callable[[bytes], bool] = lambda space: False,
    ) -> None:
        """learned: called with each namespace cleared by another host; b"": all
        numbers: namespace -> generation of this host's chunks
        may_hold: false: no `learned` at the first contact with a namespace
        holds: memory has its chunks, so do not forget it
        """
        self._read_only = read_only
        self._tier = tier
        self._learned = learned
        self._numbers: OrderedDict[bytes, int] = OrderedDict(numbers or {})
        self._may_hold = may_hold
        self._holds = holds
        self._contact = 1
        self._used: dict[bytes, _Use] = {ALL: _Use()}
        self._turns: OrderedDict[bytes, None] = OrderedDict()
        self._lately: OrderedDict[bytes, None] = OrderedDict()
        self._own: dict[bytes, int] = {}
        self._is_failing = False
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
        """Raises a marker's fault: there may be a newer clear."""
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
        await self._meet_forgotten(keys)
        return await self._noticed(self._tier.get(self._names(keys), into, starts=starts))

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        return await self.putting(items, ttl_s=ttl_s)()

    def putting(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> Callable[[], Awaitable[list[TierError | None]]]:
        """Under the present names. If those are old, no host finds the values."""
        for space in _spaces_of([key for key, _ in items]):
            self.use(space)
        named = [(self.name_of(key), parts) for key, parts in items]
        return lambda: self._noticed(self._tier.put(named, ttl_s=ttl_s))

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        return await self.replace_named([(self.name_of(key), parts) for key, parts in items])

    async def replace_named(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Under their names at the time of the read.

        Raises TierError if the tier below cannot.
        """
        if not isinstance(self._tier, Replaces):
            raise TierError(
                self.traits.name,
                "replace",
                "this kind of tier cannot replace a value in one step",
            )
        return await self._noticed(self._tier.replace(items))

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        await self._meet_forgotten(keys)
        return await self._noticed(self._tier.delete(self._names(keys)))

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """A scan of all namespaces learns their clears."""
        if len(prefix) >= NAMESPACE_BYTES:
            spaces = _spaces_of([prefix])
            await self._meet_forgotten(spaces)
            names, _ = await self._scanned(self.name_of(prefix))
        else:
            names, spaces = await self._scanned(b"")
            await self._catch_up(spaces)
            spaces += [*self._used, *self._numbers]
        space_of = await self._spaces_by_name(spaces)
        for part in names.taken():
            await next_turn()
            for name in part:
                start = name[:NAMESPACE_BYTES]
                key = space_of.get(start, start) + name[NAMESPACE_BYTES:]
                if key.startswith(prefix) and self.name_of(key) == name:
                    yield key

    async def _spaces_by_name(self, spaces: Sequence[bytes]) -> dict[bytes, bytes]:
        by_name = dict[bytes, bytes]()
        for some in _sliced(spaces):
            by_name.update((self.name_of(space), space) for space in some)
            await next_turn()
        return by_name

    async def _scanned(self, prefix: bytes) -> tuple[KeyList, list[bytes]]:
        names, spaces = KeyList(), dict[bytes, None]()
        async with closing_scan(self._tier, prefix) as scanned:
            async for name in scanned:
                if is_marker(name):
                    spaces[name[:NAMESPACE_BYTES]] = None
                elif names.append(name):
                    await next_turn()
        return names, list(spaces)

    async def close(self) -> None:
        await self._tier.close()

    async def advance(self, prefix: bytes) -> bytes:
        """Begin the next generation of a namespace; empty: of all.

        Returns the old values' name prefix. Raises TierError: no marker, or other hosts were first.
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
        """The names with the prefix `old` (from `advance`), without markers.

        b"": only names from before the latest known clear of everything.
        """
        every = self._number(ALL)
        names, _ = await self._scanned(old)
        if old:
            return names
        garbage = KeyList()
        assert every, "removed without a clear"
        for part in names.taken():
            for name in part:
                if _is_older(name, every):
                    garbage.append(name)
            await next_turn()
        return garbage

    async def names_under(self, prefix: bytes) -> KeyList:
        """The names of a namespace's values; b"": of all values, also of earlier generations."""
        if not prefix:
            return (await self._scanned(b""))[0]
        await self.meet([prefix])
        return (await self._scanned(self.name_of(prefix)))[0]

    async def _begin_next(self, space: bytes, prefix: bytes) -> bool:
        await self._meet_forgotten([space])
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
        if space in self._lately:
            self._lately.move_to_end(space)
        elif space not in self._used:
            self._used[space] = _Use()
            self._turns[space] = None
            self._may_forget(space)
        if space in self._numbers:
            self._numbers.move_to_end(space)

    def _may_forget(self, space: bytes) -> None:
        self._lately[space] = None
        while len(self._lately) > _MOST_USED:
            first, _ = self._lately.popitem(last=False)
            if not self._is_kept(first):
                del self._used[first], self._turns[first]

    def _is_kept(self, space: bytes) -> bool:
        return space in self._own or self._holds(space)

    def has_met(self, spaces: Sequence[bytes]) -> bool:
        return not self._unmet(spaces)

    async def meet(self, spaces: Sequence[bytes]) -> None:
        """Use namespaces. Search those not searched since the tier was last away."""
        for space in spaces:
            self.use(space)
        await self._catch_up(self._unmet(spaces))

    def _unmet(self, spaces: Sequence[bytes]) -> list[bytes]:
        every = dict.fromkeys([ALL, *spaces])
        return [space for space in every if not self._is_met(space)]

    def _is_met(self, space: bytes) -> bool:
        use = self._used.get(space)
        return use is not None and use.contact == self._contact

    async def _meet_forgotten(self, keys: Sequence[bytes]) -> None:
        for _ in range(_MOST_AT_ONCE):
            forgotten = [
                space
                for space in _spaces_of(keys)
                if (use := self._used.get(space)) is None or use.contact == _NOT_SEARCHED
            ]
            if not forgotten:
                return
            await self.meet(forgotten)
        raise TierError(self.traits.name, "get", "too many namespaces are in use at once")

    @property
    def numbers(self) -> dict[bytes, int]:
        return dict(self._numbers)

    async def refresh(self) -> None:
        """Learn clears of the namespaces in use, and restore evicted markers, in slices.

        The next refresh goes on, even after a failure.
        """
        left, due = len(self._turns), self._due([ALL])
        for _ in range(_MOST_SLICES):
            spaces = self._take_turns(min(left, _SPACES_AT_ONCE))
            left -= _SPACES_AT_ONCE
            await self._catch_up(due + self._due(spaces))
            await self._refresh_slice([ALL, *spaces])
            if left <= 0:
                break
            due = []

    def _take_turns(self, count: int) -> list[bytes]:
        spaces = []
        for _ in range(min(count, len(self._turns))):
            space, _ = self._turns.popitem(last=False)
            self._turns[space] = None
            spaces.append(space)
        for space in spaces:
            if space in self._used and space not in self._lately and not self._is_kept(space):
                self._may_forget(space)
        return [space for space in spaces if space in self._used]

    def _due(self, spaces: Sequence[bytes]) -> list[bytes]:
        for space in spaces:
            self._used[space].num_refreshes += 1
        return [space for space in spaces if self._used[space].num_refreshes % _ROUNDS == 0]

    async def _refresh_slice(self, spaces: Sequence[bytes]) -> None:
        await self._catch_up(self._unmet(spaces))
        marks = [
            (space, number)
            for space in spaces
            for number in (*_leading(self._number(space)), self._number(space) + 1)
        ]
        sizes = await self._answer_about(
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
            self._search_again([space for space, _ in unknown])
        faults = [fault for _, fault in unknown]
        if lost:
            faults += await self._restored(lost)
        if faults:
            raise faults[0]

    def name_of(self, key: bytes) -> bytes:
        space = key[:NAMESPACE_BYTES]
        own, every = self._number(space), self._number(ALL)
        if not own and not every:
            return key
        digest = blake2b(
            space + own.to_bytes(8, "little") + every.to_bytes(8, "little"),
            digest_size=NAMESPACE_BYTES - _EVERY_BYTES,
            person=b"kvhold-gen",
        )
        name = digest.digest() + (every % _EVERY_WRAP).to_bytes(_EVERY_BYTES, "little")
        return name + key[NAMESPACE_BYTES:]

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self.name_of(key) for key in keys]

    def _number(self, space: bytes) -> int:
        return self._numbers.get(space, 0)

    def _set(self, space: bytes, number: int) -> None:
        self._numbers[space] = max(number, self._number(space))
        self._numbers.move_to_end(space)
        for _ in range(_LOOKS):
            if len(self._numbers) <= _MOST_NUMBERS:
                break
            first = next(iter(self._numbers))
            if first in self._used:  # its chunks must not get older names
                self._numbers.move_to_end(first)
            else:
                del self._numbers[first]

    async def _catch_up(self, spaces: Sequence[bytes]) -> None:
        for some in _sliced(spaces):
            uses = {space: self._used.get(space) for space in some}
            self._learn(await self._searched(some), uses)

    def _learn(self, latest: Mapping[bytes, int], uses: Mapping[bytes, _Use | None]) -> None:
        for space, number in latest.items():
            if number > self._number(space) and self._own.get(space) != number:
                known = (
                    self._may_hold(space)
                    or self._was_away
                    or self._is_met(space)
                    or self._number(space) > 0
                )
                if known:
                    self._learned(b"" if space == ALL else space)
                self._set(space, number)
            use = uses[space]
            if use is not None:
                use.contact = self._contact

    async def _searched(self, spaces: Sequence[bytes]) -> dict[bytes, int]:
        latest = await self._climbed(dict.fromkeys(spaces, 0))
        known = {
            space: self._number(space) for space in spaces if self._number(space) > latest[space]
        }
        if known:
            latest |= await self._climbed(known)
        return latest

    async def _probed(
        self, names: Sequence[bytes], marks: Sequence[tuple[bytes, int]]
    ) -> Sequence[int | TierError | None]:
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
            sizes = await self._answer_about(marks, self._probed([], marks))
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
        items = [(marker_key(*mark), [memoryview(_MARK)]) for mark in marks]
        faults = await self._noticed(self._tier.put(items, ttl_s=math.inf))
        return [fault for fault in faults if fault is not None]

    async def _mark_as_first(self, space: bytes, number: int) -> bool:
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
        # even if cancelled: the result is unknown
        except BaseException:
            self._was_away = True
            self._contact += 1
            raise

    async def _answer_about(
        self, marks: Sequence[tuple[bytes, int]], call: Awaitable[Result]
    ) -> Result:
        """After a fault, search the markers' namespaces again; after two in a row, all."""
        try:
            answer = await call
        except BaseException:
            self._was_away = True
            if self._is_failing:
                self._contact += 1
            self._search_again([space for space, _ in marks])
            self._is_failing = True
            raise
        self._is_failing = False
        return answer

    def _search_again(self, spaces: Iterable[bytes]) -> None:
        for space in spaces:
            use = self._used.get(space)
            if use is not None and use.contact != _NOT_SEARCHED:
                use.contact = _SEARCH_AGAIN


def _spaces_of(keys: Iterable[bytes]) -> list[bytes]:
    return list(dict.fromkeys(key[:NAMESPACE_BYTES] for key in keys))


def _sliced(spaces: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [spaces[at : at + _SPACES_AT_ONCE] for at in range(0, len(spaces), _SPACES_AT_ONCE)]


def marker_key(space: bytes, number: int) -> bytes:
    return space + _SAYS + number.to_bytes(HASH_BYTES - len(_SAYS), "little") + _PLACE


def is_marker(name: bytes) -> bool:
    return name.endswith(_PLACE) and name[NAMESPACE_BYTES:].startswith(_SAYS)


def _is_older(name: bytes, every: int) -> bool:
    number = int.from_bytes(name[NAMESPACE_BYTES - _EVERY_BYTES : NAMESPACE_BYTES], "little")
    return (number - every) % _EVERY_WRAP >= _MOST_LATER


def _leading(number: int) -> list[int]:
    leading = {number >> bit << bit for bit in range(number.bit_length())}
    return sorted(
        leading | {1 << bit for bit in range(_BITS_AT_ONCE - 1, number.bit_length(), _BITS_AT_ONCE)}
    )
