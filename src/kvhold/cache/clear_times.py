"""When namespaces were last cleared, for the hosts of one engine to compare (`node/span.py`).

Nanoseconds; they increase even if the clock was set back. No I/O.
"""

_MOST_NAMESPACES = 4096  # forgetting one costs another clear


class ClearTimes:
    def __init__(self) -> None:
        self._all_ns = 0
        self._ns: dict[bytes, int] = {}

    def of(self, namespace: bytes) -> int:
        """0: never"""
        return max(self._all_ns, self._ns.get(namespace, 0))

    def note(self, prefix: bytes, now_ns: int, at_ns: int = 0) -> None:
        """at_ns: of another host's clear, repeated here; 0: own clear"""
        if not prefix:
            latest_ns = max(self._all_ns, *self._ns.values(), 0)
            self._all_ns = max(at_ns or now_ns, latest_ns + 1)
            self._ns.clear()
            return
        self._ns[prefix] = at_ns or max(now_ns, self.of(prefix) + 1)
        if len(self._ns) > _MOST_NAMESPACES:
            del self._ns[next(iter(self._ns))]
