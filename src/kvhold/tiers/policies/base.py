"""The contract of an eviction policy, tested by `kvhold.testing.PolicyContract`. Not thread-safe.

**No policy evicts a prefix before its continuation.** A pinned continuation protects its whole
known prefix.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvhold.tiers.policies.reuse_times import Use

# of a chunk's value per byte (`cache/values.py`), half octaves around NEUTRAL
NUM_VALUES = 16
NEUTRAL = 8


class EndOfSearch(Exception):
    """In `some_victims`."""


@dataclass
class PolicyLookup:
    """For all calls about a lookup.

    prompt:  the kind of its prompt
    at_s:    when it began, by the policy's clock
    present: counted runs in memory, of `LearnedPolicy`: `{(last use, uses): this use}`
    absent:  counted runs not in memory: their pasts
    """

    prompt: int = 0
    at_s: float = 0.0
    present: dict[tuple[Use, int], Use] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)


class Policy(Protocol):
    """Keys are KEY_BYTES long and begin with the namespace, which chunk and parent share.

    learns:   it must be told of lookups
    declined: the last `victims` was empty because `wanted` is worth less than a victim
    """

    learns: bool
    declined: bool

    def insert(self, key: bytes, nbytes: int, parent: bytes | None = None) -> None:
        """For a known key, only an unknown parent is set.

        parent: key of the previous chunk, of the same group and shard; may be absent. One that
                continues `key` is ignored
        """

    def touch(self, key: bytes) -> None:
        """Ignores unknown keys."""

    def touch_all(self, keys: Iterable[bytes]) -> None:
        """In this order."""

    def demote(self, keys: Iterable[bytes]) -> None:
        """They go first, until their next use. Ignores unknown keys."""

    def looked_up(self, keys: Sequence[bytes], num_here: int) -> PolicyLookup:
        """Only if `learns`.

        keys:     of a prompt's whole chunks, in one group and shard, in order
        num_here: leading chunks of the hit
        """

    def used(
        self,
        keys: Iterable[bytes],
        lookup: PolicyLookup,
        value: int = NEUTRAL,
        *,
        is_repeat: bool = False,
    ) -> None:
        """Record chunks of a hit, in all groups and shards, in any number of calls.

        value:     of each, below `NUM_VALUES`
        is_repeat: recorded in another group or shard
        """

    def missed(
        self,
        keys: Iterable[bytes],
        lookup: PolicyLookup,
        value: int = NEUTRAL,
        *,
        if_known: bool = False,
    ) -> None:
        """Record chunks that the hit lacks, in the same group and shard, after `used`.

        if_known: not chunks that were in no earlier lookup
        """

    def expected_back_s(self, key: bytes, ago_s: float) -> float | None:
        """How long after its eviction a use was expected; before `missed`.

        None: unknown, or none. ago_s: since it was evicted, or declined
        """

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        """Ignores unknown keys. evicted: false for a cleared chunk"""

    def victims(
        self,
        nbytes: int,
        pinned: Callable[[bytes], bool],
        namespace: bytes | None = None,
        wanted: bytes | None = None,
    ) -> list[bytes]:
        """Keys to evict, in order: just enough to free `nbytes`; empty if impossible.

        No victim is pinned; each comes after all its continuations. Removes nothing.

        pinned:    called with known keys only
        namespace: only its keys
        wanted:    empty if it is worth less than a victim
        """

    def some_victims(
        self, nbytes: int, pinned: Callable[[bytes], bool], namespace: bytes | None = None
    ) -> list[bytes]:
        """As `victims`, or fewer. `pinned` may raise EndOfSearch."""

    def nbytes(self, namespace: bytes | None = None) -> int:
        pass

    def __len__(self) -> int:
        pass
