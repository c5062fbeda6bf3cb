"""The latest MAX_SPACES namespaces that clients have registered, for `kvhold names`."""

import time
from collections import OrderedDict
from collections.abc import Callable

from kvhold.core.naming import MAX_DESCRIPTION_BYTES
from kvhold.net.messages import KnownSpace

MAX_SPACES = 512
MAX_BYTES = 8 << 20
PAGE_SPACES = 16


class Names:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._spaces: OrderedDict[bytes, KnownSpace] = OrderedDict()
        self._bytes = 0
        self._clock = clock

    def learn(self, digest: bytes, client: str, description: bytes) -> None:
        """An empty or large description is ignored."""
        if not description or len(description) > MAX_DESCRIPTION_BYTES:
            return
        before = self._spaces.pop(digest, None)
        self._bytes -= len(before.description) if before is not None else 0
        self._spaces[digest] = KnownSpace(digest, client, description, self._clock())
        self._bytes += len(description)
        while len(self._spaces) > MAX_SPACES or self._bytes > MAX_BYTES:
            _, oldest = self._spaces.popitem(last=False)
            self._bytes -= len(oldest.description)

    def page(self, after: bytes, prefix: str) -> tuple[list[KnownSpace], bool]:
        """after:  the previous page's last digest
        prefix: hexadecimal digits
        """
        found = sorted(
            digest for digest in self._spaces if digest > after and digest.hex().startswith(prefix)
        )
        return [self._spaces[digest] for digest in found[:PAGE_SPACES]], len(found) > PAGE_SPACES

    def digests(self) -> list[bytes]:
        return list(self._spaces)
