"""The contract of a tier: one place where chunks live.

Called from one loop only, never from an engine's thread. Every call is per item: item i of the answer belongs to key i, and a bad
item never loses the others. A missing chunk is `None`; a fault of the place itself raises TierError; nothing else may escape.
`kvhold.testing.TierContract` is the conformance suite.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class TierTraits:
    """What a tier can do.

    durable: an acknowledged put survives the death of this process
    """

    name: str
    durable: bool = False


class Tier(Protocol):
    """Keys are KEY_BYTES long; values are opaque bytes here (frames below RAM, plain chunks in RAM)."""

    traits: ClassVar[TierTraits]

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Size in bytes of each value that is whole and readable now, `None` for the rest. One round trip, no side effect."""

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[int | None]:
        """Read each value into its buffer (at least `probe` bytes) and return its size; one that does not fit is `None`, too.

        Unequal lists raise ValueError before any I/O.
        """

    async def put(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Store each value whole or not at all; true where it is there afterwards (a key that is there already stays as it is)."""

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove; true where something was removed."""

    def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Every key that begins with `prefix`, each once, in no order."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""
