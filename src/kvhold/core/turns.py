"""Short stretches of work, between which other tasks of an event loop run."""

import asyncio


async def next_turn() -> None:
    await asyncio.sleep(0)
