"""Why chunks were removed, for the latest 32768 to 65536 keys (7.4 MB at most)."""

from kvhold.core.reasons import Reason

LIMIT = 1 << 15


class EvictionHistory:
    """Two generations; a full younger one replaces the older."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._young: dict[bytes, Reason] = {}
        self._old: dict[bytes, Reason] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, key: bytes, why: Reason) -> None:
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[key] = why

    def why(self, key: bytes) -> Reason | None:
        return self._young.get(key) or self._old.get(key)
