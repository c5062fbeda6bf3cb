"""The process that test_disk_crash.py kills. It has no tests; it imports little, since it is
started often.

python -m tests.tiers.test_disk_crash_writer FOLDER SEED FIRST_NUMBER MAX_BYTES
"""

import asyncio
import mmap
import os
import random
import sys

from kvhold.core.keys import KEY_BYTES
from kvhold.tiers.disk import DiskConfig, DiskTier

LARGEST_BYTES = 400_000
MOST_NUMBERS = 400


def key_of(number: int) -> bytes:
    """A key for each number."""
    return number.to_bytes(8, "big") * (KEY_BYTES // 8)


def value_of(number: int) -> bytes:
    """Small and large ones, multiples of a page and others."""
    chance = random.Random(number)
    nbytes = chance.choice(
        [
            chance.randrange(1, 5000),
            chance.randrange(1, LARGEST_BYTES),
            4096 * chance.randrange(1, 80),
        ]
    )
    return chance.randbytes(nbytes)


def replacement_of(number: int) -> bytes:
    """What takes the place of some of them."""
    return value_of(number + 5_000_000)


async def put_and_delete(folder: str, seed: int, first: int, max_bytes: int) -> None:
    """Until somebody kills us: four at once, each says what it has done when that was acknowledged.

    Some values are replaced.
    """
    tier = DiskTier(DiskConfig(path=folder, max_bytes=max_bytes))
    await tier.check()
    numbers = iter(range(first, first + MOST_NUMBERS))
    chance = random.Random(seed)

    async def work() -> None:
        mine = []
        for number in numbers:
            value = value_of(number)
            memory = memoryview(mmap.mmap(-1, LARGEST_BYTES))[: len(value)]
            memory[:] = value
            if await tier.put([(key_of(number), [memory[:4096], memory[4096:]])]) == [None]:
                say("stored", number)
                mine.append(number)
                if chance.random() < 0.5:
                    await tier.replace([(key_of(number), [memoryview(replacement_of(number))])])
            if chance.random() < 0.3 and mine:
                gone = mine.pop(chance.randrange(len(mine)))
                say("deleting", gone)
                await tier.delete([key_of(gone)])
                say("deleted", gone)
        await asyncio.Event().wait()

    await asyncio.gather(*(work() for _ in range(4)))


def say(word: str, number: int) -> None:
    os.write(1, f"{word} {number}\n".encode())


if __name__ == "__main__":
    asyncio.run(put_and_delete(sys.argv[1], *map(int, sys.argv[2:])))
