"""The null tier, `null://`: accepts every value and keeps none, to measure the path above a tier.

    tier = NullTier()

**It breaks the contract of `put` on purpose:** `put` reports success, and no value is stored. It
reads no byte, does no I/O, and cannot fail. Runs in the caller's loop.
"""

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Self

from kvhold.core.errors import ConfigError, TierError
from kvhold.tiers.base import Parts, TierTraits, check_lengths
from kvhold.tiers.url import TierUrl


class NullTier:
    """A tier without values and without settings."""

    traits: ClassVar[TierTraits] = TierTraits(name="null")

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        """Make a tier from `null://`. Raises ConfigError for a host, a path or an option."""
        if url.netloc or url.path or url.options:
            raise ConfigError(
                f"{url.shown}: there is no place and no option; write {url.scheme}://"
            )
        return cls()

    async def check(self) -> None:
        """Tier contract: succeed always."""

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract: nothing is there."""
        return [None] * len(keys)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract: nothing is there."""
        check_lengths(keys, into, starts)
        return [None] * len(keys)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        """Report success for each value, and keep none."""
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
        """Tier contract: do nothing."""
