"""A tier's scan as a `with`, for whoever may leave it early.

    async with closing_scan(tier, prefix) as keys:
        async for key in keys: ...

A generator that is left early is otherwise finished by the garbage collector, some time later, with what it holds (a cursor, a
connection, an open folder). A tier's scan need not be a generator.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvhold.tiers.base import Tier


@asynccontextmanager
async def closing_scan(tier: Tier, prefix: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    """`tier.scan(prefix)`, over when the `with` is."""
    keys = tier.scan(prefix)
    try:
        yield keys
    finally:
        if (aclose := getattr(keys, "aclose", None)) is not None:
            await aclose()
