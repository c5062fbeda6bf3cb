"""Reads frames from this host's disks, for peers. Runs in the tier worker's loop."""

from collections.abc import Sequence

from kvhold.cache.transfer.watched_values import own_values
from kvhold.memory.pages import page_aligned
from kvhold.tiers.base import Parts
from kvhold.tiers.gate import Urgency
from kvhold.tiers.stack import Stack


async def read_own(stack: Stack, keys: Sequence[bytes], room: Sequence[int]) -> list[Parts | None]:
    """None: no such frame, or larger than its room."""
    found: list[Parts | None] = [None] * len(keys)
    for guard in stack.guards:
        if own_values(guard) is None:
            continue
        missing = [at for at, frame in enumerate(found) if frame is None]
        sizes = await guard.probe([keys[at] for at in missing])
        buffers = {
            at: page_aligned(size)
            for at, size in zip(missing, sizes, strict=True)
            if size is not None and size <= room[at]
        }
        if not buffers:
            continue
        async with guard.gate.turn(Urgency.WRITE):
            outcome = await guard.get(
                [keys[at] for at in buffers], [(buffer,) for buffer in buffers.values()]
            )
        for (at, buffer), size in zip(buffers.items(), outcome.items, strict=True):
            if size is not None:
                found[at] = (buffer[:size],)
    return found
