"""Least recently used: the chunk that nobody asked for longest goes first."""

from collections import OrderedDict
from collections.abc import Callable


class LruPolicy:
    """Insert, touch and remove are O(1); victims is O(evicted + pinned at the old end)."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def insert(self, key: bytes, nbytes: int) -> None:
        """Newest."""
        self._sizes[key] = nbytes
        self._sizes.move_to_end(key)

    def touch(self, key: bytes) -> None:
        """Newest again."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget it."""
        self._sizes.pop(key, None)

    def victims(self, nbytes: int, pinned: Callable[[bytes], bool]) -> list[bytes]:
        """Oldest first."""
        chosen, freed = [], 0
        for key, size in self._sizes.items():
            if freed >= nbytes:
                break
            if not pinned(key):
                chosen.append(key)
                freed += size
        return chosen if freed >= nbytes else []

    def __len__(self) -> int:
        return len(self._sizes)
