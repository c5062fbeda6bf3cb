"""The copier of a device over a fake one: right bytes in every order of its streams, and wrong ones
without any one event.
"""

from dataclasses import replace

import numpy as np
import pytest

from kvhold.core.checksums import Checksums
from kvhold.memory.copier import Piece
from kvhold.memory.device.ring import Slice
from kvhold.testing.device import FakeDriver
from tests.memory.device_world import (
    LAYERS,
    NoFence,
    NoMark,
    NoWaitAtTheEnd,
    NoWaitOfDirectLoads,
    NoWaitOfGathers,
    NoWaitOfScatters,
    NoWaitOfStores,
    NoWaitOfSums,
    World,
)

SEEDS = range(30)


def serve(world: World) -> str:
    """Store what passes compute, load it into other blocks, and read it.

    Returns what was wrong; empty: nothing.
    """
    copier, device = world.copier, world.device
    here, there = [1, 2, 3, 4], [5, 6, 0, 1]
    stored: list[tuple[list[set[int]], Piece]] = []
    for value in (17, 18, 19):
        expected = [{value}, {value + 100}]
        world.fill(here, value, value + 100)
        sums = Checksums.not_taken(2, LAYERS)
        piece = world.piece(here, at=value % 17 * 20_000, sums=sums)
        transfer = copier.gather([piece], after=copier.mark())
        copier.fence([transfer])
        world.fill(here, 99)  # the next pass
        if transfer.wait() != [None]:
            return "a store cannot be damaged"
        if not sums.known.all():
            return "a store of whole chunks takes their checksums"
        taken = sums.values.copy()
        if (found := bytes_of(piece)) != expected:
            return f"stored {expected} as {found}"
        piece.planned.take_sums(range(LAYERS), np.arange(2))  # of the bytes that are there now
        if (taken != sums.values).any():
            return f"took the checksums {taken} of bytes with {sums.values}"
        stored.append((expected, piece))
    for expected, piece in stored:
        world.fill(there, 77)  # they are zeroed, or others read them
        loads = [Piece(world.engine.view, np.array(there), world.arena.read_only, piece.places)]
        steps = (
            [range(layer, layer + 1) for layer in range(LAYERS)]
            if world.random.random() < 0.3
            else [None]
        )
        mark, seen = copier.mark(), list[set[int]]()
        transfers = [copier.scatter(loads, after=mark, layers=layers) for layers in steps]
        if is_fenced := world.random.random() < 0.5:
            copier.fence(transfers)
            device.compute(lambda seen=seen: seen.extend(world.read(there)))  # type: ignore[misc]
            world.fill(there, 55)  # the pass goes on in these blocks
        damage = [transfer.wait() for transfer in transfers]
        if damage != [[None]] * len(steps):
            return f"damage {damage}"
        if not is_fenced:
            device.compute(lambda seen=seen: seen.extend(world.read(there)))  # type: ignore[misc]
        device.wait(device.put(device.engine))
        if seen != expected:
            return f"loaded {seen} for {expected}"
    return ""


def bytes_of(piece: Piece) -> list[set[int]]:
    """The bytes of each of a piece's chunks."""
    plan = piece.planned.plan
    sizes = plan.chunk_rows * plan.view.layers * plan.view.planes * plan.view.row_bytes
    return [
        set(piece.buffer[at : at + size].tolist())
        for at, size in zip(plan.chunk_starts, sizes, strict=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_in_every_order_of_streams_the_bytes_are_right(seed: int) -> None:
    world = World(seed)
    assert serve(world) == ""
    world.device.synchronize()
    world.arenas.close()
    assert not world.driver.pinned


@pytest.mark.parametrize("seed", range(8))
def test_a_device_that_takes_no_host_memory_is_served(seed: int) -> None:
    world = World(seed, lambda device: FakeDriver(device, refuses_pinning=True))
    assert serve(world) == ""


@pytest.mark.parametrize("seed", range(8))
def test_a_device_without_direct_copies_is_served_by_the_ring(seed: int) -> None:
    world = World(seed, lambda device: FakeDriver(device, has_direct_copies=False))
    world.copier._settings = replace(world.copier._settings, store_ring_bytes=1 << 16)
    assert serve(world) == ""


def goes_wrong(world: World) -> bool:
    try:
        return bool(serve(world))
    except AssertionError as error:
        return "read after the event" in str(error)


BROKEN = [
    NoWaitOfGathers,
    NoWaitOfStores,
    NoWaitOfScatters,
    NoWaitOfSums,
    NoWaitOfDirectLoads,
    NoMark,
    NoFence,
    NoWaitAtTheEnd,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_without_any_one_event_some_order_gives_wrong_bytes(broken: type[FakeDriver]) -> None:
    """A control: the tests above would find each of them left out."""
    assert any(goes_wrong(World(seed, broken)) for seed in range(200))


def test_a_slice_of_the_ring_that_is_taken_before_its_last_use_has_ended_gives_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Slice, "is_free", lambda _: True)
    assert any(serve(World(seed)) for seed in range(200))
