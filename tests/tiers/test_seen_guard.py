"""What a host knows of a shared tier's values, by its own calls."""

from collections.abc import Iterator

import pytest

from kvhold.core.errors import TierUnavailable
from kvhold.core.keys import NAME_BYTES, NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.testing.tier import make_key
from kvhold.tiers.base import Parts
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.outcomes import Unknown
from kvhold.tiers.seen_guard import SeenGuard
from tests.tiers.memory import Place, SharedMemoryTier, a_place

SPACE = b"A" * NAMESPACE_BYTES
KEYS = [make_key(number, SPACE) for number in range(3)]
AWAY = TierUnavailable("memory", "x", "away")


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


class Host:
    """seen: what it has told last of each key"""

    def __init__(self, place: Place) -> None:
        self.seen: dict[bytes, bool] = {}
        self.guard = SeenGuard(
            SharedMemoryTier(place),
            GuardConfig(breaker_pause_s=0.01, breaker_failures=100),
            name="tier",
            metrics=Metrics(),
        )
        self.guard.share(lambda prefix: self._tell(prefix, False))
        self.guard.watch(self._tell)

    def _tell(self, key: bytes, present: bool) -> None:
        for one in [one for one in self.seen if one.startswith(key)]:
            self.seen[one] = present
        if len(key) > NAME_BYTES:
            self.seen[key] = present

    def take(self) -> dict[bytes, bool]:
        taken, self.seen = self.seen, {}
        return taken

    async def get(self) -> None:
        await self.guard.get(KEYS, [[memoryview(bytearray(4))] for _ in KEYS])


def items(*keys: bytes) -> list[tuple[bytes, Parts]]:
    return [(key, [memoryview(b"abcd")]) for key in keys]


async def test_each_call_tells_what_it_has_seen(place: Place) -> None:
    host = Host(place)
    await host.guard.put(items(*KEYS[:2]))
    assert host.take() == {KEYS[0]: True, KEYS[1]: True}
    there = {KEYS[0]: True, KEYS[1]: True, KEYS[2]: False}
    assert await host.guard.probe(KEYS) == [4, 4, None]
    assert host.take() == there
    await host.get()
    assert host.take() == there
    await host.guard.replace(items(*KEYS))
    assert host.take() == there
    await host.guard.delete(KEYS[:1])
    assert host.take() == {KEYS[0]: False}
    await host.guard.close()


async def test_a_fault_tells_nothing(place: Place) -> None:
    host = Host(place)
    await host.guard.put(items(*KEYS))
    host.take()
    for operation in ("probe", "get", "put", "replace"):
        place.faults[operation] = AWAY
    unknown = Unknown()
    await host.guard.probe(KEYS, unknown=unknown)
    assert unknown.why is AWAY.miss
    await host.get()
    await host.guard.put(items(*KEYS))
    await host.guard.replace(items(*KEYS))
    assert host.take() == {}
    place.faults.clear()
    place.unreadable.add(next(iter(place.values)))
    await host.get()
    assert len(host.take()) == 2
    await host.guard.close()


async def test_an_unanswered_key_tells_nothing_and_is_passed_on(place: Place) -> None:
    host, unknown = Host(place), Unknown()
    await host.guard.put(items(*KEYS))
    host.take()
    place.unanswered.update(host.guard.names(KEYS[:1]))
    assert await host.guard.probe(KEYS, unknown=unknown) == [None, 4, 4]
    assert host.take() == {KEYS[1]: True, KEYS[2]: True}
    assert unknown.keys.keys() == {KEYS[0]}
    await host.guard.close()


@pytest.mark.parametrize("prefix", [b"", SPACE])
async def test_a_clear_tells_that_its_values_are_gone(place: Place, prefix: bytes) -> None:
    host = Host(place)
    await host.guard.put(items(*KEYS))
    pending = await host.guard.begin_clear(prefix)
    assert host.seen == dict.fromkeys(KEYS, False)
    await host.guard.end_clear(pending)
    await host.guard.put(items(KEYS[0]))
    assert host.seen == {KEYS[0]: True, KEYS[1]: False, KEYS[2]: False}
    await host.guard.close()


async def test_a_clear_of_another_host_is_seen(place: Place) -> None:
    one, other = Host(place), Host(place)
    await one.guard.put(items(*KEYS))
    await other.guard.clear(SPACE)
    await one.guard.probe(KEYS)
    assert one.seen == dict.fromkeys(KEYS, False)
    await one.guard.close()
    await other.guard.close()


async def test_a_removal_and_a_clear_of_chunks_tell_it(place: Place) -> None:
    host = Host(place)
    await host.guard.put(items(*KEYS))
    await host.guard.end_removal(await host.guard.begin_removal(SPACE))
    assert host.seen == dict.fromkeys(KEYS, False)
    await host.guard.put(items(*KEYS))
    host.guard.chunk_clears.begin(KEYS[:1])
    assert host.seen == {KEYS[0]: False, KEYS[1]: True, KEYS[2]: True}
    await host.guard.put(items(KEYS[0]))
    assert not host.seen[KEYS[0]], "it is hidden"
    await host.guard.close()
