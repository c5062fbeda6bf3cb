"""The contract of an eviction policy: which chunk goes first.

    policy.insert(key, nbytes, parent)                # it is here; parent: the chunk before it in its prompt
    policy.touch(key); policy.touch_all(keys)         # asked for
    for key in policy.victims(nbytes, pinned):        # who must go to free so many bytes, in order
        policy.remove(key, evicted=True)

**A prefix never goes before its continuation.** A chunk's KV is of use only with the KV of all text before it. So only a chunk that no
other one here continues is a victim, and when all that continue a chunk are victims, it may be one in the same answer, after them. A
continuation that is pinned keeps its whole prefix, as far as that is here. This holds in every policy; a policy orders what is left: the
leaves of a forest, with a tree for each first chunk and a branch where prompts part.

Parents may come before or after their continuations, may be absent, and may come back: links are by name. A tier that does not know a
chunk's parent says None, and that chunk is then ordered alone.

Pure bookkeeping over keys; not thread-safe, its tier is the single writer. `kvhold.testing.PolicyContract` is its conformance suite;
`chains.py` has all of this but the order, for policies to build on.
"""

from collections.abc import Callable, Iterable
from typing import Protocol


class Policy(Protocol):
    """Keys are KEY_BYTES long; their first NAMESPACE_BYTES are their namespace, and a chunk's parent is in its own."""

    def insert(self, key: bytes, nbytes: int, parent: bytes | None = None) -> None:
        """A chunk is here. For a known key nothing changes, but that a parent that was unknown becomes known.

        parent: the key of the chunk before it, of the same group and shard; None if it is the first, or not known. One that is itself
                a continuation of `key` (which no hash chain gives) is ignored.
        """

    def touch(self, key: bytes) -> None:
        """It was asked for. Unknown keys are ignored: the chunk may have gone in between."""

    def touch_all(self, keys: Iterable[bytes]) -> None:
        """They were asked for, one after the other: as `touch` of each, but in one pass."""

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        """It has gone: evicted as a victim, or else cleared, so that its going says nothing about its worth. Unknown keys are ignored."""

    def victims(self, nbytes: int, pinned: Callable[[bytes], bool], namespace: bytes | None = None) -> list[bytes]:
        """Keys to evict, in order, that free at least `nbytes` and no more of them than that takes; empty if there are not enough.

        None of them is pinned, and each comes after all its continuations that are here. `pinned` is asked for known keys alone.
        Removes nothing: the tier evicts and calls `remove`. An empty answer changes nothing at all.

        namespace: only keys of this one, as a quota asks for
        """

    def nbytes(self, namespace: bytes | None = None) -> int:
        """Bytes of all known keys, or of those in one namespace."""

    def __len__(self) -> int:
        """How many keys it knows."""
