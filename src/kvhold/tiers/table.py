"""Tables of keys in many small dictionaries, so that no single step takes long.

    table = KeyTable(); table[key] = entry; table.get(key); del table[key]
    for part in table.parts(): ...  # a scan that may stop between two parts, while entries come and
    go keys = KeyList(); keys.append(key); keys.parts

A dictionary of a million keys takes 20 ms to grow once, and must not change while it is iterated.
Here each of 256 dictionaries grows by itself, and a scan copies one at a time. An entry that exists
during the whole scan is in exactly one part.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from kvhold.core.keys import NAMESPACE_BYTES

Value = TypeVar("Value")

SPREAD = NAMESPACE_BYTES  # this byte of a key selects its dictionary: the token hash's first byte
_MOST = 512  # values in one part
KEYS_A_PART = 256  # keys in one part of a KeyList


class KeyTable(Generic[Value]):
    """Values by key. Keys are KEY_BYTES long.

    shards: `shards[key[SPREAD]]` is the dictionary of a key, for callers that look up many keys
    num:    number of keys
    """

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
        """Return the value of a key, or None."""
        return self.shards[key[SPREAD]].get(key)

    def values(self) -> Iterator[Value]:
        """Yield all values. The table must not change until the end."""
        for shard in self.shards:
            yield from shard.values()

    def parts(self) -> Iterator[list[Value]]:
        """Yield all values, some hundred at a time.

        The table may change between two parts, so a part may contain values that were removed.
        """
        for shard in self.shards:
            if not shard:
                continue
            values = iter(list(shard.values()))
            while part := list(islice(values, _MOST)):
                yield part

    def emptied(self) -> Iterator[list[Value]]:
        """Remove all values and yield them, some hundred at a time."""
        for shard in self.shards:
            while shard:
                part = [shard.popitem()[1] for _ in range(min(_MOST, len(shard)))]
                self.num -= len(part)
                yield part
            shard.clear()  # frees the memory of the grown dictionary


class KeySet:
    """A set of keys, in many small sets for the same reasons."""

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[set[bytes]] = [set() for _ in range(256)]

    def add(self, keys: Sequence[bytes]) -> list[bytes]:
        """Add keys. Returns the new ones, in order."""
        new = []
        for key in keys:
            shard = self.shards[key[SPREAD]]
            if key not in shard:
                shard.add(key)
                new.append(key)
        return new

    def emptied(self) -> Iterator[int]:
        """Remove all keys, some hundred at a time, and yield the numbers."""
        for shard in self.shards:
            while shard:
                num_keys = min(_MOST, len(shard))
                for _ in range(num_keys):
                    shard.pop()
                yield num_keys
            shard.clear()  # frees the memory of the grown set


class KeyList:
    """A list of keys, in many short lists: one list of a million keys takes 7 ms to grow once."""

    __slots__ = ("num", "parts")

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self.num = len(keys)
        self.parts = [list(keys[at : at + KEYS_A_PART]) for at in range(0, len(keys), KEYS_A_PART)]

    def __len__(self) -> int:
        return self.num

    def append(self, key: bytes) -> bool:
        """Add a key. Returns whether it began a new part, a good time to let other tasks run."""
        begins = not self.parts or len(self.parts[-1]) == KEYS_A_PART
        if begins:
            self.parts.append([])
        self.parts[-1].append(key)
        self.num += 1
        return begins

    def taken(self) -> Iterator[list[bytes]]:
        """Remove the parts and yield them, the last one first."""
        while self.parts:
            self.num -= len(self.parts[-1])
            yield self.parts.pop()
