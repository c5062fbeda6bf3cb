"""`memory://?max_bytes=8GiB&codec=lossless`: encoded frames in memory."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from kvhold.core.errors import CapacityError, ConfigError, TierError, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.core.setting import setting, size
from kvhold.memory.arena import Arena
from kvhold.tiers.base import Parts, TierTraits
from kvhold.tiers.policies import TIER_POLICIES, make_policy
from kvhold.tiers.ram import RamTier
from kvhold.tiers.url import TierUrl


@dataclass(frozen=True)
class MemoryConfig:
    max_bytes: int = size(0, "memory to use; required")
    policy: str = setting("lru", "which value is evicted first", choices=TIER_POLICIES)


class MemoryTier:
    traits: ClassVar[TierTraits] = TierTraits(name="memory", expires=True, replaces=True)

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._arena: Arena | None = None
        self._ram: RamTier | None = None

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if url.netloc or url.path:
            raise ConfigError(f"{url.shown}: it has no place; write memory://?max_bytes=8GiB")
        config = url.apply(MemoryConfig())
        if not config.max_bytes:
            raise ConfigError(
                f"{url.shown}: max_bytes is missing, such as memory://?max_bytes=8GiB"
            )
        return cls(config)

    @property
    def used_bytes(self) -> int:
        return self._ram.used_bytes if self._ram is not None else 0

    async def check(self) -> None:
        self._tier("check")

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        return await self._tier("probe").probe(keys)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        return await self._tier("get").get(keys, into, starts=starts)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        return await self._tier("put").put(items, ttl_s=ttl_s)

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        return await self._tier("replace").replace(items)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._tier("delete").delete(keys)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        async for key in self._tier("scan").scan(prefix):
            yield key

    async def close(self) -> None:
        self._ram = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _tier(self, operation: str) -> RamTier:
        """The first call allocates the memory, or raises TierUnavailable."""
        if self._ram is None:
            try:
                self._arena = Arena.create(self._config.max_bytes, huge_pages="never")
            except CapacityError as error:
                raise TierUnavailable("memory", operation, str(error)) from None
            self._ram = RamTier(self._arena, make_policy(self._config.policy), Metrics())
        return self._ram
