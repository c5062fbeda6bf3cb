"""The copier of a device over a fake one: right bytes in every order of its streams, and wrong ones
without any one event.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from kvhold.core.checksums import Checksums
from kvhold.core.errors import CapacityError, DeviceError, DeviceRefused
from kvhold.core.holdings import ChunkBytes
from kvhold.memory.copier import HostCopier, Piece
from kvhold.memory.device import (
    Copies,
    DeviceCopier,
    DeviceEvent,
    Lane,
    PinnedArenas,
    Ring,
    Settings,
    new_checkers,
)
from kvhold.memory.device.batches import batches
from kvhold.memory.device.copier import DeviceTransfer
from kvhold.memory.device.crossover import NEVER, SIZES, direct_bytes
from kvhold.memory.device.pinning import PinnedArena as HeldArena
from kvhold.memory.device.pinning import Reach
from kvhold.memory.device.ring import Slice
from kvhold.testing.device import FakeDevice, FakeDriver, FakeEvent
from tests.kernels.engines import ARRANGEMENTS, BLOCKS, Engine, make

SEEDS = range(30)
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
        self.copier = DeviceCopier(self.driver, self.arenas, sizes, checkers=checkers)

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
        damage = [transfer.wait() for transfer in transfers]
        if damage != [[None]] * len(steps):
            return f"damage {damage}"
        if not is_fenced:
            device.compute(lambda seen=seen: seen.extend(world.read(there)))  # type: ignore[misc]
        device.wait(device.put(device.engine))
        if seen != expected:
            return f"loaded {seen} for {expected}"
    return ""


def flip(memory: np.ndarray, at: int) -> None:
    """Change one bit."""
    memory[at] ^= 1


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


BROKEN = [
    NoWaitOfGathers,
    NoWaitOfStores,
    NoWaitOfScatters,
    NoWaitOfDirectLoads,
    NoMark,
    NoFence,
    NoWaitAtTheEnd,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_without_any_one_event_some_order_gives_wrong_bytes(broken: type[FakeDriver]) -> None:
    """A control: the tests above would find each of them left out."""
    assert any(serve(World(seed, broken)) for seed in range(200))


def test_a_slice_of_the_ring_that_is_taken_before_its_last_use_has_ended_gives_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Slice, "is_free", lambda _: True)
    assert any(serve(World(seed)) for seed in range(200))


class TestTransfer:
    def test_a_damaged_chunk_is_named_in_whatever_batch_it_is(self) -> None:
        for seed in range(10):
            world = World(seed)
            sums = Checksums.not_taken(3, LAYERS)
            written = world.piece([0, 1, 2, 3, 4, 5], sums=sums)
            HostCopier().gather([written], after=None)
            read = Checksums(sums.values, np.zeros_like(sums.known))
            loaded = Piece(
                world.engine.view,
                written.ids,
                world.arena.read_only,
                replace(written.places, sums=read),
            )
            world.arena.writable[int(written.places.offsets[2]) + 1] ^= 4
            (damage,) = world.copier.scatter([loaded], after=world.copier.mark()).wait()
            assert damage is not None and list(damage.chunks) == [2]

    def test_bytes_that_change_before_the_device_has_read_them_are_found(self) -> None:
        """Some other process damages the arena, a moment before the copy."""
        for seed in range(20):
            world = World(seed)
            sums = Checksums.not_taken(3, LAYERS)
            written = world.piece([0, 1, 2, 3, 4, 5], sums=sums)
            HostCopier().gather([written], after=None)
            read = Checksums(sums.values, np.zeros_like(sums.known))
            loaded = Piece(
                world.engine.view,
                written.ids,
                world.arena.read_only,
                replace(written.places, sums=read),
            )
            loads = world.driver._streams[Lane.LOAD]
            world.device.delay(loads)
            world.device.put(
                loads, partial(flip, world.arena.writable, int(written.places.offsets[1]))
            )
            (damage,) = world.copier.scatter([loaded], after=world.copier.mark()).wait()
            assert damage is not None and list(damage.chunks) == [1]

    @pytest.mark.parametrize(
        "error", [ValueError("unforeseen"), DeviceError("unforeseen"), CapacityError("unforeseen")]
    )
    @pytest.mark.parametrize("verb", ["gather", "scatter"])
    def test_what_was_submitted_before_a_failure_has_ended_when_the_failure_is_told(
        self, verb: str, error: Exception
    ) -> None:
        """The caller gives the arena's memory back then, and the engine its blocks."""

        class FailsOnce(FakeDriver):
            left = 2

            def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> FakeEvent:
                self.left -= 1
                if not self.left:
                    raise error
                return super().copy(lane, after, copies)

        for seed in range(20):
            world = World(seed, FailsOnce)
            world.copier._settings = replace(world.copier._settings, batch_bytes=1)
            world.fill([1, 2, 3, 4], 17)
            with pytest.raises(type(error), match="unforeseen"):
                getattr(world.copier, verb)([world.piece([1, 2, 3, 4])], after=world.copier.mark())
            before = world.arena.writable.copy(), world.read([1, 2, 3, 4])
            world.device.synchronize()
            assert (world.arena.writable == before[0]).all()
            assert verb == "gather" or world.read([1, 2, 3, 4]) == before[1]

    def test_it_is_done_when_its_bytes_are_there(self) -> None:
        world = World(4)
        transfer = world.copier.gather([world.piece([1, 2])], after=world.copier.mark())
        world.device.synchronize()
        assert transfer.done()
        assert transfer.wait() == [None]

    def test_a_chunk_that_is_larger_than_the_ring_is_refused_and_nothing_stays_under_way(
        self,
    ) -> None:
        world = World(5)
        world.copier._settings = Settings(load_ring_bytes=128, direct_bytes=1 << 30)
        with pytest.raises(CapacityError, match="does not fit into the device's ring"):
            world.copier.scatter([world.piece([1, 2])], after=None)
        world.device.synchronize()

    @pytest.mark.parametrize(("least_direct", "waits"), [(1 << 20, True), (1, False)])
    def test_small_pieces_wait_for_a_full_ring(self, *, least_direct: int, waits: bool) -> None:
        """Thousands of copies of a few bytes would hold the engine for longer."""
        driver, arena, engine = Counting(FakeDevice(3)), Arena(1 << 16), make("NHD", layers=LAYERS)
        nbytes = LAYERS * 2 * 2 * engine.view.rows_per_block * engine.view.row_bytes
        arenas = PinnedArenas(driver)
        arenas.add(arena.read_only, arena.writable)
        arenas.wait()
        copier = DeviceCopier(
            driver, arenas, Settings(nbytes + 256, 1 << 16, 1 << 16, least_direct)
        )
        places = ChunkBytes(np.zeros(1, np.int64), np.array([2 * engine.view.tokens_per_block]))
        piece = Piece(engine.view, np.array([1, 2]), arena.writable, places)
        for transfer in [copier.gather([piece], after=copier.mark()) for _ in range(3)]:
            transfer.wait()
        assert (max(driver.pieces) == 1) == waits

    @pytest.mark.parametrize("kind", ARRANGEMENTS)
    def test_rows_that_are_skipped_keep_their_bytes_in_the_arena(self, kind: str) -> None:
        """The first chunk is whole, the second in part, and both are in one batch."""
        world = World(1, kind=kind)
        world.copier._settings = Settings(1 << 17, 1 << 17, 1 << 17, 1 << 30)
        piece = world.piece([1, 2, 3, -1, 5, 6])
        assert [one.is_whole for one in batches(piece, 0, range(LAYERS), 1 << 17)] == [False]
        world.arena.writable[:] = 55
        expected = world.arena.writable.copy()
        HostCopier().gather([replace(piece, buffer=expected)], after=None)
        world.copier.gather([piece], after=None).wait()
        assert (world.arena.writable == expected).all()

    def test_damage_is_that_of_its_piece(self) -> None:
        world = World(2)
        pieces = []
        for at in (0, 30_000):
            sums = Checksums.not_taken(1, LAYERS)
            written = world.piece([1, 2], at=at, sums=sums)
            HostCopier().gather([written], after=None)
            read = Checksums(sums.values, np.zeros_like(sums.known))
            pieces.append(replace(written, places=replace(written.places, sums=read)))
        flip(world.arena.writable, int(pieces[1].places.offsets[0]))
        first, second = world.copier.scatter(pieces, after=world.copier.mark()).wait()
        assert first is None
        assert second is not None and list(second.chunks) == [0]

    def test_a_gather_of_one_layer_takes_no_checksum_of_another(self) -> None:
        for seed in range(5):
            world, sums = World(seed), Checksums.not_taken(2, LAYERS)
            world.fill([1, 2, 3, 4], 17, 117)
            piece = world.piece([1, 2, 3, 4], sums=sums)
            for layer in (2, 0, 1):
                layers = range(layer, layer + 1)
                world.copier.gather([piece], after=world.copier.mark(), layers=layers).wait()
                assert sums.known[:, layer].all()
                assert sums.known.sum() == 2 * [2, 0, 1].index(layer) + 2
            taken = sums.values.copy()
            piece.planned.take_sums(range(LAYERS), np.arange(2))
            assert (taken == sums.values).all()

    @pytest.mark.parametrize("beside", [True, False])
    def test_a_check_that_fails_is_told_when_all_copies_have_ended(self, *, beside: bool) -> None:
        world = World(3)
        world.copier._checkers = new_checkers() if beside else {}
        world.arenas.add(world.arena.read_only, world.arena.writable)
        world.arenas.wait()

        def report(chunks: np.ndarray) -> None:
            raise RuntimeError("the report failed")

        wrong = Checksums(np.ones((2, LAYERS), np.uint64), np.zeros((2, LAYERS), np.bool_), report)
        transfer = world.copier.scatter([world.piece([1, 2, 3, 4], sums=wrong)], after=None)
        with pytest.raises(RuntimeError, match="the report failed"):
            transfer.wait()
        assert all(event.fired() for event in transfer._ends)
        assert [arena.users for arena in world.arenas._arenas] == [0]

    def test_without_its_checkers_it_checks_itself(self) -> None:
        """Executors end with the main thread, before a server's other threads do."""
        world, sums = World(4), Checksums.not_taken(2, LAYERS)
        world.copier._checkers = new_checkers()
        world.copier.close()
        for checker in world.copier._checkers.values():
            with pytest.raises(RuntimeError):
                checker.submit(lambda: None)
        world.copier.gather([world.piece([1, 2, 3, 4], sums=sums)], after=None).wait()
        assert sums.known.all()


class Counting(FakeDriver):
    """Notes how many pieces each copy has."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self.pieces: list[int] = []

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> FakeEvent:
        self.pieces.append(copies.nbytes.size)
        return super().copy(lane, after, copies)


class Failing(FakeDriver):
    """Fails at the nth call."""

    left = 1

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> FakeEvent:
        self.left -= 1
        if self.left <= 0:
            raise DeviceError("an illegal memory access was encountered")
        return super().launch(lane, after, work)


class TestFaults:
    @pytest.mark.parametrize("left", [1, 2, 3])
    def test_after_a_fault_nothing_is_copied_and_the_engine_goes_on(
        self, left: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        world = World(1, Failing)
        assert isinstance(world.driver, Failing)
        world.driver.left = left
        transfers: list[DeviceTransfer] = []

        def gather() -> None:
            transfers.append(
                world.copier.gather([world.piece([1, 2, 3, 4])], after=world.copier.mark())
            )

        def gather_four_times() -> None:
            for _ in range(4):
                gather()

        with pytest.raises(DeviceError, match="illegal memory access"):
            gather_four_times()
        assert world.copier.mark() is None
        world.copier.fence(transfers)
        with pytest.raises(DeviceError):
            world.copier.scatter([world.piece([1, 2])], after=None)
        for transfer in transfers:
            assert transfer.wait() == [None], "what was submitted before has ended all the same"
        assert "illegal memory access" in world.copier.fault
        assert caplog.text.count("this process stops caching") == 1


class HalfFailing(FakeDriver):
    """Fails after it has put copies on the stream."""

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> FakeEvent:
        super().copy(lane, after, copies)
        raise DeviceError("the second batch was refused")


class TestPinning:
    def test_an_arena_stays_pinned_if_copies_may_run_that_nothing_waits_for(self) -> None:
        device = FakeDevice(4)
        driver, arena, engine = HalfFailing(device), Arena(1 << 16), make("NHD", layers=LAYERS)
        arenas = PinnedArenas(driver)
        arenas.add(arena.read_only, arena.writable)
        arenas.wait()
        copier = DeviceCopier(driver, arenas, Settings(1 << 20, 1 << 20, 1 << 20, 1 << 30))
        places = ChunkBytes(np.zeros(1, np.int64), np.array([2 * engine.view.tokens_per_block]))
        device.delay(driver._streams[Lane.STORE])
        piece = Piece(engine.view, np.array([1, 2]), arena.writable, places)
        with pytest.raises(DeviceError, match="the second batch"):
            copier.gather([piece], after=copier.mark())
        copier.close()
        assert driver.pinned
        device.synchronize()  # the fake device refuses a copy of memory that is not pinned

    def test_an_arena_is_pinned_in_slices_and_unpinned_when_its_copies_have_ended(self) -> None:
        driver = FakeDriver(FakeDevice(1))
        told: list[int] = []
        arenas, first, second = (
            PinnedArenas(driver, slice_bytes=1000, report=told.append),
            Arena(2500),
            Arena(1000),
        )
        arenas.add(first.read_only, first.writable)
        arenas.wait()
        base = first.writable.ctypes.data
        assert driver.pinned == {base: 1000, base + 1000: 1000, base + 2000: 500}
        assert told == [1000, 2000, 2500]
        held = arenas.hold(first.read_only)
        assert reach(arenas, held, first.read_only, 0, 2500) == Reach(base, True, 1000), (
            "reads use the mapping that is pinned"
        )
        arenas.add(second.read_only, second.writable)
        arenas.wait()
        assert base in driver.pinned, "a copy of the old arena is under way"
        assert reach(arenas, held, first.writable, 0, 10).pinned
        assert held is not None
        arenas.release(held)
        eventually(lambda: list(driver.pinned) == [second.writable.ctypes.data])
        eventually(lambda: held.is_left)
        assert arenas.hold(first.writable) is None
        assert reach(arenas, None, first.writable, 0, 10) == Reach(base, False, 1000)
        arenas.close()
        assert not driver.pinned

    def test_a_slice_that_is_being_pinned_is_waited_for_and_waits_for_copies(self) -> None:
        go, asked = threading.Semaphore(0), threading.Semaphore(0)

        class Slow(FakeDriver):
            def pin(self, address: int, nbytes: int) -> None:
                asked.release()
                assert go.acquire(timeout=20)
                super().pin(address, nbytes)

        arena, arenas = Arena(300), PinnedArenas(Slow(FakeDevice(1)), slice_bytes=100)
        arenas.add(arena.read_only, arena.writable)
        held = arenas.hold(arena.writable)
        assert held is not None
        assert asked.acquire(timeout=20)
        entered, leave = threading.Event(), threading.Event()

        def copy() -> bool:
            with arenas.reaching(held, arena.writable, 250, 300) as found:
                entered.set()
                assert leave.wait(20)
                return found.pinned

        with ThreadPoolExecutor(2) as others:
            inside, beyond = (
                others.submit(reach, arenas, held, arena.writable, 50, 90),
                others.submit(copy),
            )
            assert not entered.wait(0.1), "a slice is being pinned"
            go.release()
            assert inside.result(timeout=20).pinned
            assert entered.wait(20), "there is a pause of a tenth of a second between the slices"
            assert not asked.acquire(timeout=0.3), "nothing is registered while it is copied"
            leave.set()
            assert not beyond.result(timeout=20)
        go.release(2)
        arenas.wait()
        assert arenas.pinned_bytes == 300
        arenas.release(held)
        arenas.close()

    def test_chunks_on_both_sides_of_what_is_pinned_so_far_are_not_waited_for_till_all_is_pinned(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.memory.device.pinning._MOST_WAIT_S", 0.05)
        go = threading.Semaphore(1)

        class Slow(FakeDriver):
            def pin(self, address: int, nbytes: int) -> None:
                assert go.acquire(timeout=20)
                super().pin(address, nbytes)

        arena, arenas = Arena(300), PinnedArenas(Slow(FakeDevice(1)), slice_bytes=100)
        arenas.add(arena.read_only, arena.writable)
        held = arenas.hold(arena.writable)
        assert held is not None
        eventually(lambda: arenas.pinned_bytes == 100)
        with pytest.raises(CapacityError, match="only a part is pinned so far"):
            reach(arenas, held, arena.writable, 0, 300)
        go.release(2)
        arenas.wait()
        assert reach(arenas, held, arena.writable, 0, 300).pinned
        arenas.release(held)
        arenas.close()

    def test_an_arena_that_is_being_unpinned_is_not_handed_out_as_pinned(self) -> None:
        go, unpinning = threading.Event(), threading.Event()

        class Slow(FakeDriver):
            def unpin(self, address: int) -> None:
                super().unpin(address)
                unpinning.set()
                assert go.wait(20)

        arenas, old, new = PinnedArenas(Slow(FakeDevice(1)), slice_bytes=300), Arena(300), Arena(10)
        arenas.add(old.read_only, old.writable)
        arenas.wait()
        held = arenas.hold(old.writable)
        assert held is not None
        arenas.add(new.read_only, new.writable)
        with held.changed:  # as `release` does, before it takes the arena off the list
            held.users -= 1
            held.changed.notify_all()
        assert unpinning.wait(20)
        again = arenas.hold(old.writable)
        assert again is held
        with pytest.raises(CapacityError, match="being unpinned"):
            reach(arenas, again, old.writable, 0, 10)
        go.set()
        arenas.release(again)
        arenas.close()

    def test_a_refusal_is_told_once_and_what_lies_over_its_edge_is_a_miss(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Full(FakeDriver):
            def pin(self, address: int, nbytes: int) -> None:
                if len(self.pinned) == 2:
                    raise DeviceRefused("out of memory")
                super().pin(address, nbytes)

        arenas, first, second = (
            PinnedArenas(Full(FakeDevice(1)), slice_bytes=100),
            Arena(300),
            Arena(10),
        )
        arenas.add(first.read_only, first.writable)
        arenas.wait()
        held = arenas.hold(first.writable)
        assert held is not None
        assert reach(arenas, held, first.writable, 0, 200).pinned
        assert not reach(arenas, held, first.writable, 200, 300).pinned
        with pytest.raises(CapacityError, match="across the end of the 200 B"):
            reach(arenas, held, first.writable, 150, 250)
        arenas.release(held)
        arenas.add(second.read_only, second.writable)
        arenas.wait()
        assert arenas.refusal is not None
        assert "out of memory" in arenas.refusal
        assert caplog.text.count("out of memory") == 1
        arenas.close()

    def test_nothing_is_copied_of_an_arena_that_cannot_be_registered(self) -> None:
        """Its addresses may be known to the device as other memory."""

        class Known(FakeDriver):
            def pin(self, address: int, nbytes: int) -> None:
                raise DeviceError(
                    "CUDA: part or all of the requested memory range is already mapped"
                )

        world = World(0, Known)
        world.arenas.add(world.arena.read_only, world.arena.writable)
        world.arenas.wait()
        with pytest.raises(DeviceError, match="already mapped"):
            world.copier.gather([world.piece([1, 2])], after=None)

    def test_who_forgets_to_close_leaves_no_registration_and_no_mapping_goes_before(self) -> None:
        driver, arena = FakeDriver(FakeDevice(1)), Arena(300)
        mapping = weakref.ref(arena.writable)
        arenas = PinnedArenas(driver, slice_bytes=100)
        arenas.add(arena.read_only, arena.writable)
        arenas.wait()
        del arena
        gc.collect()
        assert mapping() is not None
        del arenas
        eventually(lambda: gc.collect() is not None and not driver.pinned and mapping() is None)


def reach(
    arenas: PinnedArenas, held: HeldArena | None, buffer: np.ndarray, begin: int, end: int
) -> Reach:
    with arenas.reaching(held, buffer, begin, end) as found:
        return found


def eventually(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class TestRing:
    def test_no_two_slices_in_use_overlap(self) -> None:
        for seed in range(50):
            random, device = Random(seed), FakeDevice(seed)
            ring, used = (
                Ring(np.zeros(random.choice([256, 1000, 4096, 8192]), np.uint8)),
                list[tuple[Slice, FakeEvent]](),
            )
            for _ in range(200):
                nbytes = random.randrange(1, 1200)
                if random.random() < 0.3:
                    device.run_some()
                part = ring.take(nbytes)
                used = [(each, event) for each, event in used if not event.has_fired]
                if part is None:
                    device.run_some()
                    continue
                assert 0 <= part.start <= part.start + nbytes <= ring.nbytes
                assert all(
                    part.start >= each.start + each.nbytes or each.start >= part.start + part.nbytes
                    for each, _ in used
                )
                event = device.put(device.engine)
                part.until(event)
                used.append((part, event))

    def test_all_of_it_can_be_had_when_nothing_is_in_use(self) -> None:
        device = FakeDevice(1)
        ring = Ring(np.zeros(1024, np.uint8))
        for _ in range(5):
            with ring.take_when_free(1024) as part:
                assert ring.take(1) is None
                part.until(device.put(device.engine))

    def test_a_slice_that_nothing_was_submitted_for_comes_back_at_once(self) -> None:
        ring = Ring(np.zeros(512, np.uint8))
        with pytest.raises(ValueError, match="no"), ring.take_when_free(512):
            raise ValueError("no")
        assert ring.take(512) is not None


class TestBatches:
    def test_they_hold_every_chunk_once_and_no_more_bytes_than_asked_at_first_half(self) -> None:
        world = World(2)
        piece = world.piece([0, 1, 2, 3, 4, 5])
        one = int(next(iter(batches(piece, 0, range(LAYERS), 1))).nbytes)
        for most, sizes in (
            (1, [1, 1, 1]),
            (one, [1, 1, 1]),
            (2 * one, [1, 2]),
            (2 * one + 1, [1, 2]),
            (3 * one, [1, 2]),
            (4 * one, [2, 1]),
            (6 * one, [3]),
        ):
            found = list(batches(piece, 0, range(LAYERS), most))
            assert [batch.chunks.size for batch in found] == sizes
            assert np.concatenate([batch.chunks for batch in found]).tolist() == [0, 1, 2]
        assert not list(batches(piece, 0, range(0), 1))
        assert not list(batches(world.piece([-1, -1]), 0, range(LAYERS), 1))

    @pytest.mark.parametrize("kind", ARRANGEMENTS)
    def test_runs_are_what_the_kernels_copy(self, kind: str) -> None:
        engine = make(kind, layers=LAYERS, pad=3)
        view, tokens = engine.view, 2 * engine.view.tokens_per_block
        places = ChunkBytes(np.array([7, 20_000]), np.array([tokens, tokens]))
        expected, found = np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
        ids = np.array([3, -1, 0, BLOCKS - 1])
        HostCopier().gather([Piece(view, ids, expected, places)], after=None)
        (batch,) = batches(Piece(view, ids, found, places), 0, range(LAYERS), 1 << 20)
        device = FakeDevice(1)
        copies = batch.copies_of_runs(Reach(found.ctypes.data, False, 1))
        assert int(copies.nbytes.min()) == batch.smallest_piece
        FakeDriver(device).copy(Lane.STORE, [], copies).wait()
        assert (found == expected).all()


class TestCrossover:
    """Which way is taken. The times are given, not measured."""

    @pytest.mark.parametrize(
        ("ring", "direct", "expected"),
        [
            (lambda size: 1.0, lambda size: 0.5, SIZES[0]),
            (lambda size: 1.0, lambda size: 2.0, NEVER),
            (lambda size: 1.0, lambda size: 0.5 if size >= 32 << 10 else 2.0, 32 << 10),
            (lambda size: 1.0, lambda size: 0.5 if size != 64 << 10 else 2.0, 128 << 10),
        ],
        ids=["directly", "by the ring", "from 32 KiB on", "not where a larger one is slower"],
    )
    def test_the_smallest_size_from_which_on_direct_copies_are_no_slower(
        self, ring: Callable[[int], float], direct: Callable[[int], float], expected: int
    ) -> None:
        driver = FakeDriver(FakeDevice(1))
        copier = DeviceCopier(driver, PinnedArenas(driver))
        ways: list[str] = []

        def seconds_of(call: Callable[[], object]) -> float:
            call()
            size = SIZES[-1 - len(ways) // 2]
            assert copier._goes_by is not None
            ways.append(copier._goes_by)
            return ring(size) if ways[-1] == "ring" else direct(size)

        assert direct_bytes(copier, "cpu", seconds_of=seconds_of) == expected
        assert ways[:2] == ["ring", "direct"]
        assert not copier._goes_by

    def test_without_direct_copies_there_is_one_way(self) -> None:
        driver = FakeDriver(FakeDevice(1), has_direct_copies=False)
        assert (
            direct_bytes(
                DeviceCopier(driver, PinnedArenas(driver)), "cpu", seconds_of=lambda call: 1.0
            )
            == NEVER
        )

    def test_what_is_measured_is_used(self) -> None:
        driver = FakeDriver(FakeDevice(1))
        copier = DeviceCopier(driver, PinnedArenas(driver))
        copier.measure("cpu")
        assert copier._settings.direct_bytes in (*SIZES, NEVER)
