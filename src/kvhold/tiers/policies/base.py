"""The contract of an eviction policy, which decides the order of eviction.

    policy.insert(key, nbytes, parent)                # parent: the previous chunk of the prompt
    policy.touch(key); policy.touch_all(keys)         # the chunks were used
    for key in policy.victims(nbytes, pinned):        # keys to evict, in order, for `nbytes` bytes
        policy.remove(key, evicted=True)

**No policy evicts a prefix before its continuation.** The KV of a chunk is useful only with the KV
of all text before it. So a victim has no continuation here. If all continuations of a chunk are
victims, the chunk may follow them in the same answer. A pinned continuation protects its whole
prefix, as far as the links reach. The chunks form a forest: one tree for each first chunk, with a
branch where prompts differ. A policy orders the leaves of this forest.

Links are by key: a parent may be inserted before or after its continuations, be absent, or come
back. A tier that does not know a chunk's parent gives None; the chunk is then ordered on its own.

Pure bookkeeping over keys. Not thread-safe: the tier is the single writer.
`kvhold.testing.PolicyContract` is the conformance suite. `chains.py` implements everything but the
order.
"""

from collections.abc import Callable, Iterable
from typing import Protocol


class Policy(Protocol):
    """An eviction policy.

    Keys are KEY_BYTES long. Their first NAMESPACE_BYTES are the namespace, which a chunk and its
    parent share.
    """

    def insert(self, key: bytes, nbytes: int, parent: bytes | None = None) -> None:
        """Add a chunk. For a known key, only an unknown parent is set.

        parent: the key of the previous chunk, of the same group and shard; None if there is none or
                it is unknown. A parent that is a continuation of `key` (no hash chain has one) is
                ignored.
        """

    def touch(self, key: bytes) -> None:
        """Count a chunk as used. Ignores unknown keys: the chunk may have been removed."""

    def touch_all(self, keys: Iterable[bytes]) -> None:
        """Count chunks as used, in this order: as `touch` of each, but in one pass."""

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        """Remove a chunk. Ignores unknown keys.

        evicted: true for a victim; false for a cleared chunk, whose removal says nothing about its
                 use
        """

    def victims(
        self, nbytes: int, pinned: Callable[[bytes], bool], namespace: bytes | None = None
    ) -> list[bytes]:
        """Return keys to evict, in order: just enough to free `nbytes`; empty if impossible.

        No key is pinned, and each follows all its continuations here. `pinned` is called with known
        keys only. Removes nothing: the tier evicts and calls `remove`. An empty answer changes
        nothing.

        namespace: choose only among its keys, for a quota
        """

    def nbytes(self, namespace: bytes | None = None) -> int:
        """Return the bytes of all known keys, or of one namespace."""

    def __len__(self) -> int:
        """Return the number of known keys."""
