"""Turns of an event loop: short stretches of work, between which other tasks run."""

import asyncio


async def next_turn() -> None:
    """End this turn: the loop's other ready tasks run before the caller goes on."""
    # no time passes, so this wait needs no event
    await asyncio.sleep(0)
