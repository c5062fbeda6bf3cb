"""A real memcached on loopback.

with MemcachedServer(item_bytes=4 << 20) as server:
    server.url
"""

from collections.abc import Sequence

from kvhold.testing.servers.base import ServerProcess, program


class MemcachedServer(ServerProcess):
    """item_bytes: the largest item it takes. memory_bytes: for all of them. evict: make room, or
    refuse.
    """

    def __init__(
        self, *, item_bytes: int = 1 << 20, memory_bytes: int = 128 << 20, evict: bool = True
    ) -> None:
        super().__init__()
        self._item_bytes = item_bytes
        self._memory_bytes = memory_bytes
        self._evict = evict

    @property
    def url(self) -> str:
        """Where a tier finds it."""
        return f"memcached://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        """memcached, for TCP alone."""
        own = ["-p", str(self.port), "-U", "0", "-l", "127.0.0.1", "-u", "nobody", "-t", "2"]
        # It moves memory between sizes in the background otherwise, and drops what lies there:
        # right for a cache, not for a test.
        own += ["-o", "slab_automove=0"]
        limits = [
            "-I",
            str(self._item_bytes),
            "-m",
            str(self._memory_bytes >> 20),
            *([] if self._evict else ["-M"]),
        ]
        return [program("memcached", "apt-get install memcached"), *own, *limits]
