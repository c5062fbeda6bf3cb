"""S3-FIFO (Yang et al., SOSP 2023): three queues; what is asked for once leaves early, so one long scan does not wipe the cache.

New keys enter a small queue (a tenth of the bytes held). A key asked for again while there moves to the main queue when its turn
comes; one that was not is the victim, and its name is kept in a ghost queue, so that it enters the main queue if it comes back soon.
In the main queue a key asked for since its last turn goes round once more.
"""

from collections import OrderedDict
from collections.abc import Callable

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
        small, main = _Pass(self._small, self._asked, pinned), _Pass(self._main, self._asked, pinned)
        chosen, freed = [], 0
        while freed < nbytes:
            small_left, all_left = self._small_bytes - small.gone_bytes, self._small_bytes + self._main_bytes - freed
            first, second = (small, main) if small_left > _SMALL_SHARE * all_left else (main, small)
            victim = first.cold() or second.cold() or main.warm() or small.warm()
            if victim is None:
                return []
            chosen.append(victim[0])
            freed += victim[1]
        self._move_on(small.passed, main.passed)
        return chosen

    def __len__(self) -> int:
        return len(self._asked)

    def _move_on(self, small: dict[bytes, int], main: dict[bytes, int]) -> None:
        for key, nbytes in small.items():
            self._small_bytes -= self._small.pop(key)
            self._asked[key] = 0
            self._put_main(key, nbytes)
        for key in main:
            self._asked[key] -= 1
            self._main.move_to_end(key)

    def _put_main(self, key: bytes, nbytes: int) -> None:
        self._main[key] = nbytes
        self._main_bytes += nbytes


class _Pass:
    """One pass over a queue, oldest first and only as far as it is needed. It changes nothing but notes who was passed over."""

    def __init__(self, queue: OrderedDict[bytes, int], asked: dict[bytes, int], pinned: Callable[[bytes], bool]) -> None:
        self._keys = iter(queue.items())
        self._asked = asked
        self._pinned = pinned
        self.passed: dict[bytes, int] = {}
        self.gone_bytes = 0  # of the chosen and of the passed

    def cold(self) -> tuple[bytes, int] | None:
        """The next key that nobody asked for, and its size."""
        for key, nbytes in self._keys:
            if self._pinned(key):
                continue
            self.gone_bytes += nbytes
            if self._asked[key] == 0:
                return key, nbytes
            self.passed[key] = nbytes
        return None

    def warm(self) -> tuple[bytes, int] | None:
        """The last resort, when nothing cold is left: the oldest of those passed over."""
        for key, nbytes in self.passed.items():
            del self.passed[key]
            return key, nbytes
        return None
