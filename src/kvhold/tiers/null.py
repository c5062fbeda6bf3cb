"""`null://`: accepts every value and forgets it, to measure the path above a tier without one.

    tier = NullTier()

**It is the one exception to the contract's "there afterwards":** `put` answers that all went well, and nothing is there. It reads no
byte, does no I/O, and cannot fail. Runs in the loop of its caller; holds nothing.
"""

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Self

from kvhold.core.errors import ConfigError, TierError
from kvhold.tiers.base import Parts, TierTraits, check_lengths
from kvhold.tiers.url import TierUrl


class NullTier:
    """Where nothing lives. It has no settings."""

    traits: ClassVar[TierTraits] = TierTraits(name="null")

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        """`null://`. Raises ConfigError for anything after it."""
        if url.netloc or url.path or url.options:
            raise ConfigError(f"{url.shown}: there is no place and no option; write {url.scheme}://")
        return cls()

    async def check(self) -> None:
        """Tier contract: passes."""

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract: nothing is there."""
        return [None] * len(keys)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract: nothing is there."""
        check_lengths(keys, into, starts)
        return [None] * len(keys)

    async def put(self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None) -> list[TierError | None]:
        """Accepts all, keeps none."""
        return [None] * len(items)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract: nothing was there."""
        return [False] * len(keys)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract: no key."""
        keys: tuple[bytes, ...] = ()
        for key in keys:
            yield key

    async def close(self) -> None:
        """Tier contract: holds nothing."""
