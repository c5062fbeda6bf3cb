"""Why and when the latest 32768 to 65536 chunks were removed; 13.2 MB at most."""

import time
from collections.abc import Callable
from typing import NamedTuple

from kvhold.core.reasons import NEVER_STORED, Reason

LIMIT = 1 << 15
_SAME_S = 1.0  # removals within this time share one record


class Removal(NamedTuple):
    why: Reason
    at_s: float


class EvictionHistory:
    """Two generations of records; the full younger one replaces the older one."""

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._young: dict[bytes, Removal] = {}
        self._old: dict[bytes, Removal] = {}
        self._latest = Removal(NEVER_STORED, 0.0)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, key: bytes, why: Reason) -> None:
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        now_s, latest = self._clock(), self._latest
        if latest.why is not why or now_s - latest.at_s >= _SAME_S:
            latest = self._latest = Removal(why, now_s)
        self._young[key] = latest

    def why(self, key: bytes) -> Reason | None:
        removal = self._find(key)
        return None if removal is None else removal.why

    def ago_s(self, key: bytes) -> float | None:
        removal = self._find(key)
        return None if removal is None else max(0.0, self._clock() - removal.at_s)

    def _find(self, key: bytes) -> Removal | None:
        return self._young.get(key) or self._old.get(key)
