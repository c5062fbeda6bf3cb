"""256 small dictionaries: one of a million keys takes 20 ms to grow once."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

from kvhold.core.keys import NAMESPACE_BYTES

Value = TypeVar("Value")

SPREAD = NAMESPACE_BYTES  # index of the key's byte that selects its dictionary
_MOST = 512
_PART = 128  # values; a page of a snapshot is one part, and takes half a millisecond
KEYS_A_PART = 256


class KeyTable(Generic[Value]):
    __slots__ = ("num", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[bytes, Value]] = [{} for _ in range(256)]
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def __contains__(self, key: bytes) -> bool:
        return key in self.shards[key[SPREAD]]

    def __getitem__(self, key: bytes) -> Value:
        return self.shards[key[SPREAD]][key]

    def __setitem__(self, key: bytes, value: Value) -> None:
        shard = self.shards[key[SPREAD]]
        before = len(shard)
        shard[key] = value
        self.num += len(shard) - before

    def __delitem__(self, key: bytes) -> None:
        del self.shards[key[SPREAD]][key]
        self.num -= 1

    def get(self, key: bytes) -> Value | None:
        return self.shards[key[SPREAD]].get(key)

    def values(self) -> Iterator[Value]:
        return chain.from_iterable(map(dict.values, self.shards))

    def parts(self) -> Iterator[list[Value]]:
        """The table may change between parts. Values that stay are in exactly one part."""
        for shard in self.shards:
            if not shard:
                continue
            values = iter(list(shard.values()))
            yield []
            while part := list(islice(values, _PART)):
                yield part

    def emptied(self) -> Iterator[list[Value]]:
        for shard in self.shards:
            while shard:
                part = [shard.popitem()[1] for _ in range(min(_MOST, len(shard)))]
                self.num -= len(part)
                yield part
            shard.clear()


class KeySet:
    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[set[bytes]] = [set() for _ in range(256)]

    def add(self, keys: Sequence[bytes]) -> list[bytes]:
        new = []
        for key in keys:
            shard = self.shards[key[SPREAD]]
            if key not in shard:
                shard.add(key)
                new.append(key)
        return new

    def emptied(self) -> Iterator[int]:
        for shard in self.shards:
            while shard:
                num_keys = min(_MOST, len(shard))
                for _ in range(num_keys):
                    shard.pop()
                yield num_keys
            shard.clear()


class KeyList:
    """In many short lists: one of a million keys takes 7 ms to grow once."""

    __slots__ = ("num", "parts")

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.num = len(keys)
        self.parts = [list(keys[at : at + KEYS_A_PART]) for at in range(0, len(keys), KEYS_A_PART)]

    def __len__(self) -> int:
        return self.num

    def append(self, key: bytes) -> bool:
        begins = not self.parts or len(self.parts[-1]) == KEYS_A_PART
        if begins:
            self.parts.append([])
        self.parts[-1].append(key)
        self.num += 1
        return begins

    def taken(self) -> Iterator[list[bytes]]:
        while self.parts:
            self.num -= len(self.parts[-1])
            yield self.parts.pop()
