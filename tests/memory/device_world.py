"""An engine, an arena and a copier of a fake device between them, and drivers that leave out one
event.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from kvhold.core.checksums import Checksums
from kvhold.core.holdings import ChunkBytes
from kvhold.memory.copier import Piece
from kvhold.memory.device import (
    DeviceCopier,
    DeviceEvent,
    Lane,
    PinnedArenas,
    Settings,
    new_checkers,
)
from kvhold.testing.device import FakeDevice, FakeDriver, FakeEvent
from tests.kernels.engines import ARRANGEMENTS, Engine, make

LAYERS = 3


class Arena:
    """Two mappings of the same memory, as a client has them."""

    def __init__(self, nbytes: int) -> None:
        self.writable = np.zeros(nbytes, np.uint8)
        self.read_only = self.writable[:]
        self.read_only.flags.writeable = False


class World:
    """An engine, an arena and a copier of random sizes between them."""

    def __init__(
        self,
        seed: int,
        make_driver: Callable[[FakeDevice], FakeDriver] = FakeDriver,
        *,
        kind: str | None = None,
    ) -> None:
        """kind: of the engine's arrangement; None: a random one"""
        self.random = Random(seed)
        self.device = FakeDevice(seed)
        self.driver = make_driver(self.device)
        self.arena = Arena(1 << 16)
        kind = kind or self.random.choice(list(ARRANGEMENTS))
        self.engine = make(kind, layers=LAYERS, seed=seed)
        chunk_bytes = (
            LAYERS * self.engine.view.planes * self.rows_of(2) * self.engine.view.row_bytes
        )
        sizes = Settings(
            store_ring_bytes=self.random.choice([chunk_bytes // 2, 2 * chunk_bytes + 512, 1 << 16]),
            load_ring_bytes=self.random.choice([chunk_bytes + 256, 1 << 16]),
            batch_bytes=self.random.choice([1, 2 * chunk_bytes, 1 << 16]),
            direct_bytes=self.random.choice([1, 1 << 20, 1 << 20]),
        )
        self.arenas = PinnedArenas(self.driver, slice_bytes=self.random.choice([1 << 14, 500, 177]))
        if self.random.random() < 0.8:
            self.arenas.add(self.arena.read_only, self.arena.writable)
        # a checker waits beside the caller, and a device that waits runs all streams
        checkers = new_checkers() if self.random.random() < 0.3 else None
        self.copier = DeviceCopier(
            self.driver,
            self.arenas,
            sizes,
            checkers=checkers,
            sums_on=self.random.choice([None, "cpu"]),
        )

    def rows_of(self, blocks: int) -> int:
        """Rows of the view."""
        return blocks if self.engine.view.is_opaque else blocks * self.engine.view.rows_per_block

    def piece(
        self,
        blocks: Sequence[int],
        *,
        at: int = 0,
        writable: bool = True,
        sums: Checksums | None = None,
    ) -> Piece:
        """A chunk for every two blocks, from `at` on."""
        view = self.engine.view
        tokens = 2 * view.tokens_per_block
        nbytes = view.layers * view.planes * self.rows_of(2) * view.row_bytes
        offsets = at + (nbytes + 3) * np.arange(len(blocks) // 2)
        places = ChunkBytes(offsets, np.full(offsets.size, tokens), sums)
        return Piece(
            view,
            np.array(blocks),
            self.arena.writable if writable else self.arena.read_only,
            places,
        )

    def fill(self, blocks: Sequence[int], value: int, of_second: int | None = None) -> None:
        """Write blocks of two chunks, on the engine's stream. of_second: the second
        chunk's value.
        """

        def kernel() -> None:
            fill(self.engine, blocks[:2], value)
            fill(self.engine, blocks[2:], value if of_second is None else of_second)

        self.device.compute(kernel)

    def read(self, blocks: Sequence[int]) -> list[set[int]]:
        """What blocks of two chunks hold now."""
        return [values_of(self.engine, blocks[:2]), values_of(self.engine, blocks[2:])]


def fill(engine: Engine, blocks: Sequence[int], value: int) -> None:
    """Write the same byte all over some blocks."""
    view = engine.view
    per_block = 1 if view.is_opaque else view.rows_per_block
    for layer in range(view.layers):
        for plane in range(view.planes):
            for block in blocks:
                for slot in range(block * per_block, (block + 1) * per_block):
                    engine.row(layer, plane, slot)[:] = value


def values_of(engine: Engine, blocks: Sequence[int]) -> set[int]:
    """All bytes in some blocks."""
    view = engine.view
    per_block = 1 if view.is_opaque else view.rows_per_block
    seen: set[int] = set()
    for layer in range(view.layers):
        for plane in range(view.planes):
            for block in blocks:
                for slot in range(block * per_block, (block + 1) * per_block):
                    seen.update(engine.row(layer, plane, slot).reshape(-1).tolist())
    return seen


class Without(FakeDriver):
    """Leaves out the waits of one lane."""

    lane = Lane.GATHER

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> FakeEvent:
        return super().launch(lane, [] if lane is self.lane else after, work)


class NoWaitOfGathers(Without):
    """Blocks are read before they are computed."""


class NoWaitOfStores(Without):
    """The ring, or the blocks, are copied before they are written."""

    lane = Lane.STORE


class NoWaitOfScatters(Without):
    """Blocks are written from a ring that is not filled, or before others have read them."""

    lane = Lane.SCATTER


class NoWaitOfSums(Without):
    """Checksums are of bytes that have not come."""

    lane = Lane.SUM


class NoWaitOfDirectLoads(Without):
    """Blocks are written before others have read them."""

    lane = Lane.LOAD


class NoMark(FakeDriver):
    """Events of the engine's stream have fired when they are recorded."""

    def record(self) -> FakeEvent:
        event = super().record()
        event.has_fired = True
        return event


class NoFence(FakeDriver):
    """The engine goes on."""

    def hold(self, event: DeviceEvent) -> None:
        pass


class NoWaitAtTheEnd(FakeDriver):
    """Who waits for copies does not."""

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> FakeEvent:
        event = super().launch(lane, after, work)
        event.wait = lambda: None  # type: ignore[method-assign]
        return event
