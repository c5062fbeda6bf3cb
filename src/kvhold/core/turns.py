"""Turns of an event loop: short stretches of work, between which other tasks run."""

import asyncio


async def next_turn() -> None:
    await asyncio.sleep(0)
