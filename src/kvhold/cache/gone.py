"""Why chunks are no longer here, for as long as that is remembered.

    gone = Gone(); gone.add(key, EVICTED); gone.why(key)

Bounded: it remembers between `limit` and twice `limit` of the latest keys (7.4 MB at most). Pure.
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
        """Note why a chunk has gone."""
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[key] = why

    def why(self, key: bytes) -> str | None:
        """Return why a chunk has gone last; None if it was never here or is forgotten."""
        return self._young.get(key) or self._old.get(key)
