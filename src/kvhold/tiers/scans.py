from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvhold.tiers.base import Tier


@asynccontextmanager
async def closing_scan(tier: Tier, prefix: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    keys = tier.scan(prefix)
    try:
        yield keys
    finally:
        if (aclose := getattr(keys, "aclose", None)) is not None:
            await aclose()
