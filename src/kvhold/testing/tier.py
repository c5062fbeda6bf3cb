import random
from collections.abc import Sequence

import pytest

from kvhold.core.errors import TierError, TierIncomplete
from kvhold.core.keys import HASH_BYTES, KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.base import Tier, replace

UNTOUCHED = 0xA5


def make_key(number: int, namespace: bytes = b"n" * NAMESPACE_BYTES) -> bytes:
    return (
        namespace
        + random.Random(number).randbytes(HASH_BYTES)
        + bytes(KEY_BYTES - NAMESPACE_BYTES - HASH_BYTES)
    )


def make_value(seed: int, nbytes: int) -> bytes:
    return random.Random(seed + 1_000_000).randbytes(nbytes)


async def store(tier: Tier, values: dict[bytes, bytes]) -> list[bool]:
    faults = await tier.put([(key, [memoryview(value)]) for key, value in values.items()])
    assert len(faults) == len(values)
    return [fault is None for fault in faults]


async def overwrite(tier: Tier, values: dict[bytes, bytes]) -> list[bool]:
    done = await replace(tier, [(key, [memoryview(value)]) for key, value in values.items()])
    assert not any(isinstance(answer, TierError) for answer in done), done
    return [answer is True for answer in done]


async def fetch(tier: Tier, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bytes | None]:
    """Get `keys` into buffers of `sizes`; None is a miss."""
    buffers = [bytearray([UNTOUCHED]) * nbytes for nbytes in sizes]
    got = await tier.get(keys, [[memoryview(buffer)] for buffer in buffers])
    assert len(got) == len(keys)
    return [
        bytes(buffer[:nbytes]) if isinstance(nbytes, int) else None
        for nbytes, buffer in zip(got, buffers, strict=True)
    ]


async def scanned(tier: Tier, prefix: bytes = b"") -> list[bytes]:
    return sorted([key async for key in tier.scan(prefix)])


async def partly_scanned(tier: Tier) -> list[bytes]:
    """Keys of a scan that must end with TierIncomplete."""
    keys: list[bytes] = []

    async def scan() -> None:
        async for key in tier.scan(b""):
            keys.append(key)  # noqa: PERF401 - the keys count even if the scan fails

    with pytest.raises(TierIncomplete):
        await scan()
    return keys
