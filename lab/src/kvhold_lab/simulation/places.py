"""Clears of one tier, and moves between tiers and memory."""

import asyncio
from random import Random

from kvhold.core.keys import Prompt
from kvhold.net import messages as m
from kvhold_lab.simulation.client import SimClient
from kvhold_lab.simulation.draw import Draw


async def operate_places(draw: Draw, random: Random, client: SimClient, prompt: Prompt) -> bool:
    """False: nothing was drawn."""
    places = ["ram", *(guard.name for guard in draw.node.guards)]
    if draw.moves and random.random() < 0.15:
        await _move(random, client, prompt, places)
    elif draw.tier_clears and random.random() < 0.1:
        namespace = random.choice((None, prompt.namespace.digest))
        await client.clear(namespace, random.choice(places))
    else:
        return False
    return True


async def _move(random: Random, client: SimClient, prompt: Prompt, places: list[str]) -> None:
    await client.register(prompt.namespace)
    source, target, link = random.choice(places), random.choice(places), await client.link()
    whole, drop = random.random() < 0.3, random.random() < 0.7
    query = None if whole else prompt.query()
    request = m.Copy(target, query, drop, source, prompt.namespace.digest if whole else b"")
    begun = await client.call(link, request, m.CopyStatus)
    try:
        for _ in range(random.choice((0, 3, 30))):
            status = await client.call(link, m.Progress(begun.number), m.CopyStatus)
            if status.progress.done:
                break
            await asyncio.sleep(0.1)
    finally:
        await client.give_back(link, m.Release(begun.number))
