"""A tier's values that must not be found: `suppressed.hides(key)`.

They are cleared, but not removed yet; or unreadable: suppressed for 30 s.

A clear is *pending* until its values are removed. Its number keeps an earlier removal from ending a
later clear. It is *due* when the writes from before its start have ended.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvhold.core.keys import NAME_BYTES

_MOST_UNREADABLE = 10_000
_UNREADABLE_S = 30.0


def _tell_nobody(prefix: bytes) -> None: ...


class PendingClear(NamedTuple):
    prefix: bytes
    number: int


class Suppressed:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.chunks = set[bytes]()
        # called with cleared prefixes
        self.tell: Callable[[bytes], None] = _tell_nobody
        self._began_s: dict[bytes, float] = {}
        self._pending: dict[bytes, int] = {}
        self._due: dict[bytes, int] = {}
        self._due_s: dict[bytes, float] = {}
        self._lengths: set[int] = set()
        self._num_clears = 0
        self._unreadable: OrderedDict[bytes, float] = OrderedDict()

    @property
    def pending(self) -> list[bytes]:
        return list(self._pending)

    @property
    def all_due(self) -> list[bytes]:
        return [prefix for prefix in self._pending if prefix in self._due]

    def add(self, prefix: bytes) -> int:
        self._num_clears += 1
        self._pending[prefix] = self._num_clears
        self._began_s[prefix] = self._clock()
        self._lengths.add(len(prefix))
        self.tell(prefix)
        return self._num_clears

    def add_chunk(self, name: bytes) -> None:
        self.chunks.add(name)
        self.tell(name)

    def add_everything_instead(self) -> int:
        self._pending.clear()
        self._began_s.clear()
        self._due.clear()
        self._due_s.clear()
        return self.add(b"")

    def fall_due(self, prefix: bytes, number: int) -> None:
        if prefix in self._pending:
            self._due_s[prefix] = self._clock()
            self._due[prefix] = max(number, self._due.get(prefix, 0))

    def due(self, prefix: bytes) -> int:
        """0: none."""
        return self._due.get(prefix, 0)

    def due_s(self, prefix: bytes) -> float:
        return self._due_s[prefix]

    def number(self, prefix: bytes) -> int:
        """0: none."""
        return self._pending.get(prefix, 0)

    def began_s(self, prefix: bytes) -> float:
        return self._began_s.get(prefix, 0.0)

    def settle(self, prefix: bytes, number: int) -> None:
        """End a clear whose values are removed."""
        if self._pending.get(prefix) == number:
            del self._pending[prefix]
        if self._due.get(prefix, 0) <= number:
            self._due.pop(prefix, None)
            self._due_s.pop(prefix, None)
        if prefix not in self._pending:
            self._began_s.pop(prefix, None)

    def unreadable(self, key: bytes) -> None:
        self._unreadable[key] = self._clock() + _UNREADABLE_S
        self._unreadable.move_to_end(key)
        if len(self._unreadable) > _MOST_UNREADABLE:
            self._unreadable.popitem(last=False)

    def removed(self, key: bytes) -> None:
        self._unreadable.pop(key, None)

    def mended(self) -> None:
        self._unreadable.clear()

    def hides(self, key: bytes) -> bool:
        return self._is_unreadable(key) or self.was_cleared(key)

    def was_cleared(self, key: bytes) -> bool:
        return (
            bool(self._pending) and any(key[:length] in self._pending for length in self._lengths)
        ) or (bool(self.chunks) and key[:NAME_BYTES] in self.chunks)

    def _is_unreadable(self, key: bytes) -> bool:
        until_s = self._unreadable.get(key)
        if until_s is not None and self._clock() >= until_s:
            del self._unreadable[key]
            return False
        return until_s is not None
