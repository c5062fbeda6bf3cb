"""The contract of an eviction policy: which chunk goes first.

Pure bookkeeping over keys; not thread-safe, its tier is the single writer. `kvhold.testing.PolicyContract` is its conformance suite.
"""

from collections.abc import Callable
from typing import Protocol


class Policy(Protocol):
    """Every key is inserted once, and removed when its chunk has gone (evicted or cleared)."""

    def insert(self, key: bytes, nbytes: int) -> None:
        """A chunk became visible."""

    def touch(self, key: bytes) -> None:
        """It was asked for. Unknown keys are ignored: the chunk may have gone in between."""

    def remove(self, key: bytes) -> None:
        """It has gone. Unknown keys are ignored."""

    def victims(self, nbytes: int, pinned: Callable[[bytes], bool]) -> list[bytes]:
        """Keys to evict, in order, that free at least `nbytes` and of which none is pinned; empty if there are not enough.

        Removes nothing: the tier evicts and calls `remove`.
        """

    def __len__(self) -> int:
        """How many keys it knows."""
