"""S3-FIFO (Yang et al., SOSP 2023): three queues; what is asked for once leaves early, so one long scan does not wipe the cache.

New keys enter a small queue (a tenth of the bytes held). A key asked for again while there moves to the main queue when its turn
comes; one that was not is the victim, and its name is kept in a ghost queue, so that it enters the main queue if it comes back soon.
In the main queue a key asked for since its last turn goes round once more.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

_SMALL_SHARE = 0.1
_MOST_FREQUENT = 3  # the paper's two bits


class S3FifoPolicy:
    """Touch is O(1); victims is amortised O(evicted + pinned)."""

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._asked: dict[bytes, int] = {}
        self._small_bytes = 0
        self._main_bytes = 0

    def insert(self, key: bytes, nbytes: int) -> None:
        """Into the small queue, or into the main one if it was evicted lately."""
        self.remove(key)
        self._asked[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._put_main(key, nbytes)
        else:
            self._small[key] = nbytes
            self._small_bytes += nbytes

    def touch(self, key: bytes) -> None:
        """Count it, up to three."""
        if key in self._asked:
            self._asked[key] = min(_MOST_FREQUENT, self._asked[key] + 1)

    def remove(self, key: bytes) -> None:
        """Forget it; one that leaves the small queue is remembered as a ghost."""
        if self._asked.pop(key, None) is None:
            return
        if key in self._small:
            self._small_bytes -= self._small.pop(key)
            self._ghost[key] = None
            while len(self._ghost) > max(1, len(self._main) + len(self._small)):
                self._ghost.popitem(last=False)
        else:
            self._main_bytes -= self._main.pop(key)

    def victims(self, nbytes: int, pinned: Callable[[bytes], bool]) -> list[bytes]:
        """From the small queue while it holds more than its share, else from the main one; those asked for move on instead."""
        chosen: dict[bytes, int] = {}
        freed = 0
        small_left, main_left = self._small_bytes, self._main_bytes
        small, main = iter(list(self._small)), iter(list(self._main))
        while freed < nbytes:
            from_small = small_left > _SMALL_SHARE * (small_left + main_left)
            key = self._next_small(small, pinned) if from_small else self._next_main(main, pinned)
            if key is None:
                key = self._next_main(main, pinned) if from_small else self._next_small(small, pinned)
            if key is None:
                key = self._last_resort(chosen, pinned)
            if key is None:
                return []
            size = self._small.get(key) or self._main.get(key, 0)
            chosen[key] = size
            freed += size
            small_left, main_left = (small_left - size, main_left) if key in self._small else (small_left, main_left - size)
        return list(chosen)

    def __len__(self) -> int:
        return len(self._asked)

    def _next_small(self, keys: Iterator[bytes], pinned: Callable[[bytes], bool]) -> bytes | None:
        for key in keys:
            if key not in self._small or pinned(key):
                continue
            if self._asked[key] == 0:
                return key
            nbytes = self._small.pop(key)
            self._small_bytes -= nbytes
            self._asked[key] = 0
            self._put_main(key, nbytes)
        return None

    def _next_main(self, keys: Iterator[bytes], pinned: Callable[[bytes], bool]) -> bytes | None:
        for key in keys:
            if pinned(key):
                continue
            if self._asked[key] == 0:
                return key
            self._asked[key] -= 1
            self._main.move_to_end(key)
        return None

    def _last_resort(self, chosen: dict[bytes, int], pinned: Callable[[bytes], bool]) -> bytes | None:
        """All that is left was asked for lately: the oldest of the main queue, then of the small one."""
        for queue in (self._main, self._small):
            for key in queue:
                if key not in chosen and not pinned(key):
                    return key
        return None

    def _put_main(self, key: bytes, nbytes: int) -> None:
        self._main[key] = nbytes
        self._main_bytes += nbytes
