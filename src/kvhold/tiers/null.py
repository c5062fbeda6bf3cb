"""`null://` keeps no value.

**It breaks the contract on purpose:** `put` reports success, and stores nothing.
"""

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Self

from kvhold.core.errors import ConfigError, TierError
from kvhold.tiers.base import Parts, TierTraits, check_lengths
from kvhold.tiers.url import TierUrl


class NullTier:
    traits: ClassVar[TierTraits] = TierTraits(name="null")

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if url.netloc or url.path or url.options:
            raise ConfigError(
                f"{url.shown}: there is no place and no option; write {url.scheme}://"
            )
        return cls()

    async def check(self) -> None: ...

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        return [None] * len(keys)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        return [None] * len(keys)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        return [None] * len(items)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        keys: tuple[bytes, ...] = ()
        for key in keys:
            yield key

    async def close(self) -> None: ...
