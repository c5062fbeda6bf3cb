"""The transfers of a device's copier: their ring, their batches, direct copies, and faults."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from kvhold.core.checksums import Checksums
from kvhold.core.errors import CapacityError, DeviceError
from kvhold.core.holdings import ChunkBytes
from kvhold.kernels import sum_layers
from kvhold.kernels.reference_sums import sum_ranges
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
from kvhold.memory.device.pinning import Reach
from kvhold.memory.device.ring import Slice
from kvhold.testing.device import FakeDevice, FakeDriver, FakeEvent
from tests.kernels.engines import ARRANGEMENTS, BLOCKS, make
from tests.memory.device_world import LAYERS, Arena, World


def flip(memory: np.ndarray, at: int) -> None:
    """Change one bit."""
    memory[at] ^= 1


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

    @pytest.mark.parametrize("verb", ["gather", "scatter"])
    def test_copies_have_ended_if_their_checksums_cannot_be_begun(
        self, verb: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise ValueError("unforeseen")

        monkeypatch.setattr(DeviceCopier, "_sum", refuse)
        for seed in range(20):
            world = World(seed)
            world.copier._settings = replace(
                world.copier._settings, store_ring_bytes=1 << 16, direct_bytes=1 << 30
            )
            world.fill([1, 2, 3, 4], 17)
            piece = world.piece([1, 2, 3, 4], sums=Checksums.not_taken(2, LAYERS))
            with pytest.raises(ValueError, match="unforeseen"):
                getattr(world.copier, verb)([piece], after=world.copier.mark())
            before = world.arena.writable.copy(), world.read([1, 2, 3, 4])
            world.device.synchronize()
            assert (world.arena.writable == before[0]).all()
            assert verb == "gather" or world.read([1, 2, 3, 4]) == before[1]

    def test_what_follows_a_fence_does_not_change_what_is_checked(self) -> None:
        """Checksums of a direct load are taken of the blocks."""
        num_checked = 0
        for seed in range(60):
            world = World(seed)
            world.copier._settings = replace(world.copier._settings, direct_bytes=1)
            world.copier._sums_on = "cpu"
            sums = Checksums.not_taken(2, LAYERS)
            written = world.piece([0, 1, 2, 3], sums=sums)
            HostCopier().gather([written], after=None)
            loaded = Piece(world.engine.view, written.ids, world.arena.read_only, written.places)
            transfer = world.copier.scatter([loaded], after=world.copier.mark())
            world.copier.fence([transfer])
            world.fill([0, 1, 2, 3], 55)
            assert transfer.wait() == [None]
            num_checked += world.engine.view.runs_are_whole
        assert num_checked > 10

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
    def test_ranges_are_the_bytes_of_the_chunks(self, kind: str) -> None:
        """Also where chunks have different numbers of runs."""
        view = make(kind, layers=LAYERS, seed=2).view
        rows = view.tokens_per_block
        places = ChunkBytes(
            np.array([0, 20_000, 40_000]), np.array([2 * rows, rows, 3 * rows]), None
        )
        arena = Arena(1 << 16)
        piece = Piece(view, np.array([3, 1, 0, 4, 5, 2]), arena.writable, places)
        piece.planned.gather()
        expected = piece.planned._empty()
        sum_layers(piece.planned.plan, range(LAYERS), expected)
        for batch in batches(piece, 0, range(1, LAYERS), 1 << 16):
            wanted = expected[batch.chunks, 1:].reshape(-1)
            staged = batch.plan
            assert (sum_ranges(batch.ranges_of_chunks(staged)) == wanted).all()
            ranges = batch.ranges_of_runs()
            assert (ranges is None) == (not view.runs_are_whole)
            assert ranges is None or (sum_ranges(ranges) == wanted).all()

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
