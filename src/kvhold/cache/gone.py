"""What became of chunks that are not here any more, for as long as that is remembered.

    gone = Gone(); gone.add(key, EVICTED); gone.why(key)

Bounded: of the last `limit` keys at least, of twice as many at most (7.4 MB). Pure.
"""

LIMIT = 1 << 15


class Gone:
    """Two generations: when the younger is full, the older is forgotten."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._young: dict[bytes, str] = {}
        self._old: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, key: bytes, why: str) -> None:
        """It has gone."""
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[key] = why

    def why(self, key: bytes) -> str | None:
        """Why it went, when it went last; None if it was never here, or that is forgotten."""
        return self._young.get(key) or self._old.get(key)
