from collections.abc import Sequence

from kvhold_lab.servers.base import ServerProcess, program


class MemcachedServer(ServerProcess):
    """item_bytes: of the largest item; evict: False: a full server refuses"""

    def __init__(
        self, *, item_bytes: int = 1 << 20, memory_bytes: int = 128 << 20, evict: bool = True
    ) -> None:
        super().__init__()
        self._item_bytes = item_bytes
        self._memory_bytes = memory_bytes
        self._evict = evict

    @property
    def url(self) -> str:
        return f"memcached://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        own = ["-p", str(self.port), "-U", "0", "-l", "127.0.0.1", "-u", "nobody", "-t", "2"]
        # otherwise moving memory between sizes drops items
        own += ["-o", "slab_automove=0"]
        limits = [
            "-I",
            str(self._item_bytes),
            "-m",
            str(self._memory_bytes >> 20),
            *([] if self._evict else ["-M"]),
        ]
        return [program("memcached", "apt-get install memcached"), *own, *limits]
