"""A tier's scan as a `with`, for callers that may leave it early.

    async with closing_scan(tier, prefix) as keys:
        async for key in keys: ...

Otherwise the garbage collector closes an unfinished generator later, and until then it keeps its
cursor, connection or open folder. A tier's scan need not be a generator.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvhold.tiers.base import Tier


@asynccontextmanager
async def closing_scan(tier: Tier, prefix: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    """Run `tier.scan(prefix)`, and close it at the end of the `with`."""
    keys = tier.scan(prefix)
    try:
        yield keys
    finally:
        if (aclose := getattr(keys, "aclose", None)) is not None:
            await aclose()
