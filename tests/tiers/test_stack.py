"""Several tiers as one: each asked once, none in another's way."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvhold.core.errors import ConfigError, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.stack import Stack, make_stack
from kvhold.tiers.stack import TierPlace as Where
from tests.tiers.memory import MemoryTier, Place, a_place

KEYS = [bytes([i]) * 60 for i in range(4)]


@pytest.fixture
def places() -> Iterator[list[Place]]:
    with a_place() as one, a_place() as two, a_place() as three:
        yield [one, two, three]


def stack_of(places: list[Place], **settings: Any) -> Stack:
    metrics = Metrics()
    return Stack(
        [
            Guard(MemoryTier(place), GuardConfig(**settings), name=place.name, metrics=metrics)
            for place in places
        ]
    )


async def test_a_probe_takes_the_first_tier_with_a_key_and_asks_lower_tiers_only_for_the_rest(
    places: list[Place],
) -> None:
    places[0].values = {KEYS[1]: b"1"}
    places[1].values = {KEYS[0]: b"00", KEYS[1]: b"other"}
    places[2].values = {KEYS[0]: b"000", KEYS[3]: b"333"}
    stack = stack_of(places)
    assert await stack.probe(KEYS) == {
        KEYS[1]: Where(0, 1),
        KEYS[0]: Where(1, 2),
        KEYS[3]: Where(2, 3),
    }
    assert [place.asked["probe"] for place in places] == [
        [KEYS],
        [[KEYS[0], *KEYS[2:]]],
        [KEYS[2:]],
    ]
    await stack.close()


async def test_when_all_is_found_the_rest_is_not_asked(places: list[Place]) -> None:
    places[0].values = dict.fromkeys(KEYS, b"x")
    stack = stack_of(places)
    assert len(await stack.probe(KEYS)) == 4
    assert places[1].calls["probe"] == places[2].calls["probe"] == 0
    assert await stack.probe([]) == {}
    await stack.close()


async def test_one_that_fails_hides_no_other(places: list[Place]) -> None:
    places[0].faults["probe"] = TierUnavailable("memory", "probe", "gone")
    places[1].shorten = True
    for place in places:
        place.values = dict.fromkeys(KEYS, b"x")
    stack = stack_of(places)
    assert await stack.probe(KEYS) == {key: Where(2, 1) for key in KEYS}
    places[1].shorten = False
    places[1].faults["scan"] = ValueError()
    assert await stack.clear(b"") == 8
    assert [len(place.values) for place in places] == [0, 4, 0]
    await stack.close()


async def test_what_is_read_only_is_not_cleared(places: list[Place]) -> None:
    for place in places:
        place.values = dict.fromkeys(KEYS, b"x")
    metrics = Metrics()
    guards = [
        Guard(MemoryTier(p), GuardConfig(read_only=i == 1), name=p.name, metrics=metrics)
        for i, p in enumerate(places)
    ]
    stack = Stack(guards)
    assert await stack.clear(KEYS[0]) == 2
    assert [len(place.values) for place in places] == [3, 4, 3]
    await stack.close()


async def test_a_check_of_all_leaves_alone_what_is_dead_from_the_start(places: list[Place]) -> None:
    places[1].faults["check"] = TierUnavailable("memory", "check", "gone")
    stack = stack_of(places, breaker_failures=1, breaker_pause_s=1000)
    await stack.check()
    assert [status["available"] for status in stack.status()] == [True, False, True]
    await stack.close()
    assert [place.calls["close"] for place in places] == [1, 1, 1]


async def test_a_close_that_hangs_does_not_keep_others_from_closing(places: list[Place]) -> None:
    stack = stack_of(places, get_timeout_s=0.02)
    places[0].hold("close")
    async with asyncio.timeout(60):
        await stack.close()
    assert places[1].calls["close"] == places[2].calls["close"] == 1


def test_tiers_of_one_kind_get_names_of_their_own() -> None:
    lines = ["disk:///a", "disk:///b", "disk:///c?name=cold", "disk:///d", "disk:///e?name=cold"]
    stack = make_stack(lines, plugins=(), metrics=Metrics())
    assert [guard.name for guard in stack.guards] == ["disk", "disk-2", "cold", "disk-3", "cold-2"]
    assert len(stack) == 5


def test_no_tier_is_called_as_the_arena_is() -> None:
    with pytest.raises(ConfigError, match="'ram' is taken"):
        make_stack(["disk:///a?name=ram"], plugins=(), metrics=Metrics())
