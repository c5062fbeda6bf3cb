"""When namespaces were last cleared, so that the hosts of one engine can compare (`node/span.py`).

A clear of everything counts for each namespace. Times are nanoseconds of the host's clock, and a
later clear has a later time even if the clock was set back. No I/O.
"""

_MOST_NAMESPACES = 4096  # a forgotten one was never cleared, which costs another clear


class ClearTimes:
    def __init__(self) -> None:
        self._all_ns = 0
        self._ns: dict[bytes, int] = {}

    def of(self, namespace: bytes) -> int:
        """Return the time of the last clear; 0: none."""
        return max(self._all_ns, self._ns.get(namespace, 0))

    def note(self, prefix: bytes, now_ns: int, at_ns: int = 0) -> None:
        """Note a clear; an empty prefix means all.

        at_ns: the time of the clear of another host that is repeated here; 0: it is this host's
        """
        if not prefix:
            latest_ns = max(self._all_ns, *self._ns.values(), 0)
            self._all_ns = max(at_ns or now_ns, latest_ns + 1)
            self._ns.clear()
            return
        self._ns[prefix] = at_ns or max(now_ns, self.of(prefix) + 1)
        if len(self._ns) > _MOST_NAMESPACES:
            del self._ns[next(iter(self._ns))]
