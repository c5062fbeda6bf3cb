"""Arenas are pinned for a device while copies may use them, and not longer."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from kvhold.core.errors import CapacityError, DeviceError, DeviceRefused
from kvhold.core.holdings import ChunkBytes
from kvhold.memory.copier import Piece
from kvhold.memory.device import Copies, DeviceCopier, DeviceEvent, Lane, PinnedArenas, Settings
from kvhold.memory.device.pinning import PinnedArena as HeldArena
from kvhold.memory.device.pinning import Reach
from kvhold.testing.device import FakeDevice, FakeDriver, FakeEvent
from tests.kernels.engines import make
from tests.memory.device_world import LAYERS, Arena, World


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

        with ThreadPoolExecutor(2) as others, ExitStack() as after:
            after.callback(go.release, 3)
            after.callback(leave.set)
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
