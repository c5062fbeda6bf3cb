"""The namespaces that clients have registered with a node, and their parts, for `kvhold names`.

    names.learn(digest, "vllm-scheduler (pid 7)", packed)
    page, more = names.page(after=b"", prefix="")

The latest are kept: at most MAX_SPACES namespaces, and MAX_BYTES of descriptions, which stay
packed. No I/O; the node's thread.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from kvhold.core.naming import MAX_DESCRIPTION_BYTES
from kvhold.net.messages import KnownSpace

MAX_SPACES = 512
MAX_BYTES = 8 << 20
PAGE_SPACES = 16


class Names:
    """The registered namespaces of one node."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._spaces: OrderedDict[bytes, KnownSpace] = OrderedDict()
        self._bytes = 0
        self._clock = clock

    def learn(self, digest: bytes, client: str, description: bytes) -> None:
        """Record a namespace that a client has registered.

        Without a description, or with one too large, nothing changes.
        """
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
        """Return the next namespaces in the order of their digests, and whether there are more.

        after:  the last digest of the page before
        prefix: hexadecimal digits that the digests begin with
        """
        found = sorted(
            digest for digest in self._spaces if digest > after and digest.hex().startswith(prefix)
        )
        return [self._spaces[digest] for digest in found[:PAGE_SPACES]], len(found) > PAGE_SPACES

    def digests(self) -> list[bytes]:
        """Return the digests of the known namespaces."""
        return list(self._spaces)
